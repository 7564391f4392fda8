"""Fork, re-run, compare and collect on real runs; the parent kept the last of its states alone."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from real_runs import Sluice, kill_tree, short, wait_for

OTHER = """
def reward(args, sample, **kwargs):
    want = str(sample.label)
    return float(sum(a == b for a, b in zip(sample.response[::-1], want[::-1])) / len(want))
"""
SETS = ("--set", "algorithm.clip_high=0.3", "--set", "train.lr=0.01")


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory, stack_env: dict[str, str]) -> Sluice:
    """A root with run a, complete. Of its trainer states only the last is kept."""
    folder = tmp_path_factory.mktemp("branch")
    sluice = Sluice(folder / "root", cwd=folder, env=stack_env)
    config = short(folder, iterations=3, more="state_interval = 1\nkeep_last = 1")
    sluice("train", str(config), "--run-id", "a")
    (folder / "other.py").write_text(OTHER)
    return sluice


def whole(sluice: Sluice, *run_ids: str) -> None:
    for run_id in run_ids:
        report = sluice.json("verify", run_id)
        assert report["ok"], report["errors"]


def manifest(sluice: Sluice, run_id: str, iteration: int, stage: str) -> dict[str, Any]:
    path = Path(sluice.root) / f"runs/{run_id}/it/{iteration:06d}/{stage}/_MANIFEST.json"
    return dict(json.loads(path.read_text()))


@pytest.mark.timeout(600)
def test_a_fork_without_changes_ends_with_the_same_bits_though_killed(grown: Sluice) -> None:
    made = grown.json("fork", "a", "--iter", "0", "--as", "same")
    assert made["parent"]["run_id"] == "a" and made["changed"] == {}
    shown = grown.json("show", "same")
    assert (shown["status"], shown["committed"]) == ("new", 1)

    process = grown.start("resume", "same")
    wait_for(grown.committed("same", 1).exists)
    kill_tree(process.pid)
    process.wait(10)
    assert grown.json("fork", "a", "--iter", "0", "--as", "same")["changed"] == {}
    grown("resume", "same")
    a, same = grown.json("show", "a"), grown.json("show", "same")
    assert same["state_sha256"] == a["state_sha256"] and same["status"] == "completed"
    assert [m["reward"] for m in same["metrics"]] == [m["reward"] for m in a["metrics"]]
    assert not grown.committed("same", 0).exists()
    whole(grown, "a", "same")
    found = grown.json("diff", "a", "same")
    assert found["parting"] is None and (found["shared"], found["common"]) == (1, 3)
    assert found["state_sha256"][0] == found["state_sha256"][1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_train_again_with_other_settings_though_killed(grown: Sluice) -> None:
    again = ("rerun", "a", "--iter", "1", "--stage", "train", *SETS, "--as", "hot")
    base = Path(grown.root) / "runs/hot/base/_STATE.json"
    process = grown.start(*again)
    wait_for(base.exists)
    kill_tree(process.pid)
    process.wait(10)
    refused = grown(*again[:6], "--set", "train.lr=0.02", "--as", "hot", code=2)
    assert "train.lr is 0.01 there and 0.02 here" in refused

    result = grown.json(*again)
    # The state before the iteration was made again with the settings that it was trained with.
    theirs = manifest(grown, "a", 0, "train")["extra"]["state"]
    made = json.loads(base.read_text())["state"]
    for digest in ("model_sha256", "optimizer_sha256"):
        assert made[digest] == theirs[digest]
    assert result["original"]["metrics"]["train/loss"] == result["rerun"]["metrics"]["train/loss"]
    assert result["rerun"]["metrics"]["train/lr"] > result["original"]["metrics"]["train/lr"]
    assert grown.json("show", "hot")["committed"] == 2
    assert not (Path(grown.root) / "runs/hot/it/000002/rollout").exists()
    parts = manifest(grown, "hot", 1, "rollout")["files"]
    assert parts == manifest(grown, "a", 1, "rollout")["files"]
    assert grown.json(*again) == result
    whole(grown, "hot")

    grown("resume", "hot")
    whole(grown, "a", "hot")
    found = grown.json("diff", "a", "hot")
    assert found["parting"] == {"iteration": 1, "stage": "train"}
    assert set(found["settings"]) == {"algorithm.clip_high", "train.lr"}
    assert found["state_sha256"][0] != found["state_sha256"][1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stored_rollouts_scored_again_then_trained_on(grown: Sluice) -> None:
    again = ("rerun", "a", "--iter", "2", "--stage", "reward", "--reward", "other.py:reward")
    result = grown.json(*again, "--as", "scored")
    assert result["samples"] == 64 and result["rewards_changed"] > 0
    assert result["mean_reward"][0] == grown.json("show", "a")["metrics"][2]["reward"]
    assert all(
        one["advantage"][0] * one["advantage"][1] < 0 for one in result["advantages_flipped"]
    )
    assert not (Path(grown.root) / "runs/scored/logs").exists()
    assert grown.json(*again, "--as", "scored") == result
    assert "rewards changed" in grown(*again, "--as", "scored")
    drivers = list(Path(grown.root, "runs", "scored", "drivers").iterdir())
    assert drivers
    assert all("reward.custom_rm_path" in json.loads(d.read_text())["sources"] for d in drivers)
    assert "other.py has no" in grown(*again[:-1], "other.py:nope", "--as", "x", code=2)
    whole(grown, "scored")
    grown("resume", "scored")
    whole(grown, "scored")
    assert grown.json("show", "scored")["status"] == "completed"
    assert grown.json("diff", "a", "scored")["parting"] == {"iteration": 2, "stage": "reward"}


def test_what_cannot_be_asked_for_is_bad_input_and_writes_nothing(grown: Sluice) -> None:
    for args, said in (
        (("fork", "a", "--iter", "7", "--as", "x"), "no committed iteration 7; 0 to 2 are"),
        (("fork", "a", "--iter", "1", "--as", "../x"), "run.id"),
        (("fork", "a", "--iter", "1", "--as", ""), "--as is empty"),
        (("fork", "a", "--iter", "1", "--as", "x", "--set", "run.seed=9"), "a fork cannot have"),
        (("fork", "a", "--iter", "1", "--as", "x", "--set", "run.id=y"), "--set run.id"),
        (("fork", "nope", "--iter", "1", "--as", "x"), "run nope is not under"),
        (("rerun", "a", "--iter", "1", "--stage", "filter", "--as", "x"), "use train or reward"),
        (("gc", "--run", "a", "--all"), "say --yes"),
        (("gc", "--keep", "0"), "--keep must be 1 or more"),
    ):
        assert said in grown(*args, code=2)
    assert not (Path(grown.root) / "runs/x").exists()


def test_log_and_gc_over_the_family(grown: Sluice) -> None:
    grown("fork", "a", "--iter", "1", "--as", "kin")
    family = {row["run_id"]: row for row in grown.json("log")}
    assert family["kin"]["parent"]["run_id"] == "a" and family["a"]["parent"] is None
    assert "from a@1" in grown("log")
    lines = grown.json("log", "kin")
    assert [entry["run_id"] for entry in lines] == ["kin", "a"]
    assert [one["iteration"] for one in lines[1]["iterations"]] == [1, 0]

    part = Path(grown.root) / "runs/a/it/000003/rollout/part-00000-left.parquet"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"half")
    assert grown.json("gc", "--dry-run")["removed"] == []
    os.utime(part, (1, 1))
    would = grown.json("gc", "--keep", "1", "--dry-run")
    assert part.exists() and f"runs/a/{part.relative_to(Path(grown.root) / 'runs/a')}" in {
        one["key"] for one in would["removed"]
    }
    assert grown.json("gc", "--keep", "1")["removed"] == would["removed"]
    assert not part.exists()
    whole(grown, *family)
    assert "share its iterations" in grown("gc", "--run", "a", "--all", "--yes", code=1)
    grown("gc", "--run", "kin", "--all", "--yes")
    assert "kin" not in {row["run_id"] for row in grown.json("runs")}
