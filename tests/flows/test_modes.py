"""Modes: compositions of the stages other than the usual one."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from real_runs import REPO, Sluice, kill_tree, short, wait_for
from run_processes import is_actor, is_engine, pids, the_one

from rlcore.rollout.stored import read_rollout
from rlcore.store.manifest import StageRef
from rlcore.store.objects import Objects
from rlcore.store.run_store import RunStore

ROLLOUT_ONLY = ("--set", "run.mode=debug-rollout-only")
TRAIN_ONLY = ("--set", "run.mode=debug-train-only", "--set", "run.train_from=whole")
SFT = (
    *("--set", "run.mode=sft", "--set", "algorithm.loss_type=sft_loss"),
    *("--set", "data.response_key=label", "--set", "rollout.n_samples_per_prompt=1"),
    *("--set", "rollout.rollout_batch_size=64"),
)
ASYNC = ("--set", "run.mode=async", "--set", "eval.eval_interval=4")
ENDLESS = (
    *("--set", "run.mode=fully-async", "--set", "eval.eval_interval=4"),
    *("--set", "weights.transport=distributed"),
)
STAGES = {"rollout", "reward", "filter"}


def stored(sluice: Sluice, run_id: str, i: int) -> tuple[list[str], list[dict[str, Any]]]:
    """The stages of a committed iteration, and its samples but for clock and cache."""
    store = RunStore(Objects.open(str(sluice.root)), run_id)
    record = store.committed(i)
    assert record is not None
    rollout = store.manifest(StageRef.model_validate(record["stages"]["rollout"]))
    assert rollout.policy_version == 0
    samples = [sample.to_dict() for sample in read_rollout(store.objects, rollout.files)]
    for sample in samples:
        for name in ("non_generation_time", "prefix_cache_info"):
            sample.pop(name)
    return sorted(record["stages"]), samples


def test_rollouts_are_made_without_a_trainer(sluice_alone: Sluice, tmp_path: Path) -> None:
    sluice = sluice_alone
    path = str(short(tmp_path, 3))
    process = sluice.start("train", path, "--run-id", "only", *ROLLOUT_ONLY)
    wait_for(sluice.committed("only", 0).exists)
    assert pids(process, is_actor("RolloutActor"))
    assert not pids(process, is_actor("TrainerActor"))
    said = process.communicate(timeout=120)
    assert process.returncode == 0, said

    made = [stored(sluice, "only", i) for i in range(3)]
    assert [set(stages) for stages, _ in made] == [STAGES] * 3
    prompts = [{sample["prompt_id"] for sample in samples} for _, samples in made]
    assert prompts[0] != prompts[1], "the data went on"
    assert all(version == ["0"] for _, s in made for version in (x["weight_versions"] for x in s))
    assert sluice.json("verify", "only")["ok"]
    assert sluice.json("show", "only")["committed"] == 3


@pytest.mark.slow
def test_a_killed_rollout_only_run_makes_the_same_rollouts(sluice: Sluice, tmp_path: Path) -> None:
    path = str(short(tmp_path, 4))
    sluice("train", path, "--run-id", "calm", *ROLLOUT_ONLY)
    process = sluice.start("train", path, "--run-id", "hurt", *ROLLOUT_ONLY)
    wait_for(sluice.committed("hurt", 1).exists)
    kill_tree(process.pid)
    process.communicate()
    sluice("resume", "hurt")
    assert sluice.json("verify", "hurt")["ok"]
    for i in range(4):
        assert stored(sluice, "hurt", i) == stored(sluice, "calm", i)


@pytest.mark.slow
def test_stored_batches_train_the_same_model_without_engines(
    sluice_alone: Sluice, tmp_path: Path
) -> None:
    sluice = sluice_alone
    path = str(short(tmp_path, 3))
    sluice("train", path, "--run-id", "whole")
    process = sluice.start("train", path, "--run-id", "again", *TRAIN_ONLY)
    wait_for(sluice.committed("again", 0).exists)
    assert pids(process, is_actor("TrainerActor"))
    others = (is_engine, is_actor("EngineActor"), is_actor("RolloutActor"))
    assert not [pid for which in others for pid in pids(process, which)]
    kill_tree(process.pid)
    process.communicate()
    sluice("resume", "again")

    whole, again = sluice.json("show", "whole"), sluice.json("show", "again")
    assert again["state_sha256"] == whole["state_sha256"]
    assert [m["reward"] for m in again["metrics"]] == [m["reward"] for m in whole["metrics"]]
    stages = list(sluice.json("show", "again", "--iter", "2")["stages"])
    assert stages == ["rollout", "reward", "filter", "train", "checkpoint"]
    assert sluice.json("verify", "again")["ok"]

    longer = ("--set", "train.num_iterations=4")
    said = sluice("train", path, "--run-id", "longer", *TRAIN_ONLY, *longer, code=2)
    assert "that run has 3 committed iterations" in said
    said = sluice("train", path, "--run-id", "b", *TRAIN_ONLY[:3], "run.train_from=nobody", code=2)
    assert "run.train_from: run nobody is not under" in said


@pytest.mark.slow
def test_a_data_set_is_learned_without_engines(sluice_alone: Sluice, tmp_path: Path) -> None:
    sluice = sluice_alone
    path = str(short(tmp_path, 12))
    process = sluice.start("train", path, "--run-id", "hurt", *SFT)
    wait_for(sluice.committed("hurt", 3).exists)
    others = (is_engine, is_actor("EngineActor"))
    assert not [pid for which in others for pid in pids(process, which)]
    kill_tree(process.pid)
    process.communicate()
    sluice("resume", "hurt")
    printed = sluice("train", path, "--run-id", "calm", *SFT)
    assert "loss" in printed and "reward curve" not in printed

    hurt, calm = sluice.json("show", "hurt"), sluice.json("show", "calm")
    assert hurt["state_sha256"] == calm["state_sha256"]
    losses = [m["train/loss"] for m in calm["metrics"]]
    assert losses == [m["train/loss"] for m in hurt["metrics"]]
    assert losses[-1] < losses[0] - 0.5
    assert calm["metrics"][0]["train/perplexity"] > calm["metrics"][-1]["train/perplexity"]
    stages = list(sluice.json("show", "calm", "--iter", "11")["stages"])
    assert stages == ["rollout", "reward", "filter", "train", "checkpoint"]
    assert sluice.json("verify", "hurt")["ok"]
    [sample] = sluice.json("samples", "calm", "--iter", "0", "--limit", "1")
    assert sample["response"] == f"{sample['label'] or sample['prompt'][0] * 3}<eos>"


@pytest.mark.parametrize("iterations", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_a_checkpoint_of_the_example_is_evaluated(sluice: Sluice, iterations: int) -> None:
    more = ("--set", f"train.num_iterations={iterations}")
    sluice("train", str(REPO / "examples/sft/run.toml"), "--run-id", "sft", *more)
    done = sluice.json("evaluate", "sft")
    assert done["iteration"] == iterations - 1
    assert (sluice.root / done["manifest"]).exists()
    right = done["metrics"]["eval/greedy"]
    assert right == 1 if iterations == 40 else 0 <= right < 1
    said = sluice("evaluate", "sft", "--iter", "5", code=2)
    assert "run sft keeps no checkpoint of iteration 5; kept are: " in said


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
def test_rollouts_made_ahead_come_to_the_same_after_a_kill(
    sluice: Sluice, tmp_path: Path, every: int
) -> None:
    path, more = (
        str(short(tmp_path, 8)),
        (*ASYNC, "--set", f"rollout.update_weights_interval={every}"),
    )
    sluice("train", path, "--run-id", "calm", *more)
    process = sluice.start("train", path, "--run-id", "hurt", *more)
    wait_for(sluice.committed("hurt", 4).exists)
    kill_tree(process.pid)
    process.communicate()
    sluice("resume", "hurt")

    calm, hurt = sluice.json("show", "calm"), sluice.json("show", "hurt")
    assert hurt["state_sha256"] == calm["state_sha256"]
    assert [m["reward"] for m in hurt["metrics"]] == [m["reward"] for m in calm["metrics"]]
    store = RunStore(Objects.open(str(sluice.root)), "hurt")
    versions = [store.stage(i, "rollout")[0].policy_version for i in range(8)]  # type: ignore[index]
    expected = {1: [0, 0, 1, 2, 3, 4, 5, 6], 2: [0, 0, 0, 2, 2, 4, 4, 6]}
    assert versions == expected[every]
    assert max(m["rollout/staleness/max"] for m in hurt["metrics"]) == every
    assert all("train/tis" in m for m in hurt["metrics"])
    for run_id in ("calm", "hurt"):
        report = sluice.json("verify", run_id)
        assert report["ok"], report["errors"]


@pytest.mark.slow
def test_rollouts_made_ahead_survive_the_death_of_actors(sluice: Sluice, tmp_path: Path) -> None:
    path, more = str(short(tmp_path, 8)), (*ASYNC, "--set", "rollout.async_buffer_size=2")
    sluice("train", path, "--run-id", "calm", *more)
    process = sluice.start("train", path, "--run-id", "hurt", "--json", *more)
    for i, which in enumerate([is_engine, is_actor("TrainerActor"), is_actor("RolloutActor")]):
        wait_for(sluice.committed("hurt", 2 * i).exists)
        os.kill(the_one(process, which), signal.SIGKILL)
    said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    calm, hurt = sluice.json("show", "calm"), sluice.json("show", "hurt")
    assert hurt["state_sha256"] == calm["state_sha256"]
    assert sum(m["cluster/engine_restarts"] for m in hurt["metrics"]) == 1
    report = sluice.json("verify", "hurt")
    assert report["ok"], report["errors"]


def versions_of(sluice: Sluice, run_id: str, count: int) -> list[tuple[int, set[int]]]:
    """Of each iteration's rollout its policy version, and those of its tokens."""
    store = RunStore(Objects.open(str(sluice.root)), run_id)
    out = []
    for i in range(count):
        found = store.stage(i, "rollout")
        assert found is not None and found[0].policy_version is not None
        samples = read_rollout(store.objects, found[0].files)
        out.append((found[0].policy_version, {int(v) for s in samples for v in s.weight_versions}))
    return out


