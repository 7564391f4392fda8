"""AdamW (arXiv 1711.05101, algorithm 2) as every backend takes its steps: torch's, fused."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlcore.config.tree import TrainConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_adamw(
    decayed: Sequence[Tensor], others: Sequence[Tensor], config: TrainConfig
) -> torch.optim.AdamW:
    """Over weights that decay, and others."""
    groups = [
        {"params": list(decayed), "weight_decay": config.weight_decay},
        {"params": list(others), "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,
    )
