"""The example's reward."""

from typing import Any

from rlcore.sample import Sample


def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """1 for the right number and nothing else.

    No number is worth more than another before it is right: else the nearest one to all pictures is
    learned first, and the pictures are not looked at.
    """
    return float(sample.response == sample.label)
