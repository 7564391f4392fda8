"""Groups: the samples of one prompt, adjacent in their batch."""

from collections.abc import Iterable
from itertools import groupby

from rlcore.sample import Sample


def split_groups(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Adjacent samples of one `group_index` as groups."""
    return [list(group) for _, group in groupby(samples, key=lambda s: s.group_index)]
