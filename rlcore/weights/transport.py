"""How new weights travel: as a folder on a disk that both sides see, or over HTTP.

Others are `rlcore.weights.distributed`, `handles` and `delta`.

`prepare` runs while the engines still work, `send` while they are paused.

Invariants:
- `disk`: a folder appears whole; that of the last confirmed version stays until the next is
  confirmed.
- `tensor`: a bucket reaches every engine before the next one; while it is on its way the next is
  gathered, and nothing beyond these two and the tensor that comes then is held.
  Until the last bucket is in, the engines report the version with `PARTIAL` behind it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlcore.rollout.client import EngineClient
from rlcore.train.trainer import DType
from rlcore.weights.export import (
    Adapter,
    buckets_and_last,
    write_adapter,
    write_config,
    write_tensors,
)
from rlcore.weights.wire import safetensors_parts

if TYPE_CHECKING:
    from torch import Tensor

PARTIAL = "-partial"
Tensors = Iterator[tuple[str, "Tensor"]]
Buckets = Iterator[tuple[dict[str, "Tensor"], bool]]
Deliver = Callable[[dict[str, "Tensor"], str], Awaitable[None]]


class Transport(Protocol):
    """One way for weights to reach engines; made anew for each sync, on every rank.

    What `parts` gives is gathered from all ranks, so all of them draw it to its end; the rest is
    for rank 0.
    """

    def parts(self, tensors: Tensors) -> Iterator[Any]:
        """What is to be sent."""

    def prepare(self, parts: Iterator[Any]) -> dict[str, float]:
        """What can be done before the engines pause; figures of that."""

    async def send(self, engines: Sequence[EngineClient], parts: Iterator[Any]) -> None:
        """Give every engine all weights, the version with the last of them."""

    def confirmed(self) -> None:
        """Every engine holds the new version."""


class DiskTransport:
    """A safetensors folder below `root`, which engines of the same machine or file system load."""

    def __init__(
        self,
        root: Path,
        model_folder: Path,
        version: str,
        dtype: DType,
        *,
        flush_cache: bool,
        written: Callable[[Path], None] | None = None,
    ) -> None:
        """`written` is told of the folder, before the engines are."""
        self._flush_cache = flush_cache
        self._root = root
        self._written = written
        self._model_folder = model_folder
        self._version = version
        self._dtype = dtype
        self.folder = root / f"weights-{version}"

    def parts(self, tensors: Tensors) -> Tensors:
        """The tensors as they are."""
        return tensors

    def prepare(self, parts: Tensors) -> dict[str, float]:
        """Write the folder, one file a bucket."""
        staging = self._root / f".weights-{self._version}.partial"
        for old in (staging, self.folder):
            shutil.rmtree(old, ignore_errors=True)
        staging.mkdir(parents=True)
        write_config(self._model_folder, staging, self._dtype)
        write_tensors(staging, parts)
        staging.rename(self.folder)
        if self._written is not None:
            self._written(self.folder)
        return {}

    async def send(self, engines: Sequence[EngineClient], parts: Tensors) -> None:
        """Have the engines load the folder."""
        paths = [str(self.folder)] * len(engines)
        await load_folders(engines, paths, self._version, flush_cache=self._flush_cache)

    def confirmed(self) -> None:
        """Remove the folders of other versions."""
        for folder in self._root.glob("weights-*"):
            if folder != self.folder:
                shutil.rmtree(folder, ignore_errors=True)


class AdapterTransport:
    """The trained adapter as a folder below `root`, which engines add to the starting model."""

    def __init__(self, root: Path, version: str, adapter: Adapter) -> None:
        self._root = root
        self._version = version
        self._adapter = adapter
        self.folder = root / f"adapter-{version}"

    def parts(self, tensors: Tensors) -> Tensors:
        """None of the model's own."""
        return iter(())

    def prepare(self, parts: Tensors) -> dict[str, float]:
        """Write the folder."""
        staging = self._root / f".adapter-{self._version}.partial"
        for old in (staging, self.folder):
            shutil.rmtree(old, ignore_errors=True)
        self._root.mkdir(parents=True, exist_ok=True)
        write_adapter(staging, self._adapter)
        staging.rename(self.folder)
        return {}

    async def send(self, engines: Sequence[EngineClient], parts: Tensors) -> None:
        """Have the engines load the folder."""
        await together(*(e.update_adapter(str(self.folder), self._version) for e in engines))

    def confirmed(self) -> None:
        """Remove the folders of other versions."""
        for folder in self._root.glob("adapter-*"):
            if folder != self.folder:
                shutil.rmtree(folder, ignore_errors=True)


class TensorTransport:
    """Safetensors blobs within HTTP requests."""

    def __init__(self, version: str, bucket_bytes: int) -> None:
        self._version = version
        self._bucket_bytes = bucket_bytes

    def parts(self, tensors: Tensors) -> Buckets:
        """Buckets."""
        return buckets_and_last(tensors, self._bucket_bytes)

    def prepare(self, parts: Buckets) -> dict[str, float]:
        """Nothing: tensors are gathered while they are sent."""
        return {}

    async def send(self, engines: Sequence[EngineClient], parts: Buckets) -> None:
        """Bucket by bucket, each to all engines at once."""

        async def deliver(bucket: dict[str, Tensor], version: str) -> None:
            blob = safetensors_parts(bucket)
            await together(
                *(
                    e.update_weights_from_tensor(
                        [blob], version, load_format="safetensors", flush_cache=False
                    )
                    for e in engines
                )
            )

        await in_turn(parts, self._version, deliver)

    def confirmed(self) -> None:
        """Nothing is left behind."""


async def load_folders(
    engines: Sequence[EngineClient], folders: Sequence[str], version: str, *, flush_cache: bool
) -> None:
    """Have each engine load a folder of its machine."""
    pairs = zip(engines, folders, strict=True)
    await together(
        *(e.update_weights_from_disk(at, version, flush_cache=flush_cache) for e, at in pairs)
    )


async def in_turn(parts: Buckets, version: str, deliver: Deliver) -> None:
    """Deliver buckets one after another; while one is on its way the next is gathered.

    Args:
        parts: see `buckets_and_last`.
        version: that the engines report once the last bucket is in.
        deliver: sends a bucket, and the version that it makes.
    """
    # In a thread, so that what is on its way goes on.
    gathering = asyncio.ensure_future(asyncio.to_thread(next, parts, None))
    while (part := await gathering) is not None:
        bucket, last = part
        gathering = asyncio.ensure_future(asyncio.to_thread(next, parts, None))
        try:
            await deliver(bucket, version if last else version + PARTIAL)
        except BaseException:
            # Whoever draws what is left must find nobody at it.
            await asyncio.gather(gathering, return_exceptions=True)
            raise


async def together(*calls: Any) -> list[Any]:
    """Wait for all, then raise the first error: no request is left running unseen."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
