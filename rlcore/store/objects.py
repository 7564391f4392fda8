"""The object store behind everything: named byte strings that appear whole or not at all.

What every backend promises:
- A key is visible only once all its bytes are there, and (on a disk) durable. A writer that dies,
  at whatever point, leaves nothing visible.
- `put_if_absent` has exactly one winner among any number of threads, processes and machines.
- `compare_and_swap` replaces only the content its caller has read.
- A request that failed on the way is tried again inside, for at most `retry_s` seconds, and a try
  that did arrive counts as done: no caller has to know.
- Errors are `StoreError` (`NotFound` for a missing key), each naming the URL.

Backends: `local` (file://), `s3` (s3://) and `memory` (memory://, one process, for tests).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit

from rlcore.errors import StoreError
from rlcore.store.paths import new_attempt

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

RETRY_S = 75.0
"""Seconds a remote store may be away before an operation fails."""

Option = str | int | float | bool
"""A value of a file system argument."""


class Objects(ABC):
    """One root folder of one store. Safe to use from threads, and to pickle."""

    reads_may_be_stale = False
    """Whether a read may return what lay there before a write that has ended."""

    def __init__(self, root: str, options: Mapping[str, Option] | None, retry_s: float) -> None:
        self.root = root
        self._options = dict(options or {})
        self._retry_s = retry_s

    @staticmethod
    def open(
        url: str | Path,
        options: Mapping[str, Option] | None = None,
        *,
        retry_s: float = RETRY_S,
    ) -> "Objects":
        """Open a root. Nothing is written and no server is asked.

        Args:
            url: a path or file://, s3://bucket/prefix or memory://name.
            options: arguments of the file system, such as `endpoint_url`, `key`, `secret`,
                `region_name` for s3. The variables FSSPEC_S3_ENDPOINT_URL, FSSPEC_S3_KEY and so on
                say the same.
            retry_s: how long a remote store may be away, in seconds.

        Raises:
            StoreError: the scheme is not known, or the path is no folder.
        """
        text = str(url)
        scheme = urlsplit(text).scheme if "://" in text else "file"
        if scheme == "file":
            from rlcore.store.local import LocalObjects

            return LocalObjects(text, options, retry_s)
        if scheme == "s3":
            from rlcore.store.s3 import S3Objects

            return S3Objects(text, options, retry_s)
        if scheme == "memory":
            from rlcore.store.memory import MemoryObjects

            return MemoryObjects(text, options, retry_s)
        raise StoreError(
            f"{text}: scheme {scheme!r} is not known; use a path, file://, s3:// or memory://"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.root, self._options, self._retry_s)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.root!r})"

    def url(self, key: str) -> str:
        """Address of a key for other tools."""
        return f"{self.root}/{check_key(key)}"

    def local_path(self, key: str) -> Path | None:
        """The file behind a key, where there is one."""
        return None

    @property
    @abstractmethod
    def filesystem(self) -> "AbstractFileSystem":
        """The fsspec file system, for readers such as duckdb."""

    @abstractmethod
    def read_with_tag(self, key: str) -> tuple[bytes, str]:
        """Content and a tag of it for `compare_and_swap`. Raises NotFound."""

    def get(self, key: str) -> bytes:
        """The content. Raises NotFound."""
        return self.read_with_tag(key)[0]

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Write, replacing what is there."""

    @abstractmethod
    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write if nothing is there. True for the one caller that wrote."""

    @abstractmethod
    def compare_and_swap(self, key: str, data: bytes, tag: str | None) -> bool:
        """Replace the content that `tag` was read with (None: nothing was there).

        False if it changed since.
        """

    @abstractmethod
    def writer(self, key: str) -> AbstractContextManager[BinaryIO]:
        """A file to write to; it appears under `key` when the block ends without an exception."""

    @abstractmethod
    def open_read(self, key: str) -> BinaryIO:
        """A seekable file to read from. Raises NotFound."""

    @abstractmethod
    def upload(self, local_path: str | Path, key: str) -> None:
        """Copy a local file into the store."""

    @abstractmethod
    def download(self, key: str, local_path: str | Path) -> None:
        """Copy a key into a local file, which appears whole. Raises NotFound."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Length in bytes. Raises NotFound."""

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Whether the key is there."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove a key; one that is not there is no error."""

    @abstractmethod
    def delete_tree(self, prefix: str) -> None:
        """Remove all keys below a folder."""

    @abstractmethod
    def children(self, prefix: str) -> list[str]:
        """Names of the folders directly below a folder, sorted."""

    def check_writable(self) -> None:
        """Write, try to overwrite with `put_if_absent`, and remove a probe.

        Raises:
            StoreError: the root cannot be written, or the server ignores the condition, so that
                two drivers could both commit the same stage.
        """
        key = f".probe-{new_attempt()}"
        try:
            first = self.put_if_absent(key, b"probe")
            second = self.put_if_absent(key, b"another")
        finally:
            self.delete(key)
        if not first or second:
            raise StoreError(
                f"{self.root}: the server does not honour conditional writes (If-None-Match), so "
                "two drivers could commit the same stage; use a store that does (AWS S3, MinIO, "
                "SeaweedFS, Ceph, or a local path)"
            )

    @abstractmethod
    def list(self, prefix: str) -> list[str]:
        """All keys below a folder, sorted.

        For collection of garbage: what is done is never learnt this way.
        """


def check_key(key: str) -> str:
    """The key itself, if it stays below the root.

    Raises:
        StoreError: it is empty, absolute, or has empty, '.' or '..' steps.
    """
    if (
        not key
        or "\0" in key
        or "\\" in key
        or any(step in ("", ".", "..") for step in key.split("/"))
    ):
        raise StoreError(
            f"key {key!r} does not stay below the store's root; use names joined by single '/'"
        )
    return key


def _reopen(root: str, options: dict[str, Option], retry_s: float) -> Objects:
    return Objects.open(root, options, retry_s=retry_s)
