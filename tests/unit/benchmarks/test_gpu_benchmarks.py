"""The benchmarks that need a GPU, run at a tiny size on a CPU, and what they compute."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _shapes, two_gpus
from benchmarks._common import own_env, parsed, write_config
from benchmarks._gate import Gate, reward
from benchmarks._runs import run_config
from benchmarks.race import FULL, TINY, gated, split
from rlcore.config.load import load_config
from rlcore.models.hf_config import read_hf_config
from rlcore.sample import Sample
from rlcore.store.manifest import Manifest

REPO = Path(__file__).parents[3]


def tiny(name: str, tmp_path: Path, *more: str) -> dict[str, Any]:
    """The result of a benchmark."""
    path = tmp_path / f"{name}.json"
    argv = [sys.executable, "-m", f"benchmarks.{name}", "--tiny", "--result", str(path), *more]
    done = subprocess.run(argv, cwd=REPO, env=own_env(), capture_output=True, text=True)
    assert path.exists(), done.stderr
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_rollout(tmp_path: Path) -> None:
    result = tiny("rollout", tmp_path, "--repeats", "1")
    assert result["errors"] == {}
    [size] = result["sizes"]
    assert size["requests"] == 16 and size["committed_of_bare"] > 0
    assert size["seconds"]["sluice"]["median"] > size["seconds"]["generate"]["median"] > 0


def test_trainer(tmp_path: Path) -> None:
    shapes = tiny("trainer", tmp_path, "--repeats", "1", "--micro-batches", "2")["shapes"]
    assert [found["tokens"] for found in shapes.values()] == [64, 128]
    assert all(found["seconds"]["median"] > 0 for found in shapes.values())


def test_sync(tmp_path: Path) -> None:
    result = tiny("sync", tmp_path, "--repeats", "1")
    assert result["errors"] == {"tiny": {}}
    assert set(result["shapes"]["tiny"]) == {"tensor", "disk", "distributed"}
    for figures in result["shapes"]["tiny"].values():
        paused = figures["seconds_paused"]["median"]
        assert figures["pause_to_first_token"]["median"] > paused > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sync_ranks(tmp_path: Path) -> None:
    result = tiny("sync_ranks", tmp_path, "--repeats", "1", "--layouts", "megatron tp2")
    found = result["layouts"]["megatron tp2"]
    assert set(found) == {"tensor", "disk", "distributed"}
    assert all(one["canary_abs_diff"]["max"] < 1e-3 for one in found.values())


@pytest.mark.slow
def test_race(tmp_path: Path) -> None:
    result = tiny("race", tmp_path, "--iterations", "2", "--no-peer")
    assert result["errors"] == {}
    assert len(result["sluice_s"]["by_turn"]) == 3
    whole = result["sluice_s"]["mean"]
    assert sum(part["mean"] for part in result["parts_s"].values()) == pytest.approx(
        whole, abs=0.01
    )


@pytest.mark.slow
def test_two_gpus(tmp_path: Path) -> None:
    result = tiny("two_gpus", tmp_path, "--iterations", "1")
    assert result["errors"] == {}
    assert result["times_faster"] > 0
    assert result["modes"]["async"]["staleness"] == 1.0


def test_a_shape_is_built_as_its_architecture_says(tmp_path: Path) -> None:
    _shapes.write("tiny", tmp_path / "model", 0)
    assert read_hf_config(tmp_path / "model") == _shapes.TINY
    from transformers import AutoTokenizer

    ids = _shapes.prompts("tiny", 1, 16)[0]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer(_shapes.text(ids))["input_ids"] == ids
    assert tokenizer.eos_token_id is None


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_settings_of_the_gpu_runs_are_a_configuration(mode: str, tmp_path: Path) -> None:
    model, data = tmp_path / "model", tmp_path / "prompts.jsonl"
    tree = run_config(FULL, model, data, 5)
    tree["reward"] = {"rm_type": "math"}
    tree |= {"run": {"mode": mode}, "weights": {"transport": "distributed"}}
    assert load_config(write_config(tmp_path / "a.toml", tree)).rollout.engine == "sglang"
    race = load_config(write_config(tmp_path / "b.toml", gated(FULL, model, data, 5)))
    assert race.cluster.colocate and race.sglang["cuda_graph_max_bs_decode"] == 256


def test_a_gate_holds_what_its_policy_made_until_it_is_open(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    sample = Sample(label=str(tmp_path), tokens=[1, 2], weight_versions=["3"])
    scores: list[list[float]] = []
    thread = threading.Thread(target=lambda: scores.append(reward(None, [sample])))
    thread.start()
    reached = gate.wait_reached(3, 30, lambda: None)
    assert scores == []
    assert gate.open(3) >= reached
    thread.join(30)
    assert scores == [[pytest.approx(3 / 7)]]
    # What was only tried before the run passes.
    assert reward(None, [Sample(label=str(tmp_path), tokens=[7])]) == [0.0]


def test_the_parts_of_an_iteration_add_up() -> None:
    def manifest(stage: str, **timings: float) -> Manifest:
        return Manifest(
            run_id="r", iteration=0, stage=stage, files=(), config_digest="", epoch=0,
            attempt="a", timings=timings,
        )  # fmt: skip

    stages = {
        "reward": manifest("reward", seconds=5.0, score=4.9, write=0.1),
        "filter": manifest("filter", seconds=0.2),
        "train": manifest("train", seconds=3.0),
        "weight_sync": manifest("weight_sync", seconds=0.5),
    }
    metrics = {f"perf/{name}_time": m.timings["seconds"] + 0.01 for name, m in stages.items()}
    metrics |= {"train/seconds_forward_backward": 2.0, "train/seconds_optimizer": 0.5}
    rollout = manifest("rollout", seconds=4.0, generate=3.5, write=0.3, prepare=0.2)
    parts = split(9.0, metrics, stages, rollout, waited=4.8)
    assert sum(parts.values()) == pytest.approx(9.0)
    assert parts["train"] == 2.5 and parts["train_beside"] == pytest.approx(0.5)
    assert parts["store"] == pytest.approx(0.3 + 0.1 + 0.04)
    assert parts["reward_and_filter"] == pytest.approx(0.1 + 0.2)


def test_prompts_are_chosen_so_that_training_takes_as_long_as_generation() -> None:
    def found(generate: float, train: float) -> dict[str, Any]:
        return {"parts_s": {"generate": {"median": generate}, "train": {"median": train}}}

    assert two_gpus.balanced(FULL, found(4.0, 4.4)) == FULL
    assert two_gpus.balanced(replace(FULL, prompts=16), found(4.0, 2.4)).prompts == 27
    assert two_gpus.balanced(FULL, found(4.0, 2.0)).prompts == 32
    assert two_gpus.balanced(FULL, found(3.0, 6.0)).prompts == 16


def test_settings_from_the_command_line() -> None:
    assert parsed(["a=1", "b=true", "c=fa3"]) == {"a": 1, "b": True, "c": "fa3"}
    assert TINY.batch == 8 and FULL.context == 608
