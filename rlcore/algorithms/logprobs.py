"""Log-probs of tokens and entropies, without holding float32 logits of all tokens at once.

    logits    z_t = (W h_t) / temperature
    log-prob  z_t[y_t] - logsumexp(z_t)
    entropy   -sum_v p_t[v] log p_t[v],  p_t = softmax(z_t)

Rows are worked on in chunks. Backward needs each chunk's logits once more: a GPU keeps the first
chunks' in the dtype of the inputs, in a share of its memory, and computes the others' again. From
them

    d logprob / d z = onehot(y) - p            d entropy / d z = -p (log p + entropy)

`chunked_log_probs` starts from hidden states and the weight of the output layer and never holds
more than one chunk of float32 logits; `token_log_probs` starts from logits that exist already and
saves their float32 copies. On a GPU torch compiles what is done with a chunk
(`rlcore.algorithms.logprob_kernels`). Products run in the dtype of the inputs, as the model's own
output layer would; all that follows in float32 (float64 for float64 inputs).

Invariants:
- Values and gradients are those of the plain formulas, whatever the chunk.
- A row that gets no gradient (masked) adds exactly nothing to any gradient, even if it holds NaN.
- Logits of -inf (ids that are switched off) have probability 0 and a finite log-prob and entropy.
- No rows give empty results that are still part of the graph.
- The peak beside the inputs and their gradients is what is kept and a few times chunk x vocabulary.
- What is kept changes no number: the same product gives the same logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlcore.algorithms.logit_memory import CHUNK_ELEMENTS, KEPT_SHARE
from rlcore.algorithms.logprob_kernels import (
    LOWEST,
    logits_gradient,
    row_statistics,
    run_compiled,
)
from rlcore.errors import ConfigError, DataError

Statistics = tuple[Tensor, Tensor, Tensor]
"""Log-probs, entropies and shifts of rows of logits, as `row_statistics` has them."""


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
    whole: Callable[[Statistics], Statistics] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` and entropies, from hidden states.

    Args:
        hidden: [T, H].
        weight: [V, H], the output layer as a plain tensor (gather a sharded one before); or, with
            `whole`, some rows of it.
        targets: int64 [T], ids below V; with `whole`, -1 where it is none of the rows.
        temperature: the logits are divided by it, above 0.
        chunk: rows at a time; by default as many as make `CHUNK_ELEMENTS` logits, so that a small
            problem is one chunk.
        whole: from the statistics of `weight`'s rows to those of the whole output layer, of which
            others have the rest. Each then gets its share of the gradient of `hidden`.

    Returns:
        Log-probs [T] and entropies [T], both differentiable (once) in `hidden` and `weight`;
        float32, or float64 for float64 inputs. Gradients of the weight add up over chunks in
        float32.

    Raises:
        DataError: shapes do not fit. ConfigError: temperature or chunk out of range.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise DataError(
            f"hidden is {tuple(hidden.shape)} and weight {tuple(weight.shape)}; they must be "
            "[tokens, width] and [vocabulary, width]"
        )
    rows = _rows_per_chunk(weight.shape[0], hidden, targets, temperature, chunk)
    room = _room_to_keep(hidden) if torch.is_grad_enabled() else 0
    result = _HiddenLogProbs.apply(hidden, weight, targets, temperature, rows, room, whole)
    return cast(tuple[Tensor, Tensor], result)


def token_log_probs(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` and entropies, from logits [T, V] of any float dtype.

    Arguments, results and errors else as `chunked_log_probs`.
    """
    if logits.ndim != 2:
        raise DataError(f"logits are {tuple(logits.shape)}; they must be [tokens, vocabulary]")
    rows = _rows_per_chunk(logits.shape[1], logits, targets, temperature, chunk)
    return cast(tuple[Tensor, Tensor], _LogitLogProbs.apply(logits, targets, temperature, rows))


