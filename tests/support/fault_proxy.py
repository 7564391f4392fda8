"""A proxy in front of a real S3 server that does to requests what networks and servers do.

It passes whole HTTP requests on, one a connection. `rule` decides for each request what becomes of
it; a test sets it, and changes it while clients are at work. All requests are counted by what
became of them.

`STALE` answers a read as the server would have answered it at the last `freeze`: with what the
proxy had seen until then, and 404 for what it had not.
"""

import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum

DEADLINE_S = 60.0


class Fault(StrEnum):
    """What may become of a request."""

    NONE = "none"
    UNAVAILABLE = "unavailable"
    """Answered 503; the server never sees it."""
    HANG = "hang"
    """Taken and never answered; the server never sees it."""
    CUT = "cut"
    """Answered, but the connection is reset in the middle of the body."""
    LOSE = "lose"
    """Done by the server, its answer lost."""
    STALE = "stale"
    """A read that is answered from the past."""


@dataclass(frozen=True)
class Request:
    """What a rule decides by."""

    number: int
    method: str
    path: str
    byte_range: str = ""

    @property
    def is_read(self) -> bool:
        """Whether it changes nothing."""
        return self.method in ("GET", "HEAD")


Rule = Callable[[Request], Fault]


def calm(_request: Request) -> Fault:
    """The rule that changes nothing."""
    return Fault.NONE


def mixed(seed: int, share: float, kinds: tuple[Fault, ...], hangs: int = 0) -> Rule:
    """A rule that strikes a share of all requests, and lets the first few of those hang."""
    generator, lock, left = random.Random(seed), threading.Lock(), [hangs]

    def rule(_request: Request) -> Fault:
        with lock:
            if generator.random() >= share:
                return Fault.NONE
            if left[0]:
                left[0] -= 1
                return Fault.HANG
            return generator.choice(kinds)

    return rule


@dataclass
class Proxy:
    """A running proxy."""

    server: tuple[str, int]
    endpoint: str = ""
    rule: Rule = calm
    seen: Counter[Fault] = field(default_factory=Counter)
    closing: threading.Event = field(default_factory=threading.Event)
    _now: dict[Request, bytes] = field(default_factory=dict)
    _then: dict[Request, bytes] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _count: int = 0

    def freeze(self) -> None:
        """From now on STALE means this moment."""
        with self._lock:
            self._then = dict(self._now)

    def unavailable_for(self, seconds: float) -> None:
        """Answer everything 503 for so long, from now on."""
        until = time.monotonic() + seconds
        self.rule = lambda _request: Fault.UNAVAILABLE if time.monotonic() < until else Fault.NONE

    def serve(self, listener: socket.socket) -> None:
        """Take connections until the listener is closed."""
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(client,), daemon=True).start()

    def _one(self, client: socket.socket) -> None:
        client.settimeout(DEADLINE_S)
        with client, suppress(OSError, ValueError):
            head, body = _read_request(client)
            method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
            byte_range = _header(head, b"range").decode()
            with self._lock:
                self._count += 1
                request = Request(self._count, method, path, byte_range)
            fault = self.rule(request)
            if fault is Fault.STALE and not request.is_read:
                fault = Fault.NONE
            with self._lock:
                self.seen[fault] += 1
            self._answer(client, request, fault, head + body)

    def _answer(
        self, client: socket.socket, request: Request, fault: Fault, message: bytes
    ) -> None:
        if fault is Fault.UNAVAILABLE:
            return client.sendall(_plain(503, "ServiceUnavailable", request))
        if fault is Fault.HANG:
            client.settimeout(0.5)
            while not self.closing.is_set():
                with suppress(TimeoutError):
                    if not client.recv(1):
                        return None
            return None
        place = Request(0, request.method, request.path, request.byte_range)
        if fault is Fault.STALE:
            missing = _plain(404, "NoSuchKey", request)
            return client.sendall(self._then.get(place, missing))
        reply = self._pass_on(message)
        if request.is_read:
            with self._lock:
                self._now[place] = reply
        if fault is Fault.CUT:
            body_at = reply.index(b"\r\n\r\n") + 4
            client.sendall(reply[: body_at + (len(reply) - body_at) // 2])
            # A reset and no orderly end.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif fault is not Fault.LOSE:
            client.sendall(reply)
        return None

    def _pass_on(self, message: bytes) -> bytes:
        with socket.create_connection(self.server, DEADLINE_S) as upstream:
            upstream.sendall(message.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            pieces = []
            while piece := upstream.recv(1 << 20):
                pieces.append(piece)
        return b"".join(pieces)


@contextmanager
def fault_proxy(endpoint: str) -> Iterator[Proxy]:
    """A proxy on a free loopback port in front of `http://host:port`."""
    host, port = endpoint.removeprefix("http://").split(":")
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        own = f"http://127.0.0.1:{listener.getsockname()[1]}"
        proxy = Proxy((host, int(port)), own)
        threading.Thread(target=proxy.serve, args=(listener,), daemon=True).start()
        try:
            yield proxy
        finally:
            proxy.closing.set()
            listener.shutdown(socket.SHUT_RDWR)


def _read_request(client: socket.socket) -> tuple[bytes, bytes]:
    """Head without what only concerns this connection, and body."""
    got = bytearray()
    while b"\r\n\r\n" not in got:
        got += _some(client)
    head, _, body = bytes(got).partition(b"\r\n\r\n")
    length = int(_header(head, b"content-length") or b"0")
    if _header(head, b"expect") and len(body) < length:
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    rest = bytearray(body)
    while len(rest) < length:
        rest += _some(client)
    lines = [
        line
        for line in head.split(b"\r\n")
        if not line.lower().startswith((b"expect:", b"connection:"))
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n", bytes(rest)


def _some(client: socket.socket) -> bytes:
    piece = client.recv(1 << 20)
    if not piece:
        raise ConnectionError("the client has gone")
    return piece


def _header(head: bytes, name: bytes) -> bytes:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return b""


def _plain(status: int, code: str, request: Request) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>by the proxy</Message></Error>".encode()
    reason = http.client.responses[status]
    head = (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/xml\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()
    return head if request.method == "HEAD" else head + body
