"""From the committed rows of rollout, reward and filter to one rank's share of a training batch.

Every rank reads the narrow columns of the whole batch, computes the same advantages and the same
plan, and makes sequences of its own rows alone.

Who is trained: samples that the filter kept, that have a reward, that did not fail, that no plugin
marked `remove_sample`, and that have a token to train on. Removed samples still count in their
group's statistics; failed ones do not. What is left, in rollout order, is cut into
`num_steps_per_rollout` parts whose sizes differ by at most one, and each step is normalised by what
is in it: with a full batch a step holds exactly `global_batch_size` samples, with a filtered one
proportionally fewer. Where fewer samples than steps are left each is a step of its own; where none
is left there is no step, and the state stays as it is. Several samples that were cut from one
execution count as one in all of this, and go into the same step.

Invariants:
- All ranks agree on steps, micro-batch counts, totals and metrics; every trained sample is on one
  rank.
- Every sample that is left out is counted in the batch's metrics, under the first reason
  that applies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rlcore.algorithms.advantages import AdvantageInputs, AdvantageOutputs, sample_advantages
from rlcore.algorithms.aggregate import Totals
from rlcore.algorithms.packing import LogProbs, TrainSequence
from rlcore.algorithms.plan import Step, plan
from rlcore.config.tree import AlgorithmConfig, TrainConfig
from rlcore.errors import DataError
from rlcore.images.processor import ImageProcessor
from rlcore.rollout.groups import execution_of
from rlcore.sample import Sample, Status
from rlcore.store.batch import read_parts
from rlcore.store.manifest import FileRef
from rlcore.store.objects import Objects
from rlcore.store.rows import table_to_samples
from rlcore.train.converted import LOG_PROBS
from rlcore.train.custom import Functions
from rlcore.train.images import IMAGE_COLUMNS, BatchImages
from rlcore.train.trainer import BatchFiles, TrainBatch, TrainStep

SAMPLE_COLUMNS = (
    "group_index",
    "rollout_id",
    "status",
    "remove_sample",
    "response_length",
    "tokens",
    "loss_mask",
    "rollout_log_probs",
    "teacher_log_probs",
)
EXPERT_COLUMNS = ("routed_experts", "routed_experts_shape")


def read_rollout(
    objects: Objects, rollout: Sequence[FileRef], *, images: bool = False, experts: bool = False
) -> pa.Table:
    """What training needs of a rollout's samples; their images too, if the model takes them, and
    their experts, where these are replayed.

    Raises:
        Corrupt: a part is not what was committed.
    """
    columns = SAMPLE_COLUMNS + (IMAGE_COLUMNS if images else ())
    return read_parts(objects, rollout, columns + (EXPERT_COLUMNS if experts else ()))


def load_batch(
    objects: Objects,
    files: BatchFiles,
    *,
    train: TrainConfig,
    algorithm: AlgorithmConfig,
    rank: int,
    world: int,
    rollout: pa.Table | None = None,
    images: ImageProcessor | None = None,
    experts: bool = False,
) -> TrainBatch:
    """Reads a batch and takes the share of one rank.

    Args:
        objects: the store.
        files: the parts.
        train, algorithm: settings.
        rank, world: whose share.
        rollout: the rollout's columns, where they were read before.
        images: of the model, where it takes them.
        experts: whether those that the engines chose are replayed.

    Raises:
        Corrupt: a part is not what was committed.
        DataError: the parts do not belong together, or a sample has no experts to replay.
        PluginError: a function of one's own makes no numbers of the rewards, or no sequences.
    """
    if rollout is None:
        rollout = read_rollout(objects, files.rollout, images=images is not None, experts=experts)
    samples = _Samples(rollout, images, experts=experts)
    rewards, keep = _verdicts(objects, files, samples.count, samples.status)
    advantages = sample_advantages(
        AdvantageInputs(
            rewards,
            samples.groups,
            algorithm.group_std,
            baseline=algorithm.group_baseline,
            executions=samples.executions,
        )
    )
    own, scored = Functions(algorithm), {}
    if "reward_post_process" in own or "convert_samples" in own:
        chosen = [i for i, good in enumerate(advantages.trainable) if good and keep[i]]
        scored = _whole_samples(objects, files, chosen, rewards)
    if "reward_post_process" in own and scored:
        numbers = list(advantages.advantages)
        for i, number in zip(scored, own.numbers(list(scored.values())), strict=True):
            numbers[i] = number
        advantages = replace(advantages, advantages=tuple(numbers))
    rows, metrics = _trained_rows(samples, keep, advantages)
    if "convert_samples" in own:
        made = own.sequences(list(scored.values())) if scored else []
        trained, counted = _as_converted(made)
    else:
        trained, counted = _as_stored(samples, rows, advantages)
    return _share(trained, metrics | counted, files.iteration, train, rank, world)


def _verdicts(
    objects: Objects, files: BatchFiles, count: int, status: Sequence[str]
) -> tuple[list[float | None], npt.NDArray[np.bool_]]:
    """The reward of each sample, None where it has none or failed; and whether it was kept."""
    scores = read_parts(objects, files.reward, ("row", "status"))
    selection = read_parts(objects, files.selection, ("row", "reward", "keep"))
    for name, table in (("reward", scores), ("filter", selection)):
        if table.column("row").to_pylist() != list(range(count)):
            raise DataError(
                f"iteration {files.iteration}: the {name} part has {table.num_rows} rows that are "
                f"not, in order, those of the {count} samples of the rollout; run the "
                f"{name} stage again"
            )
    failed = np.asarray(
        [Status.FAILED in pair for pair in zip(status, scores["status"].to_pylist(), strict=True)]
    )
    rewards = [
        None if f else r for f, r in zip(failed, selection["reward"].to_pylist(), strict=True)
    ]
    return rewards, np.asarray(selection["keep"].to_pylist(), dtype=bool)


def _whole_samples(
    objects: Objects, files: BatchFiles, rows: list[int], rewards: Sequence[float | None]
) -> dict[int, Sample]:
    """Some samples with all their fields and their rewards as numbers, by row."""
    read = table_to_samples(read_parts(objects, files.rollout, rows=rows)) if rows else []
    for sample, i in zip(read, rows, strict=True):
        sample.reward = rewards[i]
    return dict(zip(rows, read, strict=True))


def _trained_rows(
    samples: _Samples, keep: npt.NDArray[np.bool_], advantages: AdvantageOutputs
) -> tuple[list[int], dict[str, float]]:
    """Rows to train in rollout order, and how many are not, by reason."""
    left = np.ones(samples.count, dtype=bool)
    metrics = {}
    for name, good in (
        ("samples_not_kept", keep),
        ("samples_failed", np.asarray(advantages.trainable, dtype=bool)),
        ("samples_removed", ~samples.removed),
        ("samples_without_tokens", samples.trainable_tokens > 0),
    ):
        metrics[name] = float((left & ~good).sum())
        left &= good
    metrics["groups"] = float(advantages.num_groups)
    metrics["groups_of_equal_reward"] = float(advantages.num_equal_groups)
    return np.flatnonzero(left).tolist(), metrics


@dataclass(frozen=True)
class _Trained:
    """What is trained of a batch, in order."""

    lengths: list[int]
    """Tokens of each sequence, prompts included."""
    executions: list[int]
    """Which sequences are of one execution."""
    tokens: Mapping[int, int]
    """Tokens of each execution that are trained."""
    given: tuple[LogProbs, ...]
    """The log-probs that all sequences have."""
    sequence: Callable[[int], TrainSequence]


def _as_stored(
    samples: _Samples, rows: list[int], advantages: AdvantageOutputs
) -> tuple[_Trained, dict[str, float]]:
    """The samples of some rows as they are, and their figures by slime's names."""
    given = tuple(name for name in LOG_PROBS if samples.log_probs[name].present[rows].all())
    numbers = advantages.advantages
    executions = [samples.executions[row] for row in rows]
    tokens = Counter[int]()
    for row, execution in zip(rows, executions, strict=True):
        tokens[execution] += int(samples.trainable_tokens[row])
    trained = _Trained(
        lengths=samples.lengths[rows].tolist(),
        executions=executions,
        tokens=tokens,
        given=given,
        sequence=lambda i: samples.sequence(
            rows[i], numbers[rows[i]], given, tokens[executions[i]]
        ),
    )
    if not rows:
        return trained, {}
    cut = [samples.status[row] == Status.TRUNCATED for row in rows]
    return trained, {
        "rollout/rewards": float(np.mean([numbers[row] for row in rows])),
        "rollout/response_lengths": float(samples.response_lengths[rows].mean()),
        "rollout/truncated": float(np.mean(cut)),
    }


