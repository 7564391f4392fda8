"""The table `megatron` of a configuration: settings by megatron-core's own names.

Some say how the model lies on ranks; the others are fields of megatron-core's `TransformerConfig`.
What follows from the model or from `train` is not asked for twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Self

from megatron.core.transformer.transformer_config import MLATransformerConfig

from rlcore.config.tree import Scalar, TrainConfig
from rlcore.errors import ConfigError
from rlcore.models.architecture import Architecture
from rlcore.train.megatron.model import Layout

OF_LAYOUT = {
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "context_parallel_size": "context_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "expert_tensor_parallel_size": "expert_tensor_parallel",
    "sequence_parallel": "sequence_parallel",
}
OPTIMIZER = "use_distributed_optimizer"
FROM_ELSEWHERE = {
    "params_dtype": "train.precision",
    "pipeline_dtype": "train.precision",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "hidden_dropout": "nothing: the policy that is trained is the one that sampled",
    "attention_dropout": "nothing: the policy that is trained is the one that sampled",
    "calculate_per_token_loss": "algorithm.loss_aggregation",
    "variable_seq_lengths": "the packing",
}
"""Fields that other settings decide."""
FROM_THE_MODEL = frozenset(
    {
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "layernorm_epsilon",
        "normalization",
        "qk_layernorm",
        "add_qkv_bias",
        "add_bias_linear",
        "rotary_interleaved",
        "gated_linear_unit",
        "activation_func",
        "num_moe_experts",
        "moe_router_topk",
        "moe_ffn_hidden_size",
        "moe_shared_expert_intermediate_size",
        "moe_layer_freq",
        "moe_router_score_function",
        "moe_router_pre_softmax",
        "moe_router_enable_expert_bias",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_topk_scaling_factor",
        "multi_latent_attention",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "v_head_dim",
        "rotary_base",
        "rope_type",
        "rotary_scaling_factor",
    }
)
"""Fields that the model's architecture decides."""
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
"""What `train.gradient_checkpointing` stands for."""


@dataclass(frozen=True)
class Settings:
    """What a table comes to."""

    layout: Layout
    divided: bool
    """Whether ranks that have copies of a weight share its optimizer."""
    more: Mapping[str, Any]
    """Further fields of `TransformerConfig`."""

    @classmethod
    def of(cls, table: Mapping[str, Scalar], train: TrainConfig) -> Self:
        """Checked by name.

        Raises:
            ConfigError: naming the setting that there is not, and the nearest one.
        """
        known = {field.name for field in fields(MLATransformerConfig)}
        for name in table:
            reason = "the model" if name in FROM_THE_MODEL else FROM_ELSEWHERE.get(name)
            if reason is not None:
                raise ConfigError(f"megatron.{name} follows from {reason}; leave it out")
            if name not in known and name not in OF_LAYOUT and name != OPTIMIZER:
                near = get_close_matches(name, [*known, *OF_LAYOUT, OPTIMIZER], 1)
                hint = f"; do you mean megatron.{near[0]}?" if near else ""
                raise ConfigError(f"megatron.{name}: megatron-core has no such setting{hint}")
        layout: dict[str, Any] = {
            own: table[name] for name, own in OF_LAYOUT.items() if name in table
        }
        for name, own in OF_LAYOUT.items():
            wanted = bool if own == "sequence_parallel" else int
            value = layout.get(own)
            if value is not None and (type(value) is not wanted or (wanted is int and value < 1)):
                kind = "true or false" if wanted is bool else "a whole number from 1 on"
                raise ConfigError(f"megatron.{name} = {value!r} must be {kind}")
        more = {k: v for k, v in table.items() if k not in OF_LAYOUT and k != OPTIMIZER}
        recompute = RECOMPUTE if train.gradient_checkpointing else {}
        return cls(Layout(**layout), bool(table.get(OPTIMIZER, True)), {**recompute, **more})


def check_layout(arch: Architecture, layout: Layout) -> None:
    """Whether a model can be trained so.

    Raises:
        ConfigError: naming the settings that do not go together.
    """
    tensor, context = layout.tensor_parallel, layout.context_parallel
    if arch.num_experts and tensor > 1 and not layout.sequence_parallel:
        raise ConfigError(
            f"megatron.tensor_model_parallel_size = {tensor} with experts needs "
            "megatron.sequence_parallel = true"
        )
    heads, groups = arch.num_attention_heads // tensor, arch.num_key_value_heads // tensor
    if context > 1 and (heads % context or (groups % context and context % max(groups, 1))):
        raise ConfigError(
            f"megatron.context_parallel_size = {context} must divide the {heads} heads of a "
            f"tensor-parallel rank, and divide or be a multiple of its {groups} heads of keys"
        )
