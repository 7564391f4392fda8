"""The processes of a run that a test started: which is which, so that one of them can be killed."""

import subprocess
from collections.abc import Callable
from typing import Any

import psutil
from real_runs import wait_for

Which = Callable[[dict[str, Any]], bool]
HEAD_PID = "SLUICE_TEST_RAY_HEAD"
"""In the environment of a run: the Ray head beside it, from which its actors descend."""


def is_engine(info: dict[str, Any]) -> bool:
    """The server process of an embedded engine."""
    return "rlcore.engine.embedded" in info["cmdline"]


def is_sglang(info: dict[str, Any]) -> bool:
    """The main process of an SGLang server."""
    return "sglang.launch_server" in info["cmdline"]


def is_actor(kind: str) -> Which:
    """The process of a Ray actor of that class."""
    return lambda info: any(part.startswith(f"ray::{kind}") for part in info["cmdline"])


def pids(process: subprocess.Popen[str], which: Which) -> list[int]:
    """Processes that descend from the command, or from the Ray beside it, and are such ones."""
    try:
        command = psutil.Process(process.pid)
        tree = command.children(recursive=True)
        if head := command.environ().get(HEAD_PID):
            tree += psutil.Process(int(head)).children(recursive=True)
    except psutil.Error:
        return []
    found = []
    for one in tree:
        try:
            info = one.as_dict(["cmdline", "status"])
        except psutil.NoSuchProcess:
            continue
        if info["cmdline"] and info["status"] != psutil.STATUS_ZOMBIE and which(info):
            found.append(one.pid)
    return found


def the_one(process: subprocess.Popen[str], which: Which) -> int:
    """The one process of that kind, once it is there."""
    wait_for(lambda: len(pids(process, which)) == 1)
    return pids(process, which)[0]
