"""The canary: fixed token sequences whose log-probs engine and trainer must agree on.

Version numbers say what an engine was told; log-probs say what it holds. The sequences are drawn
once from a fixed seed, so figures of different syncs compare.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from rlcore.errors import SyncError

LENGTH = 32
"""Tokens of a sequence, where the context allows it."""
_SEED = 20_240_601


def canary_sequences(count: int, vocab_size: int, context_length: int) -> list[list[int]]:
    """`count` sequences of ids of the vocabulary, shorter than the context.

    Its last id is left out: SGLang 0.5.16 scores it as id 0 when it stands in a prompt.
    """
    draw = random.Random(_SEED)
    length = max(2, min(LENGTH, context_length - 1))
    return [[draw.randrange(vocab_size - 1) for _ in range(length)] for _ in range(count)]


def mean_difference(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Mean absolute difference over all tokens; NaN where either has one.

    Raises:
        SyncError: they are not about the same tokens.
    """
    if [len(row) for row in ours] != [len(row) for row in theirs]:
        raise SyncError("engine and trainer answered log-probs of different numbers of tokens")
    pairs = [p for a, b in zip(ours, theirs, strict=True) for p in zip(a, b, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def check(
    url: str,
    ours: Sequence[Sequence[float]],
    theirs: Sequence[Sequence[float]],
    tolerance: float,
) -> float:
    """The mean absolute difference of one engine.

    Raises:
        SyncError: it is above the tolerance, or not a number.
    """
    gap = mean_difference(ours, theirs)
    if not gap <= tolerance:
        raise SyncError(
            f"engine {url} differs from the trainer by {gap:.4g} nat a token on the canary, more "
            f"than weights.canary_tolerance = {tolerance:g}: it does not hold the trainer's weights"
        )
    return gap
