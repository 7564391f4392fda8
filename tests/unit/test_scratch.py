"""Scratch folders: those of living processes stay, those of dead ones go."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlcore.scratch import make_scratch, sweep_scratch


def test_only_folders_of_dead_processes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "from rlcore.scratch import make_scratch; print(make_scratch('dead'))"
    env = {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    dead = Path(subprocess.check_output([sys.executable, "-c", code], text=True, env=env).strip())
    (dead / "inner").mkdir()
    (dead / "inner" / "file").write_text("x")
    alive = make_scratch("alive")
    machine = alive.name.split("-")[1]
    other = [f"sluice-{machine}-notes", "sluice-ffffffff-1-1-x", "sluice-run-abc", "other"]
    for name in other:
        (tmp_path / name).mkdir()
    (tmp_path / dead.name.replace("dead", "link")).symlink_to(tmp_path / "other")

    assert sweep_scratch() == [dead]
    assert not dead.exists() and alive.is_dir()
    assert all((tmp_path / name).is_dir() for name in other)
