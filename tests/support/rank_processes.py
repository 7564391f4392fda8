"""Ranks of a trainer as processes, given cases to run (`tests/unit/train/megatron_rank.py`)."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

RANK = Path(__file__).parents[1] / "unit" / "train" / "megatron_rank.py"


def run_ranks(folder: Path, world: int, cases: list[dict[str, Any]], device: str = "cpu") -> None:
    """All cases on fresh ranks, one after another."""
    folder.mkdir(exist_ok=True)
    (folder / "job").write_bytes(pickle.dumps(cases))
    command = [sys.executable, "-W", "ignore", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(world), folder, folder / "job", device])
        for rank in range(world)
    ]
    try:
        for rank in ranks:
            rank.wait(500)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def results(folder: Path, name: str, world: int) -> list[dict[str, Any]]:
    """What each rank says of a case."""
    found = []
    for rank in range(world):
        file = folder / f"{name}.{rank}"
        assert file.exists(), f"rank {rank} did not come to {name}: a case before it failed"
        out = pickle.loads(file.read_bytes())
        assert isinstance(out, dict), out
        found.append(out)
    return found
