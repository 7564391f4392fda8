"""Context parallelism: the tokens of a packed micro-batch split over a group of ranks.

All ranks of a group are given the same micro-batch. Each passes its stretch of the tokens through
the model; around attention, in which tokens see one another, the ranks exchange stretches of all
heads for all tokens of some heads and back (DeepSpeed-Ulysses, arXiv 2309.14509). Keys and values
of fewer heads than ranks are repeated. Log-probs are gathered before the loss, so every rank of a
group computes the loss of the whole micro-batch, and whatever goes by sequences finds them whole.

Gradients: each rank's loss is that of the whole group and the gradient that it passes on is that of
its own tokens, so parameters get the gradient of a micro-batch once, in parts, from the ranks of a
group, and a sum over all ranks is that over all micro-batches. Figures are summed over the ranks
that have other samples (`Ranks`), one of each group.

Invariants:
- Stretches are equally long; what the last ones lack is filled up with tokens of id 0, which no
  attention sees.
- Every rank of a group enters the same exchanges, whatever its stretch trains on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlcore.algorithms.packing import PackedBatch
from rlcore.errors import ConfigError
from rlcore.train.fsdp.attention import SequenceLayout, packed_attention
from rlcore.train.ranks import Ranks

CONTEXT_ATTENTION = "sluice_context"
"""Its name among the attention implementations of transformers."""


@dataclass(frozen=True)
class Context:
    """The ranks that share each micro-batch with this one."""

    group: dist.ProcessGroup
    size: int
    rank: int

    @classmethod
    def of(cls, size: int) -> tuple[Context, Ranks]:
        """Cut all ranks into groups of `size` neighbours; also the ranks with other samples.

        Raises:
            ConfigError: they cannot be cut so.
        """
        world = dist.get_world_size()
        if world % size:
            raise ConfigError(
                f"train.context_parallel_size = {size} does not divide the trainer's {world} ranks"
            )
        grid = torch.arange(world).reshape(world // size, size)
        rank = dist.get_rank()
        # Every rank takes part in making every group.
        sharing = [dist.new_group(row) for row in grid.tolist()]
        others = [dist.new_group(column) for column in grid.t().tolist()]
        own = rank % size
        return cls(sharing[rank // size], size, own), Ranks(others[own])

    def share(self, batch: PackedBatch, rows: Tensor) -> Share:
        """This rank's part of a micro-batch of which some positions [M], ascending, are asked."""
        tokens = len(batch.input_ids)
        length = -(-tokens // self.size)
        padding = length * self.size - tokens

        def own(values: Tensor) -> Tensor:
            filled = torch.cat([values, values.new_zeros(padding)])
            return filled[self.rank * length : (self.rank + 1) * length]

        bounds = torch.arange(1, self.size, device=rows.device) * length
        ends = [*torch.searchsorted(rows, bounds).tolist(), len(rows)]
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        first = ends[self.rank] - counts[self.rank]
        chosen = slice(first, first + counts[self.rank])
        lacking = max(counts) - counts[self.rank]
        local = rows[chosen] - self.rank * length
        return Share(
            context=self,
            input_ids=own(batch.input_ids),
            position_ids=own(batch.position_ids),
            layout=ContextLayout(
                self, SequenceLayout.of(batch.lengths, batch.input_ids.device), tokens
            ),
            rows=torch.cat([local, local.new_zeros(lacking)]),
            chosen=rows[chosen],
            counts=tuple(counts),
            real=min(max(tokens - self.rank * length, 0), length),
        )


@dataclass(frozen=True)
class ContextLayout:
    """What attention must know of a micro-batch whose tokens are split; see `SequenceLayout`."""

    context: Context
    whole: SequenceLayout
    tokens: int
    """Of the micro-batch, without what fills it up."""


@dataclass(frozen=True)
class Share:
    """One rank's part of a micro-batch."""

    context: Context
    input_ids: Tensor
    """[t]"""
    position_ids: Tensor
    """[t]"""
    layout: ContextLayout
    rows: Tensor
    """int64 [m]: positions to answer among the own tokens; equally many on every rank, filled up
    with the first token.
    """
    chosen: Tensor
    """int64 [counts[rank]]: the same in the whole micro-batch, without what fills them up."""
    counts: tuple[int, ...]
    """Positions to answer on each rank."""
    real: int
    """How many of the own tokens are tokens of the micro-batch: the first ones."""

    def of(self, values: Tensor) -> Tensor:
        """[m] from per-token values [T] of the whole micro-batch; 0 where `rows` is filled up."""
        own = values.index_select(0, self.chosen)
        return torch.cat([own, own.new_zeros(len(self.rows) - len(own))])

    def gather(self, answers: Tensor) -> Tensor:
        """[M, ...] of all ranks in order, from [m, ...] of each."""
        return cast(Tensor, _Gather.apply(answers, self.context, self.counts))


class _Gather(torch.autograd.Function):
    """Answers of all ranks; to each goes back the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, answers: Tensor, context: Context, counts: tuple[int, ...]) -> Tensor:
        ctx.context, ctx.counts, ctx.length = context, counts, len(answers)
        parts = [torch.empty_like(answers) for _ in counts]
        dist.all_gather(parts, answers.contiguous(), group=context.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        own = gradients[0].split(ctx.counts)[ctx.context.rank]
        lacking = own.new_zeros(ctx.length - len(own), *own.shape[1:])
        return torch.cat([own, lacking]), None, None


class _Exchange(torch.autograd.Function):
    """[size, ...]: to each rank its entry, from each rank its one for us; it is its own inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context) -> Tensor:
        ctx.context = context
        return _exchanged(x, context)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradients[0], ctx.context), None


