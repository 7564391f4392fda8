"""What only a GPU shows: the contract of a real SGLang server, and the quickstart trained with one.

Run on a machine with a GPU and the extra `gpu`; skipped elsewhere.
"""

import importlib.util
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_servers import SERVER
from real_runs import REPO, Sluice, wait_for
from run_processes import is_actor, is_sglang, the_one

from rlcore.engine.launch import EngineProcess
from rlcore.engine.sglang import sglang_argv
from rlcore.net import free_port

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not there"),
]


def test_the_contract_holds_for_a_real_server(tmp_path: Path) -> None:
    build = runpy.run_path(str(REPO / "tests" / "contract" / "tiny_model.py"))["build"]
    model = build(tmp_path / "model", head_dim=64)
    port = free_port()
    engine = EngineProcess(port)
    engine.start(sglang_argv(model, port, extra=SERVER), tmp_path / "engine.log")
    try:
        engine.wait_healthy(400)
        env = os.environ | {"SLUICE_CONTRACT_URL": engine.url, "SLUICE_CONTRACT_MODEL": str(model)}
        suite = REPO / "tests" / "contract" / "test_contract.py"
        # Without the repository's settings, which name plugins that a bare GPU machine may lack.
        options = ["-q", "--import-mode=importlib", "-c", os.devnull, f"--rootdir={REPO}"]
        argv = [sys.executable, "-m", "pytest", *options, str(suite)]
        run = subprocess.run(argv, env=env, cwd=REPO, capture_output=True, text=True)
    finally:
        engine.stop()
    print(run.stdout[-8000:])
    assert run.returncode == 0


def test_the_quickstart_trains_with_sglang(tmp_path: Path) -> None:
    sluice = Sluice(tmp_path / "root", cwd=tmp_path)
    config = REPO / "examples" / "quickstart" / "gpu.toml"
    printed = sluice(
        "train", str(config), "--run-id", "gpu", "--set", "train.num_iterations=20", timeout=900
    )
    print(printed)
    metrics = sluice.json("show", "gpu")["metrics"]
    rewards = [m["reward"] for m in metrics]
    print("reward", rewards)
    print("canary", [m["sync/canary_abs_diff"] for m in metrics])
    print("gap", [m["train/train_rollout_logprob_abs_diff"] for m in metrics])
    assert len(metrics) == 20
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3])
    assert max(m["sync/canary_abs_diff"] for m in metrics) < 0.05
    assert sluice.json("verify", "gpu")["ok"]


def test_a_run_survives_the_death_of_its_server_and_of_its_trainer(tmp_path: Path) -> None:
    sluice, config = Sluice(tmp_path / "root", cwd=tmp_path), REPO / "examples/quickstart/gpu.toml"
    sets = ["--set", "train.num_iterations=8", "--set", "rollout.health_check_timeout_s=5"]
    process = sluice.start("train", str(config), "--run-id", "hurt", "--json", *sets)
    blows = [
        (0, is_sglang, signal.SIGKILL),
        (2, is_actor("TrainerActor"), signal.SIGKILL),
        (4, is_sglang, signal.SIGSTOP),
    ]
    for iteration, which, blow in blows:
        wait_for(sluice.committed("hurt", iteration).exists, seconds=400)
        os.kill(the_one(process, which), blow)
    said = process.communicate(timeout=400)
    assert process.returncode == 0, said

    metrics = sluice.json("show", "hurt")["metrics"]
    print("seconds", [round(m["seconds"], 1) for m in metrics])
    print("canary", [m["sync/canary_abs_diff"] for m in metrics])
    assert len(metrics) == 8
    assert max(m["sync/canary_abs_diff"] for m in metrics) < 0.05
    assert sum(m["cluster/engine_restarts"] for m in metrics) == 2
    assert sum(m["cluster/trainer_restarts"] for m in metrics) == 1
    assert sluice.json("verify", "hurt")["ok"]
