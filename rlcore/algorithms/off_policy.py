"""What is done about tokens that another policy sampled than the one that is trained.

Truncated importance sampling weighs a token's loss by how much likelier the trainer finds it than
the engine that sampled it (F. Yao et al., "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training", 2025, fengyao.notion.site/off-policy-rl):

    x_t = log pi_old(t) - log pi_engine(t)             of each trained token
    token      w_t = exp(x_t)
    sequence   w_t = exp(sum of x over the sequence)   the ratio of whole sequences
    geometric  w_t = exp(mean of x over the sequence)  its length taken out

    clip       l_t *= clip(w_t, low, high)
    mask       l_t *= w_t where low <= w_t <= high, else 0  (IcePop, Ling team, arXiv 2510.18855)

Off-policy sequence masking leaves out sequences that are worse than the others and that the policy
has left (DeepSeek-V3.2, arXiv 2512.02556, section 3.1):

    d_i = mean over the sequence of log pi_old - log pi
    l_t = 0 where A_t < 0 and d_i > delta

Invariants:
- Neither weights nor masks have a gradient.
- Logarithms are clamped to +-20 before `exp`: weights are finite for any log-probs but NaN.
- Equal log-probs give a weight of exactly 1; the denominators of the loss stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

from rlcore.algorithms.kl import MAX_LOG_RATIO
from rlcore.algorithms.logprobs import LOWEST
from rlcore.algorithms.metrics import Metrics, masked, peak

Level = Literal["token", "sequence", "geometric"]
Bounding = Literal["clip", "mask"]


@dataclass(frozen=True, slots=True)
class ImportanceSampling:
    """What `sampling_weights` computes."""

    low: float = 0.0
    """Smallest weight."""
    high: float = 2.0
    """Largest weight."""
    level: Level = "token"
    """Whose ratio is the weight of a token: its own, or that of its sequence."""
    bounding: Bounding = "clip"
    """What becomes of a weight beyond the bounds: the bound itself, or 0."""


def sampling_weights(
    old: Tensor,
    rollout: Tensor,
    mask: Tensor,
    weights: Tensor,
    lengths: Sequence[int],
    settings: ImportanceSampling,
) -> tuple[Tensor, Metrics]:
    """Weights of truncated importance sampling; formulas in the module docstring.

    Args:
        old: [M] log-probs of the trainer before the step.
        rollout: [M] log-probs of the engine.
        mask: bool [M].
        weights: [M] of each token in the step.
        lengths: how many of the tokens, in order, are of each sequence; not needed by level
            `token`.

    Returns:
        [M] weights, and the metrics `tis` (mean before bounding), `tis_abs` (mean distance from 1),
        `tis_clipfrac` (tokens beyond the bounds) and the maximum `tis_max`.
    """
    # Both may say that a token is impossible, and -inf less -inf is not a number.
    ours, theirs = (masked(p.detach(), mask).clamp(min=LOWEST) for p in (old, rollout))
    x = (ours - theirs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if settings.level == "sequence":
        x = per_sequence(x, mask, lengths, mean=False).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    elif settings.level == "geometric":
        x = per_sequence(x, mask, lengths, mean=True)
    plain = x.exp()
    outside = (plain < settings.low) | (plain > settings.high)
    if settings.bounding == "clip":
        bounded = plain.clamp(settings.low, settings.high)
    elif settings.bounding == "mask":
        bounded = plain.masked_fill(outside, 0.0)
    else:
        assert_never(settings.bounding)
    shares = masked(weights, mask)
    means = {
        "tis": (plain * shares).sum(),
        "tis_abs": ((plain - 1).abs() * shares).sum(),
        "tis_clipfrac": (outside * shares).sum(),
    }
    return bounded, Metrics(means, {"tis_max": peak(masked(plain, mask))})


def left_sequences(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, lengths: Sequence[int], delta: float
) -> Tensor:
    """bool [M]: tokens that off-policy sequence masking leaves out; formula in the docstring.

    Args:
        log_ratio: [M] log pi - log pi_old, 0 where masked.
        advantages: [M].
        mask: bool [M].
        lengths: as `sampling_weights`.
        delta: distance, in nat a token, beyond which a policy has left a sequence.
    """
    distance = per_sequence(-log_ratio.detach(), mask, lengths, mean=True)
    return (advantages < 0) & (distance > delta) & mask


def per_sequence(values: Tensor, mask: Tensor, lengths: Sequence[int], *, mean: bool) -> Tensor:
    """[M] the sum, or mean, over the trained tokens of each token's sequence, with its gradient.

    Sequence by sequence: to scatter them all at once would add up in no fixed order on a GPU, and a
    step must have the same bits whenever it is done again.

    Args:
        values: [M], 0 where masked.
        mask: bool [M].
        lengths: how many of the tokens, in order, are of each sequence.
        mean: divide by the number of trained tokens, where there are any.
    """
    if not lengths:
        return values
    parts, masks = values.split(list(lengths)), mask.split(list(lengths))
    sums = torch.stack([part.sum() for part in parts])
    if mean:
        sums = sums / torch.stack([part.sum() for part in masks]).clamp(min=1)
    spread = [one.expand(n) for one, n in zip(sums.unbind(), lengths, strict=True)]
    return torch.cat(spread)