def _rows_per_chunk(
    vocabulary: int, given: Tensor, targets: Tensor, temperature: float, chunk: int | None
) -> int:
    """Checks the arguments that both functions share; rows of one chunk of what is given."""
    tokens = len(given)
    if targets.shape != (tokens,):
        raise DataError(f"targets are {tuple(targets.shape)}; they must be [{tokens}], one a row")
    if not temperature > 0:
        raise ConfigError(f"rollout.temperature is {temperature}; to train it must be above 0")
    if chunk is None:
        return max(1, CHUNK_ELEMENTS[given.device.type] // vocabulary)
    if chunk < 1:
        raise ConfigError(f"chunk is {chunk}; it must be at least 1")
    return chunk


def _room_to_keep(hidden: Tensor) -> int:
    """How many logits may wait for backward."""
    if not hidden.is_cuda:
        return 0
    memory = torch.cuda.get_device_properties(hidden.device).total_memory
    return int(KEPT_SHARE * memory) // hidden.dtype.itemsize


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that is computed in after the product."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _statistics(z: Tensor, targets: Tensor, temperature: float) -> Statistics:
    """Log-probs, entropies and shifts of one chunk of logits, which may be overwritten."""
    if _is_compiled(z):
        found = run_compiled(row_statistics, z, targets, temperature=temperature)
        return cast(Statistics, found)
    return _forward(z.to(_wide(z.dtype)), targets, temperature)


def _is_compiled(z: Tensor) -> bool:
    # A single row would be compiled by itself.
    return z.is_cuda and z.dtype != torch.float64 and len(z) > 1


def _to_spend(z: Tensor) -> Tensor:
    """Logits that somebody keeps, as a tensor that may be overwritten where it is."""
    return z if _is_compiled(z) else z.to(_wide(z.dtype), copy=True)


def _forward(z: Tensor, targets: Tensor, temperature: float) -> Statistics:
    """Log-probs, entropies and shifts of one chunk of wide logits, which are overwritten.

    The shifts [rows, 2] are the largest logit and the log of the sum over the others beside it:
    what backward takes off. Apart, since their sum would lose the digits of a large logit.
    """
    top = _scaled(z, temperature).amax(-1, keepdim=True)
    p = z.sub_(top).clamp_(min=LOWEST).exp()
    total = p.sum(-1)
    log_total = total.log()
    log_probs = z.gather(-1, targets.clamp(min=0)[:, None])[:, 0] - log_total
    entropy = log_total - p.mul_(z).sum(-1) / total
    return log_probs, entropy, torch.stack([top[:, 0], log_total], -1)


def _scaled(z: Tensor, temperature: float) -> Tensor:
    """Divides in place; a temperature of 1 costs no pass."""
    return z if temperature == 1.0 else z.div_(temperature)


@dataclass(frozen=True, slots=True, eq=False)
class _Upstream:
    """Gradients that arrive at log-probs and entropies, and what they need of the forward pass."""

    log_probs: Tensor
    entropy: Tensor | None
    """None when nobody differentiates the entropy, which spares passes over the chunk."""
    dead: Tensor
    """bool: rows without any gradient; what they hold is replaced by 0, so that NaN stays out."""
    entropy_value: Tensor
    shifts: Tensor
    targets: Tensor
    temperature: float

    @classmethod
    def of(cls, ctx: Any, log_probs: Tensor | None, entropy: Tensor | None) -> _Upstream:
        targets, value, shifts = ctx.saved_tensors[-3:]
        grad = torch.zeros_like(value) if log_probs is None else log_probs
        dead = grad == 0 if entropy is None else (grad == 0) & (entropy == 0)
        value = value.masked_fill(dead, 0.0)
        shifts = shifts.masked_fill(dead[:, None], 0.0)
        return cls(grad, entropy, dead, value, shifts, targets, ctx.temperature)

    def alive(self, z: Tensor, rows: slice) -> Tensor:
        """Logits of a chunk as they were in forward, which are overwritten, without dead rows."""
        return z if _is_compiled(z) else z.masked_fill_(self.dead[rows, None], 0.0)

    def logits_grad(self, z: Tensor, rows: slice) -> Tensor:
        """Gradient of one chunk of logits, which may be overwritten."""
        if not _is_compiled(z):
            return self._wide_grad(z.to(_wide(z.dtype)), rows)
        found = run_compiled(
            logits_gradient,
            z,
            self.targets[rows],
            self.dead[rows],
            self.shifts[rows],
            self.log_probs[rows],
            self.entropy_value[rows],
            None if self.entropy is None else self.entropy[rows],
            temperature=self.temperature,
        )
        return cast(Tensor, found)

    def _wide_grad(self, z: Tensor, rows: slice) -> Tensor:
        """Gradient of one chunk of wide logits, which are overwritten."""
        top, log_total = self.shifts[rows].split(1, -1)
        log_p = _scaled(z, self.temperature).sub_(top).sub_(log_total)
        grad = self.log_probs[rows, None]
        if self.entropy is None:
            out = log_p.exp_().mul_(-grad)
        else:
            p = log_p.clamp_(min=LOWEST).exp()
            log_p.add_(self.entropy_value[rows, None]).mul_(self.entropy[rows, None])
            out = p.mul_(log_p.add_(grad).neg_())
        targets = self.targets[rows, None]
        out.scatter_add_(-1, targets.clamp(min=0), grad.masked_fill(targets < 0, 0.0))
        return _scaled(out, self.temperature)


def chunks(tokens: int, rows: int) -> list[slice]:
    """Slices of at most `rows` rows; one empty slice of no tokens."""
    return [slice(start, start + rows) for start in range(0, max(tokens, 1), rows)]


def _joined(parts: Sequence[Statistics]) -> Statistics:
    """Those of all chunks."""
    log_probs, entropy, shifts = (torch.cat(values) for values in zip(*parts, strict=True))
    return log_probs, entropy, shifts


def _saved(
    ctx: Any, found: Statistics, inputs: tuple[Tensor, ...], temperature: float, rows: int
) -> tuple[Tensor, Tensor]:
    """Keeps what backward needs."""
    log_probs, entropy, shifts = found
    ctx.save_for_backward(*inputs, entropy, shifts)
    ctx.temperature, ctx.rows = temperature, rows
    ctx.set_materialize_grads(False)
    return log_probs, entropy


class _HiddenLogProbs(torch.autograd.Function):
    """`chunked_log_probs` after its checks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        rows: int,
        room: int,
        whole: Callable[[Statistics], Statistics] | None,
    ) -> tuple[Tensor, Tensor]:
        parts, ctx.kept = [], []
        for part in chunks(len(hidden), rows):
            z = hidden[part] @ weight.t()
            if (room := room - z.numel()) >= 0:
                ctx.kept.append(z)
                z = _to_spend(z)
            parts.append(_statistics(z, targets[part], temperature))
        found = _joined(parts)
        if whole is not None:
            found = whole(found)
        return _saved(ctx, found, (hidden, weight, targets), temperature, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[0] is None and grads[1] is None:
            return (None,) * 7
        hidden, weight = ctx.saved_tensors[:2]
        upstream = _Upstream.of(ctx, grads[0], grads[1])
        parts = chunks(len(hidden), ctx.rows)
        grad_hidden = torch.empty_like(hidden)
        sum_dtype = torch.float32 if len(parts) > 1 and weight.dtype.itemsize < 4 else weight.dtype
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype)
        kept = ctx.kept[::-1]
        ctx.kept = []
        for part in parts:
            alive = hidden[part].masked_fill(upstream.dead[part, None], 0.0)
            z = upstream.alive(kept.pop(), part) if kept else alive @ weight.t()
            grad = upstream.logits_grad(z, part).to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[part])
            if sum_dtype == weight.dtype:
                grad_weight.addmm_(grad.t(), alive)
            else:
                grad_weight.add_(grad.t() @ alive)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


class _LogitLogProbs(torch.autograd.Function):
    """`token_log_probs` after its checks."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, rows: int
    ) -> tuple[Tensor, Tensor]:
        parts = [
            _statistics(_to_spend(logits[part]), targets[part], temperature)
            for part in chunks(len(logits), rows)
        ]
        return _saved(ctx, _joined(parts), (logits, targets), temperature, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[0] is None and grads[1] is None:
            return (None,) * 4
        logits = ctx.saved_tensors[0]
        upstream = _Upstream.of(ctx, grads[0], grads[1])
        grad_logits = torch.empty_like(logits)
        for part in chunks(len(logits), ctx.rows):
            alive = logits[part].masked_fill(upstream.dead[part, None], 0.0)
            grad_logits[part] = upstream.logits_grad(alive, part)
        return grad_logits, None, None, None
