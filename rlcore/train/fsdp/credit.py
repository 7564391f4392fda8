"""Advantages of a rollout batch's tokens, from those of its samples and the log-probs before the
first step; or what a function of one's own makes of both.

Invariants:
- Whitening is over the whole batch, all ranks and steps: every rank enters the same collectives.
- With an estimator whose advantages are those of its samples nothing is touched.
- A function of one's own is called once a batch on each rank that has samples, with those samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from rlcore.algorithms.kl import kl_estimate
from rlcore.algorithms.packing import PackedBatch, TrainSequence
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
from rlcore.train.custom import Functions, Given
from rlcore.train.fsdp.responses import Responses
from rlcore.train.ranks import Ranks


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
    responses: Responses | None = None
    """Its samples' responses, for functions of one's own; None without samples too."""
    empty: bool = False
    """It has no samples: a masked token stands in for them."""

    @classmethod
    def of(
        cls,
        packed: PackedBatch,
        device: torch.device,
        sequences: Sequence[TrainSequence] = (),
    ) -> MicroBatch:
        """On the device, with the advantages of its samples.

        Args:
            packed: of some sequences.
            device: to compute on.
            sequences: the same ones, where functions of one's own are to see them.
        """
        rows = packed.loss_mask.nonzero()[:, 0]
        shown = len(sequences) > 0 and len(rows) > 0
        lengths = tuple(int(part.sum()) for part in packed.loss_mask.split(packed.lengths))
        empty = not len(rows)
        if empty:
            rows, lengths = torch.zeros(1, dtype=torch.int64), (1,)
        advantages = packed.advantages.index_select(0, rows)
        responses = Responses.of(sequences, packed, device) if shown else None
        return cls(
            packed.to(device),
            rows.to(device),
            lengths,
            advantages.to(device),
            responses=responses,
            empty=empty,
        )

    def pick(self, name: str) -> Tensor:
        """A per-token tensor at the trained positions."""
        value: Tensor = getattr(self.packed, name)
        return value.index_select(0, self.rows)

    def told(self) -> Given:
        """What functions of one's own are told of its samples, by slime's names."""
        there = self.responses
        assert there is not None
        given = Given(
            total_lengths=there.total_lengths,
            response_lengths=there.response_lengths,
            loss_masks=there.masks,
            rewards=there.numbers,
        )
        for name, values in (
            ("log_probs", self.old),
            ("ref_log_probs", self.ref),
            ("teacher_log_probs", self.teacher),
            ("values", self.values),
            ("returns", self.returns),
            ("kl", self.kl),
        ):
            if values is not None:
                given[name] = there.each(values)
        if self.packed.rollout_log_probs is not None:
            engine = self.packed.rollout_log_probs.index_select(0, there.where)
            given["rollout_log_probs"] = there.split(engine)
        return given


def spread_advantages(
    steps: Sequence[Sequence[MicroBatch]],
    algorithm: AlgorithmConfig,
    ranks: Ranks,
    own: Functions | None = None,
) -> None:
    """Set the token advantages of all micro-batches; formulas in `rlcore.algorithms.returns`.

    Args:
        steps: of the batch.
        algorithm: the settings.
        ranks: that the batch is dealt out to.
        own: functions of one's own.
    """
    micros = [micro for step in steps for micro in step]
    by_function = own is not None and "advantage" in own
    for micro in micros:
        _estimate_kl(micro, algorithm)
        if not by_function:
            micro.advantages = _of_one(micro, algorithm)
    if own is not None and by_function:
        _of_function(micros, algorithm, own)
    for micro in micros:
        if algorithm.use_opd:
            assert micro.old is not None and micro.teacher is not None
            micro.behind = micro.old - micro.teacher
            advantages = penalised(micro.advantages, micro.behind, algorithm.opd_kl_coef)
            micro.advantages = advantages.float()
    if algorithm.whitens:
        _whiten(micros, ranks)


def _estimate_kl(micro: MicroBatch, algorithm: AlgorithmConfig) -> None:
    if algorithm.kl_coef:
        assert micro.old is not None and micro.ref is not None
        micro.kl = kl_estimate(micro.old - micro.ref, algorithm.kl_loss_type)


def _of_function(micros: Sequence[MicroBatch], algorithm: AlgorithmConfig, own: Functions) -> None:
    """Advantages, and returns for a critic, by a function of one's own over all samples here."""
    there = [(micro, micro.responses) for micro in micros if micro.responses is not None]
    found: list[list[Tensor]] = []
    if there:
        parts = [micro.told() for micro, _ in there]
        data = Given({name: [x for part in parts for x in part[name]] for name in parts[0]})
        data["tokens"] = [one for _, responses in there for one in responses.tokens]
        masks = list(data["loss_masks"])
        if "kl" not in data:
            data["kl"] = [torch.zeros_like(mask) for mask in masks]
        found = own.advantages(data, masks, with_returns=algorithm.has_critic)
    # Nothing of an empty micro-batch is trained, but the critic passes through it all the same.
    for micro in micros:
        micro.returns = micro.values
    for name, values in zip(("advantages", "returns"), found, strict=False):
        rest = iter(values)
        for micro, responses in there:
            whole = torch.cat(list(islice(rest, len(responses.masks)))).detach()
            setattr(micro, name, responses.gather(whole).float().to(micro.advantages.device))


def _of_one(micro: MicroBatch, algorithm: AlgorithmConfig) -> Tensor:
    """Advantages [M] of a micro-batch before whitening."""
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


def _whiten(micros: Sequence[MicroBatch], ranks: Ranks) -> None:
    masks = [micro.pick("loss_mask") for micro in micros]
    pairs = [(micro.advantages, mask) for micro, mask in zip(micros, masks, strict=True)]
    top = torch.tensor(max((largest(*pair) for pair in pairs), default=-torch.inf))
    top = top.double()
    ranks.maximum(top)
    shift = float(top)
    sums = torch.zeros(3, dtype=torch.float64)
    for pair in pairs:
        sums += moments(*pair, shift).sums.cpu()
    ranks.add(sums)
    for micro, mask in zip(micros, masks, strict=True):
        micro.advantages = whiten(micro.advantages, mask, Moments(shift, sums)).float()
