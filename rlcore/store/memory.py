"""memory:// : a store in this process, for tests. Invariant: every operation holds one lock."""

import hashlib
import io
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from rlcore.errors import NotFound
from rlcore.store.objects import Objects, Option, check_key

_LOCK = threading.RLock()


class MemoryObjects(Objects):
    """The store in fsspec's in-memory file system, shared by all who open the same name."""

    def __init__(self, url: str, options: Mapping[str, Option] | None, retry_s: float) -> None:
        name = url.removeprefix("memory://").strip("/") or "root"
        super().__init__(f"memory://{name}", options, retry_s)
        self._fs = MemoryFileSystem()

    @property
    def filesystem(self) -> AbstractFileSystem:
        return self._fs

    def read_with_tag(self, key: str) -> tuple[bytes, str]:
        with _LOCK:
            try:
                data = bytes(self._fs.cat_file(self.url(key)))
            except (FileNotFoundError, IsADirectoryError) as error:
                raise NotFound(f"{self.url(key)} does not exist") from error
        return data, hashlib.sha256(data).hexdigest()

    def put(self, key: str, data: bytes) -> None:
        with _LOCK:
            self._fs.pipe_file(self.url(key), data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with _LOCK:
            if self._fs.isfile(self.url(key)):
                return False
            self.put(key, data)
            return True

    def compare_and_swap(self, key: str, data: bytes, tag: str | None) -> bool:
        with _LOCK:
            if tag is None:
                return self.put_if_absent(key, data)
            if not self.exists(key) or self.read_with_tag(key)[1] != tag:
                return False
            self.put(key, data)
            return True

    @contextmanager
    def writer(self, key: str) -> Iterator[BinaryIO]:
        check_key(key)
        buffer = io.BytesIO()
        yield buffer
        self.put(key, buffer.getvalue())

    def open_read(self, key: str) -> BinaryIO:
        return io.BytesIO(self.get(key))

    def upload(self, local_path: str | Path, key: str) -> None:
        self.put(key, Path(local_path).read_bytes())

    def download(self, key: str, local_path: str | Path) -> None:
        Path(local_path).write_bytes(self.get(key))

    def size(self, key: str) -> int:
        return len(self.get(key))

    def exists(self, key: str) -> bool:
        with _LOCK:
            return bool(self._fs.isfile(self.url(key)))

    def delete(self, key: str) -> None:
        with _LOCK:
            if self.exists(key):
                self._fs.rm_file(self.url(key))

    def delete_tree(self, prefix: str) -> None:
        with _LOCK:
            for key in self.list(prefix):
                self.delete(key)

    def children(self, prefix: str) -> list[str]:
        steps = len(prefix.split("/"))
        return sorted(
            {key.split("/")[steps] for key in self.list(prefix) if key.count("/") > steps}
        )

    def list(self, prefix: str) -> list[str]:
        root = self.root.removeprefix("memory:/")
        with _LOCK:
            found = self._fs.find(self.url(prefix))
        keys = [str(path).removeprefix(f"{root}/") for path in found]
        return sorted(key for key in keys if key != prefix)
