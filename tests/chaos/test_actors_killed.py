"""An engine, a trainer rank or the rollout worker killed inside a run: the same driver goes on, no
iteration is lost, and the result is the same.
"""

from pathlib import Path

import pytest
from chaos_runs import Calm, Point, calm_run, chaos, epochs, outcome, record, tiny
from real_runs import Sluice

# Two of each, so that one is left when the other goes.
TWO = """
[cluster]
actor_num_gpus_per_node = 2
rollout_num_gpus = 2
"""
PATIENCE = "health_check_timeout_s = 4"
DONE_S = 600.0
POINTS = [
    Point("engine-0", "rollout", "middle", 0),
    Point("rank-1", "train", "middle", 0),
    Point("engine-1", "weight_sync", "middle", 0),
    Point("engine-0", "evaluate", "middle", 0, signal="stop"),
    Point("rollout", "reward", "before", 1),
    Point("rank-0", "train", "before", 1),
    Point("rollout", "evaluate", "middle", 1),
    Point("rank-1", "checkpoint", "middle", 1),
    Point("engine-1", "rollout", "committed", 2, signal="stop"),
    Point("rollout", "filter", "middle", 2),
    Point("rank-0", "weight_sync", "middle", 2),
]


@pytest.mark.chaos
@pytest.mark.timeout(1200)
def test_an_actor_that_dies_costs_no_iteration(sluice: Sluice, tmp_path: Path) -> None:
    config = tiny(tmp_path, rollout=PATIENCE, more=TWO)
    (tmp_path / "calm").mkdir()
    calm: Calm = calm_run(tmp_path / "calm", config)
    with chaos("actors", POINTS, calm.usual) as faults:
        Sluice(sluice.root, sluice.cwd, env=faults.env())(
            "train", str(config), "--run-id", "actors"
        )
        faults.assert_all_struck()
        assert (faults.drivers(), epochs(Path(sluice.root), "actors")) == (1, {1})
        assert outcome(Path(sluice.root), "actors") == calm.outcome
        faults.assert_nothing_left()
        record("actors", faults)
