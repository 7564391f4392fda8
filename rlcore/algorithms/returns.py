"""Advantages token by token: returns with a KL penalty, generalised advantages, whitening.

A step of an episode is a token that the policy chose, a trained token: what a tool put between two
of them takes no time. With R_i the number of a sample (`rlcore.algorithms.advantages`) and kl_t the
estimate of KL(pi_old || pi_ref) at a token:

    penalised   A_t = R_i - kl_coef * kl_t         baseline of REINFORCE++, arXiv 2501.03262
    returns     r_t = -kl_coef * kl_t, plus R_i at the last token of the sequence
                A_t = G_t = r_t + gamma * G_(t+1)  REINFORCE++, arXiv 2501.03262
    gae         delta_t = r_t + gamma * V_(t+1) - V_t,  V = 0 behind the last token
                A_t = delta_t + gamma * lambda * A_(t+1)
                return_t = A_t + V_t               GAE, arXiv 1506.02438, eq. 16
    whiten      (A - mean) / sqrt(var + 1e-8)      over the trained tokens of a whole rollout batch,
                                                   var with Bessel's correction

Invariants:
- All is computed in float64, without gradient; what stands at masked tokens never matters.
- Whitening equal advantages gives exactly 0; a batch's cut into parts and ranks does not show
  beyond float64 rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.algorithms.metrics import masked
from rlcore.errors import DataError

WHITENING_EPS = 1e-8
"""Added to the variance before its root is taken."""


def penalised(rewards: Tensor, kl: Tensor, kl_coef: float) -> Tensor:
    """[M] float64, of `rewards` [M], the sample's number at each of its tokens, and `kl` [M]."""
    return rewards.detach().double() - kl_coef * kl.detach().double()


def returns(
    rewards: Tensor, kl: Tensor | None, lengths: Sequence[int], gamma: float, kl_coef: float
) -> Tensor:
    """Discounted returns of trained tokens, in order; formula in the module docstring.

    Args:
        rewards: [M] the sample's number at each of its tokens.
        kl: [M], or None for no penalty.
        lengths: how many of the tokens, in order, are of each sequence.
        gamma: discount of a token.
        kl_coef: weight of the penalty.

    Returns:
        [M] float64.
    """
    return _backwards(_with_reward_last(rewards, kl, lengths, kl_coef), lengths, gamma)


def gae(
    rewards: Tensor,
    kl: Tensor | None,
    values: Tensor,
    lengths: Sequence[int],
    *,
    gamma: float,
    lambd: float,
    kl_coef: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Generalised advantages and returns of trained tokens; formula in the module docstring.

    Args:
        rewards, kl, lengths, gamma, kl_coef: as `returns`.
        values: [M] the critic's before the step.
        lambd: lambda, from 0 (one step) to 1 (whole returns).

    Returns:
        Advantages [M] and returns [M], float64.
    """
    now = values.detach().double()
    following = torch.zeros_like(now)
    if len(now):
        following[:-1] = now[1:]
        following[_ends(lengths, len(now), now.device)] = 0.0
    delta = _with_reward_last(rewards, kl, lengths, kl_coef) + gamma * following - now
    advantages = _backwards(delta, lengths, gamma * lambd)
    return advantages, advantages + now


def _with_reward_last(
    rewards: Tensor, kl: Tensor | None, lengths: Sequence[int], kl_coef: float
) -> Tensor:
    """[M] each token's own reward: the penalty, and the sample's number at the last token."""
    given = rewards.detach().double()
    out = torch.zeros_like(given) if kl is None else -kl_coef * kl.detach().double()
    ends = _ends(lengths, len(given), given.device)
    out[ends] += given[ends]
    return out


def _ends(lengths: Sequence[int], tokens: int, device: torch.device) -> Tensor:
    """Position of the last token of each sequence that has any."""
    if sum(lengths) != tokens:
        raise DataError(f"the sequences have {sum(lengths)} tokens, but {tokens} are given")
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0) - 1
    return ends[torch.tensor([n > 0 for n in lengths], dtype=torch.bool)].to(device)


def _backwards(x: Tensor, lengths: Sequence[int], decay: float) -> Tensor:
    """y_t = x_t + decay * y_(t+1) in each sequence, 0 behind its end."""
    if not len(x):
        return x
    counts = torch.tensor(lengths, device=x.device)
    real = torch.arange(max(lengths), device=x.device)[None, :] < counts[:, None]
    # Token by token over all sequences side by side; one row a token, so that rows are contiguous.
    grid = x.new_zeros(real.shape)
    grid[real] = x
    grid = grid.t().contiguous()
    for t in range(len(grid) - 2, -1, -1):
        grid[t] += decay * grid[t + 1]
    return grid.t()[real]


# --- whitening ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Sums over trained tokens; those of parts and ranks add up where their shifts are equal."""

    shift: float
    """Taken off every value first, so that equal values leave nothing but zeros."""
    sums: Tensor
    """float64 [3]: number of tokens, sum, and sum of squares."""

    def add(self, other: Moments) -> Moments:
        """Both together."""
        return Moments(self.shift, self.sums + other.sums)


def largest(values: Tensor, mask: Tensor) -> float:
    """The largest trained value, -inf of none: the shift that all parts agree on."""
    chosen = values[mask]
    return float(chosen.max()) if len(chosen) else -torch.inf


def moments(values: Tensor, mask: Tensor, shift: float) -> Moments:
    """Of `values` [M] where `mask` [M]."""
    chosen = values[mask].double() - shift
    count = torch.tensor(float(len(chosen)), dtype=torch.float64, device=values.device)
    return Moments(shift, torch.stack([count, chosen.sum(), chosen.square().sum()]))


def whiten(values: Tensor, mask: Tensor, over: Moments) -> Tensor:
    """[M] float64: whitened where `mask`, else 0.

    Args:
        values, mask: [M].
        over: of the whole rollout batch.
    """
    count, total, squares = over.sums.tolist()
    if not count:
        return torch.zeros_like(values, dtype=torch.float64)
    mean = total / count
    spread = max(squares - total * mean, 0.0) / max(count - 1, 1)
    centred = masked(values.double() - over.shift - mean, mask)
    return centred / (spread + WHITENING_EPS) ** 0.5
