"""Fixtures of the tests that run the real command."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from once import once
from real_runs import Sluice
from shared_stack import shared_stack
from undisturbed import Undisturbed, undisturbed


@pytest.fixture(scope="session")
def stack_env() -> Iterator[dict[str, str]]:
    """Where a Prefect server and a Ray head are that many tests share."""
    with shared_stack() as env:
        yield env


@pytest.fixture
def sluice(tmp_path: Path, stack_env: dict[str, str]) -> Sluice:
    """The command, with a root of its own, beside a server and a Ray that are there."""
    return Sluice(tmp_path / "root", cwd=tmp_path, env=stack_env)


@pytest.fixture
def sluice_alone(tmp_path: Path) -> Sluice:
    """The command, with a root, a server and a Ray of its own: its processes descend from it."""
    return Sluice(tmp_path / "root", cwd=tmp_path)


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The short run, undisturbed."""
    return once(tmp_path_factory, "undisturbed", undisturbed)
