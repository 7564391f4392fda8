"""Dynamic sampling in a run that is killed and resumed: no sample scored twice, no prompt lost."""

import json
from pathlib import Path
from typing import Any

import pytest
from real_runs import QUICKSTART, Sluice, kill_tree, wait_for

from rlcore.store.batch import read_parts
from rlcore.store.manifest import FileRef, Manifest
from rlcore.store.objects import Objects
from rlcore.store.paths import manifest_key

ITERATIONS, WANT, BEGUN, N = 5, 4, 6, 8
REWARD = """
import pathlib

def reward(args, sample, **kwargs):
    with open(pathlib.Path(__file__).with_name("calls"), "a") as calls:
        calls.write(f"{sample.prompt_id} {sample.seed}\\n")
    return float((sample.seed or 0) % 7 == 0)
"""


def config(tmp_path: Path) -> Path:
    (tmp_path / "reward.py").write_text(REWARD)
    path = tmp_path / "dynamic.toml"
    path.write_text(
        f"""
extends = "{QUICKSTART}"
[reward]
custom_rm_path = "reward.py:reward"
[filter]
dynamic_sampling_filter_path = "nonzero_std"
[rollout]
rollout_batch_size = {WANT}
over_sampling_batch_size = {BEGUN}
partial_rollout = true
n_samples_per_prompt = {N}
[train]
global_batch_size = {WANT * N}
num_iterations = {ITERATIONS}
[eval]
eval_interval = 100
[checkpoint]
save_interval = 100
"""
    )
    return path


def manifest(objects: Objects, i: int, stage: str) -> Manifest:
    key = manifest_key("dynamic", i, stage)
    return Manifest.from_bytes(objects.get(key), key)


@pytest.mark.timeout(600)
def test_a_killed_run_scores_and_drops_nothing_twice(sluice: Sluice, tmp_path: Path) -> None:
    process = sluice.start("train", str(config(tmp_path)), "--run-id", "dynamic")
    first = sluice.committed("dynamic", 1)
    wait_for(lambda: first.exists() or process.poll() is not None, 300)
    kill_tree(process.pid)
    process.wait(10)
    objects = Objects.open(str(sluice.root))

    printed = sluice("resume", "dynamic")
    assert f"{ITERATIONS} iterations committed" in printed
    report: dict[str, Any] = sluice.json("verify", "dynamic")
    assert report["ok"], json.dumps(report)

    scored: list[str] = []
    dropped = 0
    for i in range(ITERATIONS):
        rollout, reward, chosen = (manifest(objects, i, s) for s in ("rollout", "reward", "filter"))
        assert reward.extra["scored_by"] == "rollout"
        assert chosen.extra["kept"] == WANT * N
        early = [FileRef.model_validate(f) for f in rollout.extra["scores"]["files"]]
        assert reward.files[0].sha256 == early[0].sha256
        thrown = rollout.extra.get("dropped", {"files": [], "places": [], "reasons": []})
        dropped += len(thrown["reasons"])
        files = [*rollout.files, *(FileRef.model_validate(f) for f in thrown["files"])]
        for file in files:
            table = read_parts(objects, [file], ["prompt_id", "seed"]).to_pylist()
            scored += [f"{row['prompt_id']} {row['seed']}" for row in table]
    assert dropped > 0
    made = (tmp_path / "calls").read_text().split("\n")[:-1]
    # The trial before the run has no seed; what was scored and not committed when the run was
    # killed, or begun ahead of its end, belongs to no iteration.
    assert set(scored) <= set(made)
    assert len(scored) == len(set(scored))
