"""Large objects of an S3 store, in blocks: each block is a request of its own, tried again alone.

Invariants:
- At most `IN_FLIGHT` blocks of an object are in memory.
- An upload appears when it is completed; one that fails is given up and leaves nothing visible.
- A reader that is used in sequence has the next blocks on their way; one that jumps has not.
"""

import io
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any, Protocol, TypeVar

from rlcore.errors import StoreError

T = TypeVar("T")
BLOCK = 8 << 20
"""Bytes; S3 takes no smaller parts than 5 MiB."""
IN_FLIGHT = 4
MOST_PARTS = 9_000
"""S3 takes 10,000; a larger object gets larger parts."""
NONCE = "sluice-writer"
"""Object metadata that tells whose write arrived."""


class Requests(Protocol):
    """How a store speaks to its server."""

    def request(self, key: str, method: str, **arguments: Any) -> dict[str, Any]:
        """One request about a key, again while it fails for reasons that pass."""
        ...

    def read_range(self, key: str, start: int, end: int, tag: str) -> bytes:
        """The bytes [start, end) of the content that `tag` names."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write at once."""
        ...


@cache
def _threads() -> ThreadPoolExecutor:
    """Shared by all transfers of this process."""
    return ThreadPoolExecutor(2 * IN_FLIGHT, thread_name_prefix="s3")


class Upload(io.RawIOBase):
    """A file to write to, whose full blocks travel while the next one is written.

    `finish` makes the object appear, `give_up` forgets it.
    """

    def __init__(self, store: Requests, key: str, expected: int = 0) -> None:
        """`expected`: its length in bytes, as far as known; only to choose the size of parts."""
        super().__init__()
        self._store, self._key = store, key
        self._block = max(BLOCK, -(-expected // MOST_PARTS))
        self._buffer = bytearray()
        self._upload_id: str | None = None
        self._nonce = uuid.uuid4().hex
        self._parts: list[Future[str]] = []

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: Any) -> int:
        """Take all of it; may wait for blocks under way."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), self._block):
            self._buffer += view[start : start + self._block]
            while len(self._buffer) >= self._block:
                self._send(bytes(self._buffer[: self._block]))
                del self._buffer[: self._block]
        return len(view)

    def finish(self) -> None:
        """Send the rest and make the object appear."""
        if self._upload_id is None:
            self._store.put(self._key, bytes(self._buffer))
            return
        if self._buffer:
            self._send(bytes(self._buffer))
        parts = [
            {"PartNumber": number, "ETag": part.result()}
            for number, part in enumerate(self._parts, 1)
        ]
        try:
            self._store.request(
                self._key,
                "complete_multipart_upload",
                UploadId=self._upload_id,
                MultipartUpload={"Parts": parts},
            )
        except StoreError:
            # An earlier try may have arrived and its answer been lost: then the upload is no more.
            if not self._arrived():
                raise

    def give_up(self) -> None:
        """Leave nothing behind, as far as the server can be told."""
        for part in self._parts:
            part.cancel()
        if self._upload_id is not None:
            with suppress(StoreError):
                self._store.request(self._key, "abort_multipart_upload", UploadId=self._upload_id)

    def _send(self, block: bytes) -> None:
        if self._upload_id is None:
            metadata = {NONCE: self._nonce}
            begun = self._store.request(self._key, "create_multipart_upload", Metadata=metadata)
            self._upload_id = begun["UploadId"]
        under_way = [part for part in self._parts[-IN_FLIGHT:] if not part.done()]
        if len(under_way) == IN_FLIGHT:
            under_way[0].result()
        number = len(self._parts) + 1
        self._parts.append(_threads().submit(self._send_part, number, block))

    def _send_part(self, number: int, block: bytes) -> str:
        answer = self._store.request(
            self._key, "upload_part", UploadId=self._upload_id, PartNumber=number, Body=block
        )
        return str(answer["ETag"])

    def _arrived(self) -> bool:
        with suppress(StoreError):
            metadata = self._store.request(self._key, "head_object")["Metadata"]
            return bool(metadata.get(NONCE) == self._nonce)
        return False


class Reader(io.RawIOBase):
    """A seekable file over ranged reads of one version of an object."""

    def __init__(self, store: Requests, key: str, size: int, tag: str) -> None:
        super().__init__()
        self._store, self._key, self._size, self._tag = store, key, size, tag
        self._at = 0
        self._last = -2
        self._blocks: dict[int, Future[bytes]] = {}

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; nothing is read."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as the object goes."""
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view) and self._at < self._size:
            number, skip = divmod(self._at, BLOCK)
            block = self._block(number)
            piece = block[skip : skip + len(view) - done]
            view[done : done + len(piece)] = piece
            done += len(piece)
            self._at += len(piece)
        return done

    def close(self) -> None:
        """Drop what was fetched."""
        for block in self._blocks.values():
            block.cancel()
        self._blocks.clear()
        super().close()

    def _block(self, number: int) -> memoryview:
        ahead = IN_FLIGHT - 2 if number in (self._last, self._last + 1) and number else 0
        self._last = number
        for wanted in range(number, number + ahead + 1):
            if wanted not in self._blocks and wanted * BLOCK < self._size:
                self._blocks[wanted] = _submit(self._fetch, wanted)
        for old in [n for n in self._blocks if not number - 1 <= n <= number + ahead]:
            self._blocks.pop(old).cancel()
        return memoryview(self._blocks[number].result())

    def _fetch(self, number: int) -> bytes:
        start = number * BLOCK
        end = min(start + BLOCK, self._size)
        return self._store.read_range(self._key, start, end, self._tag)


def _submit(act: Callable[[int], T], argument: int) -> "Future[T]":
    return _threads().submit(act, argument)
