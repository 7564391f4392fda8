"""A model's limits, as its folder states them."""

import json
from pathlib import Path

import pytest

from rlcore.errors import ConfigError
from rlcore.rollout.limits import Limits


def test_they_come_from_the_model_folder(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"vocab_size": 45, "max_position_embeddings": 64}))
    assert Limits.of_model(tmp_path) == Limits(45, 64)
    assert Limits.of_model(tmp_path, 16) == Limits(45, 16)
    config.write_text(json.dumps({"text_config": {"vocab_size": 7, "max_position_embeddings": 8}}))
    assert Limits.of_model(tmp_path) == Limits(7, 8)


def test_the_budget_is_what_the_context_leaves() -> None:
    limits = Limits(10, 16)
    assert [limits.response_budget(n, 8) for n in (4, 8, 12, 16)] == [8, 8, 4, 0]


def test_a_folder_that_states_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        Limits.of_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no vocab_size"):
        Limits.of_model(tmp_path)
