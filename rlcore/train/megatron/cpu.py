"""megatron-core on a machine without CUDA.

It asks for CUDA where nothing needs it: `torch.cuda.current_device()` as the place of new tensors,
the literal device "cuda", the stream before gradients are reduced, and the state of CUDA's random
numbers around what it computes again. Within `without_cuda` the devices mean the CPU, and there is
no such stream or state. Where CUDA is, it does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def own_device() -> torch.device:
    """Where a rank's model lies: its GPU, or the CPU where there is no CUDA."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


class _OnCpu(TorchFunctionMode):
    """Calls of torch that name a CUDA device are made with the CPU."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        args = tuple(CPU if _is_cuda(arg) else arg for arg in args)
        named = {key: CPU if _is_cuda(value) else value for key, value in (kwargs or {}).items()}
        # Memory is pinned for copies to a GPU.
        named.pop("pin_memory", None)
        return func(*args, **named)


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


@contextmanager
def without_cuda() -> Iterator[None]:
    """Let megatron-core build and run models on the CPU."""
    if torch.cuda.is_available():
        yield
        return
    stand_ins: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "synchronize", _nothing),
        (torch.cuda, "current_stream", _no_stream),
        (random, "_get_cuda_rng_state", _nothing),
        (random, "_set_cuda_rng_state", _nothing),
    ]
    real = [getattr(module, name) for module, name, _ in stand_ins]
    for module, name, stand_in in stand_ins:
        setattr(module, name, stand_in)
    try:
        with _OnCpu():
            yield
    finally:
        for (module, name, _), own in zip(stand_ins, real, strict=True):
            setattr(module, name, own)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _no_stream(*_: Any, **__: Any) -> None:
    """Of its own: torch's compiler knows functions of torch by what stands for them."""
