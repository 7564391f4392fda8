"""Is the sum right?"""

import re
from typing import Any

from rlcore.sample import Sample


def last_integer(text: str) -> int | None:
    """The last whole number in a text."""
    found = re.findall(r"-?\d+", text)
    return int(found[-1]) if found else None


def exact(args: Any, sample: Sample, **kwargs: Any) -> float:
    """1 if the last integer of the answer is the label, else 0."""
    return float(last_integer(sample.response) == int(sample.label))


def near(args: Any, sample: Sample, **kwargs: Any) -> float:
    """1 if right, 0 without a number, and below 1/2 the less the further off.

    For runs too short for `exact`: at first one sampled answer in a hundred is right, and a group
    of equal rewards teaches nothing.
    """
    answer = last_integer(sample.response)
    if answer is None:
        return 0.0
    off = abs(answer - int(sample.label))
    return 1.0 if off == 0 else 0.5 / (1 + off)
