"""Causal attention over sequences that lie end to end, as an attention function of transformers.

A token sees the earlier tokens of its own sequence and nothing else. transformers hands the keyword
argument `layout` of the model's forward down to here.

On a GPU, in bfloat16, torch's variable-length FlashAttention takes them as they lie. Else they are
laid out as the rows of a rectangle [n, longest]: padded on the right, causal attention needs no
mask, since no token comes after padding that it could see. `packed_attention` is the one place that
chooses a kernel.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from rlcore.errors import ConfigError

ATTENTION = "sluice_packed"
"""Its name among the attention implementations of transformers."""
HALF = (torch.bfloat16, torch.float16)
"""What FlashAttention computes in."""
KNOWS_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether this torch wants to be told of fewer heads of keys; older ones take them as they are."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceLayout:
    """Where the sequences of a packed micro-batch are."""

    count: int
    longest: int
    slots: Tensor | None
    """int64 [T]: the place of each token in the flattened rectangle; None when no sequence is
    shorter.
    """
    bounds: Tensor
    """int32 [n + 1]: where each sequence begins, and where the last ends."""

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> SequenceLayout:
        """The layout of sequences of these lengths, in order."""
        longest, ends = max(lengths), np.cumsum(lengths)
        bounds = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)).to(device)
        if min(lengths) == longest:
            return cls(len(lengths), longest, None, bounds)
        shifts = np.arange(len(lengths)) * longest - (ends - lengths)
        slots = np.arange(sum(lengths)) + np.repeat(shifts, lengths)
        return cls(len(lengths), longest, torch.from_numpy(slots).to(device), bounds)

    def spread(self, x: Tensor) -> Tensor:
        """[1, heads, T, width] to [n, heads, longest, width], zeros in the padding."""
        x = x[0].transpose(0, 1)
        if self.slots is not None:
            x = x.new_zeros(self.count * self.longest, *x.shape[1:]).index_copy(0, self.slots, x)
        return x.reshape(self.count, self.longest, *x.shape[1:]).transpose(1, 2)

    def gather(self, x: Tensor) -> Tensor:
        """[n, heads, longest, width] to [1, T, heads, width]."""
        x = x.transpose(1, 2).reshape(self.count * self.longest, x.shape[1], x.shape[3])
        return (x if self.slots is None else x.index_select(0, self.slots))[None]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: SequenceLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer.

    Args:
        query: [1, heads, T, width]; key and value may have fewer heads.
        attention_mask: none is made for this implementation.

    Returns:
        [1, T, heads, width], and no attention weights.

    Raises:
        ConfigError: the model asks for a variant that is not computed here.
    """
    if softcap is not None or (sliding_window is not None and sliding_window < layout.longest):
        raise ConfigError(
            f"{type(module).__name__} asks for a sliding window of {sliding_window} (longest "
            f"sequence {layout.longest}) or a soft cap of {softcap}, which the fsdp trainer does "
            "not compute"
        )
    if _takes_uneven(query, value):
        return _variable_length(query[0], key[0], value[0], layout, scaling)[None], None
    # Known to torch while it compiles: the comparison alone would be a symbol to it.
    grouped = True if key.shape[1] != query.shape[1] else False  # noqa: SIM210
    mixed = scaled_dot_product_attention(
        layout.spread(query),
        layout.spread(key),
        layout.spread(value),
        is_causal=True,
        scale=scaling,
        enable_gqa=grouped,
    )
    return layout.gather(mixed), None


def _takes_uneven(query: Tensor, value: Tensor) -> bool:
    """Whether FlashAttention computes it."""
    return query.is_cuda and query.dtype in HALF and query.shape[3] == value.shape[3]


def _variable_length(
    query: Tensor, key: Tensor, value: Tensor, layout: SequenceLayout, scaling: float | None
) -> Tensor:
    """[T, heads, width], from [heads, T, width] of each."""
    more: dict[str, Any] = (
        {"enable_gqa": True} if KNOWS_GROUPS and query.shape[0] != key.shape[0] else {}
    )
    mixed = varlen_attn(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        layout.bounds,
        layout.bounds,
        layout.longest,
        layout.longest,
        scale=scaling,
        window_size=(-1, 0),
        **more,
    )
    assert isinstance(mixed, Tensor)
    return mixed


def register() -> None:
    """Make `ATTENTION` known to transformers; doing so twice is harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)
