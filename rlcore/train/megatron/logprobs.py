"""Log-probs of tokens and entropies where each tensor-parallel rank has a part of the vocabulary.

The formulas are those of `rlcore.algorithms.logprobs`. What ranks exchange is numbers a token: the
largest logit, the sum of exponentials, the target's logit and the sum that entropies need; the
logits of a chunk of tokens are never gathered, and computed again in backward.

Invariants:
- All ranks get the same values.
- The gradient of the hidden states is this rank's share of a sum over ranks.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlcore.algorithms.logprobs import LOWEST, chunked_log_probs, chunks

MAX = dist.ReduceOp.MAX


def parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    start: int,
    group: dist.ProcessGroup,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` and entropies, from hidden states; see `chunked_log_probs`.

    Args:
        hidden: [T, H], the same on all ranks.
        weight: [V', H], this rank's rows of the output layer, without padding.
        targets: int64 [T].
        temperature: the logits are divided by it.
        start: the id of this rank's first row.
        group: the ranks that have the vocabulary together.
        chunk: rows at a time, as many on every rank.

    Returns:
        Log-probs [T] and entropies [T], float32 (float64 of float64), on every rank.
    """
    if group.size() == 1:
        return chunked_log_probs(hidden, weight, targets, temperature, chunk)
    result = _ParallelLogProbs.apply(hidden, weight, targets, temperature, start, group, chunk)
    return cast(tuple[Tensor, Tensor], result)


class _ParallelLogProbs(torch.autograd.Function):
    """`parallel_log_probs` on several ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        start: int,
        group: dist.ProcessGroup,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        own = targets - start
        here = (own >= 0) & (own < weight.shape[0])
        own = own.clamp(0, weight.shape[0] - 1)
        parts = []
        for rows in chunks(len(hidden), chunk):
            z = _logits(hidden[rows], weight, temperature)
            top = z.amax(-1)
            dist.all_reduce(top, op=MAX, group=group)
            z.sub_(top[:, None]).clamp_(min=LOWEST)
            target = z.gather(-1, own[rows, None])[:, 0].masked_fill(~here[rows], 0.0)
            p = z.exp()
            sums = torch.stack([p.sum(-1), p.mul_(z).sum(-1), target])
            dist.all_reduce(sums, group=group)
            log_total = sums[0].log()
            parts.append((sums[2] - log_total, log_total - sums[1] / sums[0], top, log_total))
        log_probs, entropy, top, log_total = (torch.cat(x) for x in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, own, here, entropy, top, log_total)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, own, here, entropy, top, log_total = ctx.saved_tensors
        of_log_probs = torch.zeros_like(entropy) if grads[0] is None else grads[0]
        of_entropy = torch.zeros_like(entropy) if grads[1] is None else grads[1]
        # What has no gradient adds exactly nothing, even where it is not finite.
        dead = (of_log_probs == 0) & (of_entropy == 0)
        entropy, top, log_total = (x.masked_fill(dead, 0.0) for x in (entropy, top, log_total))
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=entropy.dtype)
        for rows in chunks(len(hidden), ctx.chunk):
            alive = hidden[rows].masked_fill(dead[rows, None], 0.0)
            log_p = _logits(alive, weight, ctx.temperature)
            log_p.sub_(top[rows, None]).sub_(log_total[rows, None]).clamp_(min=LOWEST)
            p = log_p.exp()
            upstream = of_log_probs[rows, None]
            log_p.add_(entropy[rows, None]).mul_(of_entropy[rows, None]).add_(upstream)
            grad = p.mul_(log_p.neg_())
            hit = (upstream[:, 0] * here[rows])[:, None]
            grad.scatter_add_(-1, own[rows, None], hit.to(grad.dtype))
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.t() @ alive
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """A chunk's, wide."""
    z = hidden @ weight.t()
    return z.to(torch.float64 if z.dtype == torch.float64 else torch.float32).div(temperature)
