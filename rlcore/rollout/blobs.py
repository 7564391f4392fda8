"""A JSON body with large base64 strings in it, made while it is sent."""

import base64
from collections.abc import AsyncIterator, Iterator, Sequence

Blob = str | bytes | Sequence[memoryview]
"""Text as it is; bytes, or parts of them, that travel as base64."""
CHUNK = 3 * 2**18
"""Bytes encoded at a time."""


def with_blobs(body: bytes, key: str, blobs: Sequence[Blob]) -> tuple[AsyncIterator[bytes], int]:
    """A JSON object with one more key, a list of strings; and how many bytes it has.

    Args:
        body: the object, with at least one key.
        key: the new one.
        blobs: its value.
    """
    head, between, tail = body[:-1] + f',"{key}":["'.encode(), b'","', b'"]}'
    length = len(head) + sum(map(_length, blobs)) + len(between) * (len(blobs) - 1) + len(tail)

    async def pieces() -> AsyncIterator[bytes]:
        yield head
        for k, blob in enumerate(blobs):
            if k:
                yield between
            for piece in _encoded(blob):
                yield piece
        yield tail

    return pieces(), length


def _length(blob: Blob) -> int:
    if isinstance(blob, str):
        return len(blob)
    size = len(blob) if isinstance(blob, bytes) else sum(part.nbytes for part in blob)
    return -(-size // 3) * 4


def _encoded(blob: Blob) -> Iterator[bytes]:
    if isinstance(blob, str):
        yield blob.encode("ascii")
        return
    rest = b""
    for part in [memoryview(blob)] if isinstance(blob, bytes) else blob:
        for begin in range(0, part.nbytes, CHUNK):
            data = rest + part[begin : begin + CHUNK]
            whole = len(data) - len(data) % 3
            yield base64.b64encode(data[:whole])
            rest = data[whole:]
    if rest:
        yield base64.b64encode(rest)
