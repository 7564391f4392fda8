"""The critic's loss of one micro-batch: squared error with a clipped value.

    v_t  = clip(V_t, V_old(t) - value_clip, V_old(t) + value_clip)
    loss = sum_t w_t max((V_t - R_t)^2, (v_t - R_t)^2)     as in OpenAI's PPO, without its 1/2

where R_t is the return (`rlcore.algorithms.returns.gae`), V_old the value before the first step of
the batch, and w_t what a token weighs in the step.

Invariants: what stands where the mask is False never matters; no trained token gives a loss of 0
that is part of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.algorithms.metrics import Metrics, masked
from rlcore.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class ValueInputs:
    """Per-token tensors of one shape."""

    values: Tensor
    """Of the critic that is trained, with gradient."""
    old_values: Tensor
    """Before the first step of the batch."""
    returns: Tensor
    mask: Tensor
    """bool: which tokens are trained."""
    weights: Tensor
    """Weight of each token in the step."""


@dataclass(frozen=True, slots=True, eq=False)
class ValueOutputs:
    """The loss of one micro-batch."""

    loss: Tensor
    """Scalar; the sum over micro-batches and ranks is the loss of the step."""
    metrics: Metrics
    """Means: `value_loss`, `value_clipfrac` (tokens whose clipped error is the larger), `values`
    and `returns`."""


def value_loss(inputs: ValueInputs, value_clip: float) -> ValueOutputs:
    """Clipped squared error; formula in the module docstring.

    Raises:
        DataError: shapes differ.
    """
    for name in ("old_values", "returns", "mask", "weights"):
        shape = getattr(inputs, name).shape
        if shape != inputs.values.shape:
            raise DataError(
                f"{name} has shape {tuple(shape)} but values has {tuple(inputs.values.shape)}: all "
                "per-token tensors of a loss must have one shape"
            )
    mask = inputs.mask
    weights = masked(inputs.weights, mask)
    values = masked(inputs.values, mask)
    old = masked(inputs.old_values.detach(), mask)
    goal = masked(inputs.returns.detach(), mask)
    clipped = old + (values - old).clamp(-value_clip, value_clip)
    plain, bounded = (values - goal).square(), (clipped - goal).square()
    loss = (torch.maximum(plain, bounded) * weights).sum()
    means = {
        "value_loss": loss.detach(),
        "value_clipfrac": ((bounded > plain) * weights).sum(),
        "values": (values.detach() * weights).sum(),
        "returns": (goal * weights).sum(),
    }
    return ValueOutputs(loss, Metrics(means))
