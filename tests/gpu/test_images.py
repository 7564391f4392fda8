"""A run on pictures with a real SGLang server: the trainer sees what the engine saw.

Prints the canary's difference after each sync, and the gap of log-probs in each iteration.
"""

import importlib.util
from pathlib import Path

import pytest
from real_runs import REPO, Sluice
from vision_models import write_model

from rlcore.config import load_config

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
WITH_GPU = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not there"),
]
KINDS = ("qwen2_5_vl", "qwen3_vl")
EXAMPLE = REPO / "examples" / "geo3k_vlm"
LARGEST_GAP = 0.05
ENGINES = {
    "embedded": """
[rollout]
engine = "embedded"
[cluster]
device = "cpu"
""",
    "sglang": """
[rollout]
engine = "sglang"
[sglang]
attention_backend = "fa3"
sampling_backend = "pytorch"
disable_cuda_graph = true
mem_fraction_static = 0.2
[train]
precision = "bfloat16"
[cluster]
device = "cuda"
colocate = true
""",
}
SETTINGS = """
extends = "{engine}"
[model]
path = "{model}"
[data]
path = "{example}/train.jsonl"
label_key = "label"
apply_chat_template = true
[data.multimodal_keys]
image = "image"
[reward]
custom_rm_path = "{reward}:reward"
[rollout]
rollout_batch_size = 6
n_samples_per_prompt = 4
max_response_len = 8
context_length = 128
[weights]
transport = "tensor"
canary_tolerance = {gap}
[algorithm]
max_logprob_gap = {gap}
[train]
num_iterations = 2
global_batch_size = 24
lr = 1e-3
"""
REWARD = """
def reward(args, sample, **kwargs):
    return sum(sample.tokens) % 7 / 7
"""


def write_config(folder: Path, kind: str, engine: str) -> Path:
    """A run of two iterations on the example's pictures."""
    (folder / "engine.toml").write_text(ENGINES[engine])
    (folder / "reward.py").write_text(REWARD)
    path = folder / "run.toml"
    path.write_text(
        SETTINGS.format(
            engine=folder / "engine.toml",
            model=write_model(folder / "model", kind, wider=4),
            example=EXAMPLE,
            reward=folder / "reward.py",
            gap=LARGEST_GAP,
        )
    )
    return path


def check_run(folder: Path, kind: str, engine: str) -> None:
    """Train, and see that both sides agree before and after the weights have changed."""
    sluice = Sluice(folder / "root", cwd=folder)
    config = write_config(folder, kind, engine)
    sluice("train", str(config), "--run-id", "pictures", timeout=900)
    metrics = sluice.json("show", "pictures")["metrics"]
    print("canary", [m["sync/canary_abs_diff"] for m in metrics])
    print("gap", [m["train/train_rollout_logprob_abs_diff"] for m in metrics])
    print("gap, largest", [m["train/train_rollout_logprob_abs_diff_max"] for m in metrics])
    assert len(metrics) == 2
    assert all(m["train/train_rollout_logprob_abs_diff"] <= LARGEST_GAP for m in metrics)
    assert all(m["train/grad_norm"] > 0 for m in metrics)
    assert sluice.json("verify", "pictures")["ok"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", [pytest.param("sglang", marks=WITH_GPU), "embedded"])
def test_trainer_and_engine_agree_on_pictures(kind: str, engine: str, tmp_path: Path) -> None:
    check_run(tmp_path, kind, engine)


@pytest.mark.parametrize("kind", KINDS)
def test_the_settings_are_good(kind: str, tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, kind, "sglang"))
    assert (config.rollout.engine, config.train.num_iterations) == ("sglang", 2)
