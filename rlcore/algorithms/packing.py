"""Sequences to the tensors of one micro-batch: end to end without padding, or a padded rectangle.

Everything per token stands at the position whose logits predict it: the logits at t predict token
t + 1, so at t `targets` holds token t + 1, and `loss_mask`, `loss_weights`, `advantages` and all
log-probs belong to that token. The last position of a sequence predicts nothing.

    tokens          p0 p1 r0 r1 r2      prompt of 2, response of 3
    targets         p1 r0 r1 r2  0
    loss_mask        0  1  1  1  0      (response tokens, where the sequence's own mask is 1)
    position_ids     0  1  2  3  4

Old log-probs computed by the trainer need no shifting: put them in with `dataclasses.replace`. To
work on trainable positions alone (the output layer over a large vocabulary is the dearest part of
the step) select with `loss_mask` from hidden states, targets and every per-token tensor alike.

Invariants:
- Only response tokens whose mask is 1, of trainable sequences, have `loss_mask` True.
- Where `loss_mask` is False, `loss_weights` is exactly 0; the other per-token tensors hold 0
  outside responses, and inside them whatever the caller gave.
- Packed and padded hold the same numbers for the same sequences; neither depends on the other
  sequences of the micro-batch.
- No sequences make one token that is masked, so that every rank has something to pass forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlcore.algorithms.aggregate import Normalization, Totals, token_weight
from rlcore.errors import DataError

LogProbs = Literal["old_log_probs", "rollout_log_probs", "ref_log_probs"]
Ints = Sequence[int] | npt.NDArray[np.integer]
Floats = Sequence[float] | npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True, eq=False)
class TrainSequence:
    """One sample as the trainer needs it: lists or 1-d arrays; R is `response_length`."""

    tokens: Ints
    """Ids of the prompt (at least one) and the response."""
    response_length: int
    """R: how many of the ids, at the end, are the response."""
    loss_mask: Ints | None = None
    """[R] 1 where the token is trained on, 0 where not (a tool's output); None is all 1."""
    advantages: float | Floats = 0.0
    """One for the whole response, or [R]."""
    old_log_probs: Floats | None = None
    """[R] of the policy before the first optimizer step of the batch."""
    rollout_log_probs: Floats | None = None
    """[R] as the engine reported them."""
    ref_log_probs: Floats | None = None
    """[R] of the reference policy."""
    trainable: bool = True
    """False masks the whole response: a sample without a reward, or one that was removed."""

    @property
    def trainable_tokens(self) -> int:
        """How many tokens count in the loss: what `Totals.of` is made from."""
        if not self.trainable:
            return 0
        if self.loss_mask is None:
            return self.response_length
        return int(np.count_nonzero(np.asarray(self.loss_mask)))


@dataclass(frozen=True, slots=True, eq=False)
class TokenTensors:
    """What both layouts hold, all of one shape: [T] packed, [n, L] padded."""

    input_ids: Tensor
    """int64"""
    position_ids: Tensor
    """int64, from 0 in each sequence."""
    targets: Tensor
    """int64, the next token; 0 where there is none."""
    loss_mask: Tensor
    """bool"""
    loss_weights: Tensor
    """float32, see `rlcore.algorithms.aggregate`."""
    advantages: Tensor
    """float32"""
    old_log_probs: Tensor | None
    """float32; None unless asked for."""
    rollout_log_probs: Tensor | None
    """float32; None unless asked for."""
    ref_log_probs: Tensor | None
    """float32; None unless asked for."""

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""
        moved = {
            f.name: v.to(device, non_blocking=True)
            for f in fields(self)
            if isinstance(v := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch(TokenTensors):
    """Sequences end to end."""

    cu_seqlens: Tensor
    """int32 [n + 1]: sequence i is at cu_seqlens[i]:cu_seqlens[i + 1]."""
    lengths: tuple[int, ...]
    """Tokens of each sequence (those of `cu_seqlens`, known without waiting for a device)."""

    def per_sequence(self, values: Tensor) -> list[Tensor]:
        """Per-token values [T] to one tensor a sequence, [length - 1]: those of tokens[1:]."""
        return [part[:-1] for part in values.split(self.lengths)]


@dataclass(frozen=True, slots=True, eq=False)
class PaddedBatch(TokenTensors):
    """One sequence a row, padded on the right."""

    attention_mask: Tensor
    """int64 [n, L]: 1 at tokens, 0 at padding."""
    lengths: tuple[int, ...]
    """Tokens of each sequence."""

    def per_sequence(self, values: Tensor) -> list[Tensor]:
        """Per-token values [n, L] to one tensor a sequence, [length - 1]: those of tokens[1:]."""
        return [row[: n - 1] for row, n in zip(values, self.lengths, strict=True)]


_DTYPES: dict[str, type[np.generic]] = {
    "input_ids": np.int64,
    "position_ids": np.int64,
    "targets": np.int64,
    "loss_mask": np.bool_,
    "loss_weights": np.float32,
    "advantages": np.float32,
}
_Row = dict[str, npt.NDArray[np.generic]]


def pack(
    sequences: Sequence[TrainSequence],
    totals: Totals,
    how: Normalization,
    *,
    log_probs: Sequence[LogProbs] = (),
) -> PackedBatch:
    """Lays the sequences end to end.

    Args:
        sequences: those of one micro-batch; none gives one masked token of id 0.
        totals: counts of the whole optimizer step, from every sequence's `trainable_tokens`.
        how: normalisation of the loss.
        log_probs: which log-probs of the sequences to take along. Named and not guessed, so that a
            micro-batch of no sequences has the same tensors as the others.

    Raises:
        DataError: lengths that do not fit each other, or a sequence lacks log-probs asked for.
    """
    rows = _rows(sequences, totals, how, log_probs)
    lengths = tuple(len(row["input_ids"]) for row in rows)
    flat = {name: torch.from_numpy(np.concatenate([r[name] for r in rows])) for name in rows[0]}
    edges = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
    return PackedBatch(**_complete(flat), cu_seqlens=edges, lengths=lengths)


def padded(
    sequences: Sequence[TrainSequence],
    totals: Totals,
    how: Normalization,
    *,
    log_probs: Sequence[LogProbs] = (),
    pad_id: int = 0,
) -> PaddedBatch:
    """The same sequences as the rows of a rectangle; arguments and errors as `pack`.

    `pad_id` fills `input_ids` behind the sequences: any id that the model has an embedding for.
    """
    rows = _rows(sequences, totals, how, log_probs)
    lengths = tuple(len(row["input_ids"]) for row in rows)
    shape = (len(rows), max(lengths))
    grid: dict[str, Tensor] = {}
    for name in rows[0]:
        fill = pad_id if name == "input_ids" else 0
        array = np.full(shape, fill, dtype=rows[0][name].dtype)
        for target, row in zip(array, rows, strict=True):
            target[: len(row[name])] = row[name]
        grid[name] = torch.from_numpy(array)
    mask = (np.arange(shape[1])[None, :] < np.asarray(lengths)[:, None]).astype(np.int64)
    return PaddedBatch(**_complete(grid), attention_mask=torch.from_numpy(mask), lengths=lengths)


def _complete(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Adds None for the log-probs that were not asked for."""
    return {**dict.fromkeys(get_args(LogProbs)), **tensors}


def _rows(
    sequences: Sequence[TrainSequence],
    totals: Totals,
    how: Normalization,
    log_probs: Sequence[LogProbs],
) -> list[_Row]:
    """Aligned arrays of each sequence, all with the same keys."""
    if not sequences:
        nothing: dict[str, Any] = dict.fromkeys(log_probs, ())
        return [_aligned(TrainSequence([0], 0, **nothing), log_probs, 0.0)]
    for i, sequence in enumerate(sequences):
        _check(sequence, i, log_probs)
    return [
        _aligned(s, log_probs, token_weight(s.trainable_tokens, totals, how)) for s in sequences
    ]


def _check(sequence: TrainSequence, i: int, log_probs: Sequence[LogProbs]) -> None:
    """Raises when something is missing or the lengths of a sequence do not fit each other."""
    length, response = len(sequence.tokens), sequence.response_length
    if not 0 <= response < length:
        raise DataError(
            f"sequence {i} of the micro-batch has {length} tokens and a response of {response}: "
            "the prompt must have at least one token"
        )
    for name in ("loss_mask", "advantages", *log_probs):
        value = getattr(sequence, name)
        if value is None and name in log_probs:
            raise DataError(f"sequence {i} of the micro-batch has no {name}; all must have them")
        if value is None or isinstance(value, int | float | np.floating):
            continue
        if len(value) != response:
            raise DataError(
                f"sequence {i} of the micro-batch has {len(value)} {name} for a response of "
                f"{response} tokens"
            )


def _aligned(sequence: TrainSequence, log_probs: Sequence[LogProbs], weight: float) -> _Row:
    """Arrays [length] of one sequence, each value at the position that predicts its token."""
    tokens = np.asarray(sequence.tokens)
    length, response = len(tokens), sequence.response_length
    row: _Row = {name: np.zeros(length, dtype) for name, dtype in _DTYPES.items()}
    row["input_ids"][:] = tokens
    row["position_ids"][:] = np.arange(length)
    row["targets"][:-1] = tokens[1:]
    predicting = slice(length - 1 - response, length - 1)
    if sequence.trainable:
        mask = 1 if sequence.loss_mask is None else np.asarray(sequence.loss_mask) != 0
        row["loss_mask"][predicting] = mask
    row["loss_weights"][row["loss_mask"].astype(np.bool_)] = weight
    row["advantages"][predicting] = sequence.advantages
    for name in log_probs:
        row[name] = np.zeros(length, np.float32)
        row[name][predicting] = getattr(sequence, name)
    return row
