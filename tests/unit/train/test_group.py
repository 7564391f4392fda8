"""The trainer's ranks as Ray actors: identity, fencing, the store, and ranks that die."""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rlcore.cluster import ray_session
from rlcore.cluster.placement import NOWHERE
from rlcore.cluster.trainer_actor import TrainerActor, TrainerSpec
from rlcore.cluster.trainer_group import TrainerGroup
from rlcore.config.tree import AlgorithmConfig, TrainConfig
from rlcore.errors import ClusterError, Corrupt, Fenced, TrainError
from rlcore.sample import Sample, Status
from rlcore.store.batch import SCORES, SELECTION, rows_to_table, samples_to_table, write_table
from rlcore.store.objects import Objects
from rlcore.train.trainer import BatchFiles


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    import ray

    mine = ray_session.connect("local")
    yield
    if mine:
        ray.shutdown()


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> TrainerSpec:
    tmp_path = tmp_path_factory.mktemp("group")
    return TrainerSpec(
        train=TrainConfig(lr=1e-2),
        algorithm=AlgorithmConfig(),
        temperature=1.0,
        seed=0,
        device="cpu",
        model_folder=str(model_folder),
        storage_root=str(tmp_path / "store"),
        storage_options={},
        scratch=str(tmp_path / "scratch"),
    )


def stored_batch(root: str) -> BatchFiles:
    """Six samples of two prompts."""
    objects = Objects.open(root)
    samples = [
        Sample(
            group_index=i // 3,
            index=i,
            prompt_id="p",
            tokens=[2 + i, 3, 4 + i, 9],
            response_length=2,
            rollout_log_probs=[-3.8, -3.8],
            status=Status.COMPLETED,
        )
        for i in range(6)
    ]
    row = [{"row": i, "group_index": i // 3, "index": i, "reward": float(i % 3)} for i in range(6)]
    more = {"prompt_id": "p", "status": "completed", "details": None, "error": None}
    return BatchFiles(
        0,
        (write_table(objects, "rollout.parquet", samples_to_table(samples)),),
        (write_table(objects, "reward.parquet", rows_to_table(SCORES, [r | more for r in row])),),
        (
            write_table(
                objects,
                "filter.parquet",
                rows_to_table(SELECTION, [r | {"keep": True, "reason": None} for r in row]),
            ),
        ),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(ray: None, spec: TrainerSpec) -> AsyncIterator[TrainerGroup]:
    """Two ranks with the starting model."""
    group = await TrainerGroup.start(
        spec, places=[NOWHERE, NOWHERE], epoch=3, name="pair", namespace="test", deadline_s=120
    )
    await group.load("start")
    yield group
    await group.stop()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_group_trains_saves_and_goes_back(pair: TrainerGroup, spec: TrainerSpec) -> None:
    files = stored_batch(spec.storage_root)
    assert await pair.holds("start")
    first = await pair.train("start", "one", files)
    saved = await pair.save_state("state-one")
    names = [f"shard-0000{rank}.safetensors" for rank in (0, 1)]
    assert sorted(f.key for f in saved.files) == [f"state-one/{n}" for n in [".metadata", *names]]
    second = await pair.train("one", "two", files)
    with pytest.raises(TrainError, match="holds state 'two', not 'one'"):
        await pair.train("one", "two", files)
    await pair.restore(saved, "one")
    assert await pair.holds("one") and not await pair.holds("two")
    again = await pair.train("one", "two", files)
    assert again.metrics["grad_norm"] == second.metrics["grad_norm"] != first.metrics["grad_norm"]
    exported = await pair.export_hf("hf", "bfloat16")
    assert "hf/model.safetensors" in [f.key for f in exported]
    with pytest.raises(Corrupt, match="holds model"):
        await pair.restore(replace(saved, model_sha256="0" * 64), "one")
    assert not await pair.holds("one")
    await pair.load("start")
    assert not pair.broken


@pytest.mark.asyncio(loop_scope="module")
async def test_a_rank_that_dies_is_named_and_takes_the_group_along(
    pair: TrainerGroup, spec: TrainerSpec
) -> None:
    files = stored_batch(spec.storage_root)
    pids = await pair.ping()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(ClusterError, match=r"trainer rank 1 \(train\) died"):
        await pair.train("start", "one", files)
    assert pair.broken
    with pytest.raises(ClusterError, match="start them again"):
        await pair.holds("start")


def make_actor(spec: TrainerSpec) -> TrainerActor:
    """An actor's class as a plain object, in the test's own process group."""
    actor = TrainerActor(spec, rank=0, world=1)
    actor._node_ranks = [0]
    return actor


def test_a_store_that_is_not_local(process_group: None, spec: TrainerSpec) -> None:
    spec = replace(spec, storage_root="memory://trainer")
    actor = make_actor(spec)
    actor.load(1, "start")
    actor.train(1, "start", "one", stored_batch(spec.storage_root))
    saved = actor.save_state(1, "state-one")
    files = actor.export_hf(1, "hf", "float32")
    assert next(f.key for f in files) == "hf/config.json"
    other = make_actor(spec)
    other.restore(1, saved, "one")
    assert other.state() == ("one", False)
    assert other.save_state(1, "again").digest == saved.digest
    left = [p.name for p in Path(spec.scratch).rglob("*") if p.is_file()]
    assert left == []


def test_an_older_driver_is_fenced(process_group: None, spec: TrainerSpec) -> None:
    actor = make_actor(spec)
    actor.load(5, "start")
    calls: list[Any] = [
        lambda: actor.train(4, "start", "one", stored_batch(spec.storage_root)),
        lambda: actor.save_state(4, "state"),
        lambda: actor.load(4, "start"),
    ]
    for call in calls:
        with pytest.raises(Fenced, match="epoch 5; the call is of epoch 4"):
            call()
    actor.load(6, "start")
