"""Output that appears whole or not at all, with the digests of its files.

Invariant: below the name that was asked for there is nothing until everything is written and on
disk; a conversion that was killed leaves a hidden `.NAME.partial` beside it, which the next one
removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from rlcore.errors import ConfigError, Corrupt
from rlcore.store.files import digest_stream

DIGESTS = "conversion.json"
SMALL = 1 << 16
"""Fewer bytes are not worth a thread."""


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `target` if nothing goes wrong.

    Raises:
        ConfigError: `target` is there already.
    """
    if target.exists():
        raise ConfigError(f"{target} exists already; name a folder that does not, or remove it")
    staging = target.with_name(f".{target.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}") from None
    try:
        yield staging
        _sync(staging)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    os.rename(staging, target)
    _sync_entry(target.parent)


class DigestedFile:
    """A new file whose digest is known once it is written: a thread computes it beside the
    writing, so that what is large need not be read again.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._beside = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def write(self, data: bytes | memoryview, *, lasts: bool = False) -> int:
        """All of it.

        Args:
            data: the bytes.
            lasts: nobody changes them after this, so that their digest may be computed later.
        """
        self._wait()
        if len(data) < SMALL:
            self._digest.update(data)
            return self._file.write(data)
        self._last = self._beside.submit(self._digest.update, data)
        written = self._file.write(data)
        if not lasts:
            self._wait()
        return written

    def _wait(self) -> None:
        """Until all that was written is digested."""
        if self._last is not None:
            self._last.result()
            self._last = None

    def flush(self) -> None:
        """As of any file."""
        self._file.flush()

    def tell(self) -> int:
        """Bytes so far."""
        return self._file.tell()

    def close(self) -> str:
        """The SHA-256 of what was written."""
        self._wait()
        self._beside.shutdown()
        self._file.close()
        return self._digest.hexdigest()


def write_digests(folder: Path, about: dict[str, object], known: Mapping[str, str]) -> str:
    """Write `conversion.json`: what was converted, and the size and digest of each file.

    Args:
        folder: of the files.
        about: what was converted.
        known: digests by path in the folder; other files are read for theirs.

    Returns:
        The SHA-256 of that file, which stands for the whole folder.
    """
    # The model's folder may be a conversion's own.
    (folder / DIGESTS).unlink(missing_ok=True)
    found = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
    files = {
        name: {"bytes": path.stat().st_size, "sha256": known.get(name) or digest(path)}
        for name, path in found.items()
    }
    path = folder / DIGESTS
    path.write_text(json.dumps({**about, "files": files}, indent=2) + "\n", "utf-8")
    return digest(path)


def check_digests(folder: Path) -> None:
    """The files of a converted folder are those that were written.

    Raises:
        Corrupt: one is missing or altered.
    """
    for name, said in json.loads((folder / DIGESTS).read_text("utf-8"))["files"].items():
        path = folder / name
        if not path.is_file() or digest(path) != said["sha256"]:
            raise Corrupt(f"{path} is not the file that the conversion wrote")


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return digest_stream(file)[1]


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync_entry(path)


def _sync_entry(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
