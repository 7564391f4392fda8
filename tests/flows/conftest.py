"""Fixtures of the tests that run the real command."""

from pathlib import Path

import pytest
from real_runs import Sluice


@pytest.fixture
def sluice(tmp_path: Path) -> Sluice:
    """The command, with a root of its own."""
    return Sluice(tmp_path / "root", cwd=tmp_path)
