"""Attention without Transformer Engine: torch's, causal, of whole or packed sequences.

megatron-core's own needs an explicit mask of every pair of tokens, and heads of one width; latent
attention has values narrower than keys.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rlcore.errors import ConfigError


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
        if config.context_parallel_size > 1:
            raise ConfigError(
                f"context_parallel_size = {config.context_parallel_size} needs Transformer Engine, "
                "which is not installed"
            )
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Causal attention.

        Args:
            query: [S, B, heads, width]; packed: [T, heads, width].
            key, value: the same, of fewer heads.

        Returns:
            [S, B, heads x width of values]; packed: [T, heads x width].
        """
        if packed_seq_params is None:
            out = self._causal(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return out.permute(2, 0, 1, 3).flatten(2)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        parts = [x.split(lengths) for x in (query, key, value)]
        outs = [
            self._causal(*(x.transpose(0, 1)[None] for x in sequence))[0].transpose(0, 1)
            for sequence in zip(*parts, strict=True)
        ]
        return torch.cat(outs).flatten(1)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        grouped = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=grouped
        )
