"""file:// : a folder of a local or shared disk.

Invariants:
- Bytes go to a hidden temporary file beside the target, are fsynced, and get their name by `link`
  (if absent) or `rename`. So a key is whole from the moment it can be seen.
- A new folder is fsynced into its parent before anything is put into it.
- `put`, `put_if_absent` and `compare_and_swap` fsync the folder too before they return. `writer`
  and `upload` do not: what they write counts only through a manifest, put later into the same
  folder or one above it. (An fsync costs 0.2 ms on an idle machine and a scheduler tick on a busy
  one, and an iteration has twenty.)
- Hidden names (temporary files, locks) are no keys: listings leave them out.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from rlcore.errors import NotFound, StoreError
from rlcore.store.objects import Objects, Option, check_key
from rlcore.store.paths import new_attempt


class LocalObjects(Objects):
    """The store under a local folder, which is made at the first write."""

    def __init__(self, url: str, options: Mapping[str, Option] | None, retry_s: float) -> None:
        path = Path(os.path.abspath(Path(url.removeprefix("file://")).expanduser()))
        if path.exists() and not path.is_dir():
            raise StoreError(f"{path} is not a folder; give a folder as the store's root")
        super().__init__(f"file://{path}", options, retry_s)
        self._path = path

    @property
    def filesystem(self) -> AbstractFileSystem:
        return LocalFileSystem()

    def local_path(self, key: str) -> Path:
        return self._path / check_key(key)

    def read_with_tag(self, key: str) -> tuple[bytes, str]:
        with self._sentences(key):
            data = self.local_path(key).read_bytes()
        return data, hashlib.sha256(data).hexdigest()

    def get(self, key: str) -> bytes:
        with self._sentences(key):
            return self.local_path(key).read_bytes()

    def put(self, key: str, data: bytes) -> None:
        with self.writer(key) as file:
            file.write(data)
        with self._sentences(key):
            _fsync_folder(self.local_path(key).parent)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        path = self.local_path(key)
        with self._sentences(key):
            if path.exists():
                return False
            with _temporary(path) as (file, name):
                file.write(data)
                _settle(file)
                try:
                    os.link(name, path)
                except FileExistsError:
                    return False
            _fsync_folder(path.parent)
        return True

    def compare_and_swap(self, key: str, data: bytes, tag: str | None) -> bool:
        if tag is None:
            return self.put_if_absent(key, data)
        path = self.local_path(key)
        with self._sentences(key), _locked(path):
            try:
                now = path.read_bytes()
            except FileNotFoundError:
                return False
            if hashlib.sha256(now).hexdigest() != tag:
                return False
            self.put(key, data)
        return True

    @contextmanager
    def writer(self, key: str) -> Iterator[BinaryIO]:
        path = self.local_path(key)
        with self._sentences(key), _temporary(path) as (file, name):
            yield file
            _settle(file)
            os.replace(name, path)

    def open_read(self, key: str) -> BinaryIO:
        with self._sentences(key):
            return self.local_path(key).open("rb")

    def upload(self, local_path: str | Path, key: str) -> None:
        if not Path(local_path).is_file():
            raise NotFound(
                f"{local_path} does not exist, so it cannot be stored as {self.url(key)}"
            )
        with Path(local_path).open("rb") as source, self.writer(key) as file:
            shutil.copyfileobj(source, file, 1 << 20)

    def download(self, key: str, local_path: str | Path) -> None:
        with self.open_read(key) as source, _temporary(Path(local_path)) as (file, name):
            shutil.copyfileobj(source, file, 1 << 20)
            file.flush()
            os.replace(name, local_path)

    def size(self, key: str) -> int:
        with self._sentences(key):
            return self.local_path(key).stat().st_size

    def exists(self, key: str) -> bool:
        with self._sentences(key):
            return self.local_path(key).is_file()

    def delete(self, key: str) -> None:
        with self._sentences(key):
            self.local_path(key).unlink(missing_ok=True)

    def delete_tree(self, prefix: str) -> None:
        with self._sentences(prefix), suppress(FileNotFoundError):
            shutil.rmtree(self.local_path(prefix))

    def children(self, prefix: str) -> list[str]:
        folder = self.local_path(prefix)
        if not folder.is_dir():
            return []
        return sorted(entry.name for entry in folder.iterdir() if entry.is_dir())

    @contextmanager
    def _sentences(self, key: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError as error:
            raise NotFound(f"{self._path / key} does not exist") from error
        except NotADirectoryError as error:
            raise NotFound(
                f"{self._path / key} does not exist: a step of its path is a file"
            ) from error
        except OSError as error:
            raise StoreError(
                f"{self._path / key}: {error.strerror or error}; check that the root {self._path} "
                "is a writable folder with free space on a disk that knows hard links"
            ) from error

    def list(self, prefix: str) -> list[str]:
        keys = []
        for folder, _, names in os.walk(self.local_path(prefix)):
            relative = Path(folder).relative_to(self._path).as_posix()
            keys += [f"{relative}/{name}" for name in names if not name.startswith(".")]
        return sorted(keys)


@contextmanager
def _temporary(target: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A new hidden file beside the target; gone at the end unless it was renamed."""
    _make_folder(target.parent)
    name = target.parent / f".{target.name}.{new_attempt()}.tmp"
    try:
        with name.open("xb") as file:
            yield cast(BinaryIO, file), name
    finally:
        with suppress(FileNotFoundError):
            name.unlink()


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, durably: a file is lost with a folder that is."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        _fsync_folder(new.parent)


def _settle(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file of a key. The kernel lets go of it when its holder dies."""
    with (path.parent / f".{path.name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
