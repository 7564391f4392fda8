"""Identity of tensors by content: SHA-256 over sorted lines `name dtype shape sha256(bytes)`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from torch import Tensor

from rlcore.weights.wire import bytes_of


def digest_line(name: str, whole: Tensor) -> str:
    """The line of a whole tensor."""
    content = hashlib.sha256(bytes_of(whole.cpu().contiguous())).hexdigest()
    return f"{name} {whole.dtype!s} {list(whole.shape)} {content}"


def digest_of_lines(lines: Iterable[str]) -> str:
    """The digest of all of them."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
