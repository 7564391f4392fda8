"""A small model that sees images."""

from pathlib import Path

import pytest
from vision_models import write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2.5-VL."""
    return write_model(tmp_path_factory.mktemp("vision") / "qwen2_5_vl")
