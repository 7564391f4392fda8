"""Storage for torch DCP: each rank's shards in one safetensors file, the metadata beside them.

DCP plans who writes and who reads what, so a state can be read by any number of ranks; this module
only moves the bytes. Its own files hold a zip archive for each tensor, which for a small model
costs more than the training step's bookkeeping together; safetensors is read in place and needs no
unpickling.

A chunk of a tensor is stored under `name@offsets`, such as `model.lm_head.weight@0,0`.

Invariants:
- Files are `shard-{rank}.safetensors` and `.metadata`; nothing else is written.
- The metadata is a pickle, of which nothing is made but DCP's own records.
- A reader maps the files and touches only what its own shards overlap.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    Metadata,
    StorageReader,
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor
from torch.futures import Future

METADATA = ".metadata"


def shard_name(rank: int) -> str:
    """The file of one rank's shards."""
    return f"shard-{rank:05d}.safetensors"


def _key(index: MetadataIndex) -> str:
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


class ShardWriter:
    """Writes states of always the same tensors. DCP's plan depends on names, shapes and placements
    alone, and takes longer than writing a small model: it is made at the first save.
    """

    def __init__(self) -> None:
        self._plan: tuple[list[tuple[str, str]], bytes] | None = None

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write this rank's chunks below a local folder; rank 0 adds the metadata.

        All ranks call it; only the first time do they wait for each other.
        """
        if self._plan is None:
            self._plan = _plan_save(tensors)
        chunks, metadata = self._plan
        folder.mkdir(parents=True, exist_ok=True)
        rank = dist.get_rank()
        own = {key: _held(tensors[name]).cpu().contiguous() for key, name in chunks}
        save_file(own, folder / shard_name(rank))
        if rank == 0:
            (folder / METADATA).write_bytes(metadata)


def _plan_save(tensors: Mapping[str, Tensor]) -> tuple[list[tuple[str, str]], bytes]:
    """(key and tensor name of each chunk that this rank writes, the metadata file)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), is_coordinator=rank == 0)
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, planner.create_local_plan())
    # A function of the gathered plans alone, so every rank comes to the same.
    plans, metadata = planner.create_global_plan(gathered)
    metadata.storage_data = {
        item.index: shard_name(r) for r, plan in enumerate(plans) for item in plan.items
    }
    own = [(_key(item.index), item.index.fqn) for item in plans[rank].items]
    return own, pickle.dumps(metadata)


def _held(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: one chunk."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _PlanUnpickler(pickle.Unpickler):
    """Makes what DCP's metadata is made of, and nothing else: a pickle may name any function."""

    def find_class(self, module: str, name: str) -> Any:
        """The class, if it is one of a plan's."""
        if not is_of_a_plan(module, name):
            raise pickle.UnpicklingError(f"{METADATA} names {module}.{name}, which no plan holds")
        return super().find_class(module, name)


_OF_A_PLAN = frozenset(
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
) | {("torch", "Size"), ("torch.serialization", "_get_layout")}


def is_of_a_plan(module: str, name: str) -> bool:
    """Whether a class is one of those that DCP's metadata is made of."""
    dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
    return dtype or (module, name) in _OF_A_PLAN


class ShardReader(StorageReader):
    """Reads what `ShardWriter` wrote."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[MetadataIndex, str] = {}

    def reset(self, checkpoint_id: str | os.PathLike[Any] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the state holds, and where."""
        with (self._folder / METADATA).open("rb") as file:
            metadata: Metadata = _PlanUnpickler(file).load()
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
        return _done()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[Any]) -> bool:
        """Any local path."""
        return True


def _part(chunk: Any, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """A block of a stored chunk, read without the rest of it."""
    block = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
    part: torch.Tensor = chunk[block] if block else chunk[...]
    return part
