"""FSDP2's models as the batch loop passes micro-batches through them: one after another.

FSDP averages gradients over ranks; multiplying the loss by their number makes that a sum again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from rlcore.algorithms.flops import ModelShape
from rlcore.algorithms.metrics import Metrics
from rlcore.algorithms.packing import PackedBatch
from rlcore.train.backend import Loss
from rlcore.train.credit import MicroBatch
from rlcore.train.fsdp.critic import Critic
from rlcore.train.fsdp.model import Policy, gathered


class ScoresOne(Protocol):
    """A policy, as far as log-probs go."""

    def score(self, batch: PackedBatch, rows: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """See `Policy.score`."""


class Scorer:
    """A policy that is not trained."""

    def __init__(self, policy: ScoresOne) -> None:
        self._policy = policy

    def score(self, micros: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """See `Scores`."""
        return [self._policy.score(m.packed, m.rows, temperature)[0] for m in micros]


class Passes(Scorer):
    """A policy that is trained."""

    def __init__(self, policy: Policy, *, keeps_gathered: bool = False) -> None:
        """`keeps_gathered`: from one micro-batch of a step to the next, weights stay gathered."""
        super().__init__(policy)
        self._trained = policy
        self._keeps_gathered = keeps_gathered
        self.expert_load = policy.expert_load

    def score(self, micros: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """See `Scores`; experts that are to be replayed stay with the micro-batches."""
        found = []
        for micro in micros:
            found += super().score([micro], temperature)
            micro.packed = self._trained.routed(micro.packed)
        return found

    @property
    def shape(self) -> ModelShape:
        """Its sizes."""
        return ModelShape.of(self._trained.lm.config)

    @property
    def frozen(self) -> bool:
        """Whether some of its weights are not trained."""
        return not all(p.requires_grad for p in self._trained.lm.parameters())

    def accumulate(
        self, micros: Sequence[MicroBatch], loss: Loss, *, scale: float, temperature: float | None
    ) -> list[Metrics]:
        """See `TrainedPolicy`."""
        policy, parts = self._trained, []
        with gathered(policy) if self._keeps_gathered else nullcontext():
            for micro in micros:
                with policy.expert_load.counting(real=not micro.empty):
                    answer = (
                        policy.logits(micro.packed)
                        if temperature is None
                        else policy.score(micro.packed, micro.rows, temperature)
                    )
                value, found = loss(micro, answer)
                (value * (dist.get_world_size() * scale)).backward()
                parts.extend(found)
        return parts


class CriticPasses:
    """A critic that is trained."""

    def __init__(self, critic: Critic) -> None:
        self._critic = critic

    def values(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """See `CriticModel`."""
        return [self._critic.values(m.packed, m.rows) for m in micros]

    def accumulate(self, micros: Sequence[MicroBatch], loss: Loss) -> list[Metrics]:
        """See `CriticModel`."""
        parts = []
        for micro in micros:
            value, found = loss(micro, self._critic.values(micro.packed, micro.rows))
            (value * dist.get_world_size()).backward()
            parts.extend(found)
        return parts
