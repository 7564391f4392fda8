"""Local scratch folders of drivers, and the removal of those that killed drivers left.

A folder's name carries the machine, the process and its start time, so that whoever finds it can
tell whether its maker is gone. Only folders of this user and this machine are ever removed.
"""

import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

from rlcore.store.lease import is_dead, this_process

log = logging.getLogger("sluice")

_NAME = re.compile(r"sluice-(?P<tag>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)-.*")


def make_scratch(run_id: str) -> Path:
    """A new folder of this process."""
    machine, pid, start = this_process().split(":")
    tag = machine.rpartition("-")[2]
    return Path(tempfile.mkdtemp(prefix=f"sluice-{tag}-{pid}-{start}-{run_id[:20]}-"))


def sweep_scratch() -> list[Path]:
    """Remove the folders of processes that are gone; returns them."""
    machine = this_process().split(":")[0]
    tag = machine.rpartition("-")[2]
    removed = []
    for path in Path(tempfile.gettempdir()).glob(f"sluice-{tag}-*"):
        found = _NAME.fullmatch(path.name)
        if found is None or path.is_symlink() or not path.is_dir():
            continue
        if path.stat().st_uid == os.getuid() and is_dead(
            f"{machine}:{found['pid']}:{found['start']}"
        ):
            shutil.rmtree(path, ignore_errors=True)
            log.info("removed %s, which a driver that is gone has left", path)
            removed.append(path)
    return removed
