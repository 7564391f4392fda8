"""Background processes that outlive the command which starts them.

Invariants:
- A process is known by its id and its start time, so that one which took over the id of another is
  never ended in its place.
- What descends from a process is ended with it; nothing is ever looked up by name.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from rlcore.errors import ClusterError

LOG_TAIL_LINES = 15


@dataclass(frozen=True)
class Daemon:
    """A background process: what to know it by, and where it writes."""

    pid: int
    started: float
    log: str

    @classmethod
    def start(cls, argv: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path) -> "Daemon":
        """Start a process in a session of its own. Its output goes to `log`; the log of the one
        before is kept beside it.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists():
            log.replace(log.with_suffix(".before.log"))
        with log.open("wb") as out:
            process = subprocess.Popen(
                list(argv),
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        return cls(process.pid, start_time(process.pid) or 0.0, str(log))

    def alive(self) -> bool:
        """Whether this very process runs."""
        return start_time(self.pid) == self.started

    def family(self) -> list[psutil.Process]:
        """The process and all that descend from it; empty once it has ended."""
        if not self.alive():
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
        return []

    def tail(self) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError):
            lines = Path(self.log).read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            return f"The end of {self.log}:\n" + "\n".join(lines)
        return f"{self.log} cannot be read."

    def record(self) -> dict[str, object]:
        """As JSON."""
        return asdict(self)


def start_time(pid: int) -> float | None:
    """When a living process began; None if it has ended (a zombie has).

    In clock ticks after boot where /proc says so, which setting the clock does not change.
    """
    with contextlib.suppress(ChildProcessError):
        # One that this very process started is only gone once it was waited for.
        os.waitpid(pid, os.WNOHANG)
    try:
        # The command's name may hold spaces and brackets; the fields begin after its last one.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else float(fields[19])
    except (OSError, IndexError):
        pass
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def end(processes: Sequence[psutil.Process], patience_s: float) -> None:
    """Ask processes to end, and kill those that have not after `patience_s` seconds.

    A process that took over the id of another is left alone: psutil compares the start times.
    """
    send(processes, signal.SIGTERM)
    _, alive = psutil.wait_procs(list(processes), timeout=patience_s)
    send(alive, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=patience_s)


def send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to each process that is still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def wait_until_it_says(daemon: Daemon, text: str, timeout_s: float, what: str) -> None:
    """Wait until a daemon's log holds a text.

    Raises:
        ClusterError: it ended, or did not say so in time; the error ends with its log.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if text in Path(daemon.log).read_text(errors="replace"):
            return
        if not daemon.alive():
            raise ClusterError(f"{what} ended before it was ready. {daemon.tail()}")
        time.sleep(0.1)
    raise ClusterError(f"{what} was not ready within {timeout_s:.0f} s. {daemon.tail()}")
