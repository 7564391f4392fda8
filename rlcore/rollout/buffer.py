"""What a rollout began and did not use: stored with it, and first in line at the next one.

A rollout that over-samples leaves groups behind: some whole, some cut off, some not begun. They are
a part of their rollout (`extra["buffer"]` of its manifest), in the schema of samples and in the
order of the data plan.

Invariants:
- The buffer after a rollout is a function of that rollout's manifest alone: no process has to
  remember it.
- Every prompt that the cursor has passed is in exactly one place: in a committed rollout or in the
  newest buffer. So none is skipped and none is used twice.
- Groups are whole in number: all executions of a prompt go together, wherever they go.
- What is given up is counted; its prompt is generated anew.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlcore.config.tree import RolloutConfig
from rlcore.data import Place
from rlcore.errors import Corrupt
from rlcore.rollout.generate import OPEN
from rlcore.rollout.groups import split_executions, split_groups
from rlcore.sample import Sample, Status
from rlcore.store.manifest import FileRef

if TYPE_CHECKING:
    from rlcore.store.objects import Objects

log = logging.getLogger("sluice.rollout")

BEGUN_IN = "start_rollout_id"
"""Key in a sample's metadata: the iteration that began it, where a later one uses it. slime's
name."""

Record = dict[str, Any]
"""`extra["buffer"]` of a rollout's manifest: {key_prefix, files, places}."""


