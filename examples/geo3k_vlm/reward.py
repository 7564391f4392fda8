"""The example's reward."""

from typing import Any

from rlcore.sample import Sample


def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """1 for the right number and nothing else; a number that is near has up to 0.5, others none.

    What is near counts so that there is something to learn before the picture is understood.
    """
    if not sample.response.isdecimal():
        return 0.0
    off = abs(int(sample.response) - int(sample.label))
    return 1.0 if off == 0 else 0.5 * max(0.0, 1 - off / 8)
