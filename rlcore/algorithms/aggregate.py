"""What one token weighs in the loss of an optimizer step.

Every reduction that we offer is a weighted sum over the tokens of the step, `loss = sum_t w_t *
l_t`, whose weights depend only on the counts of the whole step. So a micro-batch's loss is the
plain sum over its own tokens, and the losses of all micro-batches on all ranks add up to the loss
of the step.

    token_mean       w_t = 1 / N          N = trainable tokens of the step
                     (DAPO, arXiv 2503.14476, eq. 8)
    sequence_mean    w_t = 1 / (S * n_s)  S = sequences of the step that have a trainable token,
                     n_s = trainable tokens of the token's own sequence
                     (GRPO, arXiv 2402.03300, eq. 3: 1/G sum_i 1/|o_i| sum_t)

Several samples that were cut from one execution count as one sequence here: S counts executions,
and n_s is the number of trainable tokens of all samples of the token's execution.

Dr.GRPO (arXiv 2503.20783, section 3.2) divides by constants alone: 1 / (S * divisor), where the
divisor is, say, the longest response. That is `token_mean` times one number a step,
`constant_scale`, so that metrics stay means.

The sum is exact for a *sum* over ranks. FSDP and DDP average gradients over their ranks: there the
caller multiplies the loss by the number of data-parallel ranks before `backward()` (once; not again
by the number of micro-batches, which gradient accumulation already sums).

Invariants:
- The weights of all trainable tokens of a step add up to 1 (to 0 when the step has none).
- A sequence without a trainable token (failed, removed, fully masked) changes no other token's
  weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, assert_never

from rlcore.errors import DataError

Normalization = Literal["token_mean", "sequence_mean"]


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over *all* sequences of one optimizer step, on all ranks."""

    tokens: int
    """Trainable tokens."""
    sequences: int
    """Sequences, or executions of several, with at least one trainable token."""

    @classmethod
    def of(cls, trainable_tokens: Iterable[int]) -> Totals:
        """Counts from the numbers of trainable tokens of the step's sequences, or executions."""
        counts = [n for n in trainable_tokens if n]
        if any(n < 0 for n in counts):
            raise DataError(f"a count of trainable tokens is negative: {min(counts)}")
        return cls(tokens=sum(counts), sequences=len(counts))


def constant_scale(totals: Totals, divisor: int) -> float:
    """What a step's `token_mean` is multiplied by to be a sum over 1 / (sequences * divisor)."""
    return totals.tokens / (totals.sequences * divisor) if totals.sequences else 0.0


def token_weight(trainable_tokens: int, totals: Totals, how: Normalization) -> float:
    """Weight of each trainable token of a sequence, or execution, that has `trainable_tokens`.

    Formulas in the module docstring. A sequence without trainable tokens gets 0.0.
    """
    if trainable_tokens == 0:
        return 0.0
    if trainable_tokens > totals.tokens or totals.sequences == 0:
        raise DataError(
            f"a sequence has {trainable_tokens} trainable tokens but its optimizer step counts "
            f"{totals.tokens} in {totals.sequences} sequences: the totals must be those of the step"
        )
    if how == "token_mean":
        return 1.0 / totals.tokens
    if how == "sequence_mean":
        return 1.0 / (totals.sequences * trainable_tokens)
    assert_never(how)
