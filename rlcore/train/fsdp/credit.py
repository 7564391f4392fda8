"""Advantages of a rollout batch's tokens, from those of its samples and the log-probs before the
first step.

Invariants:
- Whitening is over the whole batch, all ranks and steps: every rank enters the same collectives.
- With an estimator whose advantages are those of its samples nothing is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.algorithms.kl import kl_estimate
from rlcore.algorithms.packing import PackedBatch
from rlcore.algorithms.returns import (
    Moments,
    gae,
    largest,
    moments,
    penalised,
    returns,
    whiten,
)
from rlcore.config.tree import AlgorithmConfig


@dataclass
class MicroBatch:
    """A packed micro-batch on the device, with what was computed of it before the first step."""

    packed: PackedBatch
    rows: Tensor
    """int64 [M]: the trained positions, one masked position where there is none."""
    lengths: tuple[int, ...]
    """How many of `rows`, in order, are of each sequence."""
    advantages: Tensor
    """[M] float32."""
    old: Tensor | None = None
    """[M] log-probs before the first step."""
    ref: Tensor | None = None
    """[M] log-probs of the reference policy."""
    teacher: Tensor | None = None
    """[M] log-probs of the teacher."""
    behind: Tensor | None = None
    """[M] log pi_old - log teacher, where a teacher is followed."""
    values: Tensor | None = None
    """[M] of the critic before the first step."""
    returns: Tensor | None = None
    """[M] float32, what the critic learns."""
    kl: Tensor | None = None
    """[M] KL estimates, where they are a penalty on rewards."""

    @classmethod
    def of(cls, packed: PackedBatch, device: torch.device) -> MicroBatch:
        """On the device, with the advantages of its samples."""
        rows = packed.loss_mask.nonzero()[:, 0]
        lengths = tuple(int(part.sum()) for part in packed.loss_mask.split(packed.lengths))
        if not len(rows):
            rows, lengths = torch.zeros(1, dtype=torch.int64), (1,)
        advantages = packed.advantages.index_select(0, rows)
        return cls(packed.to(device), rows.to(device), lengths, advantages.to(device))

    def pick(self, name: str) -> Tensor:
        """A per-token tensor at the trained positions."""
        value: Tensor = getattr(self.packed, name)
        return value.index_select(0, self.rows)


def spread_advantages(steps: Sequence[Sequence[MicroBatch]], algorithm: AlgorithmConfig) -> None:
    """Set the token advantages of all micro-batches; formulas in `rlcore.algorithms.returns`."""
    micros = [micro for step in steps for micro in step]
    for micro in micros:
        micro.advantages = _of_one(micro, algorithm)
        if algorithm.use_opd:
            assert micro.old is not None and micro.teacher is not None
            micro.behind = micro.old - micro.teacher
            advantages = penalised(micro.advantages, micro.behind, algorithm.opd_kl_coef)
            micro.advantages = advantages.float()
    if algorithm.whitens:
        _whiten(micros)


def _of_one(micro: MicroBatch, algorithm: AlgorithmConfig) -> Tensor:
    """Advantages [M] of a micro-batch before whitening."""
    if algorithm.kl_coef:
        assert micro.old is not None and micro.ref is not None
        micro.kl = kl_estimate(micro.old - micro.ref, algorithm.kl_loss_type)
    if algorithm.has_critic:
        assert micro.values is not None
        advantages, goal = gae(
            micro.advantages,
            micro.kl,
            micro.values,
            micro.lengths,
            gamma=algorithm.gamma,
            lambd=algorithm.lambd,
            kl_coef=algorithm.kl_coef,
        )
        micro.returns = goal.float()
        return advantages.float()
    if algorithm.advantage_estimator == "reinforce_plus_plus":
        return returns(
            micro.advantages, micro.kl, micro.lengths, algorithm.gamma, algorithm.kl_coef
        )
    if micro.kl is not None:
        return penalised(micro.advantages, micro.kl, algorithm.kl_coef)
    return micro.advantages


def _whiten(micros: Sequence[MicroBatch]) -> None:
    masks = [micro.pick("loss_mask") for micro in micros]
    pairs = [(micro.advantages, mask) for micro, mask in zip(micros, masks, strict=True)]
    top = torch.tensor(max((largest(*pair) for pair in pairs), default=-torch.inf))
    top = top.double()
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    shift = float(top)
    sums = torch.zeros(3, dtype=torch.float64)
    for pair in pairs:
        sums += moments(*pair, shift).sums.cpu()
    dist.all_reduce(sums, op=dist.ReduceOp.SUM)
    for micro, mask in zip(micros, masks, strict=True):
        micro.advantages = whiten(micro.advantages, mask, Moments(shift, sums)).float()
