"""Forward FLOPs of a sequence: what balancing over ranks and throughput metrics count with.

A multiply-add is two operations. Training costs three times the forward pass (one forward, two in
backward).

Invariants:
- The count grows faster than the length (attention is quadratic): two halves cost less than a
  whole.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder that its matrix products depend on (names of Hugging Face configs)."""

    hidden_size: int
    intermediate_size: int
    """Width of the MLP; for mixture of experts that of all experts that one token passes."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int


def forward_flops(length: int, shape: ModelShape) -> float:
    """Operations of one forward pass over one sequence of `length` tokens.

    Per layer, with s tokens, width h, q = heads * head_dim, k = key/value heads * head_dim:
    projections 2sh(2q + 2k), attention s^2 q for the causal half of each of QK^T and AV together
    2 s^2 q, gated MLP 6sh * intermediate; then the output layer 2sh * vocabulary.
    """
    s, h = float(length), shape.hidden_size
    q = shape.num_attention_heads * shape.head_dim
    k = shape.num_key_value_heads * shape.head_dim
    layer = 2 * s * h * (2 * q + 2 * k) + 2 * s * s * q + 6 * s * h * shape.intermediate_size
    return shape.num_hidden_layers * layer + 2 * s * h * shape.vocab_size
