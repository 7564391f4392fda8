"""A run whose engines get what changed through the store, killed and resumed."""

from pathlib import Path

import pytest
from real_runs import Sluice, kill_tree, short, wait_for

from rlcore.store.deltas import delta_keys, read_head, read_index
from rlcore.store.objects import Objects


@pytest.mark.slow
def test_a_killed_run_goes_on_with_changes(sluice: Sluice, tmp_path: Path) -> None:
    config = short(tmp_path, iterations=4)
    process = sluice.start(
        "train", str(config), "--run-id", "far", "--set", "weights.transport=delta"
    )
    wait_for(lambda: sluice.committed("far", 1).exists())
    kill_tree(process.pid)
    process.communicate()
    sluice("resume", "far")
    straight = ("train", str(config), "--run-id", "disk", "--set", "weights.transport=disk")
    sluice(*straight)
    shown = [sluice.json("show", run) for run in ("far", "disk")]
    assert shown[0]["state_sha256"] == shown[1]["state_sha256"]
    for metrics in shown[0]["metrics"]:
        assert metrics["sync/canary_abs_diff"] < 1e-4
    objects = Objects.open(sluice.root)
    head = read_head(objects, "far")
    assert head is not None and len(read_index(objects, head).chain) >= 3
    assert delta_keys(objects, "far") <= set(objects.list("runs/far/deltas"))
