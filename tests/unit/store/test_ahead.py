"""Rollouts made ahead: which policy makes which, in which order, and the proof of it."""

import asyncio
from typing import Any, cast

import pytest
from small_runs import Refs, SmallRun, config_tree

from rlcore.cluster.fleet import Fleet
from rlcore.config import RunConfig, build_config
from rlcore.errors import ConfigError, EngineError
from rlcore.run import Run
from rlcore.store.lease import Lease
from rlcore.store.lineage import verify_run
from rlcore.store.manifest import Manifest, StageRef
from rlcore.store.objects import Objects
from rlcore.store.run_store import RunStore
from rlcore.work import Work


def tree(every: int = 1, ahead: int = 1, **sections: dict[str, Any]) -> dict[str, Any]:
    rollout = {"update_weights_interval": every, "async_buffer_size": ahead}
    rollout |= {"rollout_batch_size": 2, "n_samples_per_prompt": 2}
    return config_tree("r", run={"mode": "async"}, rollout=rollout, **sections)


class Ahead(SmallRun):
    """Writes a run as the mode `async` does. `wrong`: policy versions that are others."""

    wrong: dict[int, int] = {}  # noqa: RUF012

    def iteration(self, i: int, *, commit: bool = True) -> Refs:
        config = build_config(self.config)
        self.version = self.wrong.get(i, config.policy_version(i))
        made_by = self.store.committed(self.version - 1) if self.version else None
        policy = {"policy": StageRef(**made_by["stages"]["weight_sync"])} if made_by else {}
        refs: Refs = {"rollout": self.stage(i, "rollout", policy)}
        for name in ("reward", "filter", "train"):
            refs[name] = self.stage(i, name, dict(refs))
        if config.due(config.rollout.update_weights_interval, i, last=True):
            refs["weight_sync"] = self.stage(i, "weight_sync", {"train": refs["train"]})
        self.store.commit_iteration(i, {"stages": refs, "metrics": {}}, self.lease)
        return refs

    def _made(self, i: int, name: str, inputs: Refs) -> dict[str, Any]:
        more = {"policy_version": self.version} if name == "rollout" else {}
        return super()._made(i, name, inputs) | more


@pytest.mark.parametrize(
    ("every", "ahead", "versions"),
    [
        (1, 1, [0, 0, 1, 2, 3, 4, 5, 6]),
        (2, 1, [0, 0, 0, 2, 2, 4, 4, 6]),
        (3, 1, [0, 0, 0, 0, 3, 3, 3, 6]),
        (1, 2, [0, 0, 0, 1, 2, 3, 4, 5]),
        (2, 3, [0, 0, 0, 0, 0, 2, 2, 4]),
    ],
)
def test_the_policy_of_a_rollout_follows_from_the_settings(
    every: int, ahead: int, versions: list[int]
) -> None:
    config = build_config(tree(every, ahead))
    assert [config.policy_version(i) for i in range(8)] == versions
    ages = [i - config.policy_version(i) for i in range(60)]
    assert max(ages) == config.lag == config.max_staleness == every + ahead - 1
    # What a resume may have to go back to is kept.
    assert config.states_kept > config.lag


@pytest.mark.parametrize(("every", "ahead"), [(1, 1), (2, 1), (2, 3)])
def test_a_run_with_rollouts_ahead_is_whole(disk: Objects, every: int, ahead: int) -> None:
    Ahead(disk, "r", tree(every, ahead, train={"num_iterations": 7})).run(7)
    report = verify_run(disk, "r")
    assert report.ok, report.errors


def test_a_rollout_by_a_policy_that_is_not_the_run_s_is_noticed(disk: Objects) -> None:
    run = Ahead(disk, "r", tree())
    run.run(3)
    run = Ahead(disk, "r")
    original = run._made

    def lies(i: int, name: str, inputs: Refs) -> dict[str, Any]:
        return original(i, name, inputs) | ({"policy_version": 3} if name == "rollout" else {})

    run._made = lies  # type: ignore[method-assign]
    run.run(4)
    [fault] = verify_run(disk, "r").errors
    assert fault.startswith("iteration 3: rollout was made by policy version 3 of weight sync")


def test_one_that_is_too_old_is_noticed_and_refused(disk: Objects) -> None:
    run = Ahead(disk, "r", tree())
    run.wrong = {3: 1}
    run.run(4)
    [fault] = verify_run(disk, "r").errors
    assert "iteration 3: rollout was made by policy version 1, 2 iterations before" in fault
    own = Run(build_config(run.config), run.store, run.lease, cast(Fleet, None))
    found = run.store.stage(3, "rollout")
    assert found is not None
    with pytest.raises(ConfigError, match=r"version 1, 2 iterations before, .*max_staleness = 1"):
        own._check_age(3, found[0])


