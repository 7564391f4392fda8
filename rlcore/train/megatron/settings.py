"""The table `megatron` of a configuration: settings by megatron-core's own names.

Some say how the model lies on ranks, some how copies of weights are held together; the others are
fields of megatron-core's `TransformerConfig`. What follows from the model or from `train` is not
asked for twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Self

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig

from rlcore.config.tree import MegatronTable, TrainConfig
from rlcore.errors import ConfigError
from rlcore.models.architecture import Architecture
from rlcore.plugins import MEGATRON
from rlcore.train.megatron.model import Layout
from rlcore.train.megatron.refused import reason

OF_LAYOUT = {
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "context_parallel_size": "context_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "expert_tensor_parallel_size": "expert_tensor_parallel",
    "sequence_parallel": "sequence_parallel",
}
OF_COPIES = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "grad_reduce_in_fp32": True,
    "ddp_bucket_size": None,
    "pad_buckets_for_high_nccl_busbw": False,
    "reduce_scatter_with_fp32_accumulation": False,
}
"""What is of `DistributedDataParallelConfig`, and what it is unless it is set."""
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
    copies: DistributedDataParallelConfig
    """How ranks that have copies of weights hold them together."""
    more: Mapping[str, Any]
    """Further fields of `TransformerConfig`."""

    @classmethod
    def of(cls, table: MegatronTable, train: TrainConfig) -> Self:
        """Checked by name.

        Raises:
            ConfigError: naming the setting that there is not, and the nearest one.
        """
        _check_names(table)
        layout: dict[str, Any] = {
            own: table[name] for name, own in OF_LAYOUT.items() if name in table
        }
        for name, own in OF_LAYOUT.items():
            wanted = bool if own == "sequence_parallel" else int
            value = layout.get(own)
            if value is not None and (type(value) is not wanted or (wanted is int and value < 1)):
                kind = "true or false" if wanted is bool else "a whole number from 1 on"
                raise ConfigError(f"megatron.{name} = {value!r} must be {kind}")
        more = {k: v for k, v in table.items() if k not in OF_LAYOUT and k not in OF_COPIES}
        recompute = RECOMPUTE if train.gradient_checkpointing else {}
        return cls(Layout(**layout), _copies(table, train), {**recompute, **more})


def _check_names(table: MegatronTable) -> None:
    """Raises for those that there are not."""
    of_model = {field.name for field in fields(MLATransformerConfig)}
    known = frozenset({*of_model, *OF_LAYOUT, *OF_COPIES})
    for name in table:
        if why := reason(name, known):
            raise ConfigError(f"megatron.{name} {why}")
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; do you mean megatron.{near[0]}?" if near else ""
            raise ConfigError(f"megatron.{name}: megatron-core has no such setting{hint}")


def _copies(table: MegatronTable, train: TrainConfig) -> DistributedDataParallelConfig:
    given = {name: table[name] for name in OF_COPIES if name in table}
    for name, value in given.items():
        number = name == "ddp_bucket_size"
        if type(value) is not (int if number else bool) or (number and int(value) < 1):
            kind = "a whole number from 1 on" if number else "true or false"
            raise ConfigError(f"megatron.{name} = {value!r} must be {kind}")
    values: dict[str, Any] = {**OF_COPIES, **given}
    for name, other in (
        ("overlap_param_gather", "overlap_grad_reduce"),
        ("overlap_param_gather", "use_distributed_optimizer"),
        ("reduce_scatter_with_fp32_accumulation", "use_distributed_optimizer"),
    ):
        if given.get(name) and not values[other]:
            raise ConfigError(f"megatron.{name} = true needs megatron.{other} = true")
    if not (values["overlap_grad_reduce"] and values["use_distributed_optimizer"]):
        values["overlap_param_gather"] = False
    if "overlap_param_gather" not in given and _reads_weights(train):
        values["overlap_param_gather"] = False
    values["bucket_size"] = values.pop("ddp_bucket_size")
    try:
        return DistributedDataParallelConfig(**{k: v for k, v in values.items() if v is not None})
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"megatron-core refuses these settings: {error}") from error


def _reads_weights(train: TrainConfig) -> bool:
    """Whether functions of one's own get the model before a pass: it must be whole then."""
    return any(getattr(train, name) for name in MEGATRON if "before" in name)


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
