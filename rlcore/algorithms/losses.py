"""The policy loss of one micro-batch: clipped surrogate, KL term and entropy bonus.

    rho_t = exp(log pi(t) - log pi_old(t))
    clipped   l_t = max(-rho_t A_t, -clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)
              PPO, arXiv 1707.06347, eq. 7; separate bounds: DAPO, arXiv 2503.14476, eq. 10
    gspo      the same with rho_t = exp(mean over the sequence of log pi - log pi_old)
              GSPO, arXiv 2507.18071, eq. 5 to 7
    cispo     l_t = -stop(clip(rho_t, 1 - clip_low, 1 + clip_high)) A_t log pi(t)
              CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4 and 5
    dual      l_t = min(l_t, -c A_t) where A_t < 0; not for cispo
              dual-clip PPO, arXiv 1912.09729

    loss = sum_t w_t (l_t s_t + kl_coef * kl_t - entropy_coef * H_t)
           GRPO, arXiv 2402.03300, eq. 3

with the weights w_t of `rlcore.algorithms.aggregate`, so that the losses of all micro-batches of
all ranks add up to the loss of the step (see there for what the caller does about averaging over
ranks), and s_t what `rlcore.algorithms.off_policy` makes of tokens that another policy sampled.

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlcore.algorithms.kl import MAX_LOG_RATIO, KLKind, kl_estimate
from rlcore.algorithms.metrics import Metrics, masked, merge_metrics, peak
from rlcore.algorithms.off_policy import (
    ImportanceSampling,
    left_sequences,
    per_sequence,
    sampling_weights,
)
from rlcore.errors import ConfigError, DataError

Surrogate = Literal["clipped", "gspo", "cispo"]

LEAST_LOG_PROB = -1000.0
"""Below this a token's log-prob has no gradient in cispo, whose loss is proportional to it."""


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
    surrogate: Surrogate = "clipped"
    """Formula of a token's loss."""
    dual_clip: float | None = None
    """c of the dual clip, above 1."""
    unbiased_kl: bool = False
    """Multiply the KL term by rho_t."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    opsm_delta: float | None = None
    """Bound of off-policy sequence masking; None: off."""
    sampling: ImportanceSampling | None = None
    """Truncated importance sampling; None: off."""

    @property
    def by_sequence(self) -> bool:
        """Whether tokens must be known to belong to sequences."""
        far = self.sampling is not None and self.sampling.level != "token"
        return self.surrogate == "gspo" or self.opsm_delta is not None or far


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
    """Of the policy at each position, with gradient where there is a bonus."""
    rollout_log_probs: Tensor | None = None
    """As the engine reported them; needed for importance sampling alone."""
    lengths: tuple[int, ...] = ()
    """How many of the tokens, in order, are of each sequence; needed by what goes by sequences, for
    which the tensors must be of one dimension."""
    weigh: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Metrics]] | None = None
    """From the tokens' losses, old and engine's log-probs to losses with importance weights, and
    metrics: a function of one's own in place of `sampling`."""
    reduce: Callable[[Tensor], Tensor] | None = None
    """From the tokens' losses to their share in the loss of the step: a function of one's own in
    place of the sum by `weights`."""


@dataclass(frozen=True, slots=True, eq=False)
class LossOutputs:
    """The loss of one micro-batch."""

    loss: Tensor
    """Scalar; the sum over micro-batches and ranks is the loss of the step."""
    metrics: Metrics
    """`policy_loss` says which."""


@dataclass(frozen=True, slots=True, eq=False)
class _Terms:
    """The inputs with zeros at masked positions, and what is computed of them once."""

    mask: Tensor
    weights: Tensor
    new: Tensor
    old: Tensor
    log_ratio: Tensor
    """Of each token, clamped."""
    used: Tensor
    """The log-ratio that the surrogate uses: of the token, or of its sequence."""
    ratio: Tensor
    """exp(used)."""
    advantages: Tensor


