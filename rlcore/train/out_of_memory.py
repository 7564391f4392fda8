"""What is told when a training step does not fit: who holds how much, and which settings help."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlcore.config.tree import TrainConfig
from rlcore.errors import OutOfMemory
from rlcore.train.offload import free_bytes

GIB = 2**30
ASKED = re.compile(r"Tried to allocate ([\d.]+ \w+)")
"""In torch's message."""


def out_of_memory(
    error: torch.OutOfMemoryError,
    held: Mapping[str, int],
    device: torch.device,
    train: TrainConfig,
    what: str,
) -> OutOfMemory:
    """The error to raise in place of torch's, while what was computed is still there.

    Args:
        error: torch's.
        held: bytes by what they are, of the trainer's own tensors.
        device: of the trainer.
        train: its settings.
        what: was being done.
    """
    asked = ASKED.search(str(error))
    parts = [f"{name} {size / GIB:.2f} GiB" for name, size in held.items() if size]
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device)
        used = torch.cuda.memory_allocated(device)
        free, total = torch.cuda.mem_get_info(device)
        parts += [
            f"activations and the rest {(used - sum(held.values())) / GIB:.2f} GiB",
            f"torch's cache {(reserved - used) / GIB:.2f} GiB",
            f"other processes {(total - free - reserved) / GIB:.2f} GiB",
        ]
    return OutOfMemory(
        f"{what}: memory ran out on {device}"
        + (f" when {asked[1]} were asked for" if asked else f" ({error})")
        + f", {free_bytes(device) / GIB:.2f} GiB being free; held by {', '.join(parts)}. Lower "
        f"train.max_tokens_per_gpu = {train.max_tokens_per_gpu}{_settings(train)}, use more ranks, "
        "or leave engines on the same GPU less (cluster.offload_rollout = true, a lower "
        "sglang.mem_fraction_static)"
    )


def bytes_of_all(tensors: Iterable[Tensor | None], device: torch.device) -> int:
    """What tensors take of a device, this rank's shares of them."""
    sizes = 0
    for tensor in tensors:
        if tensor is None:
            continue
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        sizes += own.numel() * own.element_size() if own.device.type == device.type else 0
    return sizes


def _settings(train: TrainConfig) -> str:
    """Settings that would help and are not made yet."""
    others = ""
    for name in ("gradient_checkpointing", "optimizer_cpu_offload"):
        if not getattr(train, name):
            others += f", set train.{name} = true"
    return others
