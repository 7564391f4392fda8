"""The driver and all its processes killed at every point of an iteration; resumed, the run ends as
if nothing had happened.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from chaos_runs import (
    Calm,
    Chaos,
    Point,
    chaos,
    every_point,
    open_rows_at,
    open_rows_in,
    outcome,
    record,
    run_through,
    tiny,
)
from prefect_servers import prefect_server
from real_runs import Sluice

FEW = [
    Point("tree", "rollout", "middle", 0),
    Point("flow", "reward", "committed", 0),
    Point("tree", "train", "committed", 1),
    Point("flow", "evaluate", "parts", 1),
]
MORE = [
    Point("flow", "iteration", "before", 0),
    Point("tree", "iteration", "committed", 0),
    Point("tree", "iteration", "before", 2),
    Point("flow", "rollout", "middle", 1),
    Point("flow", "train", "parts", 2),
    Point("flow", "weight_sync", "middle", 2),
]
ON_A_SERVER = [
    Point("tree", "rollout", "parts", 0),
    Point("flow", "train", "middle", 1),
]
STORE_ALONE = [
    Point("tree", "rollout", "committed", 0),
    Point("tree", "train", "parts", 1),
    Point("flow", "weight_sync", "committed", 1),
    Point("tree", "checkpoint", "middle", 2),
]


@pytest.mark.timeout(900)
def test_killed_at_some_points(sluice: Sluice, tmp_path: Path, calm: Calm) -> None:
    with chaos("some", FEW, calm.usual) as faults:
        run_through(faults, sluice, tiny(tmp_path))
        assert_as_calm(faults, sluice, calm)
        record("driver", faults)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_killed_with_prefect_on_postgresql(sluice: Sluice, tmp_path: Path, calm: Calm) -> None:
    with (
        prefect_server("postgresql", tmp_path / "prefect") as api_url,
        chaos("served", ON_A_SERVER, calm.usual) as faults,
    ):
        run_through(faults, replace(sluice, env={"PREFECT_API_URL": api_url}), tiny(tmp_path))
        assert outcome(tmp_path / "root", "served") == calm.outcome
        faults.assert_nothing_left()
        assert open_rows_at(api_url) == []
        record("PostgreSQL", faults)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_killed_at_every_stage_and_phase(sluice: Sluice, tmp_path: Path, calm: Calm) -> None:
    points = sorted([*every_point("tree"), *MORE], key=lambda point: point.place)
    with chaos("all", points, calm.usual) as faults:
        run_through(faults, sluice, tiny(tmp_path))
        assert_as_calm(faults, sluice, calm)
        record("driver", faults)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_the_store_alone_is_enough(sluice: Sluice, tmp_path: Path, calm: Calm) -> None:
    def forget_prefect() -> None:
        shutil.rmtree(tmp_path / "root" / "prefect")

    with chaos("alone", STORE_ALONE, calm.usual) as faults:
        run_through(faults, sluice, tiny(tmp_path), between=forget_prefect)
        assert_as_calm(faults, sluice, calm)
        record("store alone", faults)


def assert_as_calm(faults: Chaos, sluice: Sluice, calm: Calm) -> None:
    """The run ended as the undisturbed one did and left nothing behind."""
    root = Path(sluice.root)
    assert outcome(root, faults.run_id) == calm.outcome
    faults.assert_nothing_left()
    assert open_rows_in(root / "prefect" / "prefect.db") == []