def _as_converted(made: Sequence[TrainSequence]) -> tuple[_Trained, dict[str, float]]:
    """What a function made of the samples, and its figures by slime's names."""
    kept = [s for s in made if s.trainable_tokens]
    given = tuple(name for name in LOG_PROBS if all(getattr(s, name) is not None for s in kept))
    cleared = {name: None for name in LOG_PROBS if name not in given}
    trained = _Trained(
        lengths=[len(s.tokens) for s in kept],
        executions=list(range(len(kept))),
        tokens=dict(enumerate(s.trainable_tokens for s in kept)),
        given=given,
        sequence=lambda i: replace(kept[i], **cleared),  # type: ignore[arg-type]
    )
    # Whether a sample that was marked for removal is trained was the function's to say.
    counted = {"samples_removed": 0.0, "samples_without_tokens": float(len(made) - len(kept))}
    if kept:
        counted["rollout/rewards"] = float(np.mean([s.advantages for s in kept]))
        counted["rollout/response_lengths"] = float(np.mean([s.response_length for s in kept]))
    return trained, counted


def _share(
    trained: _Trained,
    metrics: dict[str, float],
    iteration: int,
    train: TrainConfig,
    rank: int,
    world: int,
) -> TrainBatch:
    """One rank's part of the plan over all sequences."""
    count = len(trained.lengths)
    steps_of_all: tuple[Step, ...] = ()
    if count:
        whole = plan(
            trained.lengths,
            max_tokens=train.max_tokens,
            dp_size=world,
            num_steps=min(train.num_steps_per_rollout, len(trained.tokens)),
            executions=trained.executions,
        )
        steps_of_all = whole.steps
    steps = tuple(
        TrainStep(
            micro_batches=tuple(
                tuple(trained.sequence(i) for i in micro.samples) for micro in step.ranks[rank]
            ),
            totals=Totals.of(
                trained.tokens[e] for e in {trained.executions[i]: None for i in step.samples}
            ),
        )
        for step in steps_of_all
    )
    metrics["micro_batches"] = float(sum(step.num_micro_batches for step in steps_of_all))
    return TrainBatch(
        iteration=iteration,
        steps=steps,
        samples=count,
        tokens=sum(trained.lengths),
        rollout_log_probs="rollout_log_probs" in trained.given,
        teacher_log_probs="teacher_log_probs" in trained.given,
        metrics=metrics,
    )