@pytest.mark.slow
def test_generation_without_end_loses_no_prompt_in_a_kill(sluice: Sluice, tmp_path: Path) -> None:
    path = str(short(tmp_path, 8))
    process = sluice.start("train", path, "--run-id", "hurt", *ENDLESS)
    wait_for(sluice.committed("hurt", 3).exists)
    kill_tree(process.pid)
    process.communicate()
    sluice("resume", "hurt")

    shown = sluice.json("show", "hurt")
    assert shown["committed"] == 8
    assert max(m["rollout/staleness/max"] for m in shown["metrics"]) <= 2
    assert all("train/tis" in m for m in shown["metrics"])
    for i, (version, tokens) in enumerate(versions_of(sluice, "hurt", 8)):
        assert version == i and max(0, i - 2) <= min(tokens) <= max(tokens) <= i
    report = sluice.json("verify", "hurt")
    assert report["ok"], report["errors"]


@pytest.mark.slow
def test_generation_without_end_survives_the_death_of_actors(
    sluice: Sluice, tmp_path: Path
) -> None:
    path = str(short(tmp_path, 8))
    process = sluice.start("train", path, "--run-id", "hurt", *ENDLESS)
    for i, which in enumerate([is_engine, is_actor("TrainerActor"), is_actor("RolloutActor")]):
        wait_for(sluice.committed("hurt", 2 * i).exists)
        os.kill(the_one(process, which), signal.SIGKILL)
    said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    report = sluice.json("verify", "hurt")
    assert report["ok"], report["errors"]
    shown = sluice.json("show", "hurt")
    assert sum(m["cluster/engine_restarts"] for m in shown["metrics"]) >= 1
