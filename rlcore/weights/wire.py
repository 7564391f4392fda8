"""Tensors as bytes of a safetensors file, without a copy of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 8
"""Bytes that the header is padded to, as the format asks."""
DTYPES = {"torch.float32": "F32", "torch.bfloat16": "BF16"}


def safetensors_parts(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """A file's parts: its header, then the memory of each tensor.

    Args:
        tensors: contiguous and on the CPU; they must stay as they are while the parts are read.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    parts = [memoryview(len(text).to_bytes(8, "little") + text)]
    for tensor in tensors.values():
        parts.append(bytes_of(tensor))
    return parts


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    import numpy as np
    import torch

    # Not `numpy()`, after which torch refuses to empty the tensor's storage.
    return np.from_dlpack(tensor.detach().reshape(-1).view(torch.uint8)).data
