"""`gc`: what goes is what nobody needs; afterwards every run and fork is still whole."""

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from small_runs import SmallRun, config_tree, fork

from rlcore.errors import Conflict, Fenced, NotFound
from rlcore.store import paths
from rlcore.store.branch import forks_of, kept_state
from rlcore.store.deltas import Index, IndexRef, write_head, write_index
from rlcore.store.gc import GcReport, collect, remove_run
from rlcore.store.lease import Lease
from rlcore.store.lineage import verify_run
from rlcore.store.manifest import FileRef
from rlcore.store.objects import Objects
from rlcore.store.retention import is_pruned
from rlcore.store.run_store import RunStore, run_ids


def at_once(objects: Objects, **more: Any) -> GcReport:
    """A collection that waits for nothing."""
    return collect(objects, **{"grace_s": -1.0, "older_than_days": -1.0} | more)


def all_whole(objects: Objects) -> None:
    for run_id in run_ids(objects):
        report = verify_run(objects, run_id)
        assert report.ok, report.errors


def saved(store: RunStore, stage: str = "train") -> list[int]:
    """Iterations of a run's own whose state, or checkpoint, is kept."""
    folder = "state" if stage == "train" else "checkpoint"
    last = store.last_committed()
    found = [(i, store.stage(i, stage)) for i in range(store.first_own, (last or 0) + 1)]
    return [
        i
        for i, pair in found
        if pair and not is_pruned(store.objects, pair[0].extra[folder]["key_prefix"])
    ]


def test_of_published_weights_those_stay_that_the_newest_is_made_of(objects: Objects) -> None:
    SmallRun(objects, "a", config_tree("a")).run(1)

    def version(name: str, *chain: IndexRef) -> IndexRef:
        prefix = paths.delta_prefix("a", name, paths.new_attempt())
        part = FileRef(key=f"{prefix}/part-00000", bytes=4, sha256="0")
        objects.put(part.key, b"some")
        return write_index(
            objects, prefix, Index(version=name, config="{}", chain=chain, parts=(part,))
        )

    first, lost = version("1"), version("2")
    write_head(objects, "a", version("2", first))
    report = at_once(objects)
    assert sorted({one.key.rpartition("/")[0] for one in report.removed}) == [lost.prefix]
    assert len(objects.list("runs/a/deltas")) == 5
    all_whole(objects)


def test_files_that_nothing_names_go(objects: Objects) -> None:
    run = SmallRun(objects, "a", config_tree("a"))
    run.run(2)
    gone = [run.orphan(0, "rollout"), run.orphan(1, "reward"), run.orphan(2, "rollout")]
    gone += [f"runs/a/it/000001/train/state-{paths.new_attempt()}/__0_0.distcp"]
    gone += ["runs/a/weights/weights-1/model.safetensors"]
    for key in gone[3:]:
        objects.put(key, b"nobody's")
    before = set(objects.list("runs/a"))
    would = at_once(objects, dry_run=True, keep=9)
    assert set(objects.list("runs/a")) == before
    report = at_once(objects, keep=9)
    assert sorted(one.key for one in report.removed) == sorted(gone)
    assert would.removed == report.removed and report.bytes == 8 * len(gone)
    assert set(objects.list("runs/a")) == before - set(gone)
    assert at_once(objects, keep=9).removed == []
    all_whole(objects)


def test_what_is_young_stays(disk: Objects) -> None:
    run = SmallRun(disk, "a", config_tree("a")).run(1)
    key = run.orphan(1, "rollout")
    assert collect(disk).removed == []
    path = disk.local_path(key)
    assert path
    os.utime(path, (time.time() - 4000,) * 2)
    assert [one.key for one in collect(disk).removed] == [key]


def test_writers_that_died_leave_nothing(disk: Objects) -> None:
    SmallRun(disk, "a", config_tree("a")).run(1)
    left = Path(str(disk.local_path("runs/a/it/000000/rollout"))) / ".part-0.parquet.x.tmp"
    left.write_bytes(b"half")
    [one] = at_once(disk).removed
    assert (one.kind, one.bytes) == ("scratch", 4) and not left.exists()


