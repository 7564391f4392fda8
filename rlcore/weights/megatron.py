"""How Hugging Face's tensors make Megatron's: names, and which are fused in which order.

A rule joins the tensors of one or several Hugging Face names into one of Megatron's, and splits it
again. Names on Megatron's side are those of its checkpoints, with every layer and expert under its
own number; `LOCAL_NAMES` has what modules call the same without Transformer Engine.

Invariants:
- The rules of an architecture use each of its tensors (`rlcore.models.tensors`) exactly once; one
  that no rule takes is an error.
- Splitting what was joined gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcore.errors import ConfigError, DataError
from rlcore.models.architecture import Architecture
from rlcore.models.tensors import TensorSpec, layer_tensors, tensors

if TYPE_CHECKING:
    from torch import Tensor

LAYERS = "decoder.layers"
EXPERT = "mlp.experts.experts.{e}"
HF_LAYERS = "model.layers"


@dataclass(frozen=True, slots=True)
class Template:
    """A rule of every layer that has these tensors."""

    megatron: str
    hf: str
    """Names, in the order in which they are joined."""
    divide: int | None = None
    """The dimension that tensor-parallel ranks divide; None: each has all of it."""
    blocks: int = 1
    """Parts along that dimension that are divided each on its own: gate and up."""
    by_group: bool = False
    """Joined group by group of the attention heads, and not one behind the other."""


QKV = "self_attn.q_proj.{0} self_attn.k_proj.{0} self_attn.v_proj.{0}"
ATTENTION = (
    Template("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    Template("self_attention.linear_qkv.weight", QKV.format("weight"), 0, by_group=True),
    Template("self_attention.linear_qkv.bias", QKV.format("bias"), 0, by_group=True),
    Template("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    Template("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    Template("self_attention.linear_proj.weight", "self_attn.o_proj.weight", 1),
)
LATENT_ATTENTION = (
    Template("input_layernorm.weight", "input_layernorm.weight"),
    Template("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", 0),
    Template("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", 0),
    Template("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight"),
    Template("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", 0),
    Template("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", 0),
    Template(
        "self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight"
    ),
    Template("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", 0),
    Template("self_attention.linear_proj.weight", "self_attn.o_proj.weight", 1),
)
DENSE = (
    Template("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    Template("mlp.linear_fc1.weight", "mlp.gate_proj.weight mlp.up_proj.weight", 0, blocks=2),
    Template("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", 0, blocks=2),
    Template("mlp.linear_fc2.weight", "mlp.down_proj.weight", 1),
    Template("post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight"),
    Template("post_mlp_layernorm.weight", "post_mlp_layernorm.weight"),
)
SPARSE = (
    Template("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    Template("mlp.router.weight", "mlp.gate.weight"),
    Template("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),
    Template(
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.gate_proj.weight mlp.shared_experts.up_proj.weight",
        0,
        blocks=2,
    ),
    Template("mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.down_proj.weight", 1),
)
OF_AN_EXPERT = (
    Template(
        f"{EXPERT}.linear_fc1.weight",
        "mlp.experts.{e}.gate_proj.weight mlp.experts.{e}.up_proj.weight",
        0,
        blocks=2,
    ),
    Template(f"{EXPERT}.linear_fc2.weight", "mlp.experts.{e}.down_proj.weight", 1),
)
OUTSIDE = (
    Template("embedding.word_embeddings.weight", "model.embed_tokens.weight", 0),
    Template("decoder.final_layernorm.weight", "model.norm.weight"),
    Template("output_layer.weight", "lm_head.weight", 0),
)
OF_THE_VOCABULARY = frozenset({"embedding.word_embeddings.weight", "output_layer.weight"})
"""Tensors whose rows Megatron may pad."""
FAMILIES = frozenset(
    {
        "llama",
        "mimo",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "deepseek_v3",
    }
)
"""Families that Megatron's GPT model computes."""

