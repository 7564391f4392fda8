"""Safetensors files written a tensor at a time, which `save_file` cannot: the header comes first,
so names, shapes and types are known before any number is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.conversion.folder import DigestedFile
from rlcore.weights.export import SHARD_BYTES, shard_names, write_index

if TYPE_CHECKING:
    from torch import Tensor

NARROW = "F8_E4M3"
BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, NARROW: 1}
TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    NARROW: "float8_e4m3fn",
}
"""Names of types in safetensors, and torch's."""
SAFETENSORS_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
ALIGN = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Of its numbers."""
        return prod(self.shape) * BYTES[self.dtype]


def write_shards(
    folder: Path,
    entries: Sequence[Entry],
    tensors: Iterator[tuple[str, Tensor]],
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, str]:
    """Write tensors into files of at most `shard_bytes`, or of one larger tensor.

    Args:
        folder: there already.
        entries: of all tensors, in the order in which they come.
        tensors: the same.

    Returns:
        Digests of the files by name.
    """
    digests = {}
    shards = _shards(entries, shard_bytes)
    names = shard_names(len(shards))
    for name, shard in zip(names, shards, strict=True):
        file = DigestedFile(folder / name)
        try:
            _write_header(file, shard)
            for entry in shard:
                _write_tensor(file, entry, *next(tensors))
        finally:
            digests[name] = file.close()
    if len(names) > 1:
        where = {e.name: name for name, shard in zip(names, shards, strict=True) for e in shard}
        write_index(folder, where, sum(entry.bytes for entry in entries))
    return digests


def _shards(entries: Sequence[Entry], limit: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    used = 0
    for entry in entries:
        if shards[-1] and used + entry.bytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += entry.bytes
    return shards


def _write_header(file: DigestedFile, entries: Sequence[Entry]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        span = [offset, offset + entry.bytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGN)
    file.write(len(text).to_bytes(8, "little") + text)


def _write_tensor(file: DigestedFile, entry: Entry, name: str, tensor: Tensor) -> None:
    import torch

    told = (entry.name, entry.shape, getattr(torch, TORCH_NAMES[entry.dtype]))
    if (name, tuple(tensor.shape), tensor.dtype) != told:
        raise AssertionError(f"{name} {tensor.shape} {tensor.dtype} came where {told} was due")
    file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data, lasts=True)
