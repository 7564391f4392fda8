"""A batch that does not fit is trained once more with smaller micro-batches, and once in effect."""

from pathlib import Path

import pytest
from real_runs import Sluice, kill_tree, short, wait_for

LOSS = """
import torch

ROOM = 64


def loss(args, batch, logits, sum_of_sample_mean):
    if logits.shape[1] > ROOM:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    new, start = [], 0
    for tokens, n, r in zip(
        batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"]
    ):
        rows = logits[0, start + n - r - 1 : start + n - 1].log_softmax(-1)
        new.append(rows.gather(-1, tokens[-r:, None])[:, 0])
        start += n
    losses = -torch.cat(batch["advantages"]) * torch.cat(new)
    return sum_of_sample_mean(losses), {}
"""


def with_loss(tmp_path: Path) -> Path:
    """A short run whose loss has room for few tokens."""
    (tmp_path / "mine.py").write_text(LOSS)
    own = f'[algorithm]\ncustom_loss_function_path = "{tmp_path}/mine.py:loss"'
    return short(tmp_path, iterations=2, more=f"state_interval = 5\n{own}")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_batch_that_does_not_fit_is_trained_in_halves(sluice: Sluice, tmp_path: Path) -> None:
    """Also where a resume trains it again."""
    config = with_loss(tmp_path)
    sluice("train", str(config), "--run-id", "small", "--set", "train.max_tokens_per_gpu=64")
    small = sluice.json("show", "small")

    wide = ["--set", "train.max_tokens_per_gpu=128", "--set", "cluster.colocate=true"]
    process = sluice.start("train", str(config), "--run-id", "halved", *wide)
    wait_for(sluice.committed("halved", 0).exists, seconds=300)
    kill_tree(process.pid)
    process.wait(10)
    sluice("resume", "halved")
    halved = sluice.json("show", "halved")
    assert halved["state_sha256"] == small["state_sha256"]
    for metrics in halved["metrics"]:
        assert metrics["train/lowered_max_tokens_per_gpu"] == 64
        assert metrics["cluster/trainer_restarts"] == 1
    assert sluice.json("verify", "halved")["ok"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_is_halved_once(sluice: Sluice, tmp_path: Path) -> None:
    wide = ["--set", "train.max_tokens_per_gpu=256"]
    said = sluice("train", str(with_loss(tmp_path)), "--run-id", "never", *wide, code=1)
    assert "memory ran out on cpu when 20.00 MiB were asked for" in " ".join(said.split())
