"""Log-probs of tokens and entropies where each tensor-parallel rank has a part of the vocabulary.

Each rank computes them of its part as `rlcore.algorithms.logprobs` does; then ranks exchange five
numbers a token. With the largest logit m and log-sum s of each part, p the target's log-prob and E
the entropy there,

    M = max m                   S = log sum exp(s + m - M)
    log-prob  (p + s + m - M) - S, of the part that has the target
    entropy   S - sum exp(s + m - M - S) (s - E + m - M)

Logits are never gathered.

Invariants:
- All ranks get the same values.
- The gradient of the hidden states is this rank's share of a sum over ranks.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.algorithms.logprobs import Statistics, chunked_log_probs


def parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    start: int,
    group: dist.ProcessGroup,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` and entropies, from hidden states; see `chunked_log_probs`.

    Args:
        hidden: [T, H], the same on all ranks.
        weight: [V', H], this rank's rows of the output layer, without padding.
        targets: int64 [T].
        temperature: the logits are divided by it.
        start: the id of this rank's first row.
        group: the ranks that have the vocabulary together.
        chunk: tokens at a time.

    Returns:
        Log-probs [T] and entropies [T], float32 (float64 of float64), on every rank.
    """
    if group.size() == 1:
        return chunked_log_probs(hidden, weight, targets, temperature, chunk)
    own = targets - start
    here = (own >= 0) & (own < weight.shape[0])
    own = own.masked_fill(~here, -1)
    whole = partial(_of_all_parts, here=here, group=group)
    return chunked_log_probs(hidden, weight, own, temperature, chunk, whole)


def _of_all_parts(part: Statistics, *, here: Tensor, group: dist.ProcessGroup) -> Statistics:
    """Statistics of the whole vocabulary.

    Args:
        part: of this rank's logits.
        here: bool [T], whether it has the target.
    """
    log_probs, entropy, shifts = part
    top, log_total = shifts.unbind(-1)
    highest = top.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    lower = top - highest
    weight = (log_total + lower).exp()
    target = (log_probs + log_total + lower).masked_fill(~here, 0.0)
    sums = torch.stack([weight, weight * (log_total - entropy + lower), target])
    dist.all_reduce(sums, group=group)
    log_sum = sums[0].log()
    return sums[2] - log_sum, log_sum - sums[1] / sums[0], torch.stack([highest, log_sum], -1)
