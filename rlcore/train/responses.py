"""The responses of a micro-batch as functions of one's own see them: whole, sample by sample.

The trainer works on trained tokens alone, [M]; such a function gets all tokens of a response, [R],
with a mask. What was not computed stands there as 0.

Invariant: going from [M] to responses and back changes nothing, and keeps the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.algorithms.metrics import Metrics, masked
from rlcore.algorithms.packing import PackedBatch, TrainSequence
from rlcore.train.custom import Functions, Given


@dataclass(frozen=True)
class Responses:
    """The response tokens of a micro-batch's samples, end to end."""

    tokens: list[Tensor]
    """int64, prompt and response of each sample."""
    response_lengths: list[int]
    """R of each sample."""
    masks: list[Tensor]
    """float32 [R] of each sample: 1 where a token is trained."""
    numbers: list[float]
    """What was made of each sample's reward."""
    where: Tensor
    """int64 [sum R]: the position in the micro-batch that predicts each response token."""
    at: Tensor
    """int64 [M]: where, among the response tokens, the trained ones are."""
    weights: Tensor
    """float32 [sum R], of each token in the step."""

    @classmethod
    def of(
        cls, sequences: Sequence[TrainSequence], packed: PackedBatch, device: torch.device
    ) -> Responses:
        """Of the sequences that were packed, one or more; `packed` with or without last tokens."""
        starts = [0, *accumulate(packed.lengths)]
        spans = [
            torch.arange(start + len(s.tokens) - 1 - s.response_length, start + len(s.tokens) - 1)
            for start, s in zip(starts, sequences, strict=False)
        ]
        where, lengths = torch.cat(spans), [s.response_length for s in sequences]
        trained = packed.loss_mask.index_select(0, where)
        return cls(
            # Copies: a function may write into what it gets, and these are views of the batch.
            tokens=[torch.from_numpy(np.array(s.tokens, np.int64)).to(device) for s in sequences],
            response_lengths=lengths,
            masks=list(trained.float().to(device).split(lengths)),
            numbers=[_number(s) for s in sequences],
            where=where.to(device),
            at=trained.nonzero()[:, 0].to(device),
            weights=packed.loss_weights.index_select(0, where).to(device),
        )

    @property
    def total_lengths(self) -> list[int]:
        """Tokens of each sample, prompt and response."""
        return [len(one) for one in self.tokens]

    def spread(self, values: Tensor) -> Tensor:
        """[sum R] from values of the trained tokens [M]; 0 elsewhere."""
        return values.new_zeros(len(self.where)).index_copy(0, self.at, values)

    def gather(self, values: Tensor) -> Tensor:
        """[M] from values of all response tokens [sum R]."""
        return values.index_select(0, self.at.to(values.device))

    def split(self, values: Tensor) -> list[Tensor]:
        """One tensor [R] a sample, from [sum R]."""
        return list(values.split(self.response_lengths))

    def each(self, values: Tensor) -> list[Tensor]:
        """One tensor [R] a sample, from values of the trained tokens [M]."""
        return self.split(self.spread(values))

    def mean(self, values: Tensor) -> Tensor:
        """The share that values of all response tokens [sum R] have in the mean of the step."""
        if values.shape != self.where.shape:
            # Told as the fault of the function that called.
            raise ValueError(
                f"sum_of_sample_mean got values of shape {tuple(values.shape)}; it takes one for "
                f"each of the {len(self.where)} response tokens, end to end"
            )
        return (masked(values, torch.cat(self.masks) != 0) * self.weights).sum()

    def metrics(self, given: dict[str, Any]) -> Metrics:
        """Metrics of importance weights: means of values a token, or of one number for all."""
        means = {}
        for name, value in given.items():
            number = torch.as_tensor(value, dtype=torch.float32, device=self.weights.device)
            number = number.detach()
            if number.numel() == 1 and number.shape != self.where.shape:
                number = number.reshape(()).expand(len(self.where))
            means[name] = self.mean(number)
        return Metrics(means)

    def weigh(self, own: Functions, surrogate: Tensor, old: Tensor, rollout: Tensor) -> Weighed:
        """Importance weights of one's own on the loss of trained tokens [M]."""
        given = Given(
            train_log_probs=self.each(old),
            rollout_log_probs=self.each(rollout),
            loss_masks=self.masks,
            total_lengths=self.total_lengths,
            response_lengths=self.response_lengths,
        )
        loss, masks, found = own.weighed(self.spread(surrogate), given, self.masks)
        # A token that the function rejects has no loss; the denominators stay what they are.
        kept = torch.cat(masks) != 0
        return Weighed(self.gather(masked(loss, kept)), masks, self.metrics(found))

    def reduce(
        self, own: Functions, loss: Tensor, masks: list[Tensor], *, per_token: bool, count: int
    ) -> Tensor:
        """The policy loss by a reduction of one's own.

        Args:
            own: the functions.
            loss: [M] of the trained tokens.
            masks: which tokens count.
            per_token: whether the step is normalised by its tokens, not its sequences.
            count: how many of them it has.
        """
        given = Given(
            total_lengths=self.total_lengths,
            response_lengths=self.response_lengths,
            masks=masks,
            per_token=per_token,
        )
        return own.reducer(given)(self.spread(loss)) / count


@dataclass(frozen=True)
class Weighed:
    """Losses of trained tokens [M] with their importance weights."""

    loss: Tensor
    masks: list[Tensor]
    metrics: Metrics


def _number(sequence: TrainSequence) -> float:
    values = np.atleast_1d(np.asarray(sequence.advantages))
    return float(values[0]) if len(values) else 0.0
