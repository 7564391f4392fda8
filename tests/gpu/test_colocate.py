"""Trainer and a real SGLang server that take turns with one GPU's memory.

Prints what each move took and what was free at each.
"""

import importlib.util
from pathlib import Path

import pytest
from real_runs import REPO, Sluice

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not there"),
    pytest.mark.skipif(
        importlib.util.find_spec("torch_memory_saver") is None,
        reason="torch_memory_saver, with which SGLang gives memory back, is not there",
    ),
]

SETTINGS = {
    "train.num_iterations": "6",
    "weights.transport": "tensor",
    "eval.eval_interval": "3",
    "checkpoint.save_interval": "3",  # a checkpoint comes between a sync and the next rollout
    "sglang.mem_fraction_static": "0.7",
    "sglang.disable_cuda_graph": "false",
    "sglang.cuda_graph_max_bs_decode": "16",
}
FIGURES = (
    "memory/seconds_release",
    "memory/seconds_onload",
    "memory/seconds_offload",
    "memory/seconds_resume_weights",
    "memory/seconds_resume",
    "memory/free_gb_for_training",
    "memory/trainer_gb_before_offload",
    "memory/trainer_gb_after_offload",
    "memory/free_gb_for_rollout",
    "sync/seconds",
    "sync/seconds_paused",
    "sync/canary_abs_diff",
    "train/train_rollout_logprob_abs_diff",
    "seconds",
)


@pytest.mark.parametrize("graphs", [False, True], ids=["no_graphs", "graphs"])
def test_engine_and_trainer_take_turns_with_a_gpu(graphs: bool, tmp_path: Path) -> None:
    sluice = Sluice(tmp_path / "root", cwd=tmp_path)
    config = REPO / "examples" / "quickstart" / "gpu.toml"
    settings = {k: v for k, v in SETTINGS.items() if graphs or "cuda_graph" not in k}
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    print(sluice("train", str(config), "--run-id", "turns", *sets, timeout=900)[-4000:])

    metrics = sluice.json("show", "turns")["metrics"]
    for name in FIGURES:
        print(f"{name:40}", [round(m[name], 4) for m in metrics])
    total = torch.cuda.mem_get_info()[1] / 1e9
    assert len(metrics) == 6
    assert max(m["sync/canary_abs_diff"] for m in metrics) < 0.05
    for m in metrics:
        # The server takes 0.7 of the GPU; while the trainer works it leaves its context alone.
        free = m["memory/free_gb_for_training"]
        assert free > 0.8 * total, f"the engine kept memory: {free:.0f} of {total:.0f} GB are free"
        assert m["memory/trainer_gb_after_offload"] < 0.2
    assert sluice.json("verify", "turns")["ok"]
