"""Estimators of a KL divergence from log-probs of sampled tokens.

With x = log pi - log ref of a token that pi sampled, KL(pi || ref) is the expectation of each of
(J. Schulman, "Approximating KL Divergence", 2020, joschu.net/blog/kl-approx.html; r = exp(-x)):

    k1           x                  unbiased, high variance, may be negative
    k2           x^2 / 2            biased, low variance
    k3           exp(-x) - 1 + x    unbiased, never negative (DeepSeekMath, 2402.03300, eq. 4)
    low_var_kl   k3 clamped to [-10, 10]

They differ as losses: the gradient of k1 averages to zero under pi, that of k2 is the gradient of
the divergence. Where another policy sampled, an estimate is unbiased only when it is multiplied by
the ratio pi / pi_old, with its gradient (DeepSeek-V3.2, arXiv 2512.02556, section 3.1); low_var_kl
is clamped after that.

Invariants:
- Every estimator is exactly 0 at x = 0, and k2, k3 and low_var_kl are never negative.
- Value and gradient are finite for any x but NaN: x is clamped to +-20 first, beyond which the
  gradient is 0. (exp(20) is 4.9e8; float32 overflows at exp(88.8).)
"""

from __future__ import annotations

from typing import Literal, assert_never

import torch
from torch import Tensor

KLKind = Literal["k1", "k2", "k3", "low_var_kl"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this before anything is computed from them."""


def kl_estimate(log_ratio: Tensor, kind: KLKind, ratio: Tensor | None = None) -> Tensor:
    """Per-token estimates from `log_ratio` = log pi - log ref, any shape. Formulas above.

    `ratio`, pi / pi_old, is given for the unbiased form.
    """
    x = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    value = _plain(x, kind) if ratio is None else _plain(x, kind) * ratio
    return value.clamp(-10.0, 10.0) if kind == "low_var_kl" else value


def _plain(x: Tensor, kind: KLKind) -> Tensor:
    if kind == "k1":
        return x
    if kind == "k2":
        return x.square() / 2
    if kind == "k3" or kind == "low_var_kl":
        return _k3(x)
    assert_never(kind)


def _k3(x: Tensor) -> Tensor:
    # expm1 keeps the digits that exp(-x) - 1 loses near 0, where a policy is close to its
    # reference; the last digit may still round to below 0.
    return (torch.expm1(-x) + x).clamp(min=0.0)
