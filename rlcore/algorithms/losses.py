"""The policy loss of one micro-batch: clipped surrogate, and a KL term where a reference is given.

    rho_t = exp(log pi(t) - log pi_old(t))
    l_t   = max(-rho_t A_t, -clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)
            PPO, arXiv 1707.06347, eq. 7; separate bounds: DAPO, arXiv 2503.14476, eq. 10
    loss  = sum_t w_t (l_t + kl_coef * kl_t)
            GRPO, arXiv 2402.03300, eq. 3

with the weights w_t of `rlcore.algorithms.aggregate`, so that the losses of all micro-batches of
all ranks add up to the loss of the step (see there for what the caller does about averaging over
ranks).

Invariants:
- What stands where the mask is False (NaN, infinities) changes neither loss, gradient nor metric.
- Log-ratios of any size give finite losses and gradients: they are clamped to +-20, beyond which
  the token has no gradient. NaN at a trained position stays NaN, for the trainer to see.
- A micro-batch without trained tokens gives a loss of 0 that is still part of the graph, with
  gradients of 0: collectives in backward are entered on every rank.
- The same metrics come out of every micro-batch, whatever its mask: merging needs no common
  knowledge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlcore.algorithms.kl import MAX_LOG_RATIO, KLKind, kl_estimate
from rlcore.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class PolicyLossSettings:
    """What `policy_loss` computes."""

    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    kl_coef: float = 0.0
    """Weight of the KL term; with 0 the term is only measured, where a reference is given."""
    kl_kind: KLKind = "k3"
    """Estimator of the KL term."""


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """Per-token tensors of one shape: [T], [n, L], or only the trained positions [M]."""

    log_probs: Tensor
    """Of the policy that is trained, with gradient."""
    advantages: Tensor
    mask: Tensor
    """bool: which tokens are trained."""
    weights: Tensor
    """Weight of each token in the step (`TokenTensors.loss_weights`)."""
    old_log_probs: Tensor | None = None
    """Of the policy that sampled; None: the policy is that one still, and the ratio is 1."""
    ref_log_probs: Tensor | None = None
    """Of the reference policy; None: no KL term."""
    entropy: Tensor | None = None
    """Of the policy at each position, to be measured."""


@dataclass(frozen=True, slots=True, eq=False)
class Metrics:
    """Scalars without gradient, mergeable over micro-batches and ranks."""

    means: dict[str, Tensor] = field(default_factory=dict)
    """Weighted as the loss is: their *sum* over micro-batches and ranks is the mean of the step."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Never negative: their maximum over micro-batches and ranks is that of the step."""


@dataclass(frozen=True, slots=True, eq=False)
class LossOutputs:
    """The loss of one micro-batch."""

    loss: Tensor
    """Scalar; the sum over micro-batches and ranks is the loss of the step."""
    metrics: Metrics
    """`policy_loss` says which."""


