"""Trainer and engines that take turns with their memory: the same numbers, killed or not."""

import os
import signal
from pathlib import Path

import pytest
from real_runs import Sluice, finish, kill_tree, short, wait_for
from run_processes import is_engine, the_one

HOOK = """
import time
from pathlib import Path

HERE = Path(__file__).parent


def told(args, folder, engines):
    # Engines have room for weights that have no values yet, and no cache.
    if "/apart/" not in folder and folder.endswith("weights-2") and not (HERE / "marker").exists():
        (HERE / "marker").touch()
        while not (HERE / "go").exists():
            time.sleep(0.02)
"""


def with_hook(tmp_path: Path, iterations: int) -> Path:
    """A short run that waits while the weights of its second iteration are pushed."""
    (tmp_path / "hook.py").write_text(HOOK)
    hook = f'[weights]\ncustom_update_weight_post_write_path = "{tmp_path}/hook.py:told"'
    return short(tmp_path, iterations=iterations, more=f"state_interval = 2\n{hook}")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_colocated_run_ends_as_one_that_shares_nothing_and_survives_a_kill(
    sluice: Sluice, tmp_path: Path
) -> None:
    """It is killed between release and resume; evaluations and checkpoints come in between."""
    config = with_hook(tmp_path, iterations=4)
    sluice("train", str(config), "--run-id", "apart", timeout=500)
    apart = sluice.json("show", "apart")

    shared = ["--set", "cluster.colocate=true"]
    process = sluice.start("train", str(config), "--run-id", "killed", *shared)
    wait_for((tmp_path / "marker").exists, seconds=500)
    kill_tree(process.pid)
    process.wait(10)
    sluice("resume", "killed", timeout=500)
    killed = sluice.json("show", "killed")
    assert killed["state_sha256"] == apart["state_sha256"]
    assert [m["reward"] for m in killed["metrics"]] == [m["reward"] for m in apart["metrics"]]
    assert max(m["sync/canary_abs_diff"] for m in killed["metrics"]) < 1e-4
    assert sluice.json("verify", "killed")["ok"]
    for metrics in killed["metrics"]:
        assert metrics["memory/trainer_gb_before_offload"] > 0
        assert metrics["memory/free_gb_for_rollout"] > 0
        for move in ("release", "onload", "resume_weights", "offload", "resume"):
            assert metrics[f"memory/seconds_{move}"] > 0
    assert not [name for m in apart["metrics"] for name in m if name.startswith("memory/")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_engine_that_dies_without_its_memory_comes_back(sluice: Sluice, tmp_path: Path) -> None:
    """The trainer makes room for it within the weight sync."""
    config = with_hook(tmp_path, iterations=3)
    process = sluice.start(
        "train", str(config), "--run-id", "hurt", "--set", "cluster.colocate=true"
    )
    wait_for((tmp_path / "marker").exists, seconds=500)
    os.kill(the_one(process, is_engine), signal.SIGKILL)
    (tmp_path / "go").touch()
    said = finish(process, timeout=500)
    assert process.returncode == 0, said
    metrics = sluice.json("show", "hurt")["metrics"]
    assert [m["cluster/engine_restarts"] for m in metrics] == [0, 1, 0]
    assert max(m["sync/canary_abs_diff"] for m in metrics) < 1e-4
    assert sluice.json("verify", "hurt")["ok"]
