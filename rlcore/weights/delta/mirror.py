"""A local model folder that follows what is published in the store.

Invariants:
- A folder has its name once it is whole and every tensor's digest was found right; what was left
  half written is written again.
- No more than one file of the new folder and the tensors of one name are held in memory.
- Where the folder that was held turns out damaged, the version is made from the store alone.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from rlcore.errors import Corrupt
from rlcore.store.deltas import Index, IndexRef, TensorChange, read_index
from rlcore.store.files import download_folder
from rlcore.store.objects import Objects
from rlcore.weights.delta.codec import Bits, decode
from rlcore.weights.export import write_tensors

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("sluice.weights")


class Mirror:
    """One local folder for versions of one run's weights. Not safe to use from threads at once."""

    def __init__(self, objects: Objects, folder: Path, file_bytes: int) -> None:
        """
        Args:
            objects: the store.
            folder: for this mirror alone.
            file_bytes: of the files that are written, at most, or of one larger tensor.
        """
        self._objects = objects
        self._folder = folder
        self._file_bytes = file_bytes

    def folder_of(self, ref: IndexRef) -> Path:
        """Where a version lies, once it is there."""
        return self._folder / f"weights-{ref.sha256[:32]}"

    def pull(self, ref: IndexRef) -> Path:
        """Have a version as a Hugging Face folder: its config and weights.

        Raises:
            Corrupt: what is in the store is damaged or gone.
        """
        target = self.folder_of(ref)
        if target.is_dir():
            return target
        index = read_index(self._objects, ref)
        line = [*index.chain, ref]
        held = next((k for k, one in reversed([*enumerate(line)]) if self._has(one)), None)
        if held is not None:
            try:
                return self._build(line[held + 1 :], self.folder_of(line[held]), target)
            except Corrupt as error:
                log.warning("%s; the weights are fetched anew", error)
        return self._build(line, None, target)

    def keep_only(self, *refs: IndexRef) -> None:
        """Remove all versions but these, and what was left half made."""
        kept = {self.folder_of(ref) for ref in refs}
        for path in self._folder.glob("*"):
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _has(self, ref: IndexRef) -> bool:
        return self.folder_of(ref).is_dir()

    def _build(self, line: Sequence[IndexRef], base: Path | None, target: Path) -> Path:
        """Make a version of the one in `base`, or of none, by all changes since."""
        staging = target.with_name(f".{target.name}.partial")
        fetched = target.with_name(f".{target.name}.fetched")
        for old in (staging, fetched):
            shutil.rmtree(old, ignore_errors=True)
        staging.mkdir(parents=True)
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, fetched, ignore_errors=True)
            changes = [self._fetch(one, fetched / str(k)) for k, one in enumerate(line)]
            held = FolderTensors(base, stack)
            write_tensors(staging, _rebuilt(changes, held), self._file_bytes)
        (staging / "config.json").write_text(changes[-1].index.config, "utf-8")
        staging.rename(target)
        return target

    def _fetch(self, ref: IndexRef, folder: Path) -> _Changes:
        index = read_index(self._objects, ref)
        download_folder(self._objects, list(index.parts), ref.prefix, folder)
        parts = [
            np.memmap(folder / part.key.rpartition("/")[2], np.uint8, "r") for part in index.parts
        ]
        return _Changes(index, parts)


class FolderTensors:
    """The tensors of a Hugging Face folder by name; of none without one."""

    def __init__(self, folder: Path | None, stack: ExitStack) -> None:
        """The files stay open until the stack is closed."""
        self._files: dict[str, Any] = {}
        for path in [] if folder is None else sorted(folder.glob("*.safetensors")):
            try:
                file = stack.enter_context(safe_open(str(path), framework="pt"))
            except SafetensorError as error:
                raise Corrupt(f"{path} is no safetensors file: {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)

    def get(self, name: str, dtype: str, shape: Sequence[int]) -> Tensor | None:
        """A tensor, if it is there and of that form."""
        if name not in self._files:
            return None
        tensor: Tensor = self._files[name].get_tensor(name)
        same = dtype_name(tensor) == dtype and tuple(tensor.shape) == tuple(shape)
        return tensor if same else None


class _Changes:
    """A version's record with its files."""

    def __init__(self, index: Index, parts: Sequence[Any]) -> None:
        self.index = index
        self._parts = parts
        self.of = {change.name: change for change in index.tensors}

    def data(self, change: TensorChange) -> memoryview:
        """A tensor's changes."""
        part = self._parts[change.part][change.offset : change.offset + change.bytes]
        return memoryview(part)


def _rebuilt(line: Sequence[_Changes], held: FolderTensors) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the last version, found right by its digest."""
    import torch

    for last in line[-1].index.tensors:
        if any(last.name not in one.of for one in line):
            raise Corrupt(f"{last.name} is not in all versions that the last one builds on")
        changes = [one.of[last.name] for one in line]
        first = max((k for k, change in enumerate(changes) if change.whole), default=None)
        if first is not None:
            tensor = torch.zeros(last.shape, dtype=getattr(torch, last.dtype))
        else:
            found = held.get(last.name, last.dtype, last.shape)
            if found is None:
                raise Corrupt(f"the weights that are held have no {last.name} of that form")
            tensor = found.clone()
        for one, change in [*zip(line, changes, strict=True)][first or 0 :]:
            if change.bytes:
                decode(one.data(change), bits_of(tensor))
        if digest_of(tensor) != last.sha256:
            raise Corrupt(f"{last.name} of version {line[-1].index.version} has other bytes")
        yield last.name, tensor


def bits_of(tensor: Tensor) -> Bits:
    """A contiguous CPU tensor's elements as unsigned integers, flat, over the same memory."""
    import torch

    width = tensor.element_size()
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    bits: Bits = tensor.reshape(-1).view(signed).numpy().view(f"u{width}")
    return bits


def digest_of(tensor: Tensor) -> str:
    """SHA-256 of a contiguous CPU tensor's bytes."""
    return hashlib.sha256(bits_of(tensor).view(np.uint8).data).hexdigest()


def dtype_name(tensor: Tensor) -> str:
    """`bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")
