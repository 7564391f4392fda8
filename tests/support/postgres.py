"""A real PostgreSQL for tests: Debian's package, a free port, a temporary folder."""

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlcore.net import free_port

START_TIMEOUT_S = 60.0
SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "listen_addresses": "127.0.0.1",
    "shared_buffers": "32MB",
    "synchronous_commit": "off",
}
"""The data need not survive the machine."""


def die_with_tests() -> None:
    """In the child, between fork and exec: ask for SIGKILL when the tests end (Linux). Its user may
    not read our Python, by which `with_parent` would do it.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@contextmanager
def postgres() -> Iterator[str]:
    """A server with an empty database; the test is skipped where there is none.

    Yields:
        Its address, as Prefect takes it.
    """
    programs, user = find_programs(), unprivileged_user()
    folder = Path(tempfile.mkdtemp(prefix="slpg-"))
    if user is not None:
        shutil.chown(folder, user)
    run_as = {"user": user, "cwd": folder} if user is not None else {"cwd": folder}
    data, port = folder / "data", free_port()
    make = [programs / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8"]
    subprocess.run([*make, "--no-sync"], check=True, capture_output=True, **run_as)
    argv = [programs / "postgres", "-D", data, "-p", str(port), "-k", folder]
    argv += [word for name, value in SETTINGS.items() for word in ("-c", f"{name}={value}")]
    log = (folder / "log").open("wb")
    server = subprocess.Popen(argv, stdout=log, stderr=log, preexec_fn=die_with_tests, **run_as)
    try:
        create = [programs / "createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "postgres"]
        deadline = time.monotonic() + START_TIMEOUT_S
        while subprocess.run([*create, "prefect"], capture_output=True).returncode:
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        yield f"postgresql+asyncpg://postgres@127.0.0.1:{port}/prefect"
    finally:
        server.send_signal(signal.SIGINT)  # SIGTERM would wait for its clients
        server.wait(20)
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


def find_programs() -> Path:
    """The folder of PostgreSQL's programs; Debian keeps them off the PATH."""
    on_path = shutil.which("postgres")
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    folders += [Path(on_path).resolve().parent] if on_path is not None else []
    for folder in folders:
        if all((folder / name).exists() for name in ("initdb", "postgres", "createdb")):
            return folder
    pytest.skip("no PostgreSQL here: apt-get install postgresql")


def unprivileged_user() -> str | None:
    """Who runs the server: None for this user; PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            pwd.getpwnam(name)
        except KeyError:
            continue
        return name
    pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
