"""A JSON body that is made while it is sent."""

import base64
import json

import pytest

from rlcore.rollout import blobs
from rlcore.rollout.blobs import with_blobs


@pytest.mark.parametrize("chunk", [3, 6, 3 * 2**18])
async def test_it_is_the_json_that_dumps_would_make(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "CHUNK", chunk)
    whole = bytes(range(256))
    cuts = [
        memoryview(whole[:1]),
        memoryview(whole[1:100]),
        memoryview(b""),
        memoryview(whole[100:]),
    ]
    pieces, length = with_blobs(b'{"version":"1"}', "blobs", ["handle", whole, cuts, b""])
    body = b"".join([piece async for piece in pieces])
    assert len(body) == length
    text = base64.b64encode(whole).decode()
    assert json.loads(body) == {"version": "1", "blobs": ["handle", text, text, ""]}
