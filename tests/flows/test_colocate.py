"""Trainer and engines that take turns with their memory: the same numbers, killed or not."""

from pathlib import Path

import pytest
from real_runs import Sluice, kill_tree, short, wait_for

HOOK = """
import time
from pathlib import Path

HERE = Path(__file__).parent


def told(args, folder, engines):
    # Engines have room for weights that have no values yet, and no cache.
    if "/killed/" in folder and folder.endswith("weights-2") and not (HERE / "marker").exists():
        (HERE / "marker").touch()
        time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_colocated_run_ends_as_one_that_shares_nothing_and_survives_a_kill(
    sluice: Sluice, tmp_path: Path
) -> None:
    """It is killed between release and resume; evaluations and checkpoints come in between."""
    (tmp_path / "hook.py").write_text(HOOK)
    hook = f'[weights]\ncustom_update_weight_post_write_path = "{tmp_path}/hook.py:told"'
    config = short(tmp_path, iterations=4, more=f"state_interval = 2\n{hook}")
    sluice("train", str(config), "--run-id", "apart")
    apart = sluice.json("show", "apart")

    shared = ["--set", "cluster.colocate=true"]
    process = sluice.start("train", str(config), "--run-id", "killed", *shared)
    wait_for((tmp_path / "marker").exists, seconds=300)
    kill_tree(process.pid)
    process.wait(10)
    sluice("resume", "killed")
    killed = sluice.json("show", "killed")
    assert killed["state_sha256"] == apart["state_sha256"]
    assert [m["reward"] for m in killed["metrics"]] == [m["reward"] for m in apart["metrics"]]
    assert max(m["sync/canary_abs_diff"] for m in killed["metrics"]) < 1e-4
    assert sluice.json("verify", "killed")["ok"]
    for metrics in killed["metrics"]:
        assert metrics["memory/trainer_gb_before_offload"] > 0
        assert metrics["memory/free_gb_for_rollout"] > 0
        moves = {move: metrics[f"memory/seconds_{move}"] for move in ("release", "resume")}
        moves |= {move: metrics[f"memory/seconds_{move}"] for move in ("offload", "onload")}
        assert all(seconds > 0 for seconds in moves.values()), moves
    assert not [name for m in apart["metrics"] for name in m if name.startswith("memory/")]
