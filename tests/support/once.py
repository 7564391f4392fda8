"""What all workers of a test session share is made once, by the one that needs it first."""

import fcntl
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], T]) -> T:
    """What `make` returns, called with an empty folder that stays; others wait for it meanwhile.

    Args:
        factory: of the session.
        name: of the folder.
        make: its result is pickled.
    """
    base = factory.getbasetemp()
    # A worker's folder lies in the session's.
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, result = shared / name, shared / f"{name}.pickle"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            # A worker that failed may have left a part.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            result.write_bytes(pickle.dumps(make(folder)))
    made: T = pickle.loads(result.read_bytes())
    return made
