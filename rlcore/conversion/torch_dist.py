"""Megatron's `torch_dist` checkpoints, read and written without Megatron, a tensor at a time.

The format is torch DCP's: files of tensors, each as `torch.save` writes it, beside a pickle that
says where each part of each tensor lies. Megatron keeps layers of one kind as one tensor with the
layers as its first dimension, and experts likewise; both forms are read.

Invariants:
- Of the pickle nothing is made but DCP's records; whatever else it names becomes an inert object.
- A part that is missing is an error: what is read is whole.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rlcore.conversion.folder import DigestedFile
from rlcore.conversion.safetensors import SAFETENSORS_NAMES
from rlcore.errors import DataError
from rlcore.models.architecture import Architecture
from rlcore.weights.megatron import EXPERT, LAYERS, Rule, rules

if TYPE_CHECKING:
    from torch import Tensor

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""The iteration that Megatron takes for weights without an optimizer."""
METADATA = ".metadata"
CONFIG, COMMON = "metadata.json", "common.pt"
BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
NO_WEIGHTS = ("optimizer.", "chained_", "rng_state", "rerun_state", "opt_param_scheduler", "mtp.")
"""Beginnings of keys that are no weights of the decoder."""
FILE_BYTES = 5 * 10**9
"""A file is closed once it has so many."""

Region = tuple[tuple[int, int], ...]
"""First and last + 1 of each dimension."""


def checkpoint_folder(folder: Path) -> Path | None:
    """The folder of the tensors: the one that the tracker file names, or the one given; None where
    there is no such checkpoint.
    """
    tracker = folder / TRACKER
    if tracker.is_file():
        name = tracker.read_text("utf-8").strip()
        folder /= name if name == RELEASE else f"iter_{int(name):07d}"
    return folder if (folder / METADATA).is_file() else None


