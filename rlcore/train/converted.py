"""What a function of one's own makes of a batch's samples: training sequences, checked row by row.

Invariant: what comes out can be packed. Whatever cannot is an error that names the function, the
key and the row.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlcore.algorithms.packing import LogProbs, TrainSequence
from rlcore.errors import PluginError

NEEDED = ("tokens", "response_lengths", "rewards")
LOG_PROBS: tuple[LogProbs, ...] = ("rollout_log_probs", "teacher_log_probs")
"""Columns of log-probs that a batch may have."""
TAKEN = (*NEEDED, "loss_masks", *LOG_PROBS)
"""The keys that sequences are made of."""
UNUSED = frozenset(
    {
        "raw_reward",
        "truncated",
        "sample_indices",
        "rollout_ids",
        "rollout_mask_sums",
        "metadata",
        "source_names",
        "round_number",
    }
)
"""Keys of slime's that say nothing about a sequence."""


def to_sequences(data: Any, what: str) -> list[TrainSequence]:
    """One sequence for each row of a dict of lists.

    Args:
        data: `tokens` (ids of prompt and response), `response_lengths`, `rewards` (the number that
            a sequence is trained with), and where there are any `loss_masks`, `rollout_log_probs`
            and `teacher_log_probs` of the response tokens.
        what: the function, for errors.

    Raises:
        PluginError: a key is missing or unknown, or a row is not what it must be.
    """
    columns = _columns(data, what)
    return [_sequence(columns, i, what) for i in range(len(columns["tokens"]))]


def _columns(data: Any, what: str) -> Mapping[str, Sequence[Any]]:
    if not isinstance(data, Mapping):
        raise PluginError(f"{what} must return a dict of lists, not a {type(data).__name__}")
    for key in data:
        if key not in TAKEN and key not in UNUSED:
            near = difflib.get_close_matches(str(key), TAKEN, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(TAKEN)}"
            raise PluginError(f"{what} returned the key {key!r}, of which nothing is made{hint}")
    missing = [key for key in NEEDED if data.get(key) is None]
    if missing:
        raise PluginError(f"{what} must return the keys {', '.join(NEEDED)}; {missing[0]!r} lacks")
    columns = {key: data[key] for key in TAKEN if data.get(key) is not None}
    for key, column in columns.items():
        if not hasattr(column, "__len__") or len(column) != len(columns["tokens"]):
            size = len(column) if hasattr(column, "__len__") else "no"
            raise PluginError(
                f"{what}: {key!r} has {size} rows, 'tokens' {len(columns['tokens'])}; all keys "
                "must have one row a sequence"
            )
    return columns


def _sequence(columns: Mapping[str, Sequence[Any]], i: int, what: str) -> TrainSequence:
    """Row `i` as the trainer takes it."""

    def wrong(key: str, must: str) -> PluginError:
        return PluginError(f"{what}: row {i} of {key!r} must be {must}")

    tokens = _numbers(columns["tokens"][i])
    if tokens is None or not _whole(tokens) or len(tokens) < 2 or tokens.min() < 0:
        raise wrong("tokens", "two or more token ids, of prompt and response")
    length, reward = (_number(columns[key][i]) for key in ("response_lengths", "rewards"))
    if length is None or int(length) != length or not 0 <= length < len(tokens):
        raise wrong("response_lengths", f"a number from 0 to {len(tokens) - 1}, without the prompt")
    if reward is None:
        raise wrong("rewards", "a finite number")
    given: dict[str, Any] = {}
    for key in ("loss_masks", *LOG_PROBS):
        row = columns[key][i] if key in columns else None
        if row is None:
            continue
        values = _numbers(row)
        if values is None or len(values) != length or not np.isfinite(values).all():
            raise wrong(key, f"{int(length)} finite numbers, one for each response token")
        given[key] = values
    mask = given.pop("loss_masks", None)
    return TrainSequence(
        tokens=tokens.astype(np.int64),
        response_length=int(length),
        loss_mask=None if mask is None else (mask != 0).astype(np.int8),
        advantages=reward,
        **{key: values.astype(np.float32) for key, values in given.items()},
    )


def _numbers(row: Any) -> npt.NDArray[Any] | None:
    """A row as a flat array of numbers; None where it is none."""
    try:
        values = np.asarray(row.tolist() if hasattr(row, "tolist") else row)
    except (TypeError, ValueError):
        return None
    # An empty list has no type of its own.
    return values if values.ndim == 1 and (values.dtype.kind in "iufb" or not len(values)) else None


def _whole(values: npt.NDArray[Any]) -> bool:
    return values.dtype.kind in "iu" or bool((values == np.floor(values)).all())


def _number(value: Any) -> float | None:
    """A finite number; None where it is none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
