"""From the committed rows of rollout, reward and filter to one rank's share of a training batch.

Every rank reads the narrow columns of the whole batch, computes the same advantages and the same
plan, and makes sequences of its own rows alone.

Who is trained: samples that the filter kept, that have a reward, that did not fail, that no plugin
marked `remove_sample`, and that have a token to train on. Removed samples still count in their
group's statistics; failed ones do not. What is left, in rollout order, is cut into
`num_steps_per_rollout` parts whose sizes differ by at most one, and each step is normalised by what
is in it: with a full batch a step holds exactly `global_batch_size` samples, with a filtered one
proportionally fewer. Where fewer samples than steps are left each is a step of its own; where none
is left there is no step, and the state stays as it is.

Invariants:
- All ranks agree on steps, micro-batch counts, totals and metrics; every trained sample is on one
  rank.
- Every sample that is left out is counted in the batch's metrics, under the first reason
  that applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from rlcore.sample import Status
from rlcore.store.batch import read_parts
from rlcore.store.manifest import FileRef
from rlcore.store.objects import Objects
from rlcore.store.rows import table_to_samples
from rlcore.train.custom import Functions
from rlcore.train.images import IMAGE_COLUMNS, BatchImages
from rlcore.train.trainer import BatchFiles, TrainBatch, TrainStep

SAMPLE_COLUMNS = (
    "group_index",
    "status",
    "remove_sample",
    "response_length",
    "tokens",
    "loss_mask",
    "rollout_log_probs",
    "teacher_log_probs",
)

LOG_PROBS: tuple[LogProbs, ...] = ("rollout_log_probs", "teacher_log_probs")
"""Columns of log-probs that a rollout may have."""


def read_rollout(objects: Objects, rollout: Sequence[FileRef], *, images: bool = False) -> pa.Table:
    """What training needs of a rollout's samples; their images too, if the model takes them.

    Raises:
        Corrupt: a part is not what was committed.
    """
    return read_parts(objects, rollout, SAMPLE_COLUMNS + (IMAGE_COLUMNS if images else ()))


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
) -> TrainBatch:
    """Reads a batch and takes the share of one rank.

    Args:
        objects: the store.
        files: the parts.
        train, algorithm: settings.
        rank, world: whose share.
        rollout: the rollout's columns, where they were read before.
        images: of the model, where it takes them.

    Raises:
        Corrupt: a part is not what was committed.
        DataError: the parts do not belong together.
        PluginError: a function of one's own makes no numbers of the rewards.
    """
    if rollout is None:
        rollout = read_rollout(objects, files.rollout, images=images is not None)
    samples = _Samples(rollout, images)
    scores = read_parts(objects, files.reward, ("row", "status"))
    selection = read_parts(objects, files.selection, ("row", "reward", "keep"))
    for name, table in (("reward", scores), ("filter", selection)):
        if table.column("row").to_pylist() != list(range(samples.count)):
            raise DataError(
                f"iteration {files.iteration}: the {name} part has {table.num_rows} rows that are "
                f"not, in order, those of the {samples.count} samples of the rollout; run the "
                f"{name} stage again"
            )
    failed = np.asarray(
        [
            Status.FAILED in pair
            for pair in zip(samples.status, scores["status"].to_pylist(), strict=True)
        ]
    )
    rewards = [
        None if f else r for f, r in zip(failed, selection["reward"].to_pylist(), strict=True)
    ]
    advantages = sample_advantages(
        AdvantageInputs(
            rewards, samples.groups, algorithm.group_std, baseline=algorithm.group_baseline
        )
    )
    keep = np.asarray(selection["keep"].to_pylist(), dtype=bool)
    if algorithm.custom_reward_post_process_path is not None:
        advantages = _of_function(objects, files, algorithm, rewards, keep, advantages)
    rows, metrics = _trained_rows(samples, keep, advantages)
    return _share(
        samples, rows, advantages.advantages, metrics, files.iteration, train, rank, world
    )


def _of_function(
    objects: Objects,
    files: BatchFiles,
    algorithm: AlgorithmConfig,
    rewards: Sequence[float | None],
    keep: npt.NDArray[np.bool_],
    advantages: AdvantageOutputs,
) -> AdvantageOutputs:
    """Advantages by a function of one's own, over the samples that were kept and scored."""
    own = Functions(algorithm)
    chosen = [i for i, good in enumerate(advantages.trainable) if good and keep[i]]
    everything = read_parts(objects, files.rollout, rows=chosen) if chosen else None
    samples = [] if everything is None else table_to_samples(everything)
    for sample, i in zip(samples, chosen, strict=True):
        sample.reward = rewards[i]
    numbers = list(advantages.advantages)
    for i, number in zip(chosen, own.numbers(samples) if samples else [], strict=True):
        numbers[i] = number
    return replace(advantages, advantages=tuple(numbers))


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


def _share(
    samples: _Samples,
    rows: list[int],
    advantages: Sequence[float],
    metrics: dict[str, float],
    iteration: int,
    train: TrainConfig,
    rank: int,
    world: int,
) -> TrainBatch:
    """One rank's part of the plan over the trained rows."""
    lengths = samples.lengths[rows].tolist()
    steps_of_all: tuple[Step, ...] = ()
    if rows:
        whole = plan(
            lengths,
            max_tokens=train.max_tokens_per_gpu,
            dp_size=world,
            num_steps=min(train.num_steps_per_rollout, len(rows)),
        )
        steps_of_all = whole.steps
    given = tuple(name for name in LOG_PROBS if samples.log_probs[name].present[rows].all())
    steps = tuple(
        TrainStep(
            micro_batches=tuple(
                tuple(samples.sequence(rows[i], advantages[rows[i]], given) for i in micro.samples)
                for micro in step.ranks[rank]
            ),
            totals=Totals.of(samples.trainable_tokens[[rows[i] for i in step.samples]].tolist()),
        )
        for step in steps_of_all
    )
    metrics["micro_batches"] = float(sum(step.num_micro_batches for step in steps_of_all))
    return TrainBatch(
        iteration=iteration,
        steps=steps,
        samples=len(rows),
        tokens=sum(lengths),
        rollout_log_probs="rollout_log_probs" in given,
        teacher_log_probs="teacher_log_probs" in given,
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

    def __init__(self, table: pa.Table, images: ImageProcessor | None) -> None:
        self.count = table.num_rows
        self.images = None if images is None else BatchImages(table, images)
        self.groups = table["group_index"].to_pylist()
        self.status = table["status"].to_pylist()
        self.removed = np.asarray(table["remove_sample"].to_pylist(), dtype=bool)
        self.response_lengths = table["response_length"].to_numpy().astype(np.int64)
        self.tokens = _Lists(table["tokens"])
        self.masks = _Lists(table["loss_mask"])
        self.log_probs = {name: _Lists(table[name]) for name in LOG_PROBS}
        self.lengths = self.tokens.lengths
        ones = np.concatenate([[0], np.cumsum(self.masks.values != 0)])
        masked = ones[self.masks.offsets[1:]] - ones[self.masks.offsets[:-1]]
        self.trainable_tokens = np.where(self.masks.present, masked, self.response_lengths)

    def sequence(self, row: int, advantage: float, given: Sequence[LogProbs]) -> TrainSequence:
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
            images=images,
            **{name: self.log_probs[name].row(row) for name in given},  # type: ignore[arg-type]
        )
