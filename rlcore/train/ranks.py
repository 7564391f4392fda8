"""The ranks that deal the samples of a batch out among themselves.

Those that hold parts of one model together see the same samples; a rank belongs with those that
hold the same part and see others. What is summed over a batch is summed over these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlcore.net import share_as_sglang


@dataclass(frozen=True)
class Ranks:
    """Over which losses and metrics are reduced."""

    group: dist.ProcessGroup | None = None
    """None: all ranks, each of which has samples of its own."""

    @property
    def size(self) -> int:
        """How many there are."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Which of them this one is."""
        return dist.get_rank(self.group)

    def add(self, tensor: Tensor) -> None:
        """Sum over the ranks, in place."""
        dist.all_reduce(tensor, group=self.group)

    def maximum(self, tensor: Tensor) -> None:
        """Largest over the ranks, in place."""
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)

    def gather(self, value: Any) -> list[Any]:
        """What each rank has."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


@contextmanager
def one_rank(device: str) -> Iterator[None]:
    """torch.distributed of this process alone, on `cpu` or its current GPU, and none afterwards."""
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    share_as_sglang()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
