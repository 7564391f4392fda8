"""Killed anywhere, a run goes on and ends with the same bits."""

import shutil
import signal
from pathlib import Path

import pytest
from real_runs import QUICKSTART, Sluice, kill_tree, short, wait_for
from undisturbed import ITERATIONS, Undisturbed


@pytest.mark.timeout(600)
def test_a_killed_run_ends_bit_equal_to_one_never_killed(
    sluice: Sluice, tmp_path: Path, calm: Undisturbed
) -> None:
    """And it may do so elsewhere: the runs, data and functions in other folders, no database."""
    config = short(tmp_path, ITERATIONS, more="state_interval = 2")
    process = sluice.start("train", str(config), "--run-id", "killed")
    wait_for(sluice.committed("killed", 2).exists)
    kill_tree(process.pid)
    process.wait(10)
    left = sluice.json("show", "killed")
    assert left["status"] == "interrupted"
    assert 3 <= left["committed"] < ITERATIONS

    there = Sluice(tmp_path / "elsewhere", tmp_path)
    shutil.copytree(Path(sluice.root) / "runs", tmp_path / "elsewhere" / "runs")
    files = shutil.copytree(QUICKSTART.parent, tmp_path / "files")
    printed = there("resume", "killed", *moved_to(files))
    assert f"{ITERATIONS} iterations committed" in printed
    assert there.json("verify", "killed")["ok"]
    killed = there.json("show", "killed")
    assert killed["state_sha256"] == calm.shown["state_sha256"]
    assert [m["reward"] for m in killed["metrics"]] == calm.rewards
    samples = "sql", "select iteration, index, tokens from samples order by all"
    rows = there.json(*samples)
    assert rows == calm.sluice.json(*samples) and len(rows) == ITERATIONS * 64

    (files / "prompts.jsonl").write_text('{"prompt": "7=", "label": "777"}\n')
    said = there(
        "resume",
        "killed",
        *moved_to(files),
        "--set",
        f"train.num_iterations={ITERATIONS + 1}",
        code=2,
    )
    assert "data.path of run killed holds something else than when the run was made" in said


def moved_to(folder: Path) -> list[str]:
    """Settings of the quickstart for files in another folder."""
    sets = [
        f"model.build={folder}/model.py:build",
        f"data.path={folder}/prompts.jsonl",
        f"reward.custom_rm_path={folder}/reward.py:reward",
    ]
    return [word for one in sets for word in ("--set", one)]


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
