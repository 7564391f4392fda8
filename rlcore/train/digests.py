"""Identity of tensors by content: SHA-256 over sorted lines `name dtype shape sha256(bytes)`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rlcore.weights.wire import bytes_of


def digest_line(name: str, whole: Tensor) -> str:
    """The line of a whole tensor."""
    growing = Growing(name, whole.dtype, whole.shape)
    growing.add(whole)
    return growing.line


class Growing:
    """The line of a tensor that comes in parts, in the order of its numbers."""

    def __init__(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        self._begin = f"{name} {dtype!s} {list(shape)}"
        self._hash = hashlib.sha256()

    def add(self, part: Tensor) -> None:
        """The next numbers."""
        self._hash.update(bytes_of(part.cpu().contiguous()))

    @property
    def line(self) -> str:
        """Of what has come."""
        return f"{self._begin} {self._hash.hexdigest()}"


def digest_of_lines(lines: Iterable[str]) -> str:
    """The digest of all of them."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
