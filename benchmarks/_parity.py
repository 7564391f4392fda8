"""A cheap reward that differs within a group, for runs that are timed."""

from typing import Any

from rlcore.sample import Sample


def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """From 0 to 6/7, by the token ids."""
    return sum(sample.tokens) % 7 / 7
