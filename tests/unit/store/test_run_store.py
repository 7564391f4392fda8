"""Commit, look-up and quarantine: what a run relies on when it is killed and resumed."""

import logging
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import Conflict, Corrupt, Fenced, NotFound, StoreError
from rlcore.store import paths
from rlcore.store.batch import SCORES, rows_to_table, write_table
from rlcore.store.lease import Lease
from rlcore.store.manifest import FileRef, Manifest, StageRef, canonical_json, sha256_hex
from rlcore.store.objects import Objects
from rlcore.store.run_store import RunStore, run_ids

ROOT = Path(__file__).parents[3]


def part(objects: Objects, iteration: int = 0, stage: str = "reward", rows: int = 3) -> FileRef:
    table = rows_to_table(
        SCORES,
        [
            {
                "row": row,
                "prompt_id": "p",
                "group_index": 0,
                "index": row,
                "reward": 1.0,
                "status": "completed",
                "details": None,
                "error": None,
            }
            for row in range(rows)
        ],
    )
    key = paths.part_key("r", iteration, stage, 0, paths.new_attempt())
    return write_table(objects, key, table)


def manifest(lease: Lease, stage: str = "reward", iteration: int = 0, **more: Any) -> Manifest:
    plain: dict[str, Any] = {
        "run_id": "r",
        "iteration": iteration,
        "stage": stage,
        "config_digest": "c",
        "epoch": lease.epoch,
        "attempt": paths.new_attempt(),
        "inputs": {"rollout": "a" * 64},
    }
    return Manifest(**plain | more)


INPUTS = {"rollout": "a" * 64}


def test_commit_and_lookup(objects: Objects) -> None:
    store, lease = RunStore(objects, "r"), Lease.acquire(objects, "r")
    assert store.lookup(0, "reward", INPUTS, "c") is None
    made = manifest(lease, files=(part(objects),), metrics={"reward": 0.5, "kl": float("nan")})
    ref = store.commit(made, lease)
    assert ref.rows == 3
    assert store.lookup(0, "reward", INPUTS, "c") == ref
    read = store.manifest(ref)
    assert read.to_bytes() == made.to_bytes()
    assert sha256_hex(objects.get(ref.key)) == ref.sha256
    assert pickle.loads(pickle.dumps(ref)) == ref


def test_the_second_equal_commit_gets_the_first_ref(objects: Objects) -> None:
    store, lease = RunStore(objects, "r"), Lease.acquire(objects, "r")
    first = store.commit(manifest(lease, files=(part(objects),)), lease)
    second = store.commit(manifest(lease, files=(part(objects),)), lease)
    assert second == first


@pytest.mark.parametrize("change", [{"config_digest": "d"}, {"inputs": {"rollout": "b" * 64}}])
def test_another_commit_is_a_conflict(disk: Objects, change: dict[str, Any]) -> None:
    store, lease = RunStore(disk, "r"), Lease.acquire(disk, "r")
    store.commit(manifest(lease), lease)
    with pytest.raises(Conflict, match=r"it/000000/reward/_MANIFEST\.json"):
        store.commit(manifest(lease, **change), lease)
    asked = {"inputs": INPUTS, "config_digest": "c"} | change
    with pytest.raises(Conflict, match="another"):
        store.lookup(0, "reward", **asked)


def test_racing_threads_all_get_the_winners_ref(objects: Objects) -> None:
    store, lease = RunStore(objects, "r"), Lease.acquire(objects, "r")
    gate = threading.Barrier(6)

    def commit(number: int) -> StageRef | None:
        made = manifest(lease, config_digest="c" if number < 4 else "d")
        gate.wait()
        try:
            return store.commit(made, lease)
        except Conflict:
            return None

    with ThreadPoolExecutor(6) as pool:
        refs = list(pool.map(commit, range(6)))
    won = {ref.sha256 for ref in refs if ref is not None}
    assert won == {sha256_hex(objects.get(paths.manifest_key("r", 0, "reward")))}
    assert refs.count(None) in (2, 4)


def test_racing_processes_all_get_the_winners_ref(shared: Objects) -> None:
    code = (
        "import pickle, sys\n"
        "from rlcore.store.lease import Lease\n"
        "from rlcore.store.manifest import Manifest\n"
        "from rlcore.store.run_store import RunStore\n"
        "objects = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "lease = Lease(objects, 'r', 'h:1:1', 1, 60.0)\n"
        "made = Manifest(run_id='r', iteration=0, stage='train', config_digest='c', epoch=1,\n"
        "                attempt=sys.argv[2])\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(RunStore(objects, 'r').commit(made, lease).sha256)\n"
    )
    Lease.acquire(shared, "r", "h:1:1", 60.0)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, pickle.dumps(shared).hex(), str(n)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        for n in range(3)
    ]
    for child in children:
        assert child.stdout and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin
        child.stdin.write("go\n")
        child.stdin.flush()
    shas = {child.communicate(timeout=60)[0].strip() for child in children}
    assert shas == {sha256_hex(shared.get(paths.manifest_key("r", 0, "train")))}