LOCAL_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}
"""Within a layer: a checkpoint's name, and that of the module without Transformer Engine, where a
norm is a module of its own.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """One tensor of Megatron, and what it is made of."""

    megatron: str
    hf: tuple[TensorSpec, ...]
    divide: int | None = None
    blocks: int = 1
    groups: int = 1
    """Runs of rows in which the tensors alternate."""
    layer: int | None = None
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor, without padding."""
        return (sum(spec.shape[0] for spec in self.hf), *self.hf[0].shape[1:])

    @property
    def is_padded(self) -> bool:
        """Whether Megatron may have more rows than the vocabulary has tokens."""
        return self.megatron in OF_THE_VOCABULARY

    @property
    def is_bias_of_router(self) -> bool:
        """Whether only the choice of experts sees it."""
        return self.megatron.endswith(".router.expert_bias")

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Megatron's tensor, whole, of Hugging Face's."""
        import torch

        if len(parts) == 1:
            return parts[0]
        cut = [part.reshape(self.groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(cut, 1).reshape(self.shape)

    def split(self, whole: Tensor) -> list[Tensor]:
        """Hugging Face's tensors, of Megatron's; rows of padding are dropped.

        Raises:
            DataError: it has another shape.
        """
        found = tuple(whole.shape)
        padded = self.is_padded and found[0] > self.shape[0] and found[1:] == self.shape[1:]
        if found != self.shape and not padded:
            raise DataError(
                f"{self.megatron} has shape {list(found)}, and the model has {list(self.shape)}"
            )
        rows = [spec.shape[0] // self.groups for spec in self.hf]
        cut = whole[: self.shape[0]].reshape(self.groups, -1, *found[1:]).split(rows, 1)
        return [part.reshape(spec.shape) for part, spec in zip(cut, self.hf, strict=True)]

    def share(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """What one tensor-parallel rank holds of Megatron's tensor."""
        import torch

        if self.divide is None or ranks == 1:
            return whole
        parts = [block.chunk(ranks, self.divide) for block in whole.chunk(self.blocks, self.divide)]
        return torch.cat([part[rank] for part in parts], self.divide)

    def unite(self, shares: Sequence[Tensor]) -> Tensor:
        """The whole tensor, of what all tensor-parallel ranks hold."""
        import torch

        if self.divide is None or len(shares) == 1:
            return shares[0]
        parts = [share.chunk(self.blocks, self.divide) for share in shares]
        return torch.cat([part[b] for b in range(self.blocks) for part in parts], self.divide)


def rules(arch: Architecture) -> Iterator[Rule]:
    """The rules of a model, in the order of its layers.

    Raises:
        ConfigError: Megatron has no such model.
    """
    if arch.model_type not in FAMILIES:
        raise ConfigError(
            f"there is no Megatron layout of {arch.model_type!r} models; there is one of "
            f"{', '.join(sorted(FAMILIES))}"
        )
    outer = {s.name: s for s in tensors(arch.model_copy(update={"num_hidden_layers": 0}))}
    first, *last = _applied(OUTSIDE, outer, arch, "", "")
    yield first
    for layer in range(arch.num_hidden_layers):
        yield from layer_rules(arch, layer)
    yield from last
    _check_all_taken(outer, arch)


def layer_rules(arch: Architecture, layer: int) -> Iterator[Rule]:
    """The rules of one layer."""
    prefix = f"{HF_LAYERS}.{layer}"
    specs = {spec.name: spec for spec in layer_tensors(arch, layer, prefix)}
    attention = LATENT_ATTENTION if arch.is_latent else ATTENTION
    own = (*attention, *(SPARSE if arch.is_sparse(layer) else DENSE))
    yield from _applied(own, specs, arch, f"{LAYERS}.{layer}.", f"{prefix}.", layer)
    for expert in range(arch.num_experts if arch.is_sparse(layer) else 0):
        yield from _applied(
            OF_AN_EXPERT, specs, arch, f"{LAYERS}.{layer}.", f"{prefix}.", layer, expert
        )
    _check_all_taken(specs, arch)


def _applied(
    templates: Sequence[Template],
    specs: dict[str, TensorSpec],
    arch: Architecture,
    to: str,
    source: str,
    layer: int | None = None,
    expert: int | None = None,
) -> Iterator[Rule]:
    """Rules of the templates whose tensors are there; these are taken out of `specs`."""
    for template in templates:
        names = [source + name.replace("{e}", str(expert)) for name in template.hf.split()]
        if all(name in specs for name in names):
            yield Rule(
                to + template.megatron.replace("{e}", str(expert)),
                tuple(specs.pop(name) for name in names),
                template.divide,
                template.blocks,
                arch.num_key_value_heads if template.by_group else 1,
                layer,
                expert,
            )


def _check_all_taken(left: Mapping[str, TensorSpec], arch: Architecture) -> None:
    if left:
        raise ConfigError(
            f"{', '.join(left)} of {arch.model_type!r} models have no place in Megatron"
        )
