"""Groups and executions: how the samples of a batch belong together.

A group holds the samples of one prompt. An execution is one call of what generates: it makes one
sample, or several that were cut from it (agents that talk, a context that was compacted), which
share a `rollout_id`. A group has `n_samples_per_prompt` executions.

Invariant: the samples of a group, and within it those of an execution, are adjacent.
"""

from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby

from rlcore.sample import Sample

Identity = tuple[int | None, int | None, str, int | None, int | None]
"""What a function of one's own cannot change in a sample: its numbers, its prompt and its seed."""


def identity_of(sample: Sample) -> Identity:
    """Which sample it is."""
    return sample.group_index, sample.index, sample.prompt_id, sample.seed, sample.rollout_id


def set_identity(sample: Sample, identity: Identity) -> None:
    """Make it that sample."""
    sample.group_index, sample.index, sample.prompt_id, sample.seed, sample.rollout_id = identity


def split_groups(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Adjacent samples of one `group_index` as groups."""
    return [list(group) for _, group in groupby(samples, key=lambda s: s.group_index)]


def execution_of(groups: Sequence[Hashable], rollout_ids: Sequence[int | None]) -> list[int]:
    """The execution of each sample of a batch: the position of its first sample.

    Args:
        groups: the group of each sample.
        rollout_ids: shared by samples of one execution; None of one that is alone.
    """
    firsts: list[int] = []
    before: tuple[Hashable, int | None] = None, None
    for k, own in enumerate(zip(groups, rollout_ids, strict=True)):
        firsts.append(firsts[-1] if own == before and own[1] is not None else k)
        before = own
    return firsts


def split_executions(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each execution."""
    firsts = execution_of([s.group_index for s in samples], [s.rollout_id for s in samples])
    pairs = groupby(zip(firsts, samples, strict=True), key=lambda pair: pair[0])
    return [[sample for _, sample in execution] for _, execution in pairs]


def join_execution(samples: Sequence[Sample], origin: Identity) -> None:
    """Mark samples as what the execution of one sample made.

    Args:
        samples: all that it made.
        origin: which sample it was.
    """
    rollout_id = (origin[1] or 0) if len(samples) > 1 else None
    for sample in samples:
        set_identity(sample, (*origin[:4], rollout_id))


def response_lengths(samples: Sequence[Sample]) -> list[int]:
    """Response tokens of each execution."""
    return [sum(s.response_length for s in one) for one in split_executions(samples)]


def execution_rewards(
    samples: Sequence[Sample], rewards: Sequence[float | None]
) -> list[list[float | None]]:
    """The rewards of a batch's executions, by group.

    That of an execution is the mean over its samples that have one; None where none has.
    """
    firsts = execution_of([s.group_index for s in samples], [s.rollout_id for s in samples])
    found: dict[int, list[float]] = {first: [] for first in firsts}
    for first, reward in zip(firsts, rewards, strict=True):
        if reward is not None:
            found[first].append(reward)
    by_group = groupby(found, key=lambda first: samples[first].group_index)
    return [[_mean(found[first]) for first in group] for _, group in by_group]


def _mean(rewards: Sequence[float]) -> float | None:
    # The mean of equal numbers need not be that number.
    if len(set(rewards)) < 2:
        return rewards[0] if rewards else None
    return sum(rewards) / len(rewards)