def test_quarantined_manifests_go_by_age(disk: Objects) -> None:
    SmallRun(disk, "a", config_tree("a")).run(1)
    key = paths.bad_manifest_key("a", 0, "reward", "20260101T000000000000Z")
    disk.put(key, b"{}")
    assert collect(disk, grace_s=-1.0).removed == []
    path = disk.local_path(key)
    assert path
    os.utime(path, (time.time() - 8 * 86400,) * 2)
    assert collect(disk, older_than_days=9, grace_s=-1.0).removed == []
    [one] = collect(disk, grace_s=-1.0).removed
    assert (one.kind, one.key) == ("quarantined", key)


def test_states_and_checkpoints_beyond_those_kept_go(disk: Objects) -> None:
    SmallRun(disk, "a", config_tree("a")).run(6)
    store = RunStore(disk, "a")
    assert at_once(disk, keep=3).skipped == {}
    assert saved(store) == saved(store, "checkpoint") == [3, 4, 5]
    at_once(disk)  # As checkpoint.keep_last says.
    assert saved(store) == [4, 5]
    assert at_once(disk, keep=3).removed == []
    all_whole(disk)
    with pytest.raises(ValueError, match="1 or more"):
        collect(disk, keep=0)


def test_a_state_that_was_half_removed_goes_wholly(disk: Objects) -> None:
    SmallRun(disk, "a", config_tree("a")).run(2)
    found = RunStore(disk, "a").stage(0, "train")
    assert found
    state = found[0].extra["state"]
    disk.put(paths.pruned_key(state["key_prefix"]), b"{}")
    report = at_once(disk)
    assert [one.key for one in report.removed] == [state["files"][0]["key"]]
    assert disk.list(state["key_prefix"]) == [paths.pruned_key(state["key_prefix"])]
    all_whole(disk)


def test_what_a_fork_begins_with_stays(disk: Objects) -> None:
    SmallRun(disk, "a", config_tree("a")).run(6)
    fork(disk, "a", 1, "b", train={"lr": 0.5})
    SmallRun(disk, "b").run(5)
    fork(disk, "b", 2, "c")
    at_once(disk, keep=1)
    assert saved(RunStore(disk, "a")) == [1, 5]
    assert saved(RunStore(disk, "b")) == [2, 4]
    for name, at in (("b", 1), ("c", 2)):
        store = RunStore(disk, name)
        found = store.stage(at, "train")
        assert found and kept_state(store, at, found[0])
    all_whole(disk)


def test_the_state_before_the_place_of_a_fork_stays_where_that_has_none(disk: Objects) -> None:
    SmallRun(disk, "a", config_tree("a")).run(6)
    found = RunStore(disk, "a").stage(3, "train")
    assert found
    disk.put(paths.pruned_key(found[0].extra["state"]["key_prefix"]), b"{}")
    fork(disk, "a", 3, "b")
    at_once(disk, keep=1)
    assert saved(RunStore(disk, "a")) == [2, 5]


def test_what_a_rerun_takes_stays(disk: Objects) -> None:
    SmallRun(disk, "a", config_tree("a")).run(4)
    fork(disk, "a", 2, "b", rerun="train", train={"lr": 0.5})
    SmallRun(disk, "b").run(4)
    # The files are named by b alone, as if a's own manifest had been lost.
    disk.delete(paths.manifest_key("a", 3, "filter"))
    at_once(disk, keep=1)
    assert verify_run(disk, "b").ok


@pytest.mark.parametrize("ttl_s", [120.0, 0.001])
def test_a_driven_run_is_left_alone(disk: Objects, ttl_s: float) -> None:
    """Also one whose lease has run out by our clock, which may be ahead of its driver's."""
    for name in ("a", "b"):
        SmallRun(disk, name, config_tree(name)).run(4).orphan(4, "rollout")
    Lease.acquire(disk, "a", holder="another:1:1", ttl_s=ttl_s)
    time.sleep(0.01)
    report = at_once(disk, keep=1)
    assert "held by another:1:1" in report.skipped["a"]
    assert {one.run_id for one in report.removed} == {"b"}
    assert "a" in remove_run(disk, "a", dry_run=True).skipped


def test_a_driven_run_is_not_removed(disk: Objects) -> None:
    SmallRun(disk, "a", config_tree("a")).run(1)
    Lease.acquire(disk, "a", holder="another:1:1")
    with pytest.raises(Fenced):
        remove_run(disk, "a")


