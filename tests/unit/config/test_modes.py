"""Modes: what each needs and has, and that old runs keep their digests."""

from typing import Any

import pytest

from rlcore.config import RunConfig, build_config, config_digest
from rlcore.config.digest import tree_digest
from rlcore.errors import ConfigError


def config(**sections: Any) -> RunConfig:
    base: dict[str, Any] = {
        "model": {"path": "/model"},
        "data": {"path": "/train.jsonl"},
        "reward": {"custom_rm_path": "mine:reward"},
    }
    return build_config(base | sections)


def test_who_trains_and_who_generates() -> None:
    found = {
        mode: (made.trains, made.generates)
        for mode, made in {
            "sync": config(),
            "debug-rollout-only": config(run={"mode": "debug-rollout-only"}),
            "debug-train-only": config(run={"mode": "debug-train-only", "train_from": "a"}),
        }.items()
    }
    assert found == {
        "sync": (True, True),
        "debug-rollout-only": (False, True),
        "debug-train-only": (True, False),
    }


@pytest.mark.parametrize("run", [{"mode": "debug-train-only"}, {"train_from": "a"}])
def test_training_alone_names_its_batches(run: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"run\.train_from, .* belong together"):
        config(run=run)


def test_a_run_without_these_settings_keeps_its_digest() -> None:
    tree = config().model_dump(mode="json")
    del tree["run"]["train_from"]
    assert tree_digest(tree) == config_digest(config())
