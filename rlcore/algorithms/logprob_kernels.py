"""What `rlcore.algorithms.logprobs` does with a chunk of logits, as torch compiles it for a GPU:
read the logits once or twice in their own dtype, compute in float32, and write results alone.

The same formulas in plain torch hold several float32 copies of the chunk and pass over memory eight
times; at a vocabulary of 150,000 those passes take longer than the matrix products beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

LOWEST = -1e30
"""Log-prob of a token whose logit is -inf: finite, so that 0 x log 0 is 0 in entropies."""


def row_statistics(
    logits: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of `targets` and entropies of rows of logits, and what `logits_gradient` takes off.

    Args:
        logits: [M, V] of any float dtype.
        targets: int64 [M]; -1: some row's target is none of these columns, and its log-prob means
            nothing.
        temperature: the logits are divided by it.

    Returns:
        Log-probs [M], entropies [M], and shifts [M, 2]: the largest logit and the log of the sum
        beside it; float32.
    """
    picked = logits.gather(-1, targets.clamp(min=0)[:, None])[:, 0].float() / temperature
    z = logits.float() / temperature
    top = z.amax(-1, keepdim=True)
    shifted = (z - top).clamp(min=LOWEST)
    p = shifted.exp()
    total = p.sum(-1)
    log_total = total.log()
    entropy = log_total - (p * shifted).sum(-1) / total
    log_probs = (picked - top[:, 0]).clamp(min=LOWEST) - log_total
    return log_probs, entropy, torch.stack([top[:, 0], log_total], -1)


def logits_gradient(
    logits: Tensor,
    targets: Tensor,
    dead: Tensor,
    shifts: Tensor,
    grad_log_probs: Tensor,
    entropy: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Gradient of the logits, in their dtype.

    Args:
        logits, targets, temperature: as given to `row_statistics`.
        dead: bool [M], rows without a gradient; their logits are not looked at.
        shifts, entropy: as returned by it.
        grad_log_probs: [M], of the log-probs.
        grad_entropy: [M], of the entropies; None where nobody differentiates them.
    """
    top, log_total = shifts.split(1, -1)
    z = torch.where(dead[:, None], 0.0, logits.float())
    log_p = (z / temperature - top - log_total).clamp(min=LOWEST)
    p, grad = log_p.exp(), grad_log_probs[:, None]
    pull = grad
    if grad_entropy is not None:
        pull = grad + (log_p + entropy[:, None]) * grad_entropy[:, None]
    columns = torch.arange(logits.shape[-1], device=logits.device)
    chosen = torch.where(columns == targets[:, None], grad, 0.0)
    return ((chosen - p * pull) / temperature).to(logits.dtype)


def run_compiled(
    function: Callable[..., Any], logits: Tensor, *rows: Tensor | None, temperature: float
) -> Any:
    """Call a function of this module as torch compiles it, once for any number of rows above 1.

    Args:
        function: `row_statistics` or `logits_gradient`.
        logits, temperature: its first and last argument.
        rows: those between. They are copied: where a slice begins and how it is strided would be
            a part of the code that is made, and the next batch have it made again.
    """
    given = [None if one is None else one.clone() for one in rows]
    for tensor in (logits, *given):
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled(function)(logits, *given, temperature)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
