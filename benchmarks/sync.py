"""Seconds of a weight sync by transport: from the engine's pause to its first token after it.

This process is the trainer, with float32 master weights, which change before each transport's
turns, so that a sync which does nothing fails at its canary. As in a run, nothing is generated when
a sync begins and generation waits for the canary: `pause_to_first_token` is the sync's own `paused`
and `canary`, and a request for one token after them.

- tensor: CUDA IPC, engine and trainer on one GPU;
- disk: a folder, likewise;
- distributed: NCCL, the engine on a second GPU; left out where there is none.

Run: python -m benchmarks.sync [--shapes qwen3-0.6B,qwen3-4B] [--repeats N] [--tiny]
"""

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx

from benchmarks import _shapes
from benchmarks._common import RESULTS, finish, keep, machine, parsed, say, spread, tail
from benchmarks._server import SGLANG, serving
from rlcore.config.algorithm import AlgorithmConfig
from rlcore.config.tree import TrainConfig
from rlcore.config.weights import TransportName
from rlcore.weights.sync import SyncSpec, WeightSync

GOALS_S = {"qwen3-0.6B": 0.3, "qwen3-4B": 1.0}
"""Of the transport `tensor`."""
CONTEXT = 1024
ANSWER_S = 60.0


def make_trainer(model: Path, cuda: bool) -> Any:
    """This process as the one rank of a trainer."""
    import torch
    import torch.distributed as dist

    from rlcore.net import share_as_sglang
    from rlcore.train.fsdp.trainer import FsdpTrainer

    if not dist.is_initialized():
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        share_as_sglang()
        if cuda:
            torch.cuda.set_device(0)
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=60))
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    train = TrainConfig(precision="bfloat16" if cuda else "float32", torch_compile=False)
    device = "cuda" if cuda else "cpu"
    trainer = FsdpTrainer(train, AlgorithmConfig(), temperature=1.0, seed=0, device=device)
    trainer.load(model, "start")
    return trainer


def change(trainer: Any) -> None:
    """Weights that no engine has yet."""
    import torch

    from rlcore.train.fsdp.state import held

    with torch.no_grad():
        for _, parameter in trainer._held()[0].weights():
            own = held(parameter.detach())
            own.add_(torch.randn_like(own), alpha=0.02)


def first_token(url: str) -> float:
    """Seconds of a request for one token."""
    body = {"input_ids": list(range(2, 18)), "sampling_params": {"max_new_tokens": 1}}
    began = time.perf_counter()
    reply = httpx.post(f"{url}/generate", json=body, timeout=ANSWER_S, trust_env=False)
    reply.raise_for_status()
    return time.perf_counter() - began


def one_sync(trainer: Any, sync: WeightSync, spec: SyncSpec) -> dict[str, float]:
    """Figures of one sync."""
    report = sync.run(trainer, spec)
    token = first_token(spec.urls[0])
    assert report is not None
    of = report.metrics
    whole = of["seconds_paused"] + of["seconds_canary"] + token
    return {"pause_to_first_token": whole, "first_token": token, **of}


