"""The trainer's side: versions of the weights in the store, each as what changed since the last.

Its own copy of the last version is a mirror's folder: a trainer that was started again takes it up
from the store, or begins with a whole version where there is none.

Invariants:
- A version's record is written after its changes, and noted as the newest after that.
- No more than a part, a file of the own copy and two tensors are held in memory.
- Weights that are published already under their version are not published again.
"""

from __future__ import annotations

import io
import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlcore.errors import Corrupt
from rlcore.store.deltas import (
    Index,
    IndexRef,
    TensorChange,
    read_head,
    read_index,
    write_head,
    write_index,
)
from rlcore.store.manifest import FileRef, sha256_hex
from rlcore.store.objects import Objects
from rlcore.store.paths import delta_prefix, new_attempt
from rlcore.weights.delta.codec import encode
from rlcore.weights.delta.mirror import FolderTensors, Mirror, bits_of, digest_of, dtype_name
from rlcore.weights.export import write_tensors

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("sluice.weights")
Tensors = Iterator[tuple[str, "Tensor"]]


@dataclass(frozen=True)
class Published:
    """A version in the store."""

    ref: IndexRef
    index: Index

    @property
    def line(self) -> tuple[IndexRef, ...]:
        """All versions that it is made of, itself the last."""
        return (*self.index.chain, self.ref)


class Publisher:
    """Writes the versions of one run."""

    def __init__(
        self, objects: Objects, run_id: str, folder: Path, *, base_interval: int, part_bytes: int
    ) -> None:
        """
        Args:
            objects: the store.
            run_id: of the run.
            folder: local, for the own copy.
            base_interval: how many versions of changes follow on a whole one.
            part_bytes: of a file in the store, at most, or of one tensor's changes.
        """
        self._objects = objects
        self._run_id = run_id
        self._folder = folder
        self._interval = base_interval
        self._part_bytes = part_bytes
        self._mirror = Mirror(objects, folder, part_bytes)
        self._head: Published | None = None
        self._old: tuple[IndexRef, ...] = ()
        """Versions that nothing builds on any more, once the newest has arrived."""
        self.figures: dict[str, float] = {}
        """Of the last version: bytes in all and in the store, share of tensors' bytes."""

    def publish(self, version: str, config: str, tensors: Tensors) -> IndexRef:
        """Have weights in the store under a version.

        Args:
            version: that engines will report.
            config: the model's config.json.
            tensors: all weights on the CPU, by name.
        """
        head = self._head or self._resumed()
        # The same version again is for engines that were started again.
        due = head is not None and len(head.index.chain) >= self._interval
        base = None if head is None or (due and head.index.version != version) else head
        return self._write(version, config, tensors, base, head)

    def publish_whole(self) -> IndexRef:
        """The newest version again, from the own copy, building on no other."""
        head = self._head
        assert head is not None
        with ExitStack() as stack:
            held = FolderTensors(self._mirror.folder_of(head.ref), stack)

            def tensors() -> Tensors:
                for change in head.index.tensors:
                    tensor = held.get(change.name, change.dtype, change.shape)
                    assert tensor is not None
                    yield change.name, tensor

            return self._write(head.index.version, head.index.config, tensors(), None, head)

    def confirmed(self) -> None:
        """All engines hold the newest version: what it does not build on goes."""
        assert self._head is not None
        self._mirror.keep_only(self._head.ref)
        for ref in self._old:
            self._objects.delete_tree(ref.prefix)
        self._old = ()

    def _resumed(self) -> Published | None:
        """What an earlier trainer has published last, with the own copy at it."""
        ref = read_head(self._objects, self._run_id)
        if ref is None:
            return None
        try:
            self._mirror.pull(ref)
            return Published(ref, read_index(self._objects, ref))
        except Corrupt as error:
            log.warning("%s; the weights are published whole", error)
            return None

    def _write(
        self,
        version: str,
        config: str,
        tensors: Tensors,
        base: Published | None,
        head: Published | None,
    ) -> IndexRef:
        staging = self._folder / ".new.partial"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        prefix = delta_prefix(self._run_id, version, new_attempt())
        parts = _Parts(self._objects, prefix, self._part_bytes)
        with ExitStack() as stack:
            held = FolderTensors(None if base is None else self._mirror.folder_of(base.ref), stack)
            write_tensors(staging, parts.added(tensors, held), self._part_bytes)
        parts.close()
        (staging / "config.json").write_text(config, "utf-8")
        self.figures = parts.figures
        if base is not None and not parts.refs and base.index.version == version:
            shutil.rmtree(staging)
            self._head = base
            return base.ref
        index = Index(
            version=version,
            config=config,
            chain=() if base is None else base.line,
            parts=tuple(parts.refs),
            tensors=tuple(parts.changes),
        )
        ref = write_index(self._objects, prefix, index)
        staging.rename(self._mirror.folder_of(ref))
        write_head(self._objects, self._run_id, ref)
        if base is None and head is not None:
            self._old += head.line
        self._head = Published(ref, index)
        return ref


@dataclass
class _Parts:
    """Changes on their way into files of the store."""

    objects: Objects
    prefix: str
    limit: int
    refs: list[FileRef] = field(default_factory=list)
    changes: list[TensorChange] = field(default_factory=list)
    whole_bytes: int = 0
    _open: io.BytesIO = field(default_factory=io.BytesIO)

    @property
    def figures(self) -> dict[str, float]:
        """How much of the weights went into the store."""
        written = float(sum(ref.bytes for ref in self.refs))
        return {
            "bytes": float(self.whole_bytes),
            "delta_bytes": written,
            "delta_share": written / max(self.whole_bytes, 1),
        }

    def added(self, tensors: Tensors, held: FolderTensors) -> Tensors:
        """The same tensors, each as it has been added."""
        for name, given in tensors:
            tensor = given.contiguous()
            dtype, shape = dtype_name(tensor), tuple(tensor.shape)
            old = held.get(name, dtype, shape)
            offset = self._open.tell()
            if old is None or not np.array_equal(bits_of(old), bits_of(tensor)):
                for block in encode(None if old is None else bits_of(old), bits_of(tensor)):
                    self._open.write(block)
            self.changes.append(
                TensorChange(
                    name=name,
                    dtype=dtype,
                    shape=shape,
                    part=len(self.refs),
                    offset=offset,
                    bytes=self._open.tell() - offset,
                    whole=old is None,
                    sha256=digest_of(tensor),
                )
            )
            self.whole_bytes += tensor.nbytes
            if self._open.tell() >= self.limit:
                self.close()
            yield name, tensor

    def close(self) -> None:
        """Store what has been gathered."""
        data = self._open.getvalue()
        if data:
            key = f"{self.prefix}/part-{len(self.refs):05d}"
            self.objects.put(key, data)
            self.refs.append(FileRef(key=key, bytes=len(data), sha256=sha256_hex(data)))
        self._open = io.BytesIO()
