"""A mirror that is asked over HTTP: it runs beside an engine, and makes the folder that the engine
is to load.

    POST /pull {"key": ..., "sha256": ...}    200 {"folder": ...}, or 409 {"error": ...}

It reads what lies below one run's folder of versions and writes below its own folder, whatever it
is asked for. `python -m rlcore.weights.delta.server` is one for an engine that no actor of the run
supervises.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from pydantic import ValidationError

from rlcore.config.section import Scalar
from rlcore.errors import SluiceError, StoreError
from rlcore.store.deltas import IndexRef
from rlcore.store.objects import Objects
from rlcore.store.paths import delta_head_key
from rlcore.weights.delta.mirror import Mirror

_LONGEST_REQUEST = 1 << 16


@dataclass(frozen=True)
class MirrorSpec:
    """What a mirror is made with."""

    run_id: str
    storage_root: str
    folder: str
    """On the engine's machine; for one mirror alone."""
    file_bytes: int
    """Of the files that it writes, at most."""
    storage_options: dict[str, Scalar] = field(default_factory=dict, repr=False)


class MirrorServer:
    """A mirror's server, in threads of this process."""

    def __init__(self, spec: MirrorSpec, host: str = "127.0.0.1", port: int = 0) -> None:
        self._below = delta_head_key(spec.run_id).rpartition("/")[0] + "/"
        objects = Objects.open(spec.storage_root, spec.storage_options)
        self._mirror = Mirror(objects, Path(spec.folder), spec.file_bytes)
        self._lock = Lock()
        self._held: IndexRef | None = None
        self._server = ThreadingHTTPServer((host, port), _handler(self.pull))
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_address[1]}"

    def start(self) -> None:
        """Answer from now on."""
        Thread(target=self.serve, daemon=True, name="weights-mirror").start()

    def serve(self) -> None:
        """Answer until `stop`."""
        self._server.serve_forever()

    def stop(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()

    def pull(self, asked: bytes) -> str:
        """The folder of the version that a request asks for.

        Raises:
            StoreError: it is none of this run, or is damaged.
        """
        try:
            ref = IndexRef.model_validate_json(asked)
        except ValidationError as error:
            raise StoreError(f"no version of weights is asked for: {error}") from error
        if not ref.key.startswith(self._below):
            raise StoreError(f"{ref.key} is no version of this run's weights ({self._below})")
        with self._lock:
            folder = self._mirror.pull(ref)
            # The engine may still be reading the one before.
            self._mirror.keep_only(ref, self._held or ref)
            self._held = ref
        return str(folder)


def _handler(pull: Any) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = min(int(self.headers.get("Content-Length") or 0), _LONGEST_REQUEST)
            if self.path != "/pull":
                self.send_error(404)
                return
            try:
                self._answer(200, {"folder": pull(self.rfile.read(length))})
            except (SluiceError, OSError) as error:
                self._answer(409, {"error": str(error)})

        def _answer(self, status: int, tree: dict[str, str]) -> None:
            data = json.dumps(tree).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Not to the terminal."""

    return Handler


def main() -> None:
    """Serve one mirror until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m rlcore.weights.delta.server")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--root", required=True, help="the store, such as s3://bucket/prefix")
    parser.add_argument("--folder", required=True, help="local, for this mirror alone")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--file-bytes", type=int, default=512 * 2**20)
    given = parser.parse_args()
    spec = MirrorSpec(given.run_id, given.root, given.folder, given.file_bytes)
    server = MirrorServer(spec, given.host, given.port)
    sys.stdout.write(f"{server.url}\n")
    sys.stdout.flush()
    server.serve()


if __name__ == "__main__":
    main()
