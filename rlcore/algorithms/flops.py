"""Forward FLOPs of a sequence: what balancing over ranks and throughput metrics count with.

A multiply-add is two operations. Training costs three times the forward pass (one forward, two in
backward).

Invariants:
- The count grows faster than the length (attention is quadratic): two halves cost less than a
  whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder that its matrix products depend on (names of Hugging Face configs)."""

    hidden_size: int
    intermediate_size: float
    """Width of the MLP, on average over layers; for mixture of experts that of all experts that one
    token passes.
    """
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    @classmethod
    def of(cls, config: Any) -> Self:
        """The sizes that a Hugging Face config names: of its decoder, where it has other parts."""
        config = getattr(config, "text_config", config)
        heads: int = config.num_attention_heads
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=_mlp_width(config),
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab_size=config.vocab_size,
        )


def forward_flops(length: int, shape: ModelShape, outputs: int | None = None) -> float:
    """Operations of one forward pass over one sequence of `length` tokens.

    Per layer, with s tokens, width h, q = heads * head_dim, k = key/value heads * head_dim:
    projections 2sh(2q + 2k), attention s^2 q for the causal half of each of QK^T and AV together
    2 s^2 q, gated MLP 6sh * intermediate; then the output layer 2sh * vocabulary.

    Args:
        length: s.
        shape: of the model.
        outputs: tokens that go through the output layer; None: all.
    """
    s, h = float(length), shape.hidden_size
    q = shape.num_attention_heads * shape.head_dim
    k = shape.num_key_value_heads * shape.head_dim
    layer = 2 * s * h * (2 * q + 2 * k) + 2 * s * s * q + 6 * s * h * shape.intermediate_size
    out = length if outputs is None else outputs
    return shape.num_hidden_layers * layer + 2 * out * h * shape.vocab_size


def _mlp_width(config: Any) -> float:
    """What a token passes in a layer, on average over the layers."""
    layers: int = config.num_hidden_layers
    active = getattr(config, "num_experts_per_tok", None)
    expert = getattr(config, "moe_intermediate_size", None)
    dense = float(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    if active is None:
        return dense
    # Where no width is named for experts, theirs is the only one.
    sparse = active * (expert or dense) + getattr(config, "shared_expert_intermediate_size", 0.0)
    step = getattr(config, "decoder_sparse_step", None) or 1
    plain = set(getattr(config, "mlp_only_layers", None) or ())
    of_experts = sum(i not in plain and (i + 1) % step == 0 for i in range(layers))
    return (of_experts * sparse + (layers - of_experts) * dense) / layers
