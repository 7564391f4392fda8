"""The learning rate of a step, and what its gradients are scaled by."""

from __future__ import annotations

import math

from rlcore.config.tree import TrainConfig


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Rises linearly over `lr_warmup_steps`, step k having (k + 1) / warm-up of the peak, so that no
    step is wasted at 0; then stays, or goes to `lr_min`, reached at the last of `total_steps`,
    along a straight line or half a cosine.
    """
    warmup = config.lr_warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.lr_schedule == "constant":
        return config.lr
    span = max(1, total_steps - 1 - warmup)
    done = min(1.0, (step - warmup) / span)
    left = 1.0 - done if config.lr_schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return config.lr_min + (config.lr - config.lr_min) * left


def clip_scale(norm: float, limit: float) -> float:
    """What gradients of this global norm are multiplied by so that it is at most `limit`."""
    return min(1.0, limit / (norm + 1e-6))