# --- the driver -----------------------------------------------------------------------------------


class Actors:
    """Stands in for the fleet: says what it was asked for, in order."""

    start_state = "start"
    engine_restarts = 0

    def __init__(self) -> None:
        self.engine_version: int | None = 0
        self.seen: list[tuple[str, int, Any]] = []
        self.fails: set[int] = set()

    async def engines_up(self) -> None:
        pass

    async def generate(self, i: int, cursor: dict[str, Any] | None, version: int) -> Work:
        assert self.engine_version == version
        self.seen.append(("begin", i, cursor and cursor["next_offset"]))
        await asyncio.sleep(0)
        assert self.engine_version == version, "the weights changed under a rollout"
        if i in self.fails:
            self.fails.remove(i)
            raise EngineError("no engine answers")
        self.seen.append(("end", i, version))
        span = {"epoch": 0, "offset": i, "next_epoch": 0, "next_offset": i + 1, "size": 99}
        return Work(attempt=f"a{i}", policy_version=version, cursor=span)


def opened(disk: Objects, config: RunConfig) -> tuple[Run, Actors]:
    store, actors = RunStore(disk, "r"), Actors()
    run = Run(config, store, Lease.acquire(disk, "r"), cast(Fleet, actors))

    async def push(version: int) -> None:
        actors.seen.append(("push", version, None))
        actors.engine_version = version

    run.ensure_engines = push  # type: ignore[method-assign, assignment]
    return run, actors


async def iteration(run: Run, actors: Actors, i: int) -> Work:
    """What the flow asks of a run, but for the stages of others."""
    work = await run.generate(i)
    fields = {"run_id": "r", "iteration": i, "stage": "rollout", "config_digest": "c"}
    manifest = Manifest(**fields, epoch=run.lease.epoch, attempt=work.attempt, cursor=work.cursor)
    run.store.commit(manifest, run.lease)
    run.begin_ahead(i)
    await asyncio.sleep(0)
    actors.seen.append(("train", i, None))
    if run.sync_due(i):
        await run.generated_ahead()
        await run.ensure_engines(i + 1)
    return work


async def test_the_next_rollout_is_made_while_one_is_trained_on(disk: Objects) -> None:
    run, actors = opened(disk, build_config(tree(train={"num_iterations": 3})))
    works = [await iteration(run, actors, i) for i in range(3)]
    assert [w.policy_version for w in works] == [0, 0, 1]
    assert [w.cursor and w.cursor["offset"] for w in works] == [0, 1, 2]
    story = [f"{what} {n}" for what, n, _ in actors.seen]
    assert story == [
        *("push 0", "begin 0", "end 0"),
        *("push 0", "begin 1", "train 0", "end 1", "push 1"),
        *("push 1", "begin 2", "train 1", "end 2", "push 2"),
        *("train 2", "push 3"),
    ]  # fmt: skip


async def test_several_are_made_one_after_another_from_each_other_s_end(disk: Objects) -> None:
    run, actors = opened(disk, build_config(tree(2, 3, train={"num_iterations": 6})))
    works = [await iteration(run, actors, i) for i in range(6)]
    assert [w.policy_version for w in works] == [0, 0, 0, 0, 0, 2]
    # Each begins where the one before ended, committed or not.
    assert [at for what, _, at in actors.seen if what == "begin"] == [None, 1, 2, 3, 4, 5]
    assert [n for what, n, _ in actors.seen if what == "begin"] == list(range(6))


async def test_a_rollout_ahead_that_fails_is_made_again_by_its_own_policy(disk: Objects) -> None:
    run, actors = opened(disk, build_config(tree(1, 2, train={"num_iterations": 4})))
    actors.fails = {1}
    await iteration(run, actors, 0)
    with pytest.raises(EngineError):
        await run.generate(1)
    # The engines have gone on to version 1 meanwhile.
    works = [await iteration(run, actors, i) for i in (1, 2, 3)]
    assert [w.policy_version for w in works] == [0, 0, 1]
    assert [w.cursor and w.cursor["offset"] for w in works] == [1, 2, 3]


async def test_another_driver_goes_on_by_the_same_policies(disk: Objects) -> None:
    config = build_config(tree(train={"num_iterations": 5}))
    run, actors = opened(disk, config)
    for i in range(3):
        await iteration(run, actors, i)
    await run.close()
    run.lease.release()
    run, actors = opened(disk, config)
    assert (await iteration(run, actors, 3)).policy_version == 2
    assert (await iteration(run, actors, 4)).policy_version == 3
