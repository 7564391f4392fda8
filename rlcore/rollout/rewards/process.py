"""One worker process as its parent holds it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from rlcore.errors import PluginError, RewardError
from rlcore.rollout.rewards.protocol import Progress
from rlcore.sample import Sample

LOAD_TIMEOUT_S = 300.0
"""Seconds that importing the user's module may take; a large library needs its time."""

STDERR = 2
MODULE = "rlcore.rollout.rewards.worker"
Call = tuple[int, list[Sample]]
"""A call of the user's function: its number in the batch, and the samples it is about."""


class WorkerProcess:
    """A running worker. It loads the user's function while the parent goes on.

    Call it from one thread that lives as long as the worker: the kernel ends the worker when the
    thread that started it ends.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        page = os.memfd_create("sluice-scorer")
        os.ftruncate(page, os.sysconf("SC_PAGE_SIZE"))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), str(page)],
                pass_fds=(theirs.fileno(), page),
                stdin=subprocess.DEVNULL,
                # What the function prints must not mix with what a command line reports.
                stdout=STDERR,
                env=_environment(),
            )
            self.progress = Progress(page)
        finally:
            theirs.close()
            os.close(page)
        self.link = Connection(ours.detach())
        self.ready = False
        self.calls: dict[int, Call] = {}
        """Calls it was given and has not answered, by number."""
        self.link.send(settings)
        self._started = time.monotonic()
        self._late: tuple[int | None, float] = None, 0.0

    def give(self, calls: list[Call]) -> None:
        """Send a chunk of calls. Only when it is ready and has none."""
        self.calls = {call[0]: call for call in calls}
        # Until it has taken up the first call, the page must not show an older one.
        self.progress.idle()
        with contextlib.suppress(ConnectionError):
            self.link.send(calls)

    def check_loading(self) -> None:
        """See that a worker that is not ready has not been loading for too long.

        Raises:
            PluginError: it has.
        """
        if not self.ready and time.monotonic() - self._started > LOAD_TIMEOUT_S:
            raise PluginError(
                f"the reward function: loading it took longer than {LOAD_TIMEOUT_S:g} s"
            )

    def has_been_late(self, call: int | None) -> float:
        """Seconds since the parent first saw that this call takes too long; None: no call does.

        The call's own time is no measure: on a machine that was paused, it passed for all.
        """
        if call is None or call != self._late[0]:
            self._late = call, time.monotonic()
        return time.monotonic() - self._late[1] if call is not None else 0.0

    def kill(self, patience_s: float = 0.0) -> str:
        """End the process and say how it ended; its messages stay readable.

        Args:
            patience_s: seconds in which it may end by itself.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        self._process.kill()
        code = self._process.wait()
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"it ended its process by {signal.Signals(-code).name}"
        return f"it ended its process with exit code {code}"

    def close(self) -> None:
        """End the process and give up what was shared with it."""
        self.kill()
        self.link.close()
        self.progress.close()

    def receive(self) -> tuple[str, Any] | None:
        """The next message; None when the worker is gone.

        Raises:
            RewardError: it sent something that is no message, so the user's code wrote to the
                socket.
        """
        try:
            message: tuple[str, Any] = self.link.recv()
        except (EOFError, OSError):
            return None
        except Exception as error:
            raise RewardError(f"a scorer process sent what cannot be read: {error}") from error
        return message


def _environment() -> dict[str, str]:
    # Where the parent finds modules, the worker does too. The workers are the parallelism: without
    # a word each would start a thread a core when the user's module brings numpy or torch.
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    return {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path}
