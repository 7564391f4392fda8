"""A run on mixed files with a sample filter, evaluated on sets that the command line names."""

import json
from pathlib import Path
from typing import Any

import pytest
from real_runs import Sluice, short

from rlcore.store.batch import read_parts, table_to_samples
from rlcore.store.manifest import Manifest
from rlcore.store.objects import Objects
from rlcore.store.paths import manifest_key

ITERATIONS = 3
CODE = """
def mark(args, groups):
    for group in groups:
        group[0].remove_sample = group[0].reward is not None
"""


def rows(path: Path, digits: range) -> Path:
    lines = [json.dumps({"prompt": f"{d}=", "label": str(d) * 3}) for d in digits]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.timeout(400)
def test_mixed_files_in_a_run(sluice: Sluice, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    low, high = rows(tmp_path / "low.jsonl", range(5)), rows(tmp_path / "high.jsonl", range(5, 10))
    base = short(tmp_path, ITERATIONS)
    config = tmp_path / "mixed.toml"
    config.write_text(
        f"""
extends = "{base}"
[data]
path = "low.jsonl"
weight = 3
[[data.mix]]
path = "high.jsonl"
[rollout]
rollout_sample_filter_path = "mine.py:mark"
[eval]
eval_interval = {ITERATIONS}
"""
    )
    chosen = ["--eval-prompt-data", "low", str(low), "high", str(high)]
    sluice("train", str(config), "--run-id", "mixed", *chosen)
    report: dict[str, Any] = sluice.json("verify", "mixed")
    assert report["ok"], json.dumps(report)
    objects = Objects.open(str(sluice.root))
    for i in range(ITERATIONS):
        manifests = {}
        for stage in ("rollout", "reward", "train"):
            key = manifest_key("mixed", i, stage)
            manifests[stage] = Manifest.from_bytes(objects.get(key), key)
        samples = table_to_samples(read_parts(objects, manifests["rollout"].files))
        digits = [int(sample.prompt[0]) for sample in samples[::8]]
        assert len(digits) == 8 and sum(d < 5 for d in digits) == 6
        assert [s.remove_sample for s in samples] == [k % 8 == 0 for k in range(64)]
        assert manifests["reward"].extra["scored_by"] == "rollout"
        assert manifests["train"].extra["samples"] == 56
    shown = sluice.json("show", "mixed", "--iter", str(ITERATIONS - 1))
    assert {"eval/low", "eval/high"} <= set(shown["metrics"])
