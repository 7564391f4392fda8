"""Killed anywhere, a run goes on and ends with the same bits."""

import signal
from pathlib import Path

import pytest
from real_runs import Sluice, kill_tree, short, wait_for


@pytest.mark.timeout(600)
def test_a_killed_run_ends_bit_equal_to_one_never_killed(sluice: Sluice, tmp_path: Path) -> None:
    config = short(tmp_path, iterations=7, more="state_interval = 2")
    sluice("train", str(config), "--run-id", "calm")

    process = sluice.start("train", str(config), "--run-id", "killed")
    wait_for(sluice.committed("killed", 2).exists)
    kill_tree(process.pid)
    process.wait(10)
    left = sluice.json("show", "killed")
    assert left["status"] == "interrupted"
    assert 3 <= left["committed"] < 7

    printed = sluice("resume", "killed")
    assert "7 iterations committed" in printed
    assert sluice.json("verify", "killed")["ok"]
    calm, killed = sluice.json("show", "calm"), sluice.json("show", "killed")
    assert killed["state_sha256"] == calm["state_sha256"]
    assert [m["reward"] for m in killed["metrics"]] == [m["reward"] for m in calm["metrics"]]
    same = "select count(*) n from samples a join samples b using (iteration, index, tokens) "
    rows = sluice.json("sql", same + "where a.run_id = 'calm' and b.run_id = 'killed'")
    assert rows == [{"n": 7 * 64}]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_how_to_go_on(
    number: signal.Signals, sluice: Sluice, tmp_path: Path
) -> None:
    config = short(tmp_path, iterations=50)
    process = sluice.start("train", str(config), "--run-id", "stopped")
    wait_for(sluice.committed("stopped", 0).exists)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert "sluice resume stopped" in err
    assert "Traceback" not in err
    assert sluice.json("show", "stopped")["status"] == "interrupted"
