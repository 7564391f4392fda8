"""Values of slime's arguments as values of the settings that they become."""

import re
from typing import Any

from rlcore.errors import ConfigError

BUILT_IN_FILTERS = {
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": "nonzero_std",
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback": (
        "nonzero_std_with_fallback"
    ),
}
LOSSES = ("policy_loss", "sft_loss")
SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine"}
MINUTE_S = 60.0


def rollout_only(value: bool) -> str:
    """The mode of a run that is to have no trainer."""
    return "debug-rollout-only" if value else "sync"


def train_only(value: bool) -> str:
    """The mode of a run that is to have no engines."""
    return "debug-train-only" if value else "sync"


def stored_run(value: str) -> str:
    """The name of a stored run.

    Raises:
        ConfigError: it is a file's.
    """
    if re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,79}", value) is None or value.endswith(".pt"):
        raise ConfigError(
            f"--load-debug-rollout-data {value}: files of slime are not read; give the name of a "
            "stored run under storage.root (`sluice runs` lists them), whose batches are trained on"
        )
    return value


def engine_urls(value: list[str]) -> list[str]:
    """Addresses of engines as URLs."""
    return [one if "://" in one else f"http://{one}" for one in value]


def negated(value: bool) -> bool:
    """Of an argument that switches off."""
    return not value


def minutes(value: float) -> float:
    """In seconds."""
    return value * MINUTE_S


def positive_or_none(value: int) -> int | None:
    """None for the 0 or -1 that stand for none."""
    return value if value > 0 else None


def dynamic_filter(value: str) -> str:
    """The name of a built-in filter, or a function's path as it is."""
    return BUILT_IN_FILTERS.get(value, value)


def without_advantages(value: bool) -> str:
    """The loss of whoever computes none."""
    return LOSSES[value]


def schedule(value: str) -> str:
    """The course of the learning rate.

    Raises:
        ConfigError: there is none of that name here.
    """
    if value.lower() not in SCHEDULES:
        raise ConfigError(f"--lr-decay-style {value}: train.lr_schedule has {', '.join(SCHEDULES)}")
    return SCHEDULES[value.lower()]


def scalars(value: Any) -> dict[str, Any]:
    """A JSON object of plain values."""
    if not isinstance(value, dict):
        raise ConfigError(f"{value!r} is no JSON object")
    return value
