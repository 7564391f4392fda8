"""Processes of a run killed or stopped under it: the run itself goes on, to the same weights."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from real_runs import Sluice, short, wait_for
from run_processes import Which, is_actor, is_engine, pids, the_one
from undisturbed import ITERATIONS, Undisturbed

SETS = ("--set", "rollout.health_check_timeout_s=3")


def test_a_run_survives_the_death_of_each_of_its_actors(
    sluice: Sluice, tmp_path: Path, calm: Undisturbed
) -> None:
    """One after another, in one run: engine killed, engine stopped, trainer, rollout worker."""
    path = str(short(tmp_path, ITERATIONS))
    process = sluice.start("train", path, "--run-id", "hurt", "--json", *SETS)
    blows: list[tuple[int, Which, int]] = [
        (0, is_engine, signal.SIGKILL),
        (1, is_actor("TrainerActor"), signal.SIGKILL),
        (2, is_engine, signal.SIGSTOP),
        (3, is_actor("RolloutActor"), signal.SIGKILL),
        (4, is_actor("EngineActor"), signal.SIGKILL),
    ]
    for iteration, which, blow in blows:
        wait_for(sluice.committed("hurt", iteration).exists)
        os.kill(the_one(process, which), blow)
    said = process.communicate(timeout=240)
    assert process.returncode == 0, said

    assert sluice.json("verify", "hurt")["ok"]
    hurt = sluice.json("show", "hurt")
    assert hurt["committed"] == ITERATIONS
    assert hurt["state_sha256"] == calm.shown["state_sha256"]
    assert [m["reward"] for m in hurt["metrics"]] == calm.rewards
    [lease] = (tmp_path / "root" / "runs" / "hurt").glob("lease.json")
    assert '"epoch":1,' in lease.read_text(), "the run was resumed, not mended"
    assert sum(m["cluster/engine_restarts"] for m in hurt["metrics"]) == 3
    assert sum(m["cluster/trainer_restarts"] for m in hurt["metrics"]) == 1


@pytest.mark.slow
def test_one_engine_of_two_dies_and_one_rank_of_two(tmp_path: Path) -> None:
    sluice, path = Sluice(tmp_path / "root", tmp_path), str(short(tmp_path, ITERATIONS))
    two = ("rollout_num_gpus", "actor_num_gpus_per_node")
    sets = [*SETS, *(part for name in two for part in ("--set", f"cluster.{name}=2"))]
    sluice("train", path, "--run-id", "calm", *sets)

    process = sluice.start("train", path, "--run-id", "hurt", "--json", *sets)
    for iteration, which in enumerate([is_engine, is_actor("TrainerActor"), is_engine]):
        wait_for(sluice.committed("hurt", iteration).exists)
        os.kill(pids(process, which)[0], signal.SIGKILL)
    said = process.communicate(timeout=240)
    assert process.returncode == 0, said

    assert sluice.json("verify", "hurt")["ok"]
    calm, hurt = sluice.json("show", "calm"), sluice.json("show", "hurt")
    assert hurt["state_sha256"] == calm["state_sha256"]


def test_an_engine_that_never_stays_up_ends_the_run_and_says_so(
    sluice: Sluice, tmp_path: Path
) -> None:
    path = str(short(tmp_path, ITERATIONS))
    process = sluice.start("train", path, "--run-id", "down", "--json", *SETS)
    wait_for(sluice.committed("down", 0).exists)
    while process.poll() is None:
        for pid in pids(process, is_engine):
            os.kill(pid, signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1, said
    assert "engine 0" in said
    shown = sluice.json("show", "down")
    assert shown["status"] == "failed"
    assert sluice.json("verify", "down")["ok"]


@pytest.mark.slow
def test_an_engine_that_does_not_come_up_beside_the_first_stage_loses_nothing(
    tmp_path: Path,
) -> None:
    """The first stage needs no engine: the run opens, fails as soon as the engine has, goes on."""
    sluice, path = Sluice(tmp_path / "root", tmp_path), str(short(tmp_path, 2))
    sluice("train", path, "--run-id", "hurt")
    whole = sluice.json("show", "hurt")["state_sha256"]
    last = sluice.committed("hurt", 1).parent
    (last / "_COMMITTED.json").unlink()
    for stage in ("train", "weight_sync", "evaluate", "checkpoint"):
        (last / stage / "_MANIFEST.json").unlink()

    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'rlcore.engine.embedded' in sys.orig_argv:\n"
        "    print('no engine today', file=sys.stderr, flush=True)\n"
        "    os._exit(3)\n"
    )
    broken = replace(sluice, env={"PYTHONPATH": str(tmp_path)})
    assert "no engine today" in broken("resume", "hurt", code=1)
    assert sluice.json("verify", "hurt")["ok"]
    assert "2 iterations committed" in sluice("resume", "hurt")
    assert sluice.json("show", "hurt")["state_sha256"] == whole
