"""The loss of supervised fine-tuning: cross-entropy of demonstrated tokens.

    loss = sum_t w_t (-log pi(t))        over the trained tokens t

which is maximum likelihood of the demonstrations (as in arXiv 2203.02155, section 3.1), with the
weights w_t of `rlcore.algorithms.aggregate`: the losses of all micro-batches of all ranks add up to
the loss of the step. With `token_mean` it is the mean over all trained tokens of the step.

Invariants:
- What stands where the mask is False (NaN, infinities) changes neither loss, gradient nor metric.
- A micro-batch without trained tokens gives a loss of 0 that is still part of the graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from rlcore.algorithms.losses import LossOutputs
from rlcore.algorithms.metrics import Metrics, masked, peak
from rlcore.errors import DataError

MAX_EXPONENT = 700.0
"""Beyond it a perplexity is no float64 any more."""


@dataclass(frozen=True, slots=True, eq=False)
class Demonstrations:
    """Per-token tensors of one shape."""

    log_probs: Tensor
    """Of the demonstrated tokens, with gradient."""
    mask: Tensor
    """bool: which tokens are trained."""
    weights: Tensor
    """Weight of each token in the step (`TokenTensors.loss_weights`)."""
    entropy: Tensor | None = None
    """Of the policy at each position; only measured."""


def cross_entropy(inputs: Demonstrations) -> LossOutputs:
    """The loss; formula in the module docstring.

    Metrics, means: `loss`, and `entropy_loss` where the entropy is given. Maximum:
    `token_loss_max`, the loss of the unlikeliest trained token.

    Raises:
        DataError: shapes differ.
    """
    shape = inputs.log_probs.shape
    for name in ("mask", "weights", "entropy"):
        value = getattr(inputs, name)
        if value is not None and value.shape != shape:
            raise DataError(
                f"{name} has shape {tuple(value.shape)} but log_probs has {tuple(shape)}: all "
                "per-token tensors of a loss must have one shape"
            )
    losses = -masked(inputs.log_probs, inputs.mask)
    weights = masked(inputs.weights, inputs.mask)
    loss = (losses * weights).sum()
    means = {"loss": loss.detach()}
    if inputs.entropy is not None:
        entropy = masked(inputs.entropy.detach(), inputs.mask)
        means["entropy_loss"] = (entropy * weights).sum()
    return LossOutputs(loss, Metrics(means, {"token_loss_max": peak(losses.detach().clamp(min=0))}))


def perplexity(loss: float) -> float:
    """exp of the mean loss of a token."""
    return math.exp(min(loss, MAX_EXPONENT))
