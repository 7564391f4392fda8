"""The head of a critic, whatever the backend: one output and a bias.

Invariant: it depends on the seed alone, so all ranks begin with the same one.
"""

from __future__ import annotations

import torch
from torch import nn

STD = 0.02
"""Standard deviation of its first weights; its bias begins at 0."""


def value_head(size: int, seed: int) -> nn.Linear:
    """On the CPU, in float32, for hidden states of that size."""
    head = nn.Linear(size, 1)
    with torch.no_grad():
        head.weight.normal_(std=STD, generator=torch.Generator().manual_seed(seed))
        head.bias.zero_()
    return head
