"""Storage for torch DCP: each rank's shards in one safetensors file, the metadata beside them.

DCP plans who writes and who reads what, so a state can be read by any number of ranks; this module
only moves the bytes. Its own files hold a zip archive for each tensor, which for a small model
costs more than the training step's bookkeeping together; safetensors is read in place and needs no
unpickling.

A chunk of a tensor is stored under `name@offsets`, such as `model.lm_head.weight@0,0`.

Invariants:
- Files are `shard-{rank}.safetensors` and `.metadata`; nothing else is written.
- A reader maps the files and touches only what its own shards overlap.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

METADATA = ".metadata"


def shard_name(rank: int) -> str:
    """The file of one rank's shards."""
    return f"shard-{rank:05d}.safetensors"


def _key(index: MetadataIndex) -> str:
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class ShardWriter(StorageWriter):
    """Writes below a local folder. The state may hold tensors only."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._file = shard_name(rank)

    def reset(self, checkpoint_id: str | os.PathLike[Any] | None = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """DCP's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """DCP's plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks."""
        tensors, results = {}, []
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            tensor = tensor.detach().cpu().contiguous()
            tensors[_key(item.index)] = tensor
            results.append(WriteResult(item.index, tensor.nbytes, self._file))
        save_file(tensors, self._folder / self._file)
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata; only the coordinator is asked to."""
        metadata.storage_data = {r.index: r.storage_data for part in results for r in part}
        (self._folder / METADATA).write_bytes(pickle.dumps(metadata))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[Any]) -> bool:
        """Any local path."""
        return True


class ShardReader(StorageReader):
    """Reads what `ShardWriter` wrote."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[MetadataIndex, str] = {}

    def reset(self, checkpoint_id: str | os.PathLike[Any] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the state holds, and where."""
        metadata: Metadata = pickle.loads((self._folder / METADATA).read_bytes())
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Note which file holds which chunk."""
        self._files = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """DCP's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """DCP's plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the parts of chunks that this rank's shards overlap."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._files[item.storage_index], []).append(item)
        for name, items in by_file.items():
            with safe_open(self._folder / name, framework="pt") as file:
                for item in items:
                    chunk = file.get_slice(_key(item.storage_index))
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_part(chunk, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[Any]) -> bool:
        """Any local path."""
        return True


def _part(chunk: Any, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """A block of a stored chunk, read without the rest of it."""
    block = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
    part: torch.Tensor = chunk[block] if block else chunk[...]
    return part
