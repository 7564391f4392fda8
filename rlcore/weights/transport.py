"""How new weights travel: as a folder on a disk that both sides see, or over HTTP.

`prepare` runs while the engines still work, `send` while they are paused.

Invariants:
- `disk`: a folder appears whole; that of the last confirmed version stays until the next is
  confirmed.
- `tensor`: at most one bucket of weights is held, and it reaches every engine before the next one.
  Until the last bucket is in, the engines report the version with `PARTIAL` behind it.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlcore.rollout.client import EngineClient
from rlcore.train.trainer import DType
from rlcore.weights.export import NamedTensors, buckets, write_config, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 256 * 2**20
PARTIAL = "-partial"


class Transport(Protocol):
    """One way for weights to reach engines; made anew for each sync."""

    def prepare(self, tensors: NamedTensors) -> None:
        """What can be done before the engines pause."""

    async def send(self, engines: Sequence[EngineClient], tensors: NamedTensors) -> None:
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
        written: Callable[[Path], None] | None = None,
    ) -> None:
        """`written` is told of the folder, before the engines are."""
        self._root = root
        self._written = written
        self._model_folder = model_folder
        self._version = version
        self._dtype = dtype
        self.folder = root / f"weights-{version}"

    def prepare(self, tensors: NamedTensors) -> None:
        """Write the folder, one file a bucket."""
        staging = self._root / f".weights-{self._version}.partial"
        for old in (staging, self.folder):
            shutil.rmtree(old, ignore_errors=True)
        staging.mkdir(parents=True)
        write_config(self._model_folder, staging, self._dtype)
        write_tensors(staging, tensors)
        staging.rename(self.folder)
        if self._written is not None:
            self._written(self.folder)

    async def send(self, engines: Sequence[EngineClient], tensors: NamedTensors) -> None:
        """Have the engines load the folder."""
        path = str(self.folder)
        await together(*(e.update_weights_from_disk(path, self._version) for e in engines))

    def confirmed(self) -> None:
        """Remove the folders of other versions."""
        for folder in self._root.glob("weights-*"):
            if folder != self.folder:
                shutil.rmtree(folder, ignore_errors=True)


class TensorTransport:
    """Safetensors blobs within HTTP requests."""

    def __init__(self, version: str, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._version = version
        self._bucket_bytes = bucket_bytes

    def prepare(self, tensors: NamedTensors) -> None:
        """Nothing: tensors are gathered while they are sent."""

    async def send(self, engines: Sequence[EngineClient], tensors: NamedTensors) -> None:
        """Bucket by bucket, each to all engines at once."""
        from safetensors.torch import save

        for bucket, last in with_last(buckets(tensors, self._bucket_bytes)):
            blob = save(bucket)
            version = self._version if last else self._version + PARTIAL
            await together(
                *(
                    e.update_weights_from_tensor(
                        [blob], version, load_format="safetensors", flush_cache=False
                    )
                    for e in engines
                )
            )

    def confirmed(self) -> None:
        """Nothing is left behind."""


def with_last(items: Iterator[dict[str, Tensor]]) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """Each item, and whether it is the last."""
    held = next(items, None)
    while held is not None:
        following = next(items, None)
        yield held, following is None
        held = following


async def together(*calls: Any) -> list[Any]:
    """Wait for all, then raise the first error: no request is left running unseen."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
