"""Attention over the engine's own cache, plugged into transformers' attention interface.

A forward pass is given one `Prefill` or `Decode` as the keyword argument `kv`; every layer hands
its queries, keys and values to it. The model sees neither a transformers cache nor a mask.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore.errors import EngineError

NAME = "sluice_kv"


class Step(Protocol):
    """What one forward pass does with each layer's keys and values."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Attention output [rows, heads, tokens, head_dim] of q likewise; k and v with their own
        heads.
        """
        ...


class Prefill:
    """Whole prompts [rows, length] from position 0; their keys and values go to `kv`."""

    def __init__(self, kv: Tensor) -> None:
        self._kv = kv
        """[layers, 2, rows, kv heads, length, head_dim]"""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        self._kv[layer, 0] = k
        self._kv[layer, 1] = v
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


class Decode:
    """One new token a row, at that row's own position, against the cache of a lane.

    The forward pass may have more rows than the cache: those behind are padding, and cost no
    attention.
    """

    def __init__(self, kv: Tensor, positions: Tensor) -> None:
        """kv: [layers, 2, rows, kv heads, length, head_dim]; positions: [rows]."""
        rows, length = kv.shape[2], kv.shape[4]
        self._kv = kv
        self._positions = positions
        self._rows = torch.arange(rows, device=kv.device)
        behind = torch.arange(length, device=kv.device)[None] > positions[:, None]
        mask = torch.zeros((rows, length), dtype=kv.dtype, device=kv.device)
        self._mask = mask.masked_fill_(behind, float("-inf"))[:, None, None, :]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        keys, values = self._kv[layer, 0], self._kv[layer, 1]
        live = len(keys)
        keys[self._rows, :, self._positions] = k[:live, :, 0]
        values[self._rows, :, self._positions] = v[:live, :, 0]
        rows, heads, _, dim = q.shape
        # The query heads of one key/value head become its queries: no key is copied.
        grouped = q[:live].reshape(live, keys.shape[1], heads // keys.shape[1], dim)
        out = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=self._mask, scale=scale
        ).reshape(live, heads, 1, dim)
        return F.pad(out, (0, 0, 0, 0, 0, 0, 0, rows - live)) if live < rows else out


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kv: Step,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: output [rows, tokens, heads, head_dim], no weights."""
    if sliding_window is not None:
        raise EngineError(
            "The model uses sliding-window attention, which the embedded engine lacks; "
            "use rollout.engine = 'sglang'."
        )
    layer = module.layer_idx
    if not isinstance(layer, int):
        raise EngineError("The model's attention layers carry no layer_idx.")
    return kv.attend(layer, query, key, value, scaling).transpose(1, 2), None


def register() -> None:
    """Make the implementation known to transformers, under `NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
