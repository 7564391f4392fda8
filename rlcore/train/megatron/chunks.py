"""A trainer's state written chunk by chunk, in the files that `rlcore.train.fsdp.shards` reads.

What is in a file is known before its first number, so a rank writes each tensor when it has come
and keeps none. Writing goes on beside whatever brings the next ones.
"""

from __future__ import annotations

import json
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rlcore.train.fsdp.shards import METADATA, shard_name

TYPES = {torch.float32: "F32", torch.int64: "I64", torch.uint8: "U8"}
"""Of what states hold, as safetensors calls them."""
ALIGN = 8
AT_ONCE = 2
"""Tensors that wait to be written or hashed, at most."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a tensor in a state."""

    name: str
    size: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Chunk:
        """All of a tensor."""
        size = tuple(tensor.shape)
        return cls(name, size, (0,) * len(size), size, tensor.dtype)

    @property
    def key(self) -> str:
        """Its name in a file."""
        return f"{self.name}@{','.join(map(str, self.offsets))}"


class ChunkWriter:
    """Writes states of always the same chunks, which ranks tell each other the first time."""

    def __init__(self) -> None:
        self._metadata: bytes | None = None

    def write(self, folder: Path, chunks: Sequence[Chunk], tensors: Iterator[Tensor]) -> None:
        """Write this rank's file below a local folder; rank 0 adds the metadata.

        Args:
            folder: made if it is not there.
            chunks: that this rank writes.
            tensors: theirs, in the same order, on any device.
        """
        if self._metadata is None:
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, list(chunks))
            self._metadata = pickle.dumps(_metadata(gathered))
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / shard_name(dist.get_rank())).open("wb") as file, beside() as do:
            file.write(_header(chunks))
            expected = iter(chunks)
            for tensor in tensors:
                do(_write, file, next(expected), tensor.to("cpu", copy=True))
        if dist.get_rank() == 0:
            (folder / METADATA).write_bytes(self._metadata)


@contextmanager
def beside() -> Iterator[Callable[..., None]]:
    """Functions called in a thread, in order; `AT_ONCE` of them wait at most."""
    waiting: deque[Future[None]] = deque()

    def do(function: Callable[..., None], *args: Any) -> None:
        while len(waiting) >= AT_ONCE:
            waiting.popleft().result()
        waiting.append(thread.submit(function, *args))

    with ThreadPoolExecutor(1) as thread:
        yield do
        for future in waiting:
            future.result()


def _write(file: BinaryIO, chunk: Chunk, tensor: Tensor) -> None:
    assert (tuple(tensor.shape), tensor.dtype) == (chunk.shape, chunk.dtype), chunk
    file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _header(chunks: Sequence[Chunk]) -> bytes:
    """Of a safetensors file."""
    sizes = [prod(chunk.shape) * chunk.dtype.itemsize for chunk in chunks]
    ends = list(accumulate(sizes))
    header = {
        chunk.key: {
            "dtype": TYPES[chunk.dtype],
            "shape": chunk.shape,
            "data_offsets": [end - size, end],
        }
        for chunk, size, end in zip(chunks, sizes, ends, strict=True)
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGN)
    return len(text).to_bytes(8, "little") + text


def _metadata(gathered: Sequence[Sequence[Chunk]]) -> Metadata:
    """What DCP knows a state by, from the chunks of each rank."""
    found: dict[str, TensorStorageMetadata] = {}
    files: dict[MetadataIndex, str] = {}
    for rank, chunks in enumerate(gathered):
        for chunk in chunks:
            offsets = torch.Size(chunk.offsets)
            entry = found.setdefault(
                chunk.name,
                TensorStorageMetadata(
                    TensorProperties(dtype=chunk.dtype), torch.Size(chunk.size), chunks=[]
                ),
            )
            entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.shape)))
            files[MetadataIndex(chunk.name, offsets)] = shard_name(rank)
    return Metadata(dict(found), storage_data=files)
