"""Every tensor of a model by its Hugging Face name and shape: what a folder must hold, and how many
parameters that is.

Names are those of published checkpoints, in which each expert has its own matrices.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from rlcore.models.architecture import Architecture

VISION_PREFIX = {"qwen3_5": "model.language_model", "qwen3_5_moe": "model.language_model"}
"""Where the decoder lies in families whose checkpoints have a vision tower beside it."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor."""

    name: str
    shape: tuple[int, ...]
    expert: bool = False
    """Of a routed expert: a token meets only some of these."""


@dataclass(frozen=True, slots=True)
class Size:
    """Parameters of a model, without layers for predicting several tokens at once."""

    parameters: int
    """All numbers of its tensors: the bias of a router counts, since published figures count it."""
    active_parameters: int
    """What one token meets: all but the experts that it is not sent to."""


def size_of(arch: Architecture) -> Size:
    """Count parameters."""
    total = routed = 0
    for spec in tensors(arch):
        count = prod(spec.shape)
        total += count
        routed += count if spec.expert else 0
    share = arch.num_experts_per_tok / arch.num_experts if arch.num_experts else 0
    return Size(total, total - routed + round(routed * share))


def tensors(arch: Architecture) -> Iterator[TensorSpec]:
    """All tensors of a model, in the order of its layers; a tied output layer is none."""
    prefix = VISION_PREFIX.get(arch.model_type, "model")
    yield TensorSpec(f"{prefix}.embed_tokens.weight", (arch.vocab_size, arch.hidden_size))
    for layer in range(arch.num_hidden_layers):
        yield from layer_tensors(arch, layer, f"{prefix}.layers.{layer}")
    yield TensorSpec(f"{prefix}.norm.weight", (arch.hidden_size,))
    if not arch.tie_word_embeddings:
        yield TensorSpec("lm_head.weight", (arch.vocab_size, arch.hidden_size))


def layer_tensors(arch: Architecture, layer: int, prefix: str) -> Iterator[TensorSpec]:
    """The tensors of one decoder layer."""
    norms = ["input_layernorm", "post_attention_layernorm"]
    if arch.model_type == "glm4":
        norms += ["post_self_attn_layernorm", "post_mlp_layernorm"]
    for norm in norms:
        yield TensorSpec(f"{prefix}.{norm}.weight", (arch.hidden_size,))
    if arch.is_linear(layer):
        yield from _delta_net(arch, f"{prefix}.linear_attn")
    elif arch.is_latent:
        yield from _latent_attention(arch, f"{prefix}.self_attn")
    else:
        yield from _attention(arch, f"{prefix}.self_attn")
    if arch.is_sparse(layer):
        block = "block_sparse_moe" if arch.model_type == "minimax_m2" else "mlp"
        yield from _experts(arch, f"{prefix}.{block}")
    else:
        yield from _feed_forward(arch, f"{prefix}.mlp", arch.intermediate_size)


def _attention(arch: Architecture, prefix: str) -> Iterator[TensorSpec]:
    hidden, dim = arch.hidden_size, arch.head_dim
    queries, keys = arch.num_attention_heads * dim, arch.num_key_value_heads * dim
    gated = 2 if arch.attn_output_gate else 1
    for name, rows in (("q", gated * queries), ("k", keys), ("v", keys)):
        yield TensorSpec(f"{prefix}.{name}_proj.weight", (rows, hidden))
        if arch.attention_bias:
            yield TensorSpec(f"{prefix}.{name}_proj.bias", (rows,))
    yield TensorSpec(f"{prefix}.o_proj.weight", (hidden, queries))
    if arch.use_qk_norm:
        whole = arch.model_type == "minimax_m2"
        yield TensorSpec(f"{prefix}.q_norm.weight", (queries if whole else dim,))
        yield TensorSpec(f"{prefix}.k_norm.weight", (keys if whole else dim,))


