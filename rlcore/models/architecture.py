"""The architecture of a decoder, in the terms of Hugging Face's config.json.

A field has the name that most configs give it; `rlcore.models.hf_config` knows the others. What
changes neither weights nor logits (context length, dropout, initialisation) is no part of it.

Invariant: two equal architectures have the same tensors, and compute the same from them.
"""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FLOAT_TOLERANCE = 1e-6
"""Relative difference at which two numbers still count as the same, since files round."""


class RopeScaling(BaseModel):
    """How rotary frequencies are stretched beyond the length that was trained first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rope_type: Literal["llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


class Architecture(BaseModel):
    """One model, without its weights. SwiGLU, RMSNorm and rotary positions are a given."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )

    model_type: str
    """Family, by its name in transformers."""
    hidden_size: int
    intermediate_size: int = 0
    """Width of dense feed-forward layers; 0: there is none."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Of queries, keys and values; with latent attention, see the five fields of that."""
    vocab_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float
    partial_rotary_factor: float = 1.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Of the projections to queries, keys and values."""
    use_qk_norm: bool = False
    """An RMSNorm on each query and key head (minimax_m2: on all heads together)."""

    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    """Of all shared experts together."""
    shared_expert_gate: bool = False
    first_k_dense_replace: int = 0
    """Dense layers before the first one with experts."""
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    use_routing_bias: bool = False
    """A bias that only the choice of experts sees (`e_score_correction_bias`)."""

    q_lora_rank: int = 0
    """Latent attention: rank of the queries; 0: they are projected at once."""
    kv_lora_rank: int = 0
    """Latent attention: rank of keys and values; 0: attention is not latent."""
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    index_n_heads: int = 0
    """Sparse attention: heads of the indexer."""
    index_head_dim: int = 0
    index_topk: int = 0

    full_attention_interval: int = 1
    """Every so many layers attend to all tokens; those between are gated delta nets."""
    attn_output_gate: bool = False
    linear_conv_kernel_dim: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0

    @property
    def is_latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kv_lora_rank > 0

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's feed-forward part is a mixture of experts."""
        return self.num_experts > 0 and layer >= self.first_k_dense_replace

    def is_linear(self, layer: int) -> bool:
        """Whether a layer is a gated delta net."""
        return (layer + 1) % self.full_attention_interval != 0

    def dense_layers(self) -> int:
        """Layers whose feed-forward part is dense."""
        return self.first_k_dense_replace if self.num_experts else self.num_hidden_layers


def differences(a: Architecture, b: Architecture) -> Iterator[tuple[str, Any, Any]]:
    """(field, value of a, value of b) wherever two architectures differ."""
    idle = set() if a.dense_layers() or b.dense_layers() else {"intermediate_size"}
    if a.is_latent and b.is_latent:
        idle |= {"head_dim", "num_key_value_heads"}
    for name in Architecture.model_fields:
        mine, other = getattr(a, name), getattr(b, name)
        if name not in idle and not _same(mine, other):
            yield name, mine, other


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= FLOAT_TOLERANCE * max(abs(a), abs(b))
    return bool(a == b)
