"""What a scorer and its worker processes say to each other.

Messages are pickles over one socket pair. Beside it lies a page of shared memory where the worker
notes, before each call of the user's function, which call it is and when it began: that is how the
parent knows which sample a hung or crashed worker was at, without a message a sample.
"""

import mmap
import struct
import time
from dataclasses import dataclass

SPEC = struct.Struct("=qqq")


class NoRewardError(Exception):
    """A sample has no reward; the text says why, as it is shown to the user."""


@dataclass(frozen=True, slots=True)
class Score:
    """What the reward function said of one sample.

    Attributes:
        reward: None where there is none.
        details: JSON of the whole answer, where it was a dict.
        error: why there is no reward.
    """

    reward: float | None = None
    details: str | None = None
    error: str | None = None


class Progress:
    """The shared page: the running call's number and start, or none."""

    IDLE = -1
    UNKNOWN = -2
    """A call is running, and nobody can say which: async calls run side by side."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, mmap.PAGESIZE)

    def begin(self, call: int) -> None:
        """Note that a call starts now."""
        SPEC.pack_into(self._map, 0, call, time.monotonic_ns(), call)

    def idle(self) -> None:
        """Note that no call is running."""
        SPEC.pack_into(self._map, 0, self.IDLE, time.monotonic_ns(), self.IDLE)

    def read(self) -> tuple[int, float]:
        """The running call (or IDLE) and the seconds since it began."""
        while True:
            first, began, last = SPEC.unpack_from(self._map, 0)
            # A torn read shows two numbers; the writer is done within nanoseconds.
            if first == last:
                return first, (time.monotonic_ns() - began) / 1e9

    def close(self) -> None:
        """Unmap the page."""
        self._map.close()