def _latent_attention(arch: Architecture, prefix: str) -> Iterator[TensorSpec]:
    hidden, heads = arch.hidden_size, arch.num_attention_heads
    queries = heads * (arch.qk_nope_head_dim + arch.qk_rope_head_dim)
    latent = arch.kv_lora_rank
    if arch.q_lora_rank:
        yield TensorSpec(f"{prefix}.q_a_proj.weight", (arch.q_lora_rank, hidden))
        yield TensorSpec(f"{prefix}.q_a_layernorm.weight", (arch.q_lora_rank,))
        yield TensorSpec(f"{prefix}.q_b_proj.weight", (queries, arch.q_lora_rank))
    else:
        yield TensorSpec(f"{prefix}.q_proj.weight", (queries, hidden))
    shared = (latent + arch.qk_rope_head_dim, hidden)
    yield TensorSpec(f"{prefix}.kv_a_proj_with_mqa.weight", shared)
    yield TensorSpec(f"{prefix}.kv_a_layernorm.weight", (latent,))
    both = heads * (arch.qk_nope_head_dim + arch.v_head_dim)
    yield TensorSpec(f"{prefix}.kv_b_proj.weight", (both, latent))
    yield TensorSpec(f"{prefix}.o_proj.weight", (hidden, heads * arch.v_head_dim))
    if arch.index_n_heads:
        dim = arch.index_head_dim
        queries = arch.index_n_heads * dim
        yield TensorSpec(f"{prefix}.indexer.wq_b.weight", (queries, arch.q_lora_rank))
        yield TensorSpec(f"{prefix}.indexer.wk.weight", (dim, hidden))
        yield TensorSpec(f"{prefix}.indexer.k_norm.weight", (dim,))
        yield TensorSpec(f"{prefix}.indexer.k_norm.bias", (dim,))
        yield TensorSpec(f"{prefix}.indexer.weights_proj.weight", (arch.index_n_heads, hidden))


def _delta_net(arch: Architecture, prefix: str) -> Iterator[TensorSpec]:
    """Gated delta net (arXiv 2412.06464), as Qwen3-Next and Qwen3.5 project into it."""
    hidden, heads = arch.hidden_size, arch.linear_num_value_heads
    keys = arch.linear_num_key_heads * arch.linear_key_head_dim
    values = heads * arch.linear_value_head_dim
    mixed = 2 * keys + values
    if arch.model_type == "qwen3_next":
        yield TensorSpec(f"{prefix}.in_proj_qkvz.weight", (mixed + values, hidden))
        yield TensorSpec(f"{prefix}.in_proj_ba.weight", (2 * heads, hidden))
    else:
        yield TensorSpec(f"{prefix}.in_proj_qkv.weight", (mixed, hidden))
        yield TensorSpec(f"{prefix}.in_proj_z.weight", (values, hidden))
        yield TensorSpec(f"{prefix}.in_proj_b.weight", (heads, hidden))
        yield TensorSpec(f"{prefix}.in_proj_a.weight", (heads, hidden))
    yield TensorSpec(f"{prefix}.conv1d.weight", (mixed, 1, arch.linear_conv_kernel_dim))
    yield TensorSpec(f"{prefix}.dt_bias", (heads,))
    yield TensorSpec(f"{prefix}.A_log", (heads,))
    yield TensorSpec(f"{prefix}.norm.weight", (arch.linear_value_head_dim,))
    yield TensorSpec(f"{prefix}.out_proj.weight", (hidden, values))


def _feed_forward(
    arch: Architecture, prefix: str, width: int, expert: bool = False
) -> Iterator[TensorSpec]:
    hidden = arch.hidden_size
    gate, up, down = "gate_proj", "up_proj", "down_proj"
    if arch.model_type == "glm4":
        yield TensorSpec(f"{prefix}.gate_up_proj.weight", (2 * width, hidden))
    else:
        if arch.model_type == "minimax_m2":
            gate, up, down = "w1", "w3", "w2"
        yield TensorSpec(f"{prefix}.{gate}.weight", (width, hidden), expert)
        yield TensorSpec(f"{prefix}.{up}.weight", (width, hidden), expert)
    yield TensorSpec(f"{prefix}.{down}.weight", (hidden, width), expert)


def _experts(arch: Architecture, prefix: str) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{prefix}.gate.weight", (arch.num_experts, arch.hidden_size))
    if arch.use_routing_bias:
        bias = ".e_score_correction_bias"
        name = prefix + (bias if arch.model_type == "minimax_m2" else f".gate{bias}")
        yield TensorSpec(name, (arch.num_experts,))
    for expert in range(arch.num_experts):
        yield from _feed_forward(
            arch, f"{prefix}.experts.{expert}", arch.moe_intermediate_size, expert=True
        )
    if arch.shared_expert_intermediate_size:
        name = "shared_expert" if arch.model_type.startswith("qwen") else "shared_experts"
        yield from _feed_forward(arch, f"{prefix}.{name}", arch.shared_expert_intermediate_size)
    if arch.shared_expert_gate:
        yield TensorSpec(f"{prefix}.shared_expert_gate.weight", (1, arch.hidden_size))
