"""Prompts of a JSONL file that stays on disk: a row is read, and made a prompt, when it is used.

Invariants:
- Memory holds where the rows begin and their numbers, 12 bytes each, and one row at a time.
- A row that no longer is what it was when the file was indexed is an error, not another prompt.
"""

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlcore.data.prompts import Prompt
from rlcore.data.rows import Row, parse_line
from rlcore.errors import DataError


class LinePrompts(Sequence[Prompt]):
    """The prompts of a file by where their lines begin.

    Args:
        path: of the file.
        make: makes a prompt of a row.
    """

    def __init__(self, path: Path, make: Callable[[Row], Prompt]) -> None:
        self._path = path
        self._make = make
        self._offsets = array("Q")
        self._numbers = array("L" if array("L").itemsize == 4 else "I")
        self._stamp = _stamp(path)

    def add(self, row: Row) -> None:
        """Take a row in, the next in the order of the file."""
        self._offsets.append(row.offset)
        self._numbers.append(row.number)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, position: Any) -> Any:
        number = self._numbers[position]
        if _stamp(self._path) != self._stamp:
            raise DataError(
                f"data file {self._path} was changed while it was in use; put the old one back, "
                "or start a new run"
            )
        with self._path.open("rb") as file:
            file.seek(self._offsets[position])
            line = file.readline()
        return self._make(parse_line(line, number, f"{self._path} row {number}"))

    @property
    def nbytes(self) -> int:
        """Bytes of the index."""
        parts = (self._offsets, self._numbers)
        return sum(part.itemsize * len(part) for part in parts)


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
