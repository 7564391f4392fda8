"""The configuration of a run: a strict tree, loaded from TOML. Imports no torch."""

from rlcore.config.digest import config_digest
from rlcore.config.load import build_config, load_config, with_sets
from rlcore.config.tree import (
    AlgorithmConfig,
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    EvalConfig,
    EvalDataset,
    FilterConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    RunSection,
    StorageConfig,
    TrackingConfig,
    TrainConfig,
    WeightsConfig,
)

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "DataConfig",
    "EvalConfig",
    "EvalDataset",
    "FilterConfig",
    "ModelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "RunSection",
    "StorageConfig",
    "TrackingConfig",
    "TrainConfig",
    "WeightsConfig",
    "build_config",
    "config_digest",
    "load_config",
    "with_sets",
]
