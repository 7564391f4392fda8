"""A run that trains adapters, killed and resumed, and what it leaves behind."""

import json
from pathlib import Path

import pytest
from real_runs import Sluice, kill_tree, short, wait_for

LORA = ["model.lora_rank=4", "model.lora_alpha=8", "train.lr=0.005", "algorithm.use_kl_loss=true"]


@pytest.mark.slow
def test_a_killed_run_trains_the_same_adapters(sluice: Sluice, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    config = short(tmp_path, iterations=3)
    sets = [word for one in LORA for word in ("--set", one)]
    sluice("train", str(config), "--run-id", "straight", *sets)
    process = sluice.start("train", str(config), "--run-id", "killed", *sets)
    wait_for(lambda: sluice.committed("killed", 0).exists())
    kill_tree(process.pid)
    process.communicate()
    sluice("resume", "killed")
    shown = [sluice.json("show", run) for run in ("straight", "killed")]
    assert shown[0]["state_sha256"] == shown[1]["state_sha256"]
    metrics = shown[0]["metrics"]
    assert metrics[0]["train/kl_loss"] < 1e-6 < metrics[2]["train/kl_loss"]
    assert all(m["sync/canary_abs_diff"] < 1e-4 for m in metrics if "sync/canary_abs_diff" in m)
    run = Path(sluice.root) / "runs" / "straight"
    manifest = json.loads((run / "it" / "000002" / "checkpoint" / "_MANIFEST.json").read_bytes())
    folder = Path(sluice.root) / manifest["extra"]["checkpoint"]["key_prefix"]
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    merged, start = (load_file(f / "model.safetensors") for f in (folder, run / "model"))
    changed = {name for name in start if not torch.equal(merged[name], start[name])}
    prefix = "base_model.model."
    assert changed == {
        name.removeprefix(prefix).replace("lora_B.weight", "weight")
        for name in adapter
        if name.endswith("lora_B.weight")
    }
