"""Having torch compile what a step runs through before the first batch.

Invariants:
- The code of a step serves micro-batches of any size and mix of lengths: after `make_code` nothing
  is compiled again, but for a micro-batch of a single token.
- `make_code` leaves weights, optimizer and random numbers as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlcore.algorithms.aggregate import Totals
from rlcore.algorithms.metrics import Metrics
from rlcore.algorithms.packing import TrainSequence, pack
from rlcore.train.backend import Scores, TrainedPolicy
from rlcore.train.credit import MicroBatch

LENGTH = 256
"""Most tokens of a sequence for which the code of a step is made."""


def make_code(
    policy: TrainedPolicy,
    frozen: Sequence[Scores],
    device: torch.device,
    *,
    max_tokens: int,
    temperature: float,
    with_entropy: bool,
) -> None:
    """Pass micro-batches through the models as a batch will, the first as large as they may be.

    Args:
        policy: gets gradients, which are for the caller to drop.
        frozen: models that give log-probs alone.
        device: of all.
        max_tokens: of a micro-batch.
        temperature: of the rollout.
        with_entropy: whether the loss depends on the entropy.
    """

    def loss(_: MicroBatch, answer: Any) -> tuple[Tensor, list[Metrics]]:
        log_probs, entropy = answer
        return (log_probs + entropy if with_entropy else log_probs).sum(), []

    length = max(3, min(LENGTH, max_tokens // 2))
    most = max(2, max_tokens // length)
    for count in (most, most - 1):
        lengths = [length - i % 2 for i in range(count)]
        batch = [TrainSequence([0] * n, n - 1) for n in lengths]
        totals = Totals.of(n - 1 for n in lengths)
        micro = MicroBatch.of(pack(batch, totals, "token_mean").inputs(), device)
        with torch.no_grad():
            for model in (policy, *frozen):
                model.score([micro], temperature)
        policy.accumulate([micro], loss, scale=0.0, temperature=temperature)
    policy.expert_load.reset()
