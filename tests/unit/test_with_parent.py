"""Commands end with whoever started them, keep their process id, and have limits."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from rlcore.with_parent import with_parent


def test_it_becomes_the_command() -> None:
    code = "import os, sys; print(os.getpid(), sys.argv[1:])"
    with subprocess.Popen(
        with_parent([sys.executable, "-c", code, "a b", "c"]), stdout=subprocess.PIPE, text=True
    ) as process:
        said, _ = process.communicate(timeout=60)
    assert said == f"{process.pid} ['a b', 'c']\n"


def test_a_command_ends_with_its_parent() -> None:
    code = (
        "import subprocess, time\n"
        "from rlcore.with_parent import with_parent\n"
        "print(subprocess.Popen(with_parent(['sleep', '600'])).pid, flush=True)\n"
        "time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    child = psutil.Process(int(parent.stdout.readline()))
    deadline = time.monotonic() + 60
    while child.name() != "sleep":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    with pytest.raises(psutil.NoSuchProcess):
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        raise psutil.NoSuchProcess(child.pid)


def test_one_whose_parent_ended_before_it_began_is_not_run() -> None:
    argv = with_parent(["echo", "ran"])
    argv[4] = "1"  # nobody here is a child of process 1
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")


def test_limits_hold_and_a_command_that_is_not_there_is_named() -> None:
    code = "import resource as r; print(r.getrlimit(r.RLIMIT_FSIZE))"
    argv = with_parent([sys.executable, "-c", code], {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": 4096})
    assert subprocess.check_output(argv, text=True) == "(4096, 4096)\n"
    done = subprocess.run(with_parent(["no-such"]), capture_output=True, text=True)
    assert done.returncode and "no-such could not be started" in done.stderr