class Shape:
    """All transports of one shape."""

    def __init__(
        self, name: str, folder: Path, args: argparse.Namespace, note: Callable[[], object]
    ) -> None:
        """`note` is called with each transport's figures there."""
        self.name, self.folder, self._args, self._note = name, folder, args, note
        self._cuda = not args.tiny
        self.figures: dict[str, Any] = {}
        self.errors: dict[str, str] = {}

    def run(self) -> None:
        """Build the model, start the engines, measure each transport."""
        self.folder.mkdir()
        say(f"{self.name}: building the model")
        model = _shapes.build(self.name, self.folder / "model", seed=0)
        with ExitStack() as stack:
            near = self._engine(stack, model, 0)
            trainer = make_trainer(model, self._cuda)
            say(f"{self.name}: trainer loaded, {_gigabytes(trainer)}")
            for transport in self._near():
                self._measure(trainer, near, model, transport)
        if self._cuda and _gpus() > 1:
            with ExitStack() as stack:
                far = self._engine(stack, model, 1)
                self._measure(trainer, far, model, "distributed")
        elif self._cuda:
            self.errors["distributed"] = "left out: it needs two GPUs"

    def _near(self) -> tuple[TransportName, ...]:
        """Transports to an engine beside the trainer: NCCL alone cannot, gloo can."""
        return ("tensor", "disk") if self._cuda else ("tensor", "disk", "distributed")

    def _engine(self, stack: ExitStack, model: Path, gpu: int) -> str:
        more = None
        if self._cuda:
            more = SGLANG | {"disable_cuda_graph": True} | parsed(self._args.server)
            more.pop("cuda_graph_max_bs_decode")
        log = self.folder / f"engine-{gpu}.log"
        try:
            return stack.enter_context(
                serving(model, log, sglang=more, context=CONTEXT, gpu=gpu if self._cuda else None)
            )
        except Exception:
            say(tail(log, 60))
            raise

    def _measure(self, trainer: Any, url: str, model: Path, transport: TransportName) -> None:
        sync = WeightSync(0)
        taken = []
        change(trainer)
        try:
            for turn in range(self._args.repeats + 1):
                spec = self._spec(url, model, transport, f"{transport}{turn}")
                taken.append(one_sync(trainer, sync, spec))
                shown = ", ".join(f"{k} {v:.3f}" for k, v in taken[-1].items())
                say(f"{self.name} {transport} {turn}: {shown}")
        except Exception as error:
            self.errors[transport] = f"{type(error).__name__}: {error}"
            say(f"{self.name} {transport} failed: {error}\n{tail(self.folder / 'engine-0.log')}")
        finally:
            sync.close()
        if rest := taken[1:]:
            found = {name: spread([one[name] for one in rest]) for name in rest[0]}
            self.figures[transport] = {"first": taken[0], **found}
            self._note()

    def _spec(self, url: str, model: Path, transport: TransportName, version: str) -> SyncSpec:
        return SyncSpec(
            urls=(url,),
            version=version,
            transport=transport,
            dtype="bfloat16" if self._cuda else "float32",
            model_folder=model,
            scratch=self.folder / "scratch",
            canary_prompts=4,
            canary_tolerance=0.1 if self._cuda else 1e-4,
            vocab_size=_shapes.shape(self.name).vocab_size,
            context_length=CONTEXT,
            starts=(1,),
            on_gpus=self._cuda,
            bucket_bytes=self._args.bucket_mb * 2**20,
        )


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _give_back() -> None:
    """What a trainer that is gone leaves in torch's hands would lack the next engine."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _gigabytes(trainer: Any) -> str:
    return ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in trainer.memory().items())


def main() -> int:
    """Measure, write the JSON, say whether the goals are met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default=",".join(GOALS_S))
    parser.add_argument("--repeats", type=int, default=3, help="after one to warm up")
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--server", action="append", default=[], help="an argument of SGLang's")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to see that it works")
    parser.add_argument("--result", type=Path, default=RESULTS / "sync.json")
    args = parser.parse_args()
    names = ["tiny"] if args.tiny else args.shapes.split(",")
    result: dict[str, Any] = {
        "benchmark": "sync",
        "what": "seconds of a weight sync: pause_to_first_token (paused, canary, a request for one "
        "token) and the sync's parts; the first of each transport is not in the spread",
        "goal": f"median of pause_to_first_token by tensor <= {GOALS_S}",
        "met": False,
        "bucket_mb": args.bucket_mb,
        "shapes": {},
        "errors": {},
        "machine": machine("torch", "transformers", "sglang"),
    }
    with tempfile.TemporaryDirectory(prefix="sluice-sync-") as folder:
        for name in names:
            shape = Shape(name, Path(folder) / name, args, lambda: keep(result, args.result))
            result["shapes"][name] = shape.figures
            try:
                shape.run()
            except Exception as error:
                shape.errors["all"] = f"{type(error).__name__}: {error}"
                say(f"{name} failed: {error}")
            _give_back()
            result["errors"][name] = shape.errors
            result["met"] = met(result["shapes"])
            keep(result, args.result)
    return finish(result, args.result)


def met(shapes: dict[str, Any]) -> bool:
    """Whether all goals are reached."""
    medians = {
        name: of["tensor"]["pause_to_first_token"]["median"]
        for name, of in shapes.items()
        if "tensor" in of
    }
    return all(medians.get(name, float("inf")) <= goal for name, goal in GOALS_S.items())


if __name__ == "__main__":
    sys.exit(main())
