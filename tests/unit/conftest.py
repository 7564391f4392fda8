"""What holds for every unit test."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A module that leaves torch.distributed initialised is named, and the next not disturbed."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("this module left torch.distributed initialised")
