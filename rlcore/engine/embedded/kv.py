"""The key/value cache: lanes of equal length, and prompts that were read once.

A lane holds the requests whose sequence fits `length` positions. A request moves to the next lane
when it outgrows its own, so that the shape it is computed in depends on its own length alone.

Invariants:
- Live rows of a lane are its first `count`; a row that ends is replaced by the last.
- Buffers start as zeros: what lies behind a row's position is finite, and masked.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KVShape:
    """Layers, key/value heads, head dimension, and where and how they are stored."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one position of one sequence."""
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize

    def zeros(self, rows: int, length: int) -> Tensor:
        """A buffer [layers, 2, rows, heads, length, head_dim]."""
        shape = (self.layers, 2, rows, self.heads, length, self.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


class Lane:
    """Cache rows of one length, with the scheduler's row number of each."""

    def __init__(self, shape: KVShape, length: int) -> None:
        self.length = length
        self.count = 0
        self.rows: Ints = np.zeros(0, dtype=np.int64)
        self._shape = shape
        self.kv = shape.zeros(0, length)

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows, keeping what is there."""
        if capacity <= len(self.rows):
            return
        grown = self._shape.zeros(capacity, self.length)
        grown[:, :, : self.count] = self.kv[:, :, : self.count]
        rows = np.zeros(capacity, dtype=np.int64)
        rows[: self.count] = self.rows[: self.count]
        self.kv, self.rows = grown, rows

    def append(self, rows: Ints, kv: Tensor) -> None:
        """Add `rows` with their cache [layers, 2, n or 1, heads, shorter length, head_dim]."""
        end = self.count + len(rows)
        if end > len(self.rows):
            self.reserve(max(end, 2 * len(self.rows)))
        self.kv[:, :, self.count : end, :, : kv.shape[4]] = kv
        self.rows[self.count : end] = rows
        self.count = end

    def remove(self, gone: npt.NDArray[np.bool_]) -> None:
        """Drop the rows marked in `gone` [count]; the last live ones take their places."""
        left = self.count - int(gone.sum())
        holes = np.flatnonzero(gone[:left])
        movers = left + np.flatnonzero(~gone[left:])
        if len(holes):
            to = torch.from_numpy(holes).to(self.kv.device)
            self.kv[:, :, to] = self.kv[:, :, torch.from_numpy(movers).to(self.kv.device)]
            self.rows[holes] = self.rows[movers]
        self.count = left

    def take(self, at: Ints) -> Tensor:
        """A copy of the cache of the rows at `at`."""
        return self.kv[:, :, torch.from_numpy(at).to(self.kv.device)]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt read by the model."""

    kv: Tensor
    """[layers, 2, 1, heads, length, head_dim]"""
    hidden: Tensor
    """[length, hidden]: the last layer's output, from which prompt log-probabilities are made."""
    logits: Tensor
    """[vocabulary], float32: of the first token to generate."""
    experts: Tensor | None = None
    """int32 [length, layers, k] that its tokens were sent to, where that is recorded."""

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return self.kv.nbytes + self.hidden.nbytes + self.logits.nbytes


class PromptCache:
    """The prompts used last, up to a number of bytes. A prompt is computed from its own tokens
    alone, so finding it here or computing it anew gives the same bits.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._prompts: OrderedDict[bytes, Prompt] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._prompts

    def get(self, key: bytes) -> Prompt:
        """The prompt under `key`, which must be there."""
        self._prompts.move_to_end(key)
        return self._prompts[key]

    def put(self, key: bytes, prompt: Prompt) -> None:
        """Keep a prompt, dropping the longest unused ones over the limit (never the newest)."""
        self._prompts[key] = prompt
        self._bytes += prompt.nbytes
        while self._bytes > self._max_bytes and len(self._prompts) > 1:
            self._bytes -= self._prompts.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Forget all, as after a change of weights."""
        self._prompts.clear()
        self._bytes = 0
