"""Attention and rotary positions of packed sequences, without Transformer Engine.

megatron-core's own attention needs an explicit mask of every pair of tokens, and heads of one
width; latent attention has values narrower than keys. Where sequences lie end to end, what tells
them apart goes down to here through arguments that megatron-core hands to its attention, and again
when it computes a layer a second time: their layout in the place of a bias, which a layer that is
compiled does not look into; or, to latent attention, which takes no bias, the edges between them in
the place of a mask.

With context parallelism each rank has a run of the tokens, and the projections of all heads; a swap
between ranks makes that all tokens of some heads, and back.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rlcore.train.fsdp.attention import SequenceLayout, packed_attention


class TorchAttention(nn.Module):
    """Megatron's `core_attention`."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self._ranks = parallel_state.get_context_parallel_world_size()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: SequenceLayout | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Causal attention.

        Args:
            query: [S, B, heads, width]; with `packed_seq_params`: [T, heads, width].
            key, value: the same, of fewer heads.
            attention_mask: None, or int32 [n + 1] on the CPU: B is 1, and sequence i is at
                `mask[i]:mask[i + 1]`, counted over all context-parallel ranks.
            attention_bias: None, or the layout of these sequences: B is 1.

        Returns:
            [S, B, heads x width of values]; packed: [T, heads x width].
        """
        if packed_seq_params is not None:
            layout = _layout(packed_seq_params.cu_seqlens_q, query.device)
            return self._packed(query, key, value, layout).flatten(1)
        if attention_mask is not None:
            attention_bias = _layout(attention_mask, query.device)
        if attention_bias is not None:
            layout = attention_bias
            parts = self._packed(query[:, 0], key[:, 0], value[:, 0], layout)
            return parts.flatten(1)[:, None]
        grouped = query.shape[2] != key.shape[2]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped
        )
        return out.permute(2, 0, 1, 3).flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout) -> Tensor:
        """[T, heads, width of values] of [T, heads, width]."""
        if self._ranks > 1:
            return self._swapped(query, key, value, layout)
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        return packed_attention(self, q, k, v, None, layout=layout, scaling=self.scale)[0][0]

    @torch.compiler.disable
    def _swapped(self, query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout) -> Tensor:
        """The same of context-parallel ranks, each with a run of the tokens."""
        group = parallel_state.get_context_parallel_group()
        # Fewer heads than ranks are repeated: each rank has those that its queries look at.
        key, value = (_repeated(x, self._ranks) for x in (key, value))
        q, k, v = (_Swap.apply(x, group, True).transpose(0, 1)[None] for x in (query, key, value))
        mixed = packed_attention(self, q, k, v, None, layout=layout, scaling=self.scale)[0][0]
        return _Swap.apply(mixed, group, False)


class PackedRotary(nn.Module):
    """Rotary angles of the tokens at hand, in the place of those of positions from 0 on.

    Latent attention asks for them itself, in each layer, and again when the layer is computed a
    second time, long after other micro-batches have passed: what tells it the positions is what
    the layer is given.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.inner: Any = attention.rotary_pos_emb
        self.positions: Tensor | None = None
        """int64 [T]; None: as `inner` has them."""
        self.longest = 0
        attention.register_forward_pre_hook(self._look, with_kwargs=True)
        attention.rotary_pos_emb = self

    def _look(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        edges = kwargs["attention_mask"] if "attention_mask" in kwargs else args[1]
        self.positions = None
        if edges is not None:
            lengths = tuple(edges.diff().tolist())
            group = parallel_state.get_context_parallel_group()
            self.positions = token_positions(lengths, group.rank(), group.size(), hidden.device)
            self.longest = max(lengths)

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """As `inner`."""
        length: int = self.inner.get_rotary_seq_len(*args, **kwargs)
        return length

    def forward(self, length: int, **kwargs: Any) -> Any:
        """Angles [T, 1, 1, width], and what `inner` has beside them."""
        if self.positions is None:
            return self.inner(length, **kwargs)
        return angles(self.inner, self.positions, self.longest)


def angles(rotary: nn.Module, positions: Tensor, length: int) -> Any:
    """What a rotary module of megatron-core has for each of some positions [T] below `length`."""
    # Packed: all of them, and not this rank's share.
    found = rotary(length, packed_seq=True)
    if isinstance(found, tuple):
        return found[0].index_select(0, positions), *found[1:]
    return found.index_select(0, positions)


@lru_cache(maxsize=4)
def token_positions(
    lengths: tuple[int, ...], rank: int, ranks: int, device: torch.device
) -> Tensor:
    """int64 [T / ranks]: of the tokens of sequences that a context-parallel rank has."""
    whole = torch.cat([torch.arange(length) for length in lengths])
    return whole.chunk(ranks)[rank].to(device)


def _layout(edges: Tensor, device: torch.device) -> SequenceLayout:
    return sequence_layout(tuple(edges.diff().tolist()), device)


@lru_cache(maxsize=4)
def sequence_layout(lengths: tuple[int, ...], device: torch.device) -> SequenceLayout:
    """The same for all layers."""
    return SequenceLayout.of(lengths, device)


def _repeated(x: Tensor, ranks: int) -> Tensor:
    """Heads [T, heads, width], as many that ranks can divide them."""
    heads = x.shape[1]
    return x if heads % ranks == 0 else x.repeat_interleave(ranks // heads, 1)


class _Swap(torch.autograd.Function):
    """Between this rank's tokens of all heads and all tokens of this rank's heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _swapped(x, group, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _swapped(grads[0], ctx.group, not ctx.to_heads), None, None


def _swapped(x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
    """[T / ranks, heads, width] to [T, heads / ranks, width], or back."""
    parts = x.chunk(group.size(), 1 if to_heads else 0)
    given = torch.stack([part.contiguous() for part in parts])
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given, group=group)
    return torch.cat(list(taken), 0 if to_heads else 1)
