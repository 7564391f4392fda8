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
from rlcore.images.layout import SequenceImages

LogProbs = Literal["old_log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs"]
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
    teacher_log_probs: Floats | None = None
    """[R] as the teacher's server reported them."""
    execution_tokens: int | None = None
    """Trainable tokens of all samples of its execution; None: it is alone."""
    images: SequenceImages | None = None
    """Of the prompt."""
    experts: npt.NDArray[np.integer] | None = None
    """[tokens - 1, layers, k] ids of experts that a mixture is to choose for each token."""
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
    teacher_log_probs: Tensor | None
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
class PackedImages:
    """The images of a packed micro-batch; those that several sequences share are there once."""

    pixel_values: Tensor
    """float32 [patches, width]"""
    grids: Tensor
    """int64 [images, 3]: patches along time, height and width."""
    at: Tensor
    """int64 [N], ascending: the tokens that are features of images."""
    take: Tensor
    """int64 [N]: which feature each of them is, counted over all images in their order."""
    positions: Tensor
    """int64 [3, T]: on the axes of images; those of text are the same on each."""

    def to(self, device: torch.device | str) -> PackedImages:
        """The same on another device."""
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)}
        return PackedImages(**moved)

    def of_tokens(self, kept: Tensor) -> PackedImages:
        """The same where only the tokens at `kept`, ascending, are left: all images among them."""
        at = torch.searchsorted(kept, self.at)
        return replace(self, at=at, positions=self.positions.index_select(1, kept))


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch(TokenTensors):
    """Sequences end to end."""

    cu_seqlens: Tensor
    """int32 [n + 1]: sequence i is at cu_seqlens[i]:cu_seqlens[i + 1]."""
    lengths: tuple[int, ...]
    """Tokens of each sequence (those of `cu_seqlens`, known without waiting for a device)."""
    images: PackedImages | None = None
    experts: Tensor | None = None
    """int32 [T, layers, k] ids of experts to choose; None: the model chooses."""

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same on another device."""
        moved = super(PackedBatch, self).to(device)
        return moved if self.images is None else replace(moved, images=self.images.to(device))

    def per_sequence(self, values: Tensor) -> list[Tensor]:
        """Per-token values [T] to one tensor a sequence, [length - 1]: those of tokens[1:]."""
        return [part[:-1] for part in values.split(self.lengths)]

    def inputs(self) -> PackedBatch:
        """The batch without the last token of each sequence, which predicts nothing and which no
        other token sees: all that a causal model must be given. A lone token stays.
        """
        lengths = np.asarray(self.lengths)
        ends = np.cumsum(lengths)
        kept = torch.from_numpy(np.delete(np.arange(ends[-1]), ends[lengths > 1] - 1))
        tensors = {f.name: getattr(self, f.name) for f in fields(TokenTensors)}
        chosen: dict[str, Any] = {
            k: v if v is None else v.index_select(0, kept) for k, v in tensors.items()
        }
        shorter = tuple(np.maximum(lengths - 1, 1).tolist())
        images = None if self.images is None else self.images.of_tokens(kept)
        experts = None if self.experts is None else self.experts.index_select(0, kept)
        return PackedBatch(
            **chosen,
            cu_seqlens=_edges(shorter),
            lengths=shorter,
            images=images,
            experts=experts,
        )


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


_Arrays = dict[str, npt.NDArray[np.generic]]


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
        totals: counts of the whole optimizer step, from every execution's trainable tokens.
        how: normalisation of the loss.
        log_probs: which log-probs of the sequences to take along. Named and not guessed, so that a
            micro-batch of no sequences has the same tensors as the others.

    Raises:
        DataError: lengths that do not fit each other, or a sequence lacks log-probs asked for.
    """
    arrays, lengths = _flat(sequences, totals, how, log_probs)
    images = (
        _images(sequences, arrays["position_ids"]) if any(s.images for s in sequences) else None
    )
    return PackedBatch(
        **_tensors(arrays),
        cu_seqlens=_edges(lengths),
        lengths=lengths,
        images=images,
        experts=_experts(sequences) if any(s.experts is not None for s in sequences) else None,
    )


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
    flat, lengths = _flat(sequences, totals, how, log_probs)
    real = np.arange(max(lengths))[None, :] < np.asarray(lengths)[:, None]
    grid: _Arrays = {}
    for name, values in flat.items():
        fill = pad_id if name == "input_ids" else 0
        grid[name] = np.full(real.shape, fill, dtype=values.dtype)
        grid[name][real] = values
    mask = torch.from_numpy(real.astype(np.int64))
    return PaddedBatch(**_tensors(grid), attention_mask=mask, lengths=lengths)


def _edges(lengths: Sequence[int]) -> Tensor:
    """int32 [n + 1]: where each sequence begins, and the end."""
    return torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)


