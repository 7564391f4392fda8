"""Background processes: known by more than their id, ended with all that descends from them."""

import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flows.commands.stack import Stack, locked, pick_port, stack_folder
from flows.operation.daemon import Daemon, end, start_time, wait_until_it_says
from rlcore.errors import ClusterError, ConfigError
from rlcore.net import free_port

PARENT = (
    "import subprocess, sys, time\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "print('ready', flush=True)\n"
    "time.sleep(60)\n"
)


def start(tmp_path: Path, code: str) -> Daemon:
    log = tmp_path / "d.log"
    return Daemon.start([sys.executable, "-c", code], os.environ, log, tmp_path)


def test_a_daemon_ends_with_its_children(tmp_path: Path) -> None:
    daemon = start(tmp_path, PARENT)
    wait_until_it_says(daemon, "ready", 20, "the test")
    family = daemon.family()
    assert daemon.alive() and len(family) == 2
    end(family, 5)
    assert not daemon.alive() and daemon.family() == []
    assert not any(p.is_running() for p in family)


def test_another_process_of_the_same_id_is_not_it() -> None:
    here = start_time(os.getpid())
    assert here is not None
    me = Daemon(os.getpid(), here, "")
    assert me.alive()
    stranger = replace(me, started=here - 1)
    assert not stranger.alive() and stranger.family() == []


def test_one_that_ends_early_is_said_with_its_log(tmp_path: Path) -> None:
    daemon = start(tmp_path, "raise SystemExit('no luck')")
    with pytest.raises(ClusterError, match="no luck"):
        wait_until_it_says(daemon, "ready", 20, "the test")
    slow = start(tmp_path, "import time; time.sleep(60)")
    try:
        with pytest.raises(ClusterError, match=r"not ready within 0 s"):
            wait_until_it_says(slow, "ready", 0.2, "the test")
        assert "no luck" in (tmp_path / "d.before.log").read_text()
    finally:
        end(slow.family(), 5)


def test_what_will_not_end_is_killed(tmp_path: Path) -> None:
    code = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('ready', flush=True)\n"
    daemon = start(tmp_path, code + "time.sleep(60)")
    wait_until_it_says(daemon, "ready", 20, "the test")
    began = time.monotonic()
    end(daemon.family(), 0.3)
    assert not daemon.alive() and time.monotonic() - began < 5


def test_a_stack_is_remembered(tmp_path: Path) -> None:
    root = str(tmp_path)
    stack = Stack.load(root)
    assert stack.processes == {} and not stack.alive("server")
    daemon = start(tmp_path, "import time; time.sleep(60)")
    try:
        stack.api_url, stack.processes = "http://127.0.0.1:1/api", {"server": daemon}
        stack.save()
        again = Stack.load(root)
        assert again == stack and again.alive("server")
        assert (stack.folder / "stack.json").stat().st_mode & 0o077 == 0
    finally:
        end(daemon.family(), 5)


def test_ports_are_kept_where_they_are_free() -> None:
    port = free_port()
    assert pick_port(f"http://127.0.0.1:{port}/api") == port
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert pick_port(f"http://127.0.0.1:{taken}/api") != taken


def test_one_up_or_down_at_a_time(tmp_path: Path) -> None:
    root = str(tmp_path)
    with locked(root), pytest.raises(ConfigError, match="is at work"), locked(root):
        raise AssertionError
    with locked(root):
        pass


def test_a_stack_of_a_url_lies_in_the_home() -> None:
    assert stack_folder("/data/rl") == Path("/data/rl/stack")
    assert stack_folder("file:///data/rl") == Path("/data/rl/stack")
    one, other = stack_folder("s3://bucket/a"), stack_folder("s3://bucket/b")
    assert one != other and Path.home() in one.parents
