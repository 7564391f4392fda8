"""Makes the trainer that `train.backend` asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcore.config.tree import AlgorithmConfig, MegatronTable, TrainConfig
from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from rlcore.train.base import BaseTrainer


def make_trainer(
    train: TrainConfig,
    algorithm: AlgorithmConfig,
    *,
    megatron: MegatronTable,
    as_sglang: bool = False,
    **more: Any,
) -> BaseTrainer[Any, Any]:
    """One rank of a trainer, with no model yet.

    Args:
        train, algorithm: settings.
        megatron: settings by megatron-core's names.
        as_sglang: compute what SGLang does, operation by operation; for the backend `fsdp`.
        more: what every trainer takes beside.

    Raises:
        ConfigError: the backend is not installed, or has no such setting.
    """
    if train.backend == "fsdp":
        from rlcore.train.fsdp.trainer import FsdpTrainer

        return FsdpTrainer(train, algorithm, as_sglang=as_sglang, **more)
    try:
        from rlcore.train.megatron.trainer import MegatronTrainer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "megatron":
            raise
        raise ConfigError(
            "train.backend = 'megatron' needs megatron-core, which is not installed: "
            "pip install 'sluice[megatron]'"
        ) from error
    return MegatronTrainer(train, algorithm, megatron=megatron, **more)
