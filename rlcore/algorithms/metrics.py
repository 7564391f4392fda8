"""Scalars that come out of a loss beside it, and what tells trained tokens from the others.

Invariants: a metric carries no graph; what stands at masked positions is in none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Metrics:
    """Scalars without gradient, mergeable over micro-batches and ranks."""

    means: dict[str, Tensor] = field(default_factory=dict)
    """Weighted as the loss is: their *sum* over micro-batches and ranks is the mean of the step."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Never negative: their maximum over micro-batches and ranks is that of the step."""


def merge_metrics(parts: Sequence[Metrics]) -> Metrics:
    """Metrics of several micro-batches as one: means add up, maxima are compared.

    Over ranks, all-reduce `means` with SUM and `maxima` with MAX.
    """
    means: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.means.items():
            means[name] = means[name] + value if name in means else value
        for name, value in part.maxima.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
    return Metrics(means, maxima)


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Values where the mask is True, else 0: chosen, not multiplied, since 0 * NaN is NaN."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def peak(values: Tensor) -> Tensor:
    """The largest of values that are never negative; 0 of none."""
    return values.amax() if values.numel() else values.new_zeros(())
