"""A run on pictures, killed and resumed: the batches hold them, and the bits are the same."""

from pathlib import Path

import pytest
from real_runs import REPO, Sluice, kill_tree, wait_for

from rlcore.images.files import open_image
from rlcore.store.batch import read_parts, table_to_samples
from rlcore.store.manifest import Manifest
from rlcore.store.objects import Objects
from rlcore.store.paths import manifest_key

EXAMPLE = REPO / "examples" / "geo3k_vlm" / "run.toml"
ITERATIONS = 4
SETTINGS = f"""
extends = "{EXAMPLE}"
[rollout]
rollout_batch_size = 6
n_samples_per_prompt = 4
[train]
global_batch_size = 24
num_iterations = {ITERATIONS}
[eval]
eval_interval = 4
[checkpoint]
save_interval = 4
state_interval = 2
"""


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_run_with_pictures_survives_a_kill(sluice: Sluice, tmp_path: Path) -> None:
    config = tmp_path / "images.toml"
    config.write_text(SETTINGS)
    sluice("train", str(config), "--run-id", "calm", timeout=800)
    process = sluice.start("train", str(config), "--run-id", "killed")
    wait_for(sluice.committed("killed", 0).exists, 600)
    kill_tree(process.pid)
    process.wait(10)
    assert f"{ITERATIONS} iterations committed" in sluice("resume", "killed", timeout=800)
    assert sluice.json("verify", "killed")["ok"]
    calm, killed = sluice.json("show", "calm"), sluice.json("show", "killed")
    assert killed["state_sha256"] == calm["state_sha256"]
    assert [m["reward"] for m in killed["metrics"]] == [m["reward"] for m in calm["metrics"]]

    objects = Objects.open(str(sluice.root))

    def manifest(i: int, stage: str) -> Manifest:
        key = manifest_key("killed", i, stage)
        return Manifest.from_bytes(objects.get(key), key)

    for i in range(ITERATIONS):
        assert manifest(i, "train").metrics["train/train_rollout_logprob_abs_diff_max"] < 1e-4
    for sample in table_to_samples(read_parts(objects, manifest(1, "rollout").files)):
        [image] = (sample.multimodal_inputs or {})["image"]
        assert open_image(image).size == (32, 32)
        assert sample.tokens.count(5) >= 16
    [exported] = Path(sluice.root).glob("runs/killed/it/*/checkpoint/hf-*")
    from transformers import AutoModelForImageTextToText

    _, loaded = AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
    assert not any(loaded[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
