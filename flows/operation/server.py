"""A private Prefect server: SQLite under the run root, a free port, ended with its maker."""

import contextlib
import importlib.metadata
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import httpx

from rlcore.errors import ClusterError
from rlcore.net import free_port
from rlcore.with_parent import with_parent

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 3.0
IDLE_SERVICES = (
    "CANCELLATION_CLEANUP",
    "FOREMAN",
    "LATE_RUNS",
    "PAUSE_EXPIRATIONS",
    "REPOSSESSOR",
    "SCHEDULER",
    "TRIGGERS",
)
"""Of use only where there are deployments, schedules and automations: a private server has none."""


class PrefectServer:
    """A server process. It boots while its maker does other things: `wait` says when it answers."""

    def __init__(self, home: Path) -> None:
        """Start it.

        Args:
            home: folder of its database and log.
        """
        home.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.api_url = f"http://127.0.0.1:{port}/api"
        self._log = home / "server.log"
        self._database = home / "prefect.db"
        self._new = not self._database.exists()
        if self._new and empty_database().exists():
            shutil.copyfile(empty_database(), self._database)
            self._new = False
        idle = {f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in IDLE_SERVICES}
        env = server_env(home, self.api_url, f"sqlite+aiosqlite:///{self._database.name}") | idle
        argv = server_argv(port)
        # Named from its own folder: a database URL has no way to say '%', '?' or '#' in a path.
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                with_parent(argv),
                cwd=home,
                env=env,
                stdout=log,
                stderr=log,
                # Not a session: Linux would weigh it as a whole against all else of ours.
                process_group=0,
            )

    def wait(self) -> None:
        """Wait until the server answers its health check.

        Raises:
            ClusterError: it ended or did not answer in time; the text names its log.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if httpx.get(f"{self.api_url}/health", timeout=2).status_code == 200:
                    if self._new:
                        keep_empty(self._database)
                    # The first real request has the server put its routes together, for a second.
                    httpx.post(f"{self.api_url}/flow_runs/filter", json={"limit": 1}, timeout=20)
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise ClusterError(self.obituary)

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def obituary(self) -> str:
        """What to say once the server is gone, or has not come."""
        return (
            f"the private Prefect server does not answer any more; its log is {self._log}. "
            "Set PREFECT_API_URL to use a server that runs already"
        )

    def end(self) -> None:
        """Ask the server to end, and return at once."""
        self._process.terminate()

    def gone(self) -> None:
        """Wait until the server has ended; a slow one is killed, which SQLite survives."""
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def server_argv(port: int) -> list[str]:
    """What `prefect server start` runs, without the seconds that its command takes."""
    app = "flows.operation.server_app:create_app"
    argv = [sys.executable, "-P", "-m", "uvicorn", "--factory", app]
    return [*argv, "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]


def server_env(home: Path, api_url: str, database_url: str) -> dict[str, str]:
    """The environment of a server: its folder, its database, no telemetry, old rows removed."""
    env = os.environ | {
        "PREFECT_HOME": str(home),
        "PREFECT_API_DATABASE_CONNECTION_URL": database_url,
        "PREFECT_SERVER_UI_API_URL": api_url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT__SERVER_FINAL": "1",
    }
    env.pop("PREFECT_API_URL", None)
    return env


def empty_database() -> Path:
    """A database of this Prefect release before any run: copying it saves the migrations."""
    release = importlib.metadata.version("prefect")
    return Path.home() / ".cache" / "sluice" / f"prefect-{release}.db"


def keep_empty(database: Path) -> None:
    """Keep a copy of a new database for the next server; a home that is not writable keeps none."""
    target = empty_database()
    making = target.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            contextlib.closing(sqlite3.connect(database)) as source,
            contextlib.closing(sqlite3.connect(making)) as copy,
        ):
            source.backup(copy)
        making.replace(target)
