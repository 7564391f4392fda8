"""The table `megatron` of a configuration: settings by megatron-core's own names.

Some say how the model lies on ranks, some how copies of weights are held together; the others are
fields of megatron-core's `TransformerConfig`. What follows from the model or from `train` is not
asked for twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from megatron.core.distributed import DistributedDataParallelConfig

from rlcore.config.tree import MegatronTable, TrainConfig
from rlcore.errors import ConfigError
from rlcore.plugins import MEGATRON
from rlcore.train.megatron.model import Layout
from rlcore.train.megatron.table import OF_COPIES, OF_LAYOUT, check_table

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
        check_table(table)
        layout: dict[str, Any] = {
            own: table[name] for name, own in OF_LAYOUT.items() if name in table
        }
        more = {k: v for k, v in table.items() if k not in OF_LAYOUT and k not in OF_COPIES}
        recompute = RECOMPUTE if train.gradient_checkpointing else {}
        return cls(Layout(**layout), _copies(table, train), {**recompute, **more})


def _copies(table: MegatronTable, train: TrainConfig) -> DistributedDataParallelConfig:
    given = {name: table[name] for name in OF_COPIES if name in table}
    values: dict[str, Any] = {**OF_COPIES, **given}
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
