"""Supervised fine-tuning in the trainer: loss and steps against another implementation."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config.tree import AlgorithmConfig


def reference_loss(folder: Path, sequences: list[Any]) -> float:
    """Mean cross-entropy of the trained tokens, by transformers in float64, a row at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    losses = []
    for s in sequences:
        ids = torch.tensor(s.tokens)
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        labels = ids.clone()
        labels[: len(ids) - s.response_length] = -100
        if s.loss_mask is not None:
            labels[len(ids) - s.response_length :][torch.tensor(s.loss_mask) == 0] = -100
        every = torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="none")
        losses.append(every[labels[1:] >= 0])
    return torch.cat(losses).mean().item()


@pytest.mark.parametrize("steps", [1, 2])
def test_the_loss_is_the_cross_entropy_and_falls(
    toy: Any, make_trainer: Callable[..., Any], model_folder: Path, steps: int
) -> None:
    trainer = make_trainer(algorithm=AlgorithmConfig(loss_type="sft_loss"))
    sequences = toy.random_sequences(12, seed=1)
    expected = reference_loss(model_folder, sequences[: 12 // steps])
    [batch] = toy.shares(sequences, 1, num_steps=steps)
    first = trainer.train("start", "a", batch).metrics
    if steps == 1:
        assert first["loss"] == pytest.approx(expected, rel=1e-6)
        assert first["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    second = trainer.train("a", "b", batch).metrics
    assert second["loss"] < first["loss"]
    # No pass ahead of the steps, and nothing of a policy loss.
    assert "pg_loss" not in first and "ppo_kl" not in first
    assert first["entropy"] > 0
