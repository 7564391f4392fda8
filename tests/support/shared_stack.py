"""One Prefect server and one Ray head for many runs: a run that has to start neither begins seconds
earlier.

Each run has a root of its own. A killed one's actors end by Ray's hand, soon after their driver.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect_servers import prefect_server
from real_runs import kill_tree

from rlcore.net import free_port, listens
from rlcore.with_parent import with_parent

SLOTS = 16
"""CPUs that Ray counts: those of a killed run may be held while the next begins."""
OBJECT_STORE_BYTES = 256 * 2**20
START_TIMEOUT_S = 120.0


@contextmanager
def shared_stack() -> Iterator[dict[str, str]]:
    """Variables of the environment by which `sluice` finds both, while they live."""
    # Ray's sockets lie below, and their paths may have no more than about a hundred characters.
    folder = Path(tempfile.mkdtemp(prefix="slc-"))
    try:
        with prefect_server("sqlite", folder / "prefect") as api_url, ray_head(folder) as ray:
            yield ray | {"PREFECT_API_URL": api_url}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_head(folder: Path) -> Iterator[dict[str, str]]:
    """A head on this machine, its files in `folder`; how it is found."""
    port = free_port()
    found = {"RAY_ADDRESS": f"127.0.0.1:{port}", "RAY_AUTH_MODE": "disabled"}
    argv = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    argv += ["--node-ip-address", "127.0.0.1", "--port", str(port), "--num-cpus", str(SLOTS)]
    argv += ["--temp-dir", str(folder / "ray"), "--include-dashboard", "false"]
    argv += ["--disable-usage-stats", "--object-store-memory", str(OBJECT_STORE_BYTES)]
    for name in (
        "ray-client-server-port",
        "dashboard-agent-listen-port",
        "dashboard-agent-grpc-port",
        "runtime-env-agent-port",
        "metrics-export-port",
    ):
        argv += [f"--{name}", str(free_port())]
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    env |= {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
    with (folder / "ray.log").open("wb") as log:
        head = subprocess.Popen(with_parent(argv), env=env, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while "Ray runtime started" not in (said := (folder / "ray.log").read_text()):
            assert head.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.1)
        assert listens("127.0.0.1", port, START_TIMEOUT_S)
        yield found
    finally:
        kill_tree(head.pid)
