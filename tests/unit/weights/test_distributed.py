"""Weights by broadcast: who meets whom, and what happens when a member is gone."""

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rlcore.engine.launch import EngineProcess, embedded_argv
from rlcore.errors import EngineError
from rlcore.net import free_port
from rlcore.rollout.client import EngineClient
from rlcore.weights import group
from rlcore.weights.distributed import GROUP
from rlcore.weights.group import open_group
from rlcore.weights.sync import SyncSpec, WeightSync

WHOLE_WAIT_S = 500.0
ROOT = Path(__file__).parents[3]


@pytest.fixture
def spec(engine_url: str, model_folder: Path, tmp_path: Path) -> SyncSpec:
    return SyncSpec(
        urls=(engine_url,),
        version="1",
        transport="distributed",
        dtype="float32",
        model_folder=model_folder,
        scratch=tmp_path,
        canary_prompts=2,
        canary_tolerance=1e-4,
        vocab_size=45,
        context_length=64,
        starts=(1,),
        bucket_bytes=20_000,
        timeout_s=60.0,
    )


@pytest.fixture
def weight_sync() -> Iterator[WeightSync]:
    made = WeightSync(rank=0)
    yield made
    made.close()


class Spare:
    """One more engine, always at the same address."""

    def __init__(self, model_folder: Path, log: Path) -> None:
        self._port, self._folder, self._log = free_port(), model_folder, log
        self.process = EngineProcess(self._port)

    def start(self) -> str:
        argv = embedded_argv(self._folder, self._port, weight_version="start")
        self.process.start(argv, self._log, {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
        self.process.wait_healthy(400)
        return self.process.url


@pytest.fixture
def spare(model_folder: Path, tmp_path: Path) -> Iterator[Spare]:
    made = Spare(model_folder, tmp_path / "spare.log")
    yield made
    made.process.stop(0.0)


def test_a_group_lasts_until_an_engine_is_started_again(
    trainer: Any, spec: SyncSpec, weight_sync: WeightSync
) -> None:
    weight_sync.run(trainer, spec)
    first = weight_sync._group._group
    weight_sync.run(trainer, replace(spec, version="2"))
    assert weight_sync._group._group is first
    weight_sync.run(trainer, replace(spec, version="3", starts=(2,)))
    assert weight_sync._group._group is not first


def test_a_trainer_that_is_started_again_makes_a_new_group(
    trainer: Any, spec: SyncSpec, version: Any
) -> None:
    for number in ("first", "second"):
        made = WeightSync(rank=0)
        made.run(trainer, replace(spec, version=number))
        assert version() == number
        # Nothing is closed: that process was killed.


def test_an_engine_killed_on_the_way_is_named_and_comes_back(
    trainer: Any,
    spec: SyncSpec,
    weight_sync: WeightSync,
    spare: Spare,
    greedy: Any,
    version: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group, "SEND_S", WHOLE_WAIT_S)
    spec = replace(spec, urls=(*spec.urls, spare.start()), starts=(1, 1))
    weight_sync.run(trainer, spec)

    class Killing:
        """A trainer that loses an engine while it gathers."""

        log_probs = trainer.log_probs

        def named_tensors(self, dtype: Any, device: str) -> Iterator[Any]:
            for k, pair in enumerate(trainer.named_tensors(dtype, device)):
                if k == 8:
                    spare.process.stop(0.0)
                yield pair

    began = time.monotonic()
    with pytest.raises(EngineError, match=rf"{spare.process.url}.*is started again.*'disk'"):
        weight_sync.run(Killing(), replace(spec, version="2"))  # type: ignore[arg-type]
    assert time.monotonic() - began < WHOLE_WAIT_S / 2, "nobody waits for who is gone"
    assert greedy(), "the other engine must not stay paused"
    # As the bucket on its way came through, or not.
    assert version() in ("1", "2-partial")

    spare.start()
    report = weight_sync.run(trainer, replace(spec, version="2", starts=(1, 2)))
    assert report is not None and report.metrics["canary_abs_diff"] < 1e-5
    assert version() == "2"


def test_a_refused_bucket_ends_the_group_and_the_next_sync_makes_one(
    trainer: Any, spec: SyncSpec, weight_sync: WeightSync, greedy: Any, version: Any
) -> None:
    class Misnamed:
        """A trainer whose weights the engine does not know."""

        log_probs = trainer.log_probs

        def named_tensors(self, dtype: Any, device: str) -> Iterator[Any]:
            for name, tensor in trainer.named_tensors(dtype, device):
                yield f"not.{name}", tensor

    with pytest.raises(EngineError, match="which the model has not"):
        weight_sync.run(Misnamed(), spec)  # type: ignore[arg-type]
    assert greedy() and not weight_sync._group.is_open
    weight_sync.run(trainer, replace(spec, version="after"))
    assert version() == "after"


def test_engines_answer_as_sglang_does(engine_url: str) -> None:
    async def refused(path: str, body: dict[str, Any]) -> str:
        async with EngineClient(engine_url, timeout_s=30) as client:
            with pytest.raises(EngineError) as caught:
                await client._update(path, body)
            return str(caught.value)

    def said(path: str, **body: Any) -> str:
        return asyncio.run(refused(path, body))

    meeting = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}
    assert "does not exist" in said("/destroy_weights_update_group", group_name="no")
    nccl = said("/init_weights_update_group", **meeting, group_name="a", backend="nccl")
    assert "backend must be 'gloo', not 'nccl'" in nccl
    wrong = {**meeting, "rank_offset": 2}
    assert "rank_offset must be in [1, 1], got 2" in said(
        "/init_weights_update_group", **wrong, group_name="a", backend="gloo"
    )
    lists = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}
    unknown = said("/update_weights_from_distributed", **lists, group_name="no")
    assert "Please call `init_weights_update_group` first." in unknown
    uneven = {**lists, "shapes": []}
    assert "of the same length" in said(
        "/update_weights_from_distributed", **uneven, group_name=GROUP
    )


def test_a_member_made_by_torch_meets_ours(process_group: None) -> None:
    """An SGLang server joins with torch's own functions: they must look under the same keys."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    opening = open_group("127.0.0.1", 2, "met", "gloo")
    meeting, got = opening.meeting, torch.zeros(3)

    def theirs() -> None:
        address = f"tcp://{meeting.master_address}:{meeting.master_port}"
        store, rank, world = next(c10d.rendezvous(address, 1, 2))
        joined, _ = c10d._new_process_group_helper(
            world,
            rank,
            [],
            "gloo",
            dist.PrefixStore("met", store),
            group_name="met",
            timeout=timedelta(seconds=60),
        )
        options = dist.BroadcastOptions()
        options.rootRank = 0
        joined.broadcast([got], options).wait()

    other = threading.Thread(target=theirs, daemon=True)
    other.start()
    opening.join().broadcast([torch.arange(3.0)])
    other.join(60)
    assert got.tolist() == [0.0, 1.0, 2.0]
