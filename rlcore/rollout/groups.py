"""Groups: the samples of one prompt, adjacent in their batch."""

from collections.abc import Iterable
from itertools import groupby

from rlcore.sample import Sample


def split_groups(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Adjacent samples of one `group_index` as groups."""
    return [list(group) for _, group in groupby(samples, key=lambda s: s.group_index)]


Identity = tuple[int | None, int | None, str, int | None]
"""What a function of one's own cannot change in a sample: its numbers, its prompt and its seed."""


def identity_of(sample: Sample) -> Identity:
    """Which sample it is."""
    return sample.group_index, sample.index, sample.prompt_id, sample.seed


def set_identity(sample: Sample, identity: Identity) -> None:
    """Make it that sample."""
    sample.group_index, sample.index, sample.prompt_id, sample.seed = identity
