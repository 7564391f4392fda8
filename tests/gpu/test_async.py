"""Rollouts ahead of the trainer on two GPUs: one step off, and without end; killed and resumed."""

import importlib.util
from pathlib import Path

import pytest
from real_runs import REPO, Sluice, kill_tree, wait_for

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: trainer and engine"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not there"),
]

ITERATIONS = 8
SETTINGS = (
    f"train.num_iterations={ITERATIONS}",
    "cluster.colocate=false",
    "weights.transport=distributed",
    "eval.eval_interval=4",
    "checkpoint.state_interval=2",
    "sglang.disable_prefill_cuda_graph=true",
)


@pytest.mark.parametrize("mode", ["async", "fully-async"])
def test_a_run_ahead_is_killed_and_goes_on(mode: str, tmp_path: Path) -> None:
    sluice = Sluice(tmp_path / "root", cwd=tmp_path)
    sets = [part for one in (f"run.mode={mode}", *SETTINGS) for part in ("--set", one)]
    config = REPO / "examples" / "quickstart" / "gpu.toml"
    process = sluice.start("train", str(config), "--run-id", "ahead", *sets)
    wait_for(lambda: sluice.committed("ahead", 2).exists() or process.poll() is not None, 500)
    assert process.poll() is None, process.communicate()
    kill_tree(process.pid)
    process.communicate()
    print(sluice("resume", "ahead", timeout=500))

    metrics = sluice.json("show", "ahead")["metrics"]
    staleness = [m["rollout/staleness/max"] for m in metrics]
    print("staleness", staleness)
    print("seconds", [round(m["seconds"], 2) for m in metrics])
    print("canary", [m["sync/canary_abs_diff"] for m in metrics])
    print("gap", [m["train/train_rollout_logprob_abs_diff"] for m in metrics])
    assert len(metrics) == ITERATIONS
    # Without end, a group may be begun before the sync of an iteration and end after it.
    assert 1 <= max(staleness) <= (1 if mode == "async" else 2)
    assert max(m["sync/canary_abs_diff"] for m in metrics) < 0.05
    assert sluice.json("verify", "ahead")["ok"]
