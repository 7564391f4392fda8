"""S3 alone: lost answers, outages, and errors in sentences."""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import StoreError
from rlcore.store.objects import Objects


@contextmanager
def proxy(endpoint: str, lose: set[int]) -> Iterator[str]:
    """A TCP proxy that passes requests on and keeps the answers numbered in `lose` to itself."""
    host, port = endpoint.removeprefix("http://").split(":")
    listener = socket.create_server(("127.0.0.1", 0))
    count = 0

    def answer(client: socket.socket, number: int) -> None:
        with client, socket.create_connection((host, int(port))) as server:
            client.settimeout(5)
            server.settimeout(5)
            try:
                head = b""
                while b"\r\n\r\n" not in head:
                    head += client.recv(65536)
                length = 0
                for line in head.partition(b"\r\n\r\n")[0].lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                if b"100-continue" in head.lower():
                    client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                    head = head.replace(b"Expect: 100-continue\r\n", b"")
                body = head.partition(b"\r\n\r\n")[2]
                while len(body) < length:
                    more = client.recv(65536)
                    head, body = head + more, body + more
                server.sendall(head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
                reply = b""
                while more := server.recv(65536):
                    reply += more
                if number not in lose:
                    client.sendall(reply)
            except OSError:
                return

    def serve() -> None:
        nonlocal count
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            count += 1
            threading.Thread(target=answer, args=(client, count), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def open_at(server: Any, endpoint: str, retry_s: float = 20) -> Objects:
    options = server.options | {"endpoint_url": endpoint}
    return Objects.open(f"s3://runs/{uuid.uuid4().hex}", options, retry_s=retry_s)


def test_a_put_whose_answer_was_lost_counts_as_ours(s3: Any) -> None:
    with proxy(s3.endpoint, lose={1}) as endpoint:
        objects = open_at(s3, endpoint)
        assert objects.put_if_absent("k", b"mine")
        assert not objects.put_if_absent("k", b"mine")
        assert objects.get("k") == b"mine"


def test_a_swap_whose_answer_was_lost_counts_as_ours(s3: Any) -> None:
    with proxy(s3.endpoint, lose={3}) as endpoint:
        objects = open_at(s3, endpoint)
        objects.put("k", b"1")
        tag = objects.read_with_tag("k")[1]
        assert objects.compare_and_swap("k", b"2", tag)
        assert not objects.compare_and_swap("k", b"3", tag)
        assert objects.get("k") == b"2"


def test_an_outage_is_waited_out(moto: Any, caplog: pytest.LogCaptureFixture) -> None:
    with proxy(moto.endpoint, lose=set(range(1, 13))) as endpoint:
        objects = open_at(moto, endpoint)
        with caplog.at_level(logging.WARNING, "sluice.store"):
            objects.put("k", b"v")
            assert objects.get("k") == b"v"
    assert "trying again" in caplog.text and objects.root in caplog.text


def test_an_outage_without_end_is_a_sentence(moto: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
    objects = open_at(moto, endpoint, retry_s=1.5)
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"s3://runs/.*/k: the store did not answer for 2 s"):
        objects.get("k")
    assert time.monotonic() - began < 10


def test_a_missing_bucket_is_named(s3: Any) -> None:
    objects = Objects.open("s3://nowhere/x", s3.options, retry_s=5)
    with pytest.raises(StoreError, match="nowhere"):
        objects.put_if_absent("k", b"")
    with pytest.raises(StoreError, match="names no bucket"):
        Objects.open("s3://")


def test_wrong_credentials_are_named(seaweed: Any) -> None:
    objects = Objects.open("s3://runs/x", seaweed.options | {"key": "who"}, retry_s=5)
    with pytest.raises(StoreError, match="access denied"):
        objects.put("k", b"")


def test_the_environment_can_name_the_server(moto: Any) -> None:
    options = moto.options
    code = (
        "from rlcore.store.objects import Objects\n"
        "assert Objects.open('s3://runs/env', retry_s=5).put_if_absent('k', b'from env')"
    )
    environment = {
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "FSSPEC_S3_ENDPOINT_URL": options["endpoint_url"],
        "FSSPEC_S3_KEY": options["key"],
        "FSSPEC_S3_SECRET": options["secret"],
    }
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | environment)
    assert Objects.open("s3://runs/env", options).get("k") == b"from env"


def test_a_large_object_comes_in_parts_and_whole(s3: Any, tmp_path: Any) -> None:
    objects = open_at(s3, s3.endpoint)
    block = bytes(range(256)) * 4096
    with objects.writer("big") as file:
        for _ in range(60):
            file.write(block)
    assert objects.size("big") == 60 << 20
    objects.download("big", tmp_path / "big")
    assert (tmp_path / "big").read_bytes() == block * 60
