"""SQL views over the runs of a root, on every kind of store."""

import importlib.util
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlcore.observe.sql import connect
from rlcore.store.lease import Lease
from rlcore.store.manifest import Manifest
from rlcore.store.objects import Objects
from rlcore.store.run_store import RunStore


@pytest.fixture(scope="module")
def writing() -> ModuleType:
    """The module that writes small runs."""
    spec = importlib.util.spec_from_file_location(
        "writing_runs", Path(__file__).with_name("test_lineage.py")
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_views(objects: Objects, writing: ModuleType) -> None:
    writing.write_run(objects, 3)
    sql = connect(objects)
    found = sql.execute(
        "SELECT iteration, count(*), avg(reward), count(*) FILTER (NOT keep), "
        "sum(len(tokens)), min(prompt_id) FROM samples WHERE run_id = 'r' GROUP BY 1 ORDER BY 1"
    ).fetchall()
    assert found[:2] == [(0, 6, 1.4, 1, 18, "p0"), (1, 6, 1.4, 1, 18, "p2")]
    assert sql.execute(
        "SELECT status, error, details, reason FROM samples "
        "WHERE iteration = 2 AND row IN (0, 1, 4) ORDER BY row"
    ).fetchall() == [
        ("completed", None, '{"exact":1}', None),
        ("failed", "it raised", None, None),
        ("completed", None, None, "too long"),
    ]
    assert sql.execute(
        "SELECT run_id, iteration, seconds, m FROM iterations ORDER BY 2"
    ).fetchall() == [("r", i, 1.0, float(i)) for i in range(3)]
    assert sql.execute(
        "SELECT stage, count(*), sum(seconds), sum(rows), max(epoch) FROM stages "
        "WHERE stage IN ('reward', 'train') GROUP BY 1 ORDER BY 1"
    ).fetchall() == [("reward", 3, 1.5, 18, 1), ("train", 3, 1.5, 0, 1)]


def test_an_empty_root_has_empty_views(objects: Objects) -> None:
    sql = connect(objects)
    for view in ("samples", "iterations", "stages"):
        assert sql.execute(f"SELECT * FROM {view}").fetchall() == []
    names = [row[0] for row in sql.execute("DESCRIBE samples").fetchall()]
    assert {"run_id", "iteration", "row", "tokens", "reward", "keep"} <= set(names)


def test_runs_with_other_metrics_and_no_parts(disk: Objects) -> None:
    for run_id, metrics in (("a", {"x": 1.0, "it's odd/é": 2.0}), ("b", {"y": float("nan")})):
        store, lease = RunStore(disk, run_id), Lease.acquire(disk, run_id)
        store.create_run({"config_digest": "c"})
        plain: dict[str, Any] = {"run_id": run_id, "iteration": 0, "stage": "rollout"}
        made = Manifest(**plain, config_digest="c", epoch=1, attempt="a")
        ref = store.commit(made, lease)
        store.commit_iteration(0, {"stages": {"rollout": ref}, "metrics": metrics}, lease)
    sql = connect(disk)
    rows = sql.execute(
        """SELECT run_id, x, "it's odd/é", isnan(y), seconds FROM iterations ORDER BY 1"""
    ).fetchall()
    assert rows == [("a", 1.0, 2.0, None, None), ("b", None, None, True, None)]
    assert sql.execute("SELECT count(*) FROM samples").fetchall() == [(0,)]


def test_an_uncommitted_iteration_does_not_show(disk: Objects, writing: ModuleType) -> None:
    writer = writing.write_run(disk, 2)
    disk.delete(f"runs/r/it/{1:06d}/_COMMITTED.json")
    assert writer.store.stage(1, "rollout") is not None
    sql = connect(disk)
    assert sql.execute("SELECT DISTINCT iteration FROM samples").fetchall() == [(0,)]
    assert sql.execute("SELECT max(iteration) FROM stages").fetchall() == [(0,)]


@pytest.mark.slow
def test_two_hundred_iterations_answer_in_two_seconds(disk: Objects, writing: ModuleType) -> None:
    writing.write_run(disk, 200)
    began = time.perf_counter()
    found = connect(disk).execute("SELECT count(*), count(DISTINCT iteration) FROM samples")
    assert found.fetchall() == [(1200, 200)]
    assert time.perf_counter() - began < 4
