"""In which order prompts are used, of one file or of several that are mixed by weights.

Several files are mixed by a pattern that repeats: of any stretch of prompts, each file has its
share to within one. Each file goes through its own epochs at its own pace, so a small file with a
large weight comes round more often. A place, (epoch, offset), then counts prompts in units of all
files' sizes; it says where the run is, not how often a file was seen.

Invariant: which row stands at a place depends on (sizes, weights, seed, shuffle) and the place
alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rlcore.data.source import Cursor, Place, permutation, places, plan, position_at
from rlcore.errors import DataError

PARTS = 1000
"""Shares are whole thousandths, and at least one."""


@dataclass(frozen=True)
class Order:
    """The endless sequence of prompts.

    Attributes:
        sizes: prompts of each file.
        weights: relative shares of the files.
        seed: of the shuffles.
        shuffle: visit each file's rows in an order of its own in each of its epochs.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int
    shuffle: bool

    @property
    def size(self) -> int:
        """Prompts of all files."""
        return sum(self.sizes)

    def plan(self, cursor: Cursor, n: int) -> tuple[list[int], Cursor]:
        """Positions of the next `n` prompts in the joined files, and the cursor behind them.

        Raises:
            DataError: the data set has another size than the cursor's.
        """
        picked, end = plan(self.size, self.seed, self.shuffle and not self._is_mixed, cursor, n)
        if not self._is_mixed:
            return [position for _, position in picked], end
        return [self.position_at(place) for place in places(cursor, self.size, n)], end

    def position_at(self, place: Place) -> int:
        """Position in the joined files of the prompt at a place."""
        if not self._is_mixed:
            return position_at(self.size, self.seed, self.shuffle, place)
        k, nth = self.file_at(place)
        epoch, offset = divmod(nth, self.sizes[k])
        if self.shuffle:
            offset = int(permutation(self.sizes[k], f"{self.seed}/{k}", epoch)[offset])
        return sum(self.sizes[:k]) + offset

    def file_at(self, place: Place) -> tuple[int, int]:
        """Which file the prompt at a place is of, and how many of it came before."""
        turns = _turns(shares(self.weights))
        rounds, step = divmod(place[0] * self.size + place[1], len(turns))
        k, before = turns[step]
        return k, rounds * sum(1 for turn in turns if turn[0] == k) + before

    @property
    def _is_mixed(self) -> bool:
        return len(self.sizes) > 1


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as whole numbers without a common divisor.

    Raises:
        DataError: there are more files than `PARTS`.
    """
    if len(weights) > PARTS:
        raise DataError(f"{len(weights)} files cannot be mixed; {PARTS} can")
    total = math.fsum(weights)
    parts = [max(1, round(PARTS * weight / total)) for weight in weights]
    return tuple(part // math.gcd(*parts) for part in parts)


@lru_cache(maxsize=8)
def _turns(parts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The pattern: of each step the file, and how many steps before it are of that file.

    Each step goes to the file that is furthest behind its share; ties go to the first.
    """
    total, seen, out = sum(parts), [0] * len(parts), []
    for step in range(1, total + 1):
        k = max(range(len(parts)), key=lambda j: (parts[j] * step - seen[j] * total, -j))
        out.append((k, seen[k]))
        seen[k] += 1
    return tuple(out)
