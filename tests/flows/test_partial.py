"""Over-sampling with partial rollouts, killed and resumed: what was begun is gone on with."""

import json
from pathlib import Path
from typing import Any

import pytest
from real_runs import Sluice, kill_tree, short, wait_for

from rlcore.rollout.buffer import Group, read_buffer
from rlcore.sample import Sample
from rlcore.store.batch import read_parts, table_to_samples
from rlcore.store.manifest import Manifest
from rlcore.store.objects import Objects
from rlcore.store.paths import manifest_key

ITERATIONS, WANT, BEGUN, N = 6, 4, 12, 4
SETTINGS = f"""
[rollout]
rollout_batch_size = {WANT}
over_sampling_batch_size = {BEGUN}
partial_rollout = true
n_samples_per_prompt = {N}
max_response_len = 50
context_length = 56
concurrency = 24
[train]
global_batch_size = {WANT * N}
num_iterations = {ITERATIONS}
"""


def config(tmp_path: Path) -> Path:
    """The short quickstart, with rollouts that are cut off."""
    base = short(tmp_path, ITERATIONS)
    path = tmp_path / "partial.toml"
    path.write_text(f'extends = "{base}"\n{SETTINGS}')
    return path


def rollout_of(objects: Objects, run_id: str, i: int) -> tuple[Manifest, list[Sample], list[Group]]:
    """The manifest of a rollout, its samples and what it left."""
    key = manifest_key(run_id, i, "rollout")
    manifest = Manifest.from_bytes(objects.get(key), key)
    samples = table_to_samples(read_parts(objects, manifest.files))
    return manifest, samples, read_buffer(objects, manifest.extra.get("buffer"))


def has_buffer(objects: Objects, run_id: str, i: int) -> bool:
    try:
        return bool(rollout_of(objects, run_id, i)[0].extra.get("buffer"))
    except OSError:
        return False


@pytest.mark.timeout(600)
def test_what_was_begun_survives_a_kill_and_comes_first(sluice: Sluice, tmp_path: Path) -> None:
    process = sluice.start("train", str(config(tmp_path)), "--run-id", "partial")
    wait_for(sluice.committed("partial", 1).exists, 200)
    kill_tree(process.pid)
    process.wait(10)
    objects = Objects.open(str(sluice.root))
    left = sluice.json("show", "partial")
    assert 2 <= left["committed"] < ITERATIONS
    last = left["committed"] - 1
    assert has_buffer(objects, "partial", last)

    printed = sluice("resume", "partial")
    assert f"{ITERATIONS} iterations committed" in printed
    report: dict[str, Any] = sluice.json("verify", "partial")
    assert report["ok"], json.dumps(report)

    before: list[Group] = []
    continued = 0
    for i in range(ITERATIONS):
        manifest, samples, buffer = rollout_of(objects, "partial", i)
        assert manifest.cursor and len(samples) == WANT * N
        # The buffer counts among those begun: it comes first, and new prompts fill what is left.
        size = manifest.cursor["size"]
        moved = (manifest.cursor["next_epoch"] - manifest.cursor["epoch"]) * size
        moved += manifest.cursor["next_offset"] - manifest.cursor["offset"]
        whole = [group.place for group in before if group.is_whole]
        if len(whole) < WANT:
            assert moved == BEGUN - len(before)
        now = {(s.prompt_id, s.seed): s for s in samples}
        now |= {(s.prompt_id, s.seed): s for group in buffer for s in group.samples}
        for old in (s for group in before for s in group.samples if s.response_length):
            found = now[old.prompt_id, old.seed]
            assert found.tokens[: len(old.tokens)] == old.tokens
            assert found.rollout_log_probs and old.rollout_log_probs
            assert found.rollout_log_probs[: old.response_length] == old.rollout_log_probs
            assert found.weight_versions[: len(old.weight_versions)] == old.weight_versions
            continued += found.response_length > old.response_length
        # What was whole is used now, as far as there is room.
        left_again = {group.place for group in buffer}.intersection(whole)
        assert len(left_again) == max(0, len(whole) - WANT)
        before = buffer
    assert continued > 0
    metrics = sluice.json(
        "sql",
        'select sum("rollout/buffer/dropped_tokens") dropped, '
        'sum("rollout/buffer/kept_tokens") kept from iterations',
    )
    assert metrics[0]["dropped"] == 0 and metrics[0]["kept"] > 0
