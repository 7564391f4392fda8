"""Commands that end with the process that asked for them.

`subprocess` can run a function between fork and exec, but in a process with threads, and torch in
it, what Python does there first can hang for ever. So the command is run by this file, which does
what is to be done and then becomes the command, under the same process id.

Invariant: run as a program, it needs nothing but the standard library.
"""

import os
import sys
from collections.abc import Mapping, Sequence

PR_SET_PDEATHSIG = 1


def with_parent(argv: Sequence[str], limits: Mapping[str, int] | None = None) -> list[str]:
    """`argv` as a command to which the kernel sends SIGKILL when the thread that starts it ends
    (Linux; start it from one that lasts).

    Args:
        argv: the command.
        limits: values of `resource`'s limits by name, such as RLIMIT_CPU.
    """
    told = ",".join(f"{name}={value}" for name, value in (limits or {}).items())
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), told, *argv]


def _become(parent: int, limits: str, argv: list[str]) -> None:
    import resource
    import signal

    for one in filter(None, limits.split(",")):
        name, _, value = one.partition("=")
        resource.setrlimit(getattr(resource, name), (int(value), int(value)))
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            # It ended before the call above took effect.
            os._exit(1)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"{argv[0]} could not be started: {error}")


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