def policy_loss(inputs: LossInputs, settings: PolicyLossSettings) -> LossOutputs:
    """Surrogate, KL term and entropy bonus; formulas in the module docstring.

    Metrics (names as in slime where it has them), means: `loss`, `pg_loss`, `pg_clipfrac` and its
    parts `pg_clipfrac_low`, `pg_clipfrac_high` (tokens whose clipped side is the larger; for cispo,
    tokens whose ratio the clip changes), `pg_clipfrac_dual` with a dual clip, `ppo_kl` (mean of log
    pi_old - log pi), `approx_kl` (Schulman's k3 of the same divergence: mean of rho - 1 - log rho),
    `ois` (mean of rho), `kl_loss` when a reference is given, `entropy_loss` when entropy is,
    `effect` and `effect_square` (mean of what a token's gradient is multiplied by beside its
    advantage, 0 where a bound stops it, and of its square: `effective_share` says what of the batch
    that leaves), `opsm_clipfrac` with sequence masking, and those of `sampling_weights` with
    importance sampling.
    Maxima: `ratio_max`, `log_ratio_abs_max`, both of clamped log-ratios.

    Raises:
        DataError: shapes differ.
        ConfigError: something is asked for that its inputs are lacking for.
    """
    _check(inputs, settings)
    terms = _terms(inputs, settings)
    surrogate, effect, extra = _surrogate(terms, settings)
    if settings.opsm_delta is not None:
        left = left_sequences(
            terms.log_ratio, terms.advantages, terms.mask, inputs.lengths, settings.opsm_delta
        )
        surrogate, effect = surrogate.masked_fill(left, 0.0), effect.masked_fill(left, 0.0)
        extra.append(Metrics({"opsm_clipfrac": (left * terms.weights).sum()}))
    if settings.sampling is not None:
        assert inputs.rollout_log_probs is not None
        importance, found = sampling_weights(
            terms.old,
            inputs.rollout_log_probs,
            terms.mask,
            terms.weights,
            inputs.lengths,
            settings.sampling,
        )
        surrogate, effect = surrogate * importance, effect * importance
        extra.append(found)

    if inputs.weigh is not None:
        assert inputs.rollout_log_probs is not None
        engine = masked(inputs.rollout_log_probs, terms.mask)
        surrogate, found = inputs.weigh(surrogate, terms.old, engine)
        extra.append(found)

    reduce = inputs.reduce or (lambda losses: (losses * terms.weights).sum())
    pg_loss = loss = reduce(surrogate)
    means = {
        "pg_loss": pg_loss.detach(),
        "effect": (effect * terms.weights).sum(),
        "effect_square": (effect.square() * terms.weights).sum(),
    }
    if inputs.ref_log_probs is not None:
        drift = terms.new - masked(inputs.ref_log_probs, terms.mask)
        change = terms.log_ratio.exp() if settings.unbiased_kl else None
        kl_loss = (kl_estimate(drift, settings.kl_kind, change) * terms.weights).sum()
        # A coefficient of 0 must not bring the term into the graph: it would only cost.
        loss = loss + settings.kl_coef * kl_loss if settings.kl_coef else loss
        means["kl_loss"] = kl_loss.detach()
    if inputs.entropy is not None:
        entropy = inputs.entropy if settings.entropy_coef else inputs.entropy.detach()
        entropy_loss = (masked(entropy, terms.mask) * terms.weights).sum()
        loss = loss - settings.entropy_coef * entropy_loss if settings.entropy_coef else loss
        means["entropy_loss"] = entropy_loss.detach()
    means["loss"] = loss.detach()
    ratios = _ratio_metrics(terms, settings)
    return LossOutputs(loss, merge_metrics([Metrics(means), ratios, *extra]))


def log_prob_gap(train: Tensor, rollout: Tensor, mask: Tensor, weights: Tensor) -> Metrics:
    """How far the trainer's log-probs of the sampled tokens are from the engine's; tensors of one
    shape.

    Means: `train_rollout_logprob_abs_diff`, and `train_rollout_kl`, k3 of KL(rollout || train).
    Maximum: `train_rollout_logprob_abs_diff_max`.
    """
    diff = masked(train.detach(), mask) - masked(rollout.detach(), mask)
    weights = masked(weights, mask)
    return Metrics(
        means={
            "train_rollout_logprob_abs_diff": (diff.abs() * weights).sum(),
            "train_rollout_kl": (kl_estimate(-diff, "k3") * weights).sum(),
        },
        maxima={"train_rollout_logprob_abs_diff_max": peak(diff.abs())},
    )


def effective_share(effect: float, effect_square: float) -> float:
    """Kish's effective sample size as a share of the tokens, (sum e)^2 / (n sum e^2), of the means
    of e and e^2: 1 where all tokens have the same say, 0 where none has any.
    """
    return effect * effect / effect_square if effect_square else 0.0


