"""Which prompts an iteration uses: a pure function of the data set's size, the seed and a cursor.

Invariants:
- Epoch e visits every row once, in an order that depends on (size, seed, e) alone: not on the
  Python or numpy version, the platform, or what was asked before.
- Nothing is remembered here. The cursor after iteration i is what its rollout manifest says, so a
  resumed run goes on with exactly the prompts that an undisturbed one would have used.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from rlcore.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Place = tuple[int, int]
"""Where a prompt stands in the endless sequence of epochs: (epoch, offset in it). Unlike a prompt's
id no two are the same."""


@dataclass(frozen=True)
class Cursor:
    """A place in the endless sequence of epochs.

    Attributes:
        epoch: epochs finished.
        offset: rows of the current epoch already used; less than `size`.
        size: rows of the data set that the place refers to; None at the very start.
    """

    epoch: int = 0
    offset: int = 0
    size: int | None = None

    @classmethod
    def after(cls, manifest_cursor: dict[str, int] | None) -> "Cursor":
        """Where a committed rollout left off; None: the start."""
        if manifest_cursor is None:
            return cls()
        return cls(
            manifest_cursor["next_epoch"], manifest_cursor["next_offset"], manifest_cursor["size"]
        )


def span(start: Cursor, end: Cursor) -> dict[str, int]:
    """The cursor of a rollout manifest: where its prompts begin and where the next ones do."""
    if end.size is None:
        raise DataError("the end of a span of prompts needs the size of its data set")
    return {
        "epoch": start.epoch,
        "offset": start.offset,
        "next_epoch": end.epoch,
        "next_offset": end.offset,
        "size": end.size,
    }


def plan(
    size: int, seed: int, shuffle: bool, cursor: Cursor, n: int
) -> tuple[list[tuple[int, int]], Cursor]:
    """The next `n` prompts.

    Args:
        size: rows of the data set.
        seed: of the shuffle.
        shuffle: False visits every epoch in file order.
        cursor: where to begin.
        n: prompts to take; may run over any number of epochs.

    Returns:
        (epoch, position in the data set) of each prompt, and the cursor behind the last.

    Raises:
        DataError: the data set is empty or has another size than the cursor's.
    """
    if size < 1:
        raise DataError("the data set has no rows to take prompts from")
    if cursor.size is not None and cursor.size != size:
        raise DataError(
            f"the run has used a data set of {cursor.size} rows so far, but data.path now gives "
            f"{size}: prompts would be skipped or repeated; restore the file, or start a new run"
        )
    epoch, offset = cursor.epoch, cursor.offset
    picked: list[tuple[int, int]] = []
    while len(picked) < n:
        take = min(n - len(picked), size - offset)
        if shuffle:
            positions = permutation(size, seed, epoch)[offset : offset + take].tolist()
        else:
            positions = list(range(offset, offset + take))
        picked += [(epoch, position) for position in positions]
        offset += take
        if offset == size:
            epoch, offset = epoch + 1, 0
    return picked, Cursor(epoch, offset, size)


def places(start: Cursor, size: int, n: int) -> list[Place]:
    """Where the `n` prompts that `plan` takes from `start` stand, of a data set of `size` rows."""
    first = start.epoch * size + start.offset
    return [divmod(k, size) for k in range(first, first + n)]


def position_at(size: int, seed: int, shuffle: bool, place: Place) -> int:
    """Which row of the data set stands at a place; the other arguments are those of `plan`."""
    epoch, offset = place
    return int(permutation(size, seed, epoch)[offset]) if shuffle else offset


@lru_cache(maxsize=8)
def permutation(size: int, seed: int | str, epoch: int) -> "NDArray[np.int64]":
    """The order of the rows in one epoch: a read-only int64 array [size].

    Rows are sorted by a 64-bit key of (seed, epoch, row): SplitMix64 (Steele et al., 2014) seeded
    by SHA-256. Plain integer arithmetic, since the streams of library generators may change.
    """
    import numpy as np

    digest = hashlib.sha256(f"sluice-permutation:{seed}:{epoch}".encode()).digest()
    with np.errstate(over="ignore"):
        z = np.uint64(int.from_bytes(digest[:8], "big")) + np.arange(
            1, size + 1, dtype=np.uint64
        ) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        keys = z ^ (z >> np.uint64(31))
    order = np.argsort(keys, kind="stable")
    order.setflags(write=False)
    return order
