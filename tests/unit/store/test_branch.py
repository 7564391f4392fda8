"""Forks in the store: shared by reference, made once, verified through, shown by SQL."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
from small_runs import SmallRun, config_tree, fork

from rlcore.cluster.fleet import Fleet
from rlcore.config import build_config
from rlcore.errors import ConfigError, Conflict, Corrupt, NotFound
from rlcore.observe.compare import compare_runs
from rlcore.observe.history import records, summarise
from rlcore.observe.sql import connect
from rlcore.run import Run
from rlcore.store import paths
from rlcore.store.branch import drop_fork, forks_of, kept_state
from rlcore.store.lineage import verify_run
from rlcore.store.objects import Objects
from rlcore.store.retention import prune
from rlcore.store.run_store import RunStore


@pytest.fixture
def rooted(disk: Objects) -> Objects:
    """A root with run a: four iterations."""
    SmallRun(disk, "a", config_tree("a")).run(4)
    return disk


def test_a_fork_has_its_parents_iterations_and_goes_on(objects: Objects) -> None:
    SmallRun(objects, "a", config_tree("a")).run(4)
    store = fork(objects, "a", 1, "b", train={"lr": 0.5})
    assert store.last_committed() == 1 and store.first_own == 2
    assert objects.list("runs/b") == ["runs/b/run.json"]
    assert store.committed(1) == RunStore(objects, "a").committed(1)
    SmallRun(objects, "b").run(5)
    again = RunStore(objects, "b")
    assert again.last_committed() == 4
    assert [r["run_id"] for r in records(objects, "b")] == ["a", "a", "b", "b", "b"]
    for run_id in ("a", "b"):
        report = verify_run(objects, run_id)
        assert report.ok, report.errors
    assert verify_run(objects, "b").counts["iterations"] == 5


def test_forks_of_forks(rooted: Objects) -> None:
    fork(rooted, "a", 2, "b", train={"lr": 0.5})
    SmallRun(rooted, "b").run(5)
    fork(rooted, "b", 3, "c", algorithm={"clip_high": 0.3})
    SmallRun(rooted, "c").run(6)
    store = RunStore(rooted, "c")
    assert [s.run_id for s in store.lineage] == ["c", "b", "a"] and store.origin == "a"
    assert [store.owner(i).run_id for i in range(6)] == ["a", "a", "a", "b", "c", "c"]
    report = verify_run(rooted, "c")
    assert report.ok, report.errors
    # One whose place lies before its parent's own beginning shares the grandparent's.
    fork(rooted, "c", 1, "d")
    assert RunStore(rooted, "d").owner(1).run_id == "a"
    assert ("d", 1) in forks_of(rooted, "c") and ("d", 1) in forks_of(rooted, "a")
    drop_fork(rooted, "a", "d")
    assert forks_of(rooted, "a") == [("b", 2)]


@pytest.mark.parametrize("torn", [b"", b"{}", b'{"schema_version":1,"forks":[{}]}'])
def test_a_torn_list_of_forks_is_read_off_the_forks(rooted: Objects, torn: bytes) -> None:
    fork(rooted, "a", 2, "b")
    SmallRun(rooted, "b").run(5)
    fork(rooted, "b", 3, "c")
    fork(rooted, "b", 1, "d")
    before = {run_id: forks_of(rooted, run_id) for run_id in ("a", "b")}
    assert before == {"a": [("b", 2), ("d", 1)], "b": [("c", 3), ("d", 1)]}
    for run_id in before:
        rooted.put(paths.forks_key(run_id), torn)
    assert {run_id: forks_of(rooted, run_id) for run_id in before} == before
    fork(rooted, "a", 0, "e")
    assert forks_of(rooted, "a") == [("b", 2), ("d", 1), ("e", 0)]


def test_nothing_is_written_into_the_parents_iterations(rooted: Objects) -> None:
    fork(rooted, "a", 1, "b")
    run = SmallRun(rooted, "b")
    found = RunStore(rooted, "a").stage(1, "train")
    assert found
    with pytest.raises(Conflict, match="is that of its parent a, where nothing is written"):
        run.store.commit(found[0].model_copy(update={"run_id": "b"}), run.lease)


def test_made_again_it_is_the_same_and_another_is_refused(rooted: Objects) -> None:
    fork(rooted, "a", 1, "b", train={"lr": 0.5})
    before = rooted.get("runs/b/run.json")
    fork(rooted, "a", 1, "b", train={"lr": 0.5})
    assert rooted.get("runs/b/run.json") == before
    for other, said in (
        ({"train": {"lr": 0.25}}, "train.lr is 0.5 there and 0.25 here"),
        ({"train": {"lr": 0.5, "num_iterations": 9}}, "train.num_iterations is 6 there and 9"),
        ({}, "train.lr is 0.5 there and 1e-06 here"),
    ):
        with pytest.raises(ConfigError, match=said):
            fork(rooted, "a", 1, "b", **other)
    with pytest.raises(ConfigError, match="a fork of a after iteration 1, not a fork of a after i"):
        fork(rooted, "a", 2, "b", train={"lr": 0.5})
    with pytest.raises(ConfigError, match="it is no re-run, not a re-run of train"):
        fork(rooted, "a", 2, "b", rerun="train", train={"lr": 0.5})
    with pytest.raises(ConfigError, match="it is no fork, not a fork of b after iteration 1"):
        fork(rooted, "b", 1, "a", train={"lr": 1e-6})


def test_killed_before_its_record_a_fork_is_made_by_the_next_call(rooted: Objects) -> None:
    fork(rooted, "a", 1, "b")
    rooted.delete("runs/b/run.json")
    fork(rooted, "a", 1, "b")
    assert forks_of(rooted, "a") == [("b", 1)]
    assert RunStore(rooted, "b").last_committed() == 1


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ({"model": {"path": "/models/other"}}, "model.path = '/models/other' .*trained that model"),
        ({"data": {"path": "/other.jsonl"}}, "the data cursor of the shared iterations counts"),
        ({"run": {"seed": 4}}, "run.seed = 4 .*order of the prompts"),
        ({"run": {"mode": "async"}}, "run.mode = 'async' .*stages of the shared iterations"),
    ],
)
def test_what_may_not_differ(rooted: Objects, sets: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fork(rooted, "a", 1, "b", **sets)
    assert not rooted.exists("runs/b/run.json") and forks_of(rooted, "a") == []


def test_only_what_is_committed_can_be_forked(rooted: Objects) -> None:
    for iteration in (4, -1):
        with pytest.raises(NotFound, match=f"no committed iteration {iteration}; 0 to 3 are"):
            fork(rooted, "a", iteration, "b")
    with pytest.raises(NotFound, match="run x is not under"):
        fork(rooted, "x", 0, "b")


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", ""])
def test_names_stay_in_the_root(rooted: Objects, name: str) -> None:
    with pytest.raises(NotFound, match="not usable as a folder name"):
        fork(rooted, "a", 1, name)


@pytest.mark.parametrize("iteration", [0, 2])
def test_a_rerun_of_train_takes_the_stages_before_it(rooted: Objects, iteration: int) -> None:
    fork(rooted, "a", iteration, "b", rerun="train", algorithm={"clip_high": 0.3})
    # Killed after the first of them, the next driver commits the others.
    run = SmallRun(rooted, "b")
    rooted.delete(paths.manifest_key("b", iteration, "filter"))
    run = SmallRun(rooted, "b")
    theirs, own = RunStore(rooted, "a"), RunStore(rooted, "b")
    for name in ("rollout", "reward", "filter"):
        mine, original = own.stage(iteration, name), theirs.stage(iteration, name)
        assert mine and original and mine[0].files == original[0].files
        digest, inputs = original[0].config_digest, mine[0].inputs
        assert own.lookup(iteration, name, inputs, digest) == mine[1]
    run.run(iteration + 2)
    report = verify_run(rooted, "b")
    assert report.ok, report.errors
    parting = compare_runs(theirs, own).parting
    assert parting and (parting.iteration, parting.stage) == (iteration, "train")
    rows = connect(rooted).execute(
        f"SELECT run_id, count(*) FROM samples WHERE iteration = {iteration} GROUP BY 1 ORDER BY 1"
    )
    assert rows.fetchall() == [("a", 4), ("b", 4)]


def test_a_rerun_cannot_change_what_it_takes(rooted: Objects) -> None:
    with pytest.raises(ConfigError, match=r"takes rollout, reward, filter as s.*reward\.reward"):
        fork(rooted, "a", 1, "b", rerun="train", reward={"reward_key": "x"})
    with pytest.raises(ConfigError, match=r"takes rollout as stored.*rollout\.temperature"):
        fork(rooted, "a", 1, "b", rerun="reward", rollout={"temperature": 0.5})
    fork(rooted, "a", 2, "c", rollout={"temperature": 0.5})
    with pytest.raises(ConfigError, match="iteration 1 is that of run a, made with other settings"):
        fork(rooted, "c", 1, "b", rerun="train")


def test_groups_that_a_rollout_left_over_fit_the_fork(disk: Objects) -> None:
    run = SmallRun(disk, "a", config_tree("a"))
    made = run._made

    def leaving(i: int, name: str, inputs: dict[str, Any]) -> dict[str, Any]:
        more = made(i, name, inputs)
        if (i, name) == (1, "rollout"):
            more["extra"] = {"buffer": run.folder(1, "rollout", "groups")}
        return more

    run._made = leaving  # type: ignore[method-assign]
    run.run(2)
    size = {"rollout": {"n_samples_per_prompt": 4}, "train": {"global_batch_size": 8}}
    fork(disk, "a", 0, "b", **size)
    with pytest.raises(ConfigError, match="left groups of the old size"):
        fork(disk, "a", 1, "c", **size)
    fork(disk, "a", 1, "c", rollout={"temperature": 0.5})


def test_a_forks_own_rows_in_sql_and_the_rest_under_its_parent(rooted: Objects) -> None:
    fork(rooted, "a", 1, "b", train={"lr": 0.5})
    SmallRun(rooted, "b").run(4)
    sql = connect(rooted)
    query = "SELECT run_id, min(iteration), count(DISTINCT iteration) FROM {} GROUP BY 1 ORDER BY 1"
    for view in ("samples", "iterations", "stages"):
        assert sql.execute(query.format(view)).fetchall() == [("a", 0, 4), ("b", 2, 2)]


def test_a_damaged_run_is_left_out_of_sql_by_name(
    rooted: Objects, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("b", "c", "d"):
        SmallRun(rooted, name, config_tree(name)).run(1)
    rooted.put("runs/b/run.json", b"{")
    rooted.put("runs/c/it/000000/train/_MANIFEST.json", b"{")
    rooted.put("runs/d/it/000000/_COMMITTED.json", b'{"schema_version": 1, "metrics": {}}')
    found = connect(rooted).execute("SELECT DISTINCT run_id FROM samples").fetchall()
    assert found == [("a",)]
    for name in ("b", "c", "d"):
        assert f"run {name} is left out: " in caplog.text


def test_verify_sees_a_changed_configuration_and_a_changed_parent(rooted: Objects) -> None:
    fork(rooted, "a", 1, "b")
    for key, change, said in (
        ("runs/a/run.json", ("config", {}), "run a: its config is not the one of its"),
        ("runs/a/it/000001/_COMMITTED.json", ("created", "x"), "run b: iteration 1 of run a is no"),
    ):
        data = rooted.get(key)
        record = json.loads(data)
        if change[0] == "config":
            record["config"]["train"]["lr"] = 0.125
        else:
            record[change[0]] = change[1]
        rooted.put(key, json.dumps(record).encode())
        assert any(said in error for error in verify_run(rooted, "b").errors)
        rooted.put(key, data)
    assert verify_run(rooted, "b").ok
    rooted.delete_tree("runs/a")
    assert any("a" in error for error in verify_run(rooted, "b").errors)


def test_a_circle_of_parents_is_corrupt(rooted: Objects) -> None:
    fork(rooted, "a", 1, "b")
    record = json.loads(rooted.get("runs/a/run.json"))
    record["parent"] = {"run_id": "b", "iteration": 1, "digest": "x"}
    rooted.put("runs/a/run.json", json.dumps(record).encode())
    with pytest.raises(Corrupt, match="is its own fork"):
        _ = RunStore(rooted, "b").origin
    record["parent"] = {"run_id": "../a", "iteration": 1, "digest": "x"}
    rooted.put("runs/a/run.json", json.dumps(record).encode())
    with pytest.raises(Corrupt, match="does not say what it is a fork of"):
        _ = RunStore(rooted, "a").parent


def test_show_names_the_parent(rooted: Objects) -> None:
    fork(rooted, "a", 1, "b")
    summary = summarise(rooted, "b")
    assert summary.parent and (summary.parent["run_id"], summary.parent["iteration"]) == ("a", 1)
    assert (summary.committed, summary.status) == (2, "new")
    assert summarise(rooted, "a").parent is None


def test_a_state_that_was_pruned_is_not_kept(rooted: Objects, tmp_path: Path) -> None:
    store = RunStore(rooted, "a")
    found = [store.stage(i, "train") for i in range(4)]
    manifests = [pair[0] for pair in found if pair]
    prune(rooted, [m.extra["state"]["key_prefix"] for m in reversed(manifests)], keep_last=2)
    kept = [kept_state(store, i, manifest) is not None for i, manifest in enumerate(manifests)]
    assert kept == [False, False, True, True]


def test_a_run_that_goes_on_keeps_what_its_forks_begin_with(rooted: Objects) -> None:
    fork(rooted, "a", 1, "b", checkpoint={"keep_last": 1})
    config = build_config(RunStore(rooted, "a").load_run()["config"])
    kept = config.checkpoint.model_copy(update={"keep_last": 1})
    for name, until in (("a", 6), ("b", 4)):
        small = SmallRun(rooted, name).run(until)
        own = config.model_copy(
            update={"run": config.run.model_copy(update={"id": name}), "checkpoint": kept}
        )
        # Pruning asks nothing of the actors.
        run = Run(own, small.store, small.lease, cast(Fleet, None))
        run._prune(until - 1)
    states = {
        name: [i for i in range(store.first_own, until) if kept_of(store, i)]
        for name, until in (("a", 6), ("b", 4))
        if (store := RunStore(rooted, name))
    }
    assert states == {"a": [1, 5], "b": [3]}


def kept_of(store: RunStore, i: int) -> bool:
    found = store.stage(i, "train")
    return found is not None and kept_state(store, i, found[0]) is not None


def test_equal_runs_do_not_part(rooted: Objects) -> None:
    SmallRun(rooted, "z", config_tree("z")).run(4)
    fork(rooted, "a", 2, "b")
    found = compare_runs(RunStore(rooted, "a"), RunStore(rooted, "b"))
    assert (found.shared, found.common, found.parting, found.settings) == (3, 3, None, [])
    apart = compare_runs(RunStore(rooted, "a"), RunStore(rooted, "z"))
    assert apart.shared == 0 and apart.common == 4
    # Equal content; the states are told apart by their names, which hang on the manifests.
    assert apart.parting and apart.parting.stage == "train"
