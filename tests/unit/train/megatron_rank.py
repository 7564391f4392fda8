"""One rank in a process of its own: `python megatron_rank.py RANK WORLD FOLDER JOB DEVICE`.

JOB is a pickled list of cases: each is a dict with a `name`, a `model` folder, `layout` (the table
`megatron`), `shares` of a batch for any number of ranks, and what else to do. What came of a case,
or went wrong with it, is pickled to `FOLDER/NAME.RANK`; after a failure nothing more is tried,
since the other ranks may wait.
"""

import pickle
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from rlcore.config.tree import AlgorithmConfig, TrainConfig
from rlcore.train.base import BaseTrainer
from rlcore.train.make import make_trainer
from rlcore.train.megatron.buffers import Buffers
from rlcore.train.megatron.trainer import MegatronTrainer


def sent_early(buffers: Buffers) -> bool:
    """Whether all gradients are on their way, or there, before somebody waits for them."""
    return all(
        group.grad_reduce_handle is not None or getattr(group, "grad_reduce_finished", False)
        for group in buffers._groups
    )


def run(case: dict[str, Any], device: str) -> dict[str, Any]:
    """Trains a batch, and says what the trainer then holds."""
    early: list[bool] = []
    finish = Buffers.finish

    def noted(self: Buffers) -> None:
        early.append(sent_early(self))
        finish(self)

    with mock.patch.object(Buffers, "finish", noted):
        return trained(case, device) | {"early": early}


def trained(case: dict[str, Any], device: str) -> dict[str, Any]:
    """See `run`."""
    settings = {"lr": 1e-2, "num_iterations": 4, "backend": "megatron"}
    trainer = make_trainer(
        TrainConfig(**settings | case.get("train", {})),
        AlgorithmConfig(**case.get("algorithm", {})),
        temperature=1.0,
        seed=0,
        device=device,
        megatron=case["layout"],
    )
    trainer.load(case["model"], "start")
    out: dict[str, Any] = {"digest": trainer.digest()}
    if case.get("restore"):
        out["restored"] = trainer.load_state(case["restore"], "start")
    shares = case["shares"][trainer.ranks.size]
    out["metrics"] = trainer.train("start", "next", shares[trainer.ranks.rank]).metrics
    if case.get("again"):
        out["after"] = trainer.digest()
    if case.get("save"):
        trainer.save_state(case["save"])
        out["saved"] = trainer.digest()
    if case.get("export"):
        trainer.export_hf(case["export"], "float32")
    out["log_probs"] = trainer.log_probs([[1, 2, 3], [5, 4, 3, 2]])
    return out


@contextmanager
def compiled() -> Iterator[None]:
    """Trainers have torch go through what they would compile on a GPU."""
    plain = torch.compile
    torch.compile = partial(plain, backend="aot_eager")  # type: ignore[assignment]
    MegatronTrainer._compiles = True  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.compile = plain  # type: ignore[assignment]
        MegatronTrainer._compiles = BaseTrainer._compiles  # type: ignore[method-assign]


def main(rank: int, world: int, folder: Path, job: Path, device: str) -> None:
    """All cases, one after another."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), world)
    limit = timedelta(seconds=120)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=limit,
    )
    for case in pickle.loads(job.read_bytes()):
        target = folder / f"{case['name']}.{rank}"
        try:
            with compiled() if case.get("compiled") else nullcontext():
                out = run(case, device)
        except Exception:
            target.write_bytes(pickle.dumps(traceback.format_exc()))
            raise
        target.write_bytes(pickle.dumps(out))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