class _Lists:
    """A list column as flat values: no Python object a token."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        array = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks)
        self.present = np.asarray(array.is_valid())
        self.offsets = array.offsets.to_numpy()
        self.values = array.values.to_numpy()

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Entries of each row."""
        return np.diff(self.offsets).astype(np.int64)

    def row(self, i: int) -> npt.NDArray[np.generic] | None:
        """One row's values, a view."""
        return self.values[self.offsets[i] : self.offsets[i + 1]] if self.present[i] else None


class _Samples:
    """What training needs of a rollout batch, by row."""

    def __init__(
        self, table: pa.Table, images: ImageProcessor | None, *, experts: bool = False
    ) -> None:
        self.count = table.num_rows
        self.images = None if images is None else BatchImages(table, images)
        self.groups = table["group_index"].to_pylist()
        self.executions = execution_of(self.groups, table["rollout_id"].to_pylist())
        self.status = table["status"].to_pylist()
        self.removed = np.asarray(table["remove_sample"].to_pylist(), dtype=bool)
        self.response_lengths = table["response_length"].to_numpy().astype(np.int64)
        self.experts = [_Lists(table[name]) for name in EXPERT_COLUMNS] if experts else []
        self.tokens = _Lists(table["tokens"])
        self.masks = _Lists(table["loss_mask"])
        self.log_probs = {name: _Lists(table[name]) for name in LOG_PROBS}
        self.lengths = self.tokens.lengths
        ones = np.concatenate([[0], np.cumsum(self.masks.values != 0)])
        masked = ones[self.masks.offsets[1:]] - ones[self.masks.offsets[:-1]]
        self.trainable_tokens = np.where(self.masks.present, masked, self.response_lengths)

    def sequence(
        self, row: int, advantage: float, given: Sequence[LogProbs], execution_tokens: int
    ) -> TrainSequence:
        """A row as the trainer takes it, with the log-probs that all rows are given."""
        tokens, response = self.tokens.row(row), int(self.response_lengths[row])
        images = None
        if self.images is not None:
            images = self.images.of(row, tokens, len(tokens) - response)  # type: ignore[arg-type]
        return TrainSequence(
            tokens=tokens,  # type: ignore[arg-type]
            response_length=response,
            loss_mask=self.masks.row(row),  # type: ignore[arg-type]
            advantages=advantage,
            execution_tokens=execution_tokens,
            images=images,
            experts=self._experts_of(row) if self.experts else None,
            **{name: self.log_probs[name].row(row) for name in given},  # type: ignore[arg-type]
        )

    def _experts_of(self, row: int) -> npt.NDArray[np.integer]:
        """[tokens - 1, layers, k] as the engine chose them; any for tokens that came behind what it
        was last asked, on which no trained token depends.
        """
        flat, shape = (column.row(row) for column in self.experts)
        if flat is None or shape is None:
            raise DataError(
                f"sample {row} of the rollout has no routed experts, which "
                "rollout.use_rollout_routing_replay = true replays; a generate function of one's "
                "own hands them on in sample.rollout_routed_experts"
            )
        told: Any = flat.reshape(shape)
        missing, mask = int(self.lengths[row]) - 1 - len(told), self.masks.row(row)
        if missing > 0 and mask is not None and not mask[-missing:].any():
            rest = np.broadcast_to(np.arange(shape[2], dtype=flat.dtype), (missing, *shape[1:]))
            told = np.concatenate([told, rest])
        return told
