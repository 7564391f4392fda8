"""Runs of the real thing: the `sluice` command in its own process, on the quickstart's task made
short.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

REPO = Path(__file__).resolve().parents[2]
QUICKSTART = REPO / "examples" / "quickstart" / "run.toml"
RUN_TIMEOUT_S = 240


@dataclass
class Sluice:
    """Calls the command with one root."""

    root: Path | str
    cwd: Path
    env: dict[str, str] = field(default_factory=dict)
    within: tuple[str, ...] = ()
    """A command that runs it somewhere, such as in a network namespace."""

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Start the command and return at once."""
        env = {k: v for k, v in os.environ.items() if k != "PREFECT_API_URL"} | self.env
        argv = [*self.within, sys.executable, "-m", "flows.cli", *args, "--root", str(self.root)]
        return subprocess.Popen(
            argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.cwd
        )

    def __call__(self, *args: str, code: int = 0, timeout: float = RUN_TIMEOUT_S) -> str:
        """Run the command to its end; returns what it printed on standard output."""
        process = self.start(*args)
        out, err = finish(process, timeout)
        assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
        return out if code == 0 else out + err

    def json(self, *args: str) -> Any:
        """What the command prints as JSON."""
        return json.loads(self(*args, "--json"))

    def committed(self, run_id: str, iteration: int) -> Path:
        """The file that says that an iteration is committed."""
        return Path(self.root) / "runs" / run_id / "it" / f"{iteration:06d}" / "_COMMITTED.json"


def finish(process: subprocess.Popen[str], timeout: float) -> tuple[str, str]:
    """What a command printed, on both streams; one that takes too long is ended with its tree."""
    try:
        return process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        raise


def wait_for(what: Callable[[], bool], seconds: float = RUN_TIMEOUT_S) -> None:
    """Wait until `what` is true."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all that descend from it, the parent first so that nobody tidies up."""
    root = psutil.Process(pid)
    tree = [root, *root.children(recursive=True)]
    for process in tree:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    psutil.wait_procs(tree, timeout=10)


def short(tmp_path: Path, iterations: int, **more: str) -> Path:
    """The quickstart with fewer and smaller iterations, as a config file of its own."""
    lines = [
        f'extends = "{QUICKSTART}"',
        "[rollout]\nrollout_batch_size = 8\nn_samples_per_prompt = 8",
        f"[train]\nglobal_batch_size = 64\nnum_iterations = {iterations}",
        "[eval]\neval_interval = 3",
        "[checkpoint]\nsave_interval = 3",
    ]
    path = tmp_path / "short.toml"
    path.write_text("\n".join(lines) + "\n" + "\n".join(more.values()))
    return path