class TorchDist:
    """A checkpoint, whose weights are asked for by rule."""

    def __init__(self, folder: Path, arch: Architecture) -> None:
        """Find every weight.

        Raises:
            DataError: naming each that is missing, of another shape, or has no place.
        """
        self.where = str(folder)
        self._folder = folder
        metadata = read_metadata(folder)
        self._tensors = {
            key: value
            for key, value in metadata.state_dict_metadata.items()
            if hasattr(value, "chunks")
        }
        self._storage = metadata.storage_data
        self._places: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.left_out = [key for key in self._tensors if key.startswith(NO_WEIGHTS)]
        wrong = [text for rule in rules(arch) if (text := self._find(rule))]
        used = {key for key, _ in self._places.values()} | set(self.left_out)
        wrong += [
            f"{key} is of no {arch.model_type!r} model like this"
            for key in self._tensors
            if key not in used
        ]
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise DataError(f"{folder}: {'; '.join(wrong[:5])}{more}")

    def _find(self, rule: Rule) -> str | None:
        """Note where a tensor lies; what is wrong with it, if anything."""
        for key, lead in stored_keys(rule):
            if key not in self._tensors:
                continue
            found = tuple(self._tensors[key].size)[len(lead) :]
            padded = rule.is_padded and found[:1] > rule.shape[:1] and found[1:] == rule.shape[1:]
            if found != rule.shape and not padded:
                return f"{key} has shape {list(found)}, not {list(rule.shape)}"
            self._places[rule.megatron] = key, lead
            return None
        return f"{rule.megatron} is missing"

    def dtype(self, rule: Rule) -> str:
        """The type of a tensor's numbers, as safetensors writes it."""
        found = str(self._tensors[self._places[rule.megatron][0]].properties.dtype)
        name = found.removeprefix("torch.")
        return SAFETENSORS_NAMES.get(name, name)

    def read(self, rule: Rule) -> Tensor:
        """One tensor, whole, with Megatron's rows of padding.

        Raises:
            DataError: a part of it is not stored.
        """
        import torch

        key, lead = self._places[rule.megatron]
        meta = self._tensors[key]
        whole = tuple(meta.size)
        wanted: Region = (*((k, k + 1) for k in lead), *((0, n) for n in whole[len(lead) :]))
        out = torch.empty([b - a for a, b in wanted], dtype=meta.properties.dtype)
        filled = 0
        for chunk in meta.chunks:
            stored = tuple((o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            if stored == wanted:
                return self._load(key, chunk.offsets).reshape(whole[len(lead) :])
            if both := overlap(wanted, stored):
                part = self._load(key, chunk.offsets)[inside(both, stored)]
                out[inside(both, wanted)] = part
                filled += part.numel()
        if filled != out.numel():
            raise DataError(f"{self.where} lacks a part of {key}: it is no whole checkpoint")
        return out.reshape(whole[len(lead) :])

    def _load(self, key: str, offsets: Sequence[int]) -> Tensor:
        import torch
        from torch.distributed.checkpoint.metadata import MetadataIndex

        info = self._storage[MetadataIndex(key, torch.Size(offsets))]
        path = self._folder / info.relative_path
        try:
            with path.open("rb") as file:
                window = io.BufferedReader(_Window(file, info.offset, info.length))
                tensor: Tensor = torch.load(window, weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise DataError(f"{path} does not hold {key}: {error}") from None
        return tensor


class _Window(io.RawIOBase):
    """A part of a file as a file, which torch reads straight into its tensors."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length = file, start, length
        self._at = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        self._at = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        )
        return self._at

    def readinto(self, buffer: Any) -> int:
        """As of any file."""
        self._file.seek(self._start + self._at)
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        count: int = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += count
        return count


@contextmanager
def _no_checksums() -> Iterator[None]:
    """Without those that torch writes of a tensor, and never reads: the file has its digest."""
    import torch

    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _alone(tensor: Tensor) -> Tensor:
    """A tensor whose storage holds nothing else: torch writes all of a storage."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def stored_keys(rule: Rule) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The keys that a tensor may have, with its index in the leading dimensions of that key."""
    key = rule.megatron
    if rule.layer is None:
        yield key, ()
        return
    stacked = key.replace(f"{LAYERS}.{rule.layer}.", f"{LAYERS}.", 1)
    if rule.expert is None:
        yield key, ()
        yield stacked, (rule.layer,)
        return
    own, all_of_them = EXPERT.format(e=rule.expert), EXPERT.removesuffix(".{e}")
    yield key.replace(own, all_of_them), (rule.expert,)
    yield stacked.replace(own, all_of_them), (rule.layer, rule.expert)
    yield key, ()


def overlap(a: Region, b: Region) -> Region:
    """What two regions share; empty if nothing."""
    both = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return both if all(p < q for p, q in both) else ()


def inside(part: Region, whole: Region) -> tuple[slice, ...]:
    """A region as indices of a tensor that holds another."""
    return tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(part, whole, strict=True))


def read_metadata(folder: Path) -> Any:
    """What a checkpoint holds, and where.

    Raises:
        DataError: it is not to be read.
    """
    try:
        with (folder / METADATA).open("rb") as file:
            metadata = _Records(file).load()
    except Exception as error:
        # A pickle that is damaged raises anything.
        raise DataError(f"{folder / METADATA} is no checkpoint's metadata: {error}") from None
    if not hasattr(metadata, "state_dict_metadata"):
        raise DataError(f"{folder / METADATA} is no checkpoint's metadata")
    return metadata


class _Inert:
    """Stands for an object of a class that is not wanted: takes anything, does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass

    def __hash__(self) -> int:
        return 0


class _Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """A record of DCP's, or an inert class in place of any other."""
        from rlcore.train.fsdp.shards import is_of_a_plan

        is_place = (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
        if is_place or is_of_a_plan(module, name):
            return super().find_class(module, name)
        if name == "MCoreMetadata":
            return super().find_class("torch.distributed.checkpoint.metadata", "Metadata")
        return _Inert


class TorchDistWriter:
    """Writes a checkpoint of weights into an empty folder."""

    def __init__(self, folder: Path, arch: Architecture, file_bytes: int = FILE_BYTES) -> None:
        self._root = folder
        self._folder = folder / RELEASE
        self._folder.mkdir(parents=True)
        self._layers, self._experts = arch.num_hidden_layers, arch.num_experts
        # What megatron-core itself does: layers of one kind are one tensor.
        self._stacked = arch.num_experts == 0
        self._file_bytes = file_bytes
        self._file: Any = None
        self.digests: dict[str, str] = {}
        """Of the files of tensors that are finished, by path in the folder."""
        self._count = 0
        self._tensors: dict[str, Any] = {}
        self._storage: dict[Any, Any] = {}

    def add(self, rule: Rule, tensor: Tensor) -> None:
        """Write one of Megatron's tensors, whole."""
        import torch
        from torch.distributed.checkpoint import metadata as dcp
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        key, lead, dims = self._key(rule)
        size = torch.Size([*dims, *tensor.shape])
        known = self._tensors.setdefault(
            key,
            dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=tensor.dtype), size, chunks=[]),
        )
        if known.properties.dtype != tensor.dtype:
            raise DataError(
                f"{rule.megatron} is {tensor.dtype}, and in other layers {known.properties.dtype}"
            )
        offsets = torch.Size([*lead, *(0 for _ in tensor.shape)])
        sizes = torch.Size([*(1 for _ in lead), *tensor.shape])
        known.chunks.append(dcp.ChunkStorageMetadata(offsets, sizes))
        name, start = self._open(), self._file.tell()
        with _no_checksums():
            torch.save(_alone(tensor.reshape(sizes).contiguous()), self._file)
        info = _StorageInfo(name, start, self._file.tell() - start)
        self._storage[dcp.MetadataIndex(key, offsets)] = info
        self._add_state(key, lead or (0,), dims or (1,))

    def _add_state(self, key: str, lead: tuple[int, ...], dims: tuple[int, ...]) -> None:
        """An empty state of the module, and of the attention beside it: megatron-core asks for that
        of each module that could compute in fp8.
        """
        import torch
        from torch.distributed.checkpoint import metadata as dcp
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        module = key.rpartition(".")[0]
        place = f"{'.'.join(map(str, lead))}_{'.'.join(map(str, dims))}"
        attention = f"{module.rpartition('.')[0]}.core_attention"
        for owner in (module, attention) if key.endswith("linear_proj.weight") else (module,):
            name = f"{owner}._extra_state/shard_{place}"
            if name not in self._tensors:
                self._tensors[name] = dcp.BytesStorageMetadata()
                file, start = self._open(), self._file.tell()
                torch.save([None], self._file)
                info = _StorageInfo(file, start, self._file.tell() - start)
                self._storage[dcp.MetadataIndex(name)] = info

    def _key(self, rule: Rule) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Key, index in its leading dimensions, and their sizes."""
        if rule.expert is not None:
            own, lead = next(stored_keys(rule))
            return own, lead, (self._experts,)
        if rule.layer is not None and self._stacked:
            _, (key, lead) = stored_keys(rule)
            return key, lead, (self._layers,)
        return rule.megatron, (), ()

    def _open(self) -> str:
        """The name of the file that takes the next tensor."""
        if self._file is not None and self._file.tell() >= self._file_bytes:
            self._close()
        if self._file is None:
            self._count += 1
            self._file = DigestedFile(self._folder / self._name)
        return self._name

    @property
    def _name(self) -> str:
        return f"__{self._count - 1}_0.distcp"

    def _close(self) -> None:
        if self._file is not None:
            self.digests[f"{RELEASE}/{self._name}"] = self._file.close()
            self._file = None

    def finish(self) -> None:
        """Write what says where everything is, and what makes it a checkpoint of Megatron's."""
        import torch
        from torch.distributed.checkpoint.metadata import Metadata

        self._close()
        metadata = Metadata(self._tensors, planner_data={}, storage_data=self._storage)
        (self._folder / METADATA).write_bytes(pickle.dumps(metadata))
        torch.save({"checkpoint_version": 3.0, "iteration": 0}, self._folder / COMMON)
        (self._folder / CONFIG).write_text(json.dumps(BACKENDS) + "\n", "utf-8")
        (self._root / TRACKER).write_text(RELEASE, "utf-8")