def policy_loss(inputs: LossInputs, settings: PolicyLossSettings) -> LossOutputs:
    """Clipped surrogate with KL term; formulas in the module docstring.

    Metrics (names as in slime where it has them), means: `loss`, `pg_loss`, `pg_clipfrac` and its
    parts `pg_clipfrac_low`, `pg_clipfrac_high` (tokens whose clipped side is the larger), `ppo_kl`
    (mean of log pi_old - log pi), `approx_kl` (Schulman's k3 of the same divergence: mean of rho -
    1 - log rho), `ois` (mean of rho), `kl_loss` when a reference is given, `entropy_loss` when
    entropy is. Maxima: `ratio_max`, `log_ratio_abs_max`, both of clamped log-ratios.

    Raises:
        DataError: shapes differ.
        ConfigError: a KL term is asked for without a reference.
    """
    _check(inputs, settings)
    mask = inputs.mask
    weights = _masked(inputs.weights, mask)
    new = _masked(inputs.log_probs, mask)
    old = new.detach() if inputs.old_log_probs is None else _masked(inputs.old_log_probs, mask)
    log_ratio = (new - old.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    advantages = _masked(inputs.advantages, mask)
    clipped_ratio = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    surrogate = torch.maximum(-ratio * advantages, -clipped_ratio * advantages)

    pg_loss = (surrogate * weights).sum()
    loss = pg_loss
    means = {"pg_loss": pg_loss.detach()}
    if inputs.ref_log_probs is not None:
        drift = new - _masked(inputs.ref_log_probs, mask)
        kl_loss = (kl_estimate(drift, settings.kl_kind) * weights).sum()
        # A coefficient of 0 must not bring the term into the graph: it would only cost.
        loss = loss + settings.kl_coef * kl_loss if settings.kl_coef else loss
        means["kl_loss"] = kl_loss.detach()
    if inputs.entropy is not None:
        means["entropy_loss"] = (_masked(inputs.entropy.detach(), mask) * weights).sum()
    means["loss"] = loss.detach()
    ratios = _ratio_metrics(log_ratio.detach(), ratio.detach(), advantages, weights, mask, settings)
    return LossOutputs(loss, Metrics({**means, **ratios.means}, ratios.maxima))


def log_prob_gap(train: Tensor, rollout: Tensor, mask: Tensor, weights: Tensor) -> Metrics:
    """How far the trainer's log-probs of the sampled tokens are from the engine's; tensors of one
    shape.

    Means: `train_rollout_logprob_abs_diff`, and `train_rollout_kl`, k3 of KL(rollout || train).
    Maximum: `train_rollout_logprob_abs_diff_max`.
    """
    diff = _masked(train.detach(), mask) - _masked(rollout.detach(), mask)
    weights = _masked(weights, mask)
    return Metrics(
        means={
            "train_rollout_logprob_abs_diff": (diff.abs() * weights).sum(),
            "train_rollout_kl": (kl_estimate(-diff, "k3") * weights).sum(),
        },
        maxima={"train_rollout_logprob_abs_diff_max": _peak(diff.abs())},
    )


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


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """Values where the mask is True, else 0: chosen, not multiplied, since 0 * NaN is NaN."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def _peak(values: Tensor) -> Tensor:
    """The largest of values that are never negative; 0 of none."""
    return values.amax() if values.numel() else values.new_zeros(())


def _ratio_metrics(
    log_ratio: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    settings: PolicyLossSettings,
) -> Metrics:
    """How far the policy has moved from the one that sampled, and where the clip acts."""
    low = (ratio < 1.0 - settings.clip_low) & (advantages < 0)
    high = (ratio > 1.0 + settings.clip_high) & (advantages > 0)
    clip_low = (low * weights).sum()
    clip_high = (high * weights).sum()
    return Metrics(
        means={
            "pg_clipfrac": clip_low + clip_high,
            "pg_clipfrac_low": clip_low,
            "pg_clipfrac_high": clip_high,
            "ppo_kl": (-log_ratio * weights).sum(),
            "approx_kl": (kl_estimate(-log_ratio, "k3") * weights).sum(),
            "ois": (ratio * weights).sum(),
        },
        maxima={
            "ratio_max": _peak(_masked(ratio, mask)),
            "log_ratio_abs_max": _peak(log_ratio.abs()),
        },
    )


def _check(inputs: LossInputs, settings: PolicyLossSettings) -> None:
    """Raises when shapes differ or a reference is missing."""
    shape = inputs.log_probs.shape
    for name in ("advantages", "mask", "weights", "old_log_probs", "ref_log_probs", "entropy"):
        value = getattr(inputs, name)
        if value is not None and value.shape != shape:
            raise DataError(
                f"{name} has shape {tuple(value.shape)} but log_probs has {tuple(shape)}: all "
                "per-token tensors of a loss must have one shape"
            )
    if inputs.mask.dtype != torch.bool:
        raise DataError(f"the loss mask is {inputs.mask.dtype}; it must be torch.bool")
    if settings.kl_coef and inputs.ref_log_probs is None:
        raise ConfigError(
            f"kl_coef is {settings.kl_coef} but there are no reference log-probs: compute them, or "
            "set algorithm.use_kl_loss = false"
        )
