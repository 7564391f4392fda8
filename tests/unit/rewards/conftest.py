"""A real HTTP server on a thread, which answers as a test tells it."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Answer = Callable[[dict[str, Any]], tuple[int, Any]]


class RewardServer:
    """`answer` gets the body of each request and says status and content; `seen` keeps them."""

    def __init__(self) -> None:
        self.answer: Answer = lambda body: (200, 1.0)
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.open = self.most_open = 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with outer.lock:
                    outer.seen.append(body)
                    outer.headers.append({k.lower(): v for k, v in self.headers.items()})
                    outer.paths.append(self.path)
                    outer.open += 1
                    outer.most_open = max(outer.most_open, outer.open)
                try:
                    status, content = outer.answer(body)
                finally:
                    with outer.lock:
                        outer.open -= 1
                if status == 0:
                    self.close_connection = True
                    return
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                if status == 429:
                    self.send_header("retry-after", "1")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        class Listener(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, *args: Any) -> None:
                pass  # A client that went away is what some tests are about.

        self.server = Listener(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def slowly(self, seconds: float, answer: Answer) -> Answer:
        """An answer that takes its time."""

        def late(body: dict[str, Any]) -> tuple[int, Any]:
            time.sleep(seconds)
            return answer(body)

        return late


@pytest.fixture
def server() -> Iterator[RewardServer]:
    made = RewardServer()
    yield made
    made.server.shutdown()
    made.server.server_close()
