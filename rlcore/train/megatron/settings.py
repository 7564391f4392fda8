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
            if reason := FROM_ELSEWHERE.get(name):
                raise ConfigError(f"megatron.{name} follows from {reason}; leave it out")
            if name not in known and name not in OF_LAYOUT and name != OPTIMIZER:
                near = get_close_matches(name, [*known, *OF_LAYOUT, OPTIMIZER], 1)
                hint = f"; do you mean megatron.{near[0]}?" if near else ""
                raise ConfigError(f"megatron.{name}: megatron-core has no such setting{hint}")
        layout: dict[str, Any] = {
            own: table[name] for name, own in OF_LAYOUT.items() if name in table
        }
        more = {k: v for k, v in table.items() if k not in OF_LAYOUT and k != OPTIMIZER}
        recompute = RECOMPUTE if train.gradient_checkpointing else {}
        return cls(Layout(**layout), bool(table.get(OPTIMIZER, True)), {**recompute, **more})
