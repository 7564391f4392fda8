"""Python that a model wrote, run in a process of its own with limits.

What it is kept from: running on (seconds of clock and CPU), growing (memory, file size, processes),
seeing this process's environment and files beside it (an empty folder, no environment), and living
longer than this process. Where user namespaces are allowed it has no network either; `isolated`
says whether. It is no defence against somebody who means harm: run that in a container or a virtual
machine.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache

from rlcore.with_parent import with_parent

MAX_FILE_BYTES = 2**20
MAX_PROCESSES = 64
MAX_OUTPUT_BYTES = 2**20
MB = 2**20


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a program."""

    output: str
    """What it printed, on both streams, in order; cut at `max_output` characters."""
    code: int
    """Exit code; negative: the signal that ended it."""
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        """Whether it ended well."""
        return self.code == 0 and not self.timed_out


async def run_python(
    code: str, *, timeout_s: float = 5.0, memory_mb: int = 512, max_output: int = 4000
) -> Ran:
    """Run a program.

    Args:
        code: Python source.
        timeout_s: seconds that it may take.
        memory_mb: address space of each of its processes.
        max_output: characters of its output that are kept.
    """
    with tempfile.TemporaryDirectory(prefix="sluice-sandbox-") as folder:
        program = [*isolation(), sys.executable, "-I", "-S", "-c", code]
        argv = with_parent(program, _limits(timeout_s, memory_mb))
        with tempfile.TemporaryFile() as out:
            process = await asyncio.to_thread(
                subprocess.Popen,
                argv,
                cwd=folder,
                env={"HOME": folder, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                ended = await asyncio.to_thread(_wait, process, timeout_s)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            out.seek(0)
            text = out.read(MAX_OUTPUT_BYTES).decode(errors="replace")[:max_output]
    return Ran(text, process.returncode, timed_out=not ended)


def _wait(process: "subprocess.Popen[bytes]", timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _limits(timeout_s: float, memory_mb: int) -> dict[str, int]:
    return {
        "RLIMIT_CPU": max(1, round(timeout_s + 0.5)),
        "RLIMIT_AS": memory_mb * MB,
        "RLIMIT_FSIZE": MAX_FILE_BYTES,
        "RLIMIT_CORE": 0,
    }


@cache
def isolation() -> tuple[str, ...]:
    """The command that takes the network away, where this machine allows it."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    argv = (unshare, "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
    tried = subprocess.run([*argv, "true"], capture_output=True)
    return argv if tried.returncode == 0 else ()


def isolated() -> bool:
    """Whether programs run without a network and see no other process."""
    return bool(isolation())
