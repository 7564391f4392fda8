"""One Prefect server and one Ray head for many runs: a run that has to start neither begins seconds
earlier.

Each run has a root of its own. A killed one's actors end by Ray's hand, soon after their driver.
They descend from the head, which `HEAD_PID` names for `run_processes`.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect_servers import prefect_server
from real_runs import kill_tree
from run_processes import HEAD_PID

from flows.commands.stack import head_argv
from rlcore.cluster.ray_session import STARTS
from rlcore.net import free_port, listens
from rlcore.with_parent import with_parent

SLOTS = 16
"""CPUs that Ray counts: those of a killed run may be held while the next begins."""


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
    argv = [*head_argv(port, str(folder / "ray")), "--num-cpus", str(SLOTS)]
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    env |= {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
    for _ in range(STARTS):
        log = folder / "ray.log"
        with log.open("wb") as file:
            head = subprocess.Popen(with_parent(argv), env=env, stdout=file, stderr=file)
        while "Ray runtime started" not in log.read_text() and head.poll() is None:
            time.sleep(0.1)
        if head.poll() is None:
            break
    assert head.poll() is None and listens("127.0.0.1", port, 10.0), log.read_text()
    try:
        yield found | {HEAD_PID: str(head.pid)}
    finally:
        kill_tree(head.pid)
