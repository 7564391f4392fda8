"""A private Prefect server: SQLite under the run root, a free port, ended with the process that
made it.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from rlcore.engine.launch import DieWithParent
from rlcore.errors import ClusterError
from rlcore.net import free_port

START_TIMEOUT_S = 120.0


@contextmanager
def prefect_server(home: Path) -> Iterator[str]:
    """Run a server while the block runs.

    Args:
        home: folder of its database and log.

    Yields:
        Its API's address.

    Raises:
        ClusterError: it did not answer in time; the text names its log.
    """
    process, url = start_server(home)
    try:
        wait_healthy(process, url, home)
        yield url
    finally:
        stop(process)


def start_server(home: Path, port: int | None = None) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server and return at once; `wait_healthy` says when it answers."""
    home.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    url = f"http://127.0.0.1:{port}/api"
    env = os.environ | {
        "PREFECT_HOME": str(home),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home}/prefect.db",
        "PREFECT_SERVER_UI_API_URL": url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    }
    env.pop("PREFECT_API_URL", None)
    with (home / "server.log").open("ab") as log:
        argv = [
            sys.executable,
            "-m",
            "prefect",
            "server",
            "start",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        process = subprocess.Popen(
            argv,
            env=env,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=DieWithParent(os.getpid()),
        )
    return process, url


def wait_healthy(process: subprocess.Popen[bytes], url: str, home: Path) -> None:
    """Wait until the server answers its health check."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    raise ClusterError(
        f"the private Prefect server did not start; its log is {home / 'server.log'}. "
        "Set PREFECT_API_URL to use a server that runs already"
    )


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server: gently, then not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
