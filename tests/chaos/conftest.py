"""The undisturbed run that all others are compared with, made once."""

from pathlib import Path

import pytest
from chaos_runs import Calm, calm_run, tiny
from once import once
from real_runs import Sluice


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """The tiny run, undisturbed."""
    return once(tmp_path_factory, "calm", lambda folder: calm_run(folder, tiny(folder)))


@pytest.fixture
def sluice(tmp_path: Path) -> Sluice:
    """The command, with a root of its own."""
    return Sluice(tmp_path / "root", cwd=tmp_path)
