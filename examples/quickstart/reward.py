"""The quickstart's reward: how much of the answer is right."""

from typing import Any

from rlcore.sample import Sample


def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """The share of right characters, from 0 to 1; too short or too long an answer loses its share.

    A dense reward is what makes the task learnable from random weights: of random answers one in 45
    starts with the right digit, and one in four million is right.
    """
    answer, right = sample.response, str(sample.label)
    same = sum(a == b for a, b in zip(answer, right, strict=False))
    return same / max(len(answer), len(right))