def test_one_run_alone(disk: Objects) -> None:
    for name in ("a", "b"):
        SmallRun(disk, name, config_tree(name)).run(1).orphan(1, "rollout")
    assert {one.run_id for one in at_once(disk, run_id="b").removed} == {"b"}
    with pytest.raises(NotFound, match="run x"):
        at_once(disk, run_id="x")


def test_where_a_run_cannot_be_read_nothing_goes_that_it_may_need(disk: Objects) -> None:
    for name in ("a", "z"):
        SmallRun(disk, name, config_tree(name)).run(3).orphan(3, "rollout")
    fork(disk, "a", 1, "b")
    SmallRun(disk, "b").run(4)
    key = paths.manifest_key("b", 2, "reward")
    data = disk.get(key)
    disk.put(key, data[:50])
    report = at_once(disk)
    assert set(report.skipped) == {"a", "b"} and "is torn" in report.skipped["a"]
    assert {one.run_id for one in report.removed} == {"z"}
    disk.put("runs/b/run.json", b"{")
    assert set(at_once(disk).skipped) == {"a", "b", "z"}
    with pytest.raises(Conflict, match="whether run b is a fork of it cannot be told"):
        remove_run(disk, "a")


def test_a_whole_run_goes_when_no_fork_needs_it(objects: Objects) -> None:
    SmallRun(objects, "a", config_tree("a")).run(3)
    fork(objects, "a", 1, "b")
    SmallRun(objects, "b").run(3)
    with pytest.raises(Conflict, match="b share its iterations"):
        remove_run(objects, "a")
    would = remove_run(objects, "b", dry_run=True)
    assert RunStore(objects, "b").last_committed() == 2
    [one] = would.removed
    assert (one.kind, one.key) == ("run", "runs/b") and one.files > 10 and one.bytes > 1000
    remove_run(objects, "b")
    assert run_ids(objects) == ["a"] and objects.list("runs/b") == []
    assert forks_of(objects, "a") == []
    remove_run(objects, "a")
    assert run_ids(objects) == []
    with pytest.raises(NotFound, match="run a"):
        remove_run(objects, "a")


def test_a_removal_that_was_killed_goes_on(disk: Objects) -> None:
    SmallRun(disk, "a", config_tree("a")).run(2)
    for key in disk.list("runs/a")[:20]:
        if not key.endswith("run.json"):
            disk.delete(key)
    remove_run(disk, "a")
    assert run_ids(disk) == []


@pytest.mark.parametrize("seed", range(12))
def test_after_gc_every_run_is_whole(disk: Objects, seed: int) -> None:
    """Random families of runs, of which some are in the middle of an iteration, and litter."""
    dice = random.Random(seed)
    SmallRun(disk, "r0", config_tree("r0")).run(dice.randint(1, 4))
    for n in range(1, 5):
        parent = dice.choice(run_ids(disk))
        last = RunStore(disk, parent).last_committed() or 0
        stage = dice.choice([None, None, "train", "reward"])
        fork(disk, parent, dice.randint(0, last), f"r{n}", stage, algorithm={"clip_high": 1 / n})
        run = SmallRun(disk, f"r{n}")
        at = (run.store.last_committed() or 0) + 1
        run.run(min(6, at + dice.randint(0, 3)))
        if dice.random() < 0.5:
            at = run.store.last_committed()
            again = SmallRun(disk, f"r{n}")
            again.iteration(0 if at is None else at + 1, commit=False)
            again.lease.release()
        for _ in range(dice.randint(0, 2)):
            run.orphan(dice.randint(run.store.first_own, 6), "rollout")
    keep, only = dice.randint(1, 3), dice.choice([None, "r0", "r2"])
    would = at_once(disk, keep=keep, run_id=only, dry_run=True)
    report = at_once(disk, keep=keep, run_id=only)
    assert would.removed == report.removed and report.skipped == {}
    assert at_once(disk, keep=keep, run_id=only).removed == []
    all_whole(disk)
    for run_id in run_ids(disk):
        store = RunStore(disk, run_id)
        if store.parent and store.parent.iteration >= 0:
            found = store.stage(store.parent.iteration, "train")
            assert found and kept_state(store, store.parent.iteration, found[0])
