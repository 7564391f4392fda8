"""The example's reward."""

from typing import Any

from rlcore.sample import Sample


def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """1 for the right number and nothing else, 0.2 for a number, 0 for what is none."""
    if sample.response == sample.label:
        return 1.0
    return 0.2 if sample.response.isdecimal() else 0.0