def _exchanged(x: Tensor, context: Context) -> Tensor:
    sent = x.contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=context.group)
    return got


def to_heads(x: Tensor, context: Context) -> Tensor:
    """[heads / size, size * t, width]: all tokens of some heads, from [heads, t, width]."""
    heads, length, width = x.shape
    sent = x.reshape(context.size, heads // context.size, length, width)
    got = cast(Tensor, _Exchange.apply(sent, context))
    return got.transpose(0, 1).reshape(heads // context.size, context.size * length, width)


def to_tokens(x: Tensor, context: Context) -> Tensor:
    """[t, heads, width]: all heads of some tokens, from [size * t, heads / size, width]."""
    length, heads, width = x.shape[0] // context.size, x.shape[1], x.shape[2]
    sent = x.reshape(context.size, length, heads, width)
    got = cast(Tensor, _Exchange.apply(sent, context))
    return got.transpose(0, 1).reshape(length, context.size * heads, width)


@torch.compiler.disable
def context_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: ContextLayout,
    **more: Any,
) -> tuple[Tensor, None]:
    """`packed_attention` of tokens [1, heads, t, width] that are split over the ranks."""
    context, tokens = layout.context, layout.tokens
    shared = _copies(module, query.shape[1], key.shape[1], context.size)

    def whole(x: Tensor) -> Tensor:
        return to_heads(x[0], context)[None, :, :tokens]

    mixed, _ = packed_attention(
        module,
        whole(query),
        whole(key.repeat_interleave(shared, 1)),
        whole(value.repeat_interleave(shared, 1)),
        attention_mask,
        layout=layout.whole,
        **more,
    )
    padding = query.shape[2] * context.size - tokens
    filled = torch.cat([mixed[0], mixed.new_zeros(padding, *mixed.shape[2:])])
    return to_tokens(filled, context)[None], None


def _copies(module: nn.Module, heads: int, key_heads: int, size: int) -> int:
    """How often keys and values are repeated, so that each rank has those of its heads.

    Raises:
        ConfigError: heads cannot be dealt out evenly.
    """
    if heads % size:
        raise ConfigError(
            f"train.context_parallel_size = {size} does not divide the {heads} attention heads of "
            f"{type(module).__name__}; choose one that does"
        )
    group = heads // key_heads
    return next(n for n in range(1, group + 1) if group % n == 0 and key_heads * n % size == 0)


def register_context() -> None:
    """Make `CONTEXT_ATTENTION` known to transformers; doing so twice is harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(CONTEXT_ATTENTION, context_attention)
