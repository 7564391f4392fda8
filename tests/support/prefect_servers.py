"""A Prefect server that lives beside the runs of a test, on SQLite or PostgreSQL."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from postgres import postgres

from flows.operation.server import PrefectServer, server_argv, server_env
from rlcore.net import free_port
from rlcore.with_parent import with_parent

KINDS = ("sqlite", "postgresql")
START_TIMEOUT_S = 120.0


@contextmanager
def prefect_server(kind: str, home: Path) -> Iterator[str]:
    """A server with an empty database.

    Args:
        kind: of `KINDS`; the test is skipped where there is no PostgreSQL.
        home: its folder.

    Yields:
        The address of its API.
    """
    if kind == "postgresql":
        with postgres() as database_url, server_on(database_url, home) as api_url:
            yield api_url
        return
    server = PrefectServer(home)
    try:
        server.wait()
        yield server.api_url
    finally:
        server.end()
        server.gone()


@contextmanager
def server_on(database_url: str, home: Path) -> Iterator[str]:
    """A server on a database."""
    home.mkdir(parents=True, exist_ok=True)
    port = free_port()
    api_url = f"http://127.0.0.1:{port}/api"
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(
            with_parent(server_argv(port)),
            env=server_env(home, api_url, database_url),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers(api_url):
            assert process.poll() is None, (home / "server.log").read_text()
            assert time.monotonic() < deadline, (home / "server.log").read_text()
            time.sleep(0.1)
        yield api_url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers(api_url: str) -> bool:
    """Whether a server is up."""
    try:
        return httpx.get(f"{api_url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