@dataclass(frozen=True)
class Group:
    """All samples of one prompt, and where the prompt stands in the data plan."""

    place: Place
    samples: list[Sample]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left to generate."""
        return all(sample.status not in OPEN for sample in self.samples)

    @property
    def tokens(self) -> int:
        """Response tokens of its samples."""
        return sum(sample.response_length for sample in self.samples)


Anew = Callable[[Place], list[Sample]]
"""Makes the samples of the prompt at a place, nothing generated."""


@dataclass(frozen=True)
class Line:
    """What a rollout begins with.

    Attributes:
        groups: of the buffer.
        new: prompts from the data beside them.
        waiting: the rest of the buffer, for the rollout after.
    """

    groups: list[Group]
    new: int
    waiting: list[Group]


def line_up(buffer: Sequence[Group], config: RolloutConfig) -> Line:
    """The buffer first, then as many new prompts as `over_sampling_batch_size` has room for.

    Where the buffer holds whole groups for all of the batch, nothing else is begun.
    """
    want = config.rollout_batch_size
    whole = [k for k, group in enumerate(buffer) if group.is_whole][:want]
    room = config.over_sampling_batch_size or want
    chosen = set(whole if len(whole) == want else range(min(room, len(buffer))))
    return Line(
        groups=[group for k, group in enumerate(buffer) if k in chosen],
        new=0 if len(whole) == want else room - len(chosen),
        waiting=[group for k, group in enumerate(buffer) if k not in chosen],
    )


def go_on(
    groups: Sequence[Group], version: str | None, config: RolloutConfig, anew: Anew
) -> list[Group]:
    """Make groups of the buffer ready for a rollout by policy `version`.

    With `mask_offpolicy_in_partial_rollout` tokens of other policies are not trained on. Which
    tokens those are in a sample of several policies is not known, so all that it has are masked.
    """
    out = []
    for group in groups:
        samples, n = group.samples, config.n_samples_per_prompt
        if (had := len(split_executions(samples))) != n:
            log.warning(
                "the buffer's group of prompt %s has %d samples, but rollout.n_samples_per_prompt "
                "= %d: it is begun anew, and %d tokens are given up",
                samples[0].prompt_id,
                had,
                n,
                group.tokens,
            )
            samples = anew(group.place)
        if config.mask_offpolicy_in_partial_rollout:
            for sample in samples:
                if set(sample.weight_versions) - {version}:
                    sample.loss_mask = [0] * sample.response_length
        out.append(Group(group.place, samples))
    return out


@dataclass(frozen=True)
class Left:
    """What a rollout leaves to the next one.

    Attributes:
        groups: in the order of the data plan.
        metrics: how much was kept and how much was given up.
    """

    groups: list[Group]
    metrics: dict[str, float]


def leave(groups: Sequence[Group], iteration: int, config: RolloutConfig, anew: Anew) -> Left:
    """Sort what is not used into what is kept and what is begun anew.

    Without `partial_rollout` all is begun anew. With `mask_offpolicy_in_partial_rollout` whole
    groups are: all their tokens would be masked, and a place in the batch would train nothing.

    Args:
        groups: in the order of the data plan.
        iteration: of the rollout that leaves them.
        config: the rollout section.
        anew: for what is begun anew.
    """
    kept: list[Group] = []
    counts = Counter[str]()
    for group in groups:
        useless = group.is_whole and config.mask_offpolicy_in_partial_rollout
        keep = config.partial_rollout and not useless
        name = "kept" if keep else "dropped"
        counts[f"{name}_samples"] += sum(s.response_length > 0 for s in group.samples)
        counts[f"{name}_tokens"] += group.tokens
        counts["whole_groups"] += keep and group.is_whole
        made = [_marked(s, iteration) for s in group.samples] if keep else anew(group.place)
        kept.append(Group(group.place, made))
    names = ("whole_groups", "kept_samples", "kept_tokens", "dropped_samples", "dropped_tokens")
    metrics = {f"rollout/buffer/{name}": float(counts[name]) for name in names}
    return Left(kept, metrics | {"rollout/buffer/groups": float(len(kept))})


def _marked(sample: Sample, iteration: int) -> Sample:
    if sample.status == Status.ABORTED and not sample.response_length:
        return replace(sample, status=Status.PENDING)
    if not sample.response_length or BEGUN_IN in sample.metadata:
        return sample
    return replace(sample, metadata=sample.metadata | {BEGUN_IN: iteration})


def in_order(groups: Sequence[Group]) -> list[Group]:
    """Groups in the order of the data plan."""
    return sorted(groups, key=lambda group: group.place)


def number(groups: Sequence[Group], before: tuple[int, int] = (0, 0)) -> list[Sample]:
    """The samples of groups as a batch: numbered in their order.

    The `rollout_id` of samples of one execution is the index of its first.

    Args:
        groups: in order.
        before: groups, and samples, that have numbers already.
    """
    samples: list[Sample] = []
    for group_index, group in enumerate(groups, before[0]):
        for execution in split_executions(group.samples):
            first = before[1] + len(samples)
            for index, sample in enumerate(execution, first):
                sample.group_index, sample.index = group_index, index
                sample.rollout_id = first if len(execution) > 1 else None
            samples += execution
    return samples


def write_buffer(objects: "Objects", prefix: str, groups: Sequence[Group]) -> Record:
    """Store groups under `prefix`, which no other execution writes to."""
    from rlcore.store.batch import samples_to_table, write_table

    table = samples_to_table(number(groups))
    ref = write_table(objects, f"{prefix}/part-00000.parquet", table)
    return {
        "key_prefix": prefix,
        "files": [ref.model_dump(mode="json")],
        "places": [list(group.place) for group in groups],
    }


def read_buffer(objects: "Objects", record: Record | None) -> list[Group]:
    """The groups that a rollout left.

    Args:
        objects: the store.
        record: of the rollout's manifest; None: it left none.

    Raises:
        Corrupt: a file is missing or damaged, or is not the one that the record is of.
    """
    from rlcore.store.batch import read_parts, table_to_samples

    if record is None:
        return []
    files = [FileRef.model_validate(file) for file in record["files"]]
    groups = split_groups(table_to_samples(read_parts(objects, files)))
    if len(groups) != len(record["places"]):
        raise Corrupt(
            f"{objects.url(record['key_prefix'])} holds {len(groups)} groups, but its manifest "
            f"names places of {len(record['places'])}"
        )
    pairs = zip(record["places"], groups, strict=True)
    return [Group((epoch, offset), samples) for (epoch, offset), samples in pairs]