def test_a_fenced_driver_commits_nothing(objects: Objects) -> None:
    store, old = RunStore(objects, "r"), Lease.acquire(objects, "r", "a:1:1")
    Lease.acquire(objects, "r", "b:1:1", steal=True)
    with pytest.raises(Fenced, match="b:1:1"):
        store.commit(manifest(old), old)
    with pytest.raises(Fenced):
        store.commit_iteration(0, {"stages": {}}, old)
    assert not objects.exists(paths.manifest_key("r", 0, "reward"))
    assert store.committed(0) is None


def damage_missing(objects: Objects, ref: FileRef) -> None:
    objects.delete(ref.key)


def damage_truncated(objects: Objects, ref: FileRef) -> None:
    objects.put(ref.key, objects.get(ref.key)[:-7])


def damage_altered(objects: Objects, ref: FileRef) -> None:
    data = bytearray(objects.get(ref.key))
    data[len(data) // 2] ^= 1
    objects.put(ref.key, bytes(data))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_missing, "is missing"),
        (damage_truncated, "bytes, its manifest says"),
        (damage_altered, "sha256"),
    ],
)
def test_a_damaged_part_undoes_its_stage(
    objects: Objects, damage: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, lease = RunStore(objects, "r"), Lease.acquire(objects, "r")
    good, bad = part(objects), part(objects)
    ref = store.commit(manifest(lease, files=(good, bad)), lease)
    bytes_before = objects.get(ref.key)
    damage(objects, bad)
    with caplog.at_level(logging.ERROR, "sluice.store"):
        assert store.lookup(0, "reward", INPUTS, "c") is None
    assert reason in caplog.text and bad.key in caplog.text
    assert not objects.exists(ref.key)
    aside = [k for k in objects.list("runs/r/it/000000/reward") if "_MANIFEST.bad-" in k]
    assert [objects.get(key) for key in aside] == [bytes_before]
    again = store.commit(manifest(lease, files=(part(objects),)), lease)
    assert store.lookup(0, "reward", INPUTS, "c") == again != ref


def test_a_torn_manifest_undoes_its_stage(objects: Objects, caplog: Any) -> None:
    store, lease = RunStore(objects, "r"), Lease.acquire(objects, "r")
    ref = store.commit(manifest(lease, files=(part(objects),)), lease)
    objects.put(ref.key, objects.get(ref.key)[:40])
    with pytest.raises(Corrupt, match="sha256"):
        RunStore(objects, "r").manifest(ref)
    with pytest.raises(Corrupt, match="torn"):
        store.commit(manifest(lease), lease)
    assert store.lookup(0, "reward", INPUTS, "c") is None
    assert "torn" in caplog.text
    store.commit(manifest(lease), lease)


def test_a_manifest_of_another_stage_is_not_believed(disk: Objects) -> None:
    store, lease = RunStore(disk, "r"), Lease.acquire(disk, "r")
    disk.put(paths.manifest_key("r", 0, "train"), manifest(lease, stage="filter").to_bytes())
    assert store.lookup(0, "train", INPUTS, "c") is None


@pytest.mark.parametrize("tear_manifest", [False, True])
def test_stages_made_from_a_quarantined_one_go_with_it(disk: Objects, tear_manifest: bool) -> None:
    store, lease = RunStore(disk, "r"), Lease.acquire(disk, "r")
    bad = part(disk, stage="rollout")
    first = store.commit(manifest(lease, "rollout", inputs={}, files=(bad,)), lease)
    second = store.commit(manifest(lease, "reward", inputs={"rollout": first.sha256}), lease)
    store.commit(manifest(lease, "filter", inputs={"reward": second.sha256}), lease)
    store.commit(manifest(lease, "evaluate", inputs={"policy": "e" * 64}), lease)
    if tear_manifest:
        disk.put(first.key, b"{")
    else:
        disk.delete(bad.key)
    assert store.lookup(0, "rollout", {}, "c") is None
    assert store.stage(0, "reward") is None and store.stage(0, "filter") is None
    assert store.stage(0, "evaluate") is not None


def test_a_committed_iteration_is_not_undone(disk: Objects) -> None:
    store, lease = RunStore(disk, "r"), Lease.acquire(disk, "r")
    bad = part(disk)
    ref = store.commit(manifest(lease, files=(bad,)), lease)
    store.commit_iteration(0, {"stages": {"reward": ref}}, lease)
    disk.delete(bad.key)
    with pytest.raises(Corrupt, match=r"is missing; iteration 0 .* is committed"):
        store.lookup(0, "reward", INPUTS, "c")
    assert disk.exists(ref.key)


def test_the_trainer_state_is_part_of_its_stage(disk: Objects) -> None:
    store, lease = RunStore(disk, "r"), Lease.acquire(disk, "r")
    prefix = paths.state_prefix("r", 0, "a1")
    disk.put(f"{prefix}/model.bin", b"weights")
    file = FileRef(key=f"{prefix}/model.bin", bytes=7, sha256=sha256_hex(b"weights"))
    state = {"key_prefix": prefix, "files": [file.model_dump()]}
    store.commit(manifest(lease, "train", extra={"state": state}), lease)
    assert store.lookup(0, "train", INPUTS, "c") is not None
    disk.delete(file.key)
    disk.put(paths.pruned_key(prefix), b"{}")
    assert store.lookup(0, "train", INPUTS, "c") is not None
    disk.delete(paths.pruned_key(prefix))
    assert store.lookup(0, "train", INPUTS, "c") is None


def test_an_unknown_version_is_refused_and_kept(disk: Objects) -> None:
    store = RunStore(disk, "r")
    key = paths.manifest_key("r", 0, "train")
    disk.put(key, b'{"schema_version":2,"files":[]}')
    with pytest.raises(StoreError, match="schema version 2, expected 1"):
        store.lookup(0, "train", {}, "c")
    assert disk.exists(key)


def test_a_run_is_created_once(objects: Objects) -> None:
    store = RunStore(objects, "r")
    with pytest.raises(NotFound, match="run r is not under"):
        store.load_run()
    assert store.create_run({"config_digest": "c", "config": {"a": 1}})
    assert not store.create_run({"config_digest": "c"})
    with pytest.raises(Conflict, match="another config"):
        store.create_run({"config_digest": "d"})
    assert store.load_run()["config"] == {"a": 1}
    objects.put("runs/stray/file", b"")
    assert run_ids(objects) == ["r"]


def test_iterations_are_found_without_listing(objects: Objects) -> None:
    store, lease = RunStore(objects, "r"), Lease.acquire(objects, "r")
    assert store.last_committed() is None
    for i in range(11):
        ref = store.commit(manifest(lease, iteration=i), lease)
        record = store.commit_iteration(i, {"stages": {"reward": ref}, "metrics": {"m": i}}, lease)
        assert store.committed(i) == record
        assert store.last_committed() == RunStore(objects, "r").last_committed() == i
    assert record["stages"]["reward"] == ref.model_dump()


def test_an_iteration_is_committed_once(disk: Objects) -> None:
    store, lease = RunStore(disk, "r"), Lease.acquire(disk, "r")
    ref = store.commit(manifest(lease), lease)
    first = store.commit_iteration(0, {"stages": {"reward": ref}, "metrics": {"s": 1}}, lease)
    assert (
        store.commit_iteration(0, {"stages": {"reward": ref}, "metrics": {"s": 2}}, lease) == first
    )
    with pytest.raises(Conflict, match="_COMMITTED"):
        store.commit_iteration(0, {"stages": {}}, lease)


@pytest.mark.parametrize("run_id", ["", "../x", "a/b", ".hidden", "x" * 200])
def test_run_ids_are_folder_names(disk: Objects, run_id: str) -> None:
    with pytest.raises(StoreError, match="folder name"):
        RunStore(disk, run_id)


def test_canonical_json() -> None:
    assert (
        canonical_json({"b": 1, "a": [float("inf"), "é"]})
        == '{"a":["Infinity","é"],"b":1}'.encode()
    )
    with pytest.raises(StoreError, match="no JSON form"):
        canonical_json({"a": object()})


def test_a_changed_metric_is_found(objects: Objects) -> None:
    store, lease = RunStore(objects, "r"), Lease.acquire(objects, "r")
    written = store.commit_iteration(0, {"metrics": {"reward": 0.25, "kl": float("nan")}}, lease)
    assert store.committed(0)["metrics"] == {"reward": 0.25, "kl": "NaN"}  # type: ignore[index]
    key = paths.committed_key("r", 0)
    objects.put(key, objects.get(key).replace(b"0.25", b"0.75"))
    with pytest.raises(Corrupt, match=r"_COMMITTED.json was changed after it was written"):
        store.committed(0)
    objects.put(key, objects.get(key).replace(b"0.75", b"0.25"))
    assert store.committed(0)["sha256"] == written["sha256"]  # type: ignore[index]


def test_a_manifest_just_put_is_not_fetched_again(disk: Objects, monkeypatch: Any) -> None:
    store, lease = RunStore(disk, "r"), Lease.acquire(disk, "r")
    ref = store.commit(manifest(lease), lease)
    monkeypatch.setattr(disk, "get", lambda key: pytest.fail(f"{key} was fetched"))
    assert store.manifest(ref).epoch == lease.epoch