def _terms(inputs: LossInputs, settings: PolicyLossSettings) -> _Terms:
    mask = inputs.mask
    new = masked(inputs.log_probs, mask)
    old = new.detach() if inputs.old_log_probs is None else masked(inputs.old_log_probs, mask)
    log_ratio = (new - old.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    used = log_ratio
    if settings.surrogate == "gspo":
        used = per_sequence(log_ratio, mask, inputs.lengths, mean=True)
    return _Terms(
        mask=mask,
        weights=masked(inputs.weights, mask),
        new=new,
        old=old.detach(),
        log_ratio=log_ratio,
        used=used,
        ratio=used.exp(),
        advantages=masked(inputs.advantages, mask),
    )


def _surrogate(terms: _Terms, settings: PolicyLossSettings) -> tuple[Tensor, Tensor, list[Metrics]]:
    """Each token's l_t; how much of its advantage its gradient has; metrics."""
    ratio, advantages = terms.ratio, terms.advantages
    clipped_ratio = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    if settings.surrogate == "cispo":
        log_probs = terms.new.clamp(min=LEAST_LOG_PROB)
        weight = clipped_ratio.detach()
        return -weight * advantages * log_probs, weight, []
    surrogate = torch.maximum(-ratio * advantages, -clipped_ratio * advantages)
    low, high = _beyond(terms, settings)
    effect = ratio.detach().masked_fill(low | high, 0.0)
    if settings.dual_clip is None:
        return surrogate, effect, []
    bound = -settings.dual_clip * advantages
    bounded = (advantages < 0) & (surrogate > bound)
    found = Metrics({"pg_clipfrac_dual": (bounded * terms.weights).sum()})
    return torch.where(bounded, bound, surrogate), effect.masked_fill(bounded, 0.0), [found]


def _beyond(terms: _Terms, settings: PolicyLossSettings) -> tuple[Tensor, Tensor]:
    """Tokens that the clip acts on, below and above."""
    ratio = terms.ratio.detach()
    low, high = ratio < 1.0 - settings.clip_low, ratio > 1.0 + settings.clip_high
    if settings.surrogate == "cispo":
        return low, high
    return low & (terms.advantages < 0), high & (terms.advantages > 0)


def _ratio_metrics(terms: _Terms, settings: PolicyLossSettings) -> Metrics:
    """How far the policy has moved from the one that sampled, and where the clip acts."""
    log_ratio, ratio = terms.log_ratio.detach(), terms.ratio.detach()
    low, high = _beyond(terms, settings)
    weights = terms.weights
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
            "ratio_max": peak(masked(ratio, terms.mask)),
            "log_ratio_abs_max": peak(log_ratio.abs()),
        },
    )


def _check(inputs: LossInputs, settings: PolicyLossSettings) -> None:
    """Raises when shapes differ or something is lacking."""
    shape = inputs.log_probs.shape
    for name in (
        "advantages",
        "mask",
        "weights",
        "old_log_probs",
        "ref_log_probs",
        "entropy",
        "rollout_log_probs",
    ):
        value = getattr(inputs, name)
        if value is not None and value.shape != shape:
            raise DataError(
                f"{name} has shape {tuple(value.shape)} but log_probs has {tuple(shape)}: all "
                "per-token tensors of a loss must have one shape"
            )
    if inputs.mask.dtype != torch.bool:
        raise DataError(f"the loss mask is {inputs.mask.dtype}; it must be torch.bool")
    if settings.by_sequence and (len(shape) != 1 or sum(inputs.lengths) != shape[0]):
        raise DataError(
            f"the sequences of a loss have {sum(inputs.lengths)} tokens but log_probs has shape "
            f"{tuple(shape)}: each token must be of one sequence"
        )
    lacking: list[tuple[bool, Tensor | None, str]] = [
        (
            settings.kl_coef != 0,
            inputs.ref_log_probs,
            "kl_coef needs reference log-probs: compute them, or set algorithm.use_kl_loss = false",
        ),
        (settings.entropy_coef != 0, inputs.entropy, "entropy_coef needs the policy's entropy"),
        (
            settings.sampling is not None,
            inputs.rollout_log_probs,
            "importance sampling needs the "
            "engine's log-probs: have them kept, or set algorithm.use_tis = false",
        ),
    ]
    for wanted, value, what in lacking:
        if wanted and value is None:
            raise ConfigError(f"{what}")
