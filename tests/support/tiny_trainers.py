"""Trainers of one rank in the test's process."""

from pathlib import Path
from typing import Any

from rlcore.config.tree import AlgorithmConfig, TrainConfig


def loaded(
    kind: Any,
    folder: Path,
    algorithm: AlgorithmConfig,
    *,
    megatron: dict[str, Any] | None = None,
    **train: Any,
) -> Any:
    """A trainer that holds a folder's model.

    Args:
        kind: its class.
        folder: of the model.
        algorithm: settings.
        megatron: the table, for a trainer that takes one.
        train: settings of `train.*` beside a large learning rate.
    """
    table = {} if megatron is None else {"megatron": megatron}
    made = kind(
        TrainConfig(**{"lr": 1e-2, "num_iterations": 4} | train),
        algorithm,
        temperature=1.0,
        seed=0,
        device="cpu",
        **table,
    )
    made.load(folder, "start")
    return made
