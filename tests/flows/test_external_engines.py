"""Runs on an engine that somebody else started."""

import runpy
from pathlib import Path

import pytest
from real_runs import QUICKSTART, Sluice, short, wait_for

from rlcore.engine.launch import EngineProcess, embedded_argv
from rlcore.net import free_port

ITERATIONS = 4


@pytest.mark.slow
def test_a_run_trains_the_same_model_and_outlives_a_restart_of_the_engine(tmp_path: Path) -> None:
    """The engine begins with other weights, goes away in the middle, and is there in the end."""
    sluice, path = Sluice(tmp_path / "root", tmp_path), str(short(tmp_path, ITERATIONS))
    sluice("train", path, "--run-id", "calm")

    build = runpy.run_path(str(QUICKSTART.with_name("model.py")))["build"]
    build(tmp_path / "other", 99)
    engine = EngineProcess(free_port())
    argv = embedded_argv(tmp_path / "other", int(engine.url.rpartition(":")[2]), context_length=16)
    engine.start(argv, tmp_path / "engine.log")
    try:
        engine.wait_healthy(120)
        sets = ["--set", f'rollout.engine_urls=["{engine.url}"]']
        process = sluice.start("train", path, "--run-id", "theirs", "--json", *sets)
        wait_for(sluice.committed("theirs", 1).exists, seconds=240)
        engine.stop()
        engine.start(argv, tmp_path / "engine.log")
        said = process.communicate(timeout=240)
        assert process.returncode == 0, said
        assert engine.alive()
    finally:
        engine.stop()
    assert sluice.json("verify", "theirs")["ok"]
    calm, theirs = sluice.json("show", "calm"), sluice.json("show", "theirs")
    assert theirs["state_sha256"] == calm["state_sha256"]
    assert [m["reward"] for m in theirs["metrics"]] == [m["reward"] for m in calm["metrics"]]