def _images(sequences: Sequence[TrainSequence], text: npt.NDArray[np.generic]) -> PackedImages:
    """The images of sequences that lie end to end, whose tokens of text are at `text` [T]."""
    positions = np.tile(text.astype(np.int64), (3, 1))
    start, features, at, take = 0, 0, [], []
    first: dict[int, int] = {}
    given = []
    for sequence in sequences:
        end = start + len(sequence.tokens)
        if (images := sequence.images) is not None:
            positions[:, start:end] = images.positions
            at.append(images.at + start)
            if id(images.pixels) not in first:
                first[id(images.pixels)] = features
                given.append(images.pixels)
                features += len(images.at)
            take.append(np.arange(len(images.at)) + first[id(images.pixels)])
        start = end
    return PackedImages(
        pixel_values=torch.from_numpy(np.concatenate([one.values for one in given])),
        grids=torch.from_numpy(np.concatenate([one.grids for one in given])),
        at=torch.from_numpy(np.concatenate(at)),
        take=torch.from_numpy(np.concatenate(take)),
        positions=torch.from_numpy(positions),
    )


def _experts(sequences: Sequence[TrainSequence]) -> Tensor:
    """The experts of sequences that lie end to end. For the last token of each, which predicts
    nothing, any will do.
    """
    parts = []
    for i, sequence in enumerate(sequences):
        if sequence.experts is None or len(sequence.experts) != len(sequence.tokens) - 1:
            got = "none" if sequence.experts is None else str(len(sequence.experts))
            raise DataError(
                f"sequence {i} of the micro-batch has experts to replay for {got} of its tokens; "
                f"all but the last of its {len(sequence.tokens)} must have them"
            )
        layers, k = sequence.experts.shape[1:]
        last = np.broadcast_to(np.arange(k), (1, layers, k))
        parts.append(np.concatenate([sequence.experts, last]).astype(np.int32))
    return torch.from_numpy(np.concatenate(parts))


def _tensors(arrays: _Arrays) -> dict[str, Any]:
    """As tensors, with None for the log-probs that were not asked for."""
    tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    return {**dict.fromkeys(get_args(LogProbs)), **tensors}


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


def _flat(
    sequences: Sequence[TrainSequence],
    totals: Totals,
    how: Normalization,
    log_probs: Sequence[LogProbs],
) -> tuple[_Arrays, tuple[int, ...]]:
    """Arrays [T] of all sequences end to end, and the length of each sequence."""
    for i, sequence in enumerate(sequences):
        _check(sequence, i, log_probs)
    if not sequences:
        sequences = [_filler(log_probs)]
    lengths = tuple(len(s.tokens) for s in sequences)
    responses = np.asarray([s.response_length for s in sequences])
    ends = np.cumsum(lengths)
    ids = _joined([s.tokens for s in sequences], np.int64)
    # Where each response token is predicted: the R positions before the last of its sequence.
    within = np.arange(responses.sum()) - np.repeat(np.cumsum(responses) - responses, responses)
    predicting = np.repeat(ends - 1 - responses, responses) + within

    def placed(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        out = np.zeros(len(ids), values.dtype)
        out[predicting] = values
        return out

    mask = _joined([_mask(s) for s in sequences], np.int64) != 0
    weights = [
        token_weight(s.execution_tokens or s.trainable_tokens, totals, how) for s in sequences
    ]
    targets = np.roll(ids, -1)
    targets[ends - 1] = 0
    arrays: _Arrays = {
        "input_ids": ids,
        "position_ids": np.arange(len(ids)) - np.repeat(ends - lengths, lengths),
        "targets": targets,
        "loss_mask": placed(mask),
        "loss_weights": placed((np.repeat(weights, responses) * mask).astype(np.float32)),
        "advantages": placed(_joined([_advantages(s) for s in sequences], np.float32)),
    }
    for name in log_probs:
        arrays[name] = placed(_joined([getattr(s, name) for s in sequences], np.float32))
    return arrays, lengths


def _filler(log_probs: Sequence[LogProbs]) -> TrainSequence:
    """One token that predicts nothing: what an empty micro-batch passes through the model."""
    nothing: dict[str, Any] = dict.fromkeys(log_probs, ())
    return TrainSequence(tokens=[0], response_length=0, **nothing)


def _joined(parts: Sequence[npt.ArrayLike], dtype: type[np.generic]) -> npt.NDArray[np.generic]:
    """One array of all parts; an empty list counts as an array of that type."""
    return np.concatenate([np.asarray(part, dtype) for part in parts])


def _mask(sequence: TrainSequence) -> Ints:
    """[R] what the sequence trains on."""
    if sequence.trainable and sequence.loss_mask is not None:
        return sequence.loss_mask
    return [int(sequence.trainable)] * sequence.response_length


def _advantages(sequence: TrainSequence) -> Floats:
    """[R], one for each token."""
    value = sequence.advantages
    if isinstance(value, int | float | np.floating):
        return [float(value)] * sequence.response_length
    return value
