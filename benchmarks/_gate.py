"""A gate in a run: its reward function waits there, so that a turn of the loop can be timed.

The gate lies in the reward stage of each iteration, the only point at which nothing is done ahead.
From the opening of one iteration's gate to the arrival at the next there is one of everything:
train, sync, commit, and the rollout of the next iteration.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlcore.sample import Sample

POLL_S = 0.002


def reward(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    """A cheap reward that differs within a group, once the gate of the group's policy is open.

    The samples' label is the gate's folder. One that no policy made is a trial before the run.
    """
    if samples[0].weight_versions:
        Gate(Path(str(samples[0].label))).pass_through(int(samples[0].weight_versions[-1]))
    return [sum(sample.tokens) % 7 / 7 for sample in samples]


class Gate:
    """Files in a folder: `reached-N` holds when iteration N came, `open-N` when it may go on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pass_through(self, n: int) -> None:
        """Note the arrival and wait."""
        if self._of("open", n) is None:
            self._note("reached", n)
        while self._of("open", n) is None:
            time.sleep(POLL_S)

    def open(self, n: int) -> float:
        """Let iteration n go on; returns when."""
        return self._note("open", n)

    def wait_reached(self, n: int, seconds: float, check: Callable[[], None]) -> float:
        """When iteration n came.

        Args:
            n: iteration.
            seconds: to wait at most; TimeoutError after them.
            check: raises where it will never come.
        """
        deadline = time.monotonic() + seconds
        while (at := self._of("reached", n)) is None:
            check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"iteration {n} did not come within {seconds:.0f} s")
            time.sleep(POLL_S)
        return at

    def opened(self, n: int) -> float:
        """When it was let go."""
        return self._of("open", n) or 0.0

    def _of(self, what: str, n: int) -> float | None:
        try:
            return float((self.folder / f"{what}-{n}").read_text())
        except FileNotFoundError:
            return None

    def _note(self, what: str, n: int) -> float:
        now = time.time()
        part = self.folder / f".{what}-{n}"
        part.write_text(repr(now))
        os.replace(part, self.folder / f"{what}-{n}")
        return now
