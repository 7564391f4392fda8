"""A tracker in a thread of its own, so that no server of metrics can hold up a run, or end it.

Invariants:
- Nothing that a tracker raises gets out; it is told once, in one sentence.
- What a tracker did not take is kept, and given to it again with what follows.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

from rlcore.observe.boards import Metrics, Tracker

log = logging.getLogger("sluice")

PATIENCE_S = 10.0
"""Seconds that the end of a run waits for what is still to be sent."""
RETRY_S = 30.0
"""Seconds after a failure in which nothing is tried again."""


class Aside:
    """A tracker that is made and used in a thread.

    Args:
        name: what it is called in the log.
        make: makes the tracker.
        past: what is committed already, objects with `iteration` and metrics.
    """

    def __init__(
        self, name: str, make: Callable[[], Tracker], past: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        self.name = name
        self._make = make
        self._tracker: Tracker | None = None
        self._waiting: deque[tuple[int, Metrics]] = deque(map(_split, past))
        self._queue: SimpleQueue[tuple[int, Metrics] | bool] = SimpleQueue()
        self._told = False
        self._tried = -RETRY_S
        # What is logged there is of the same run as here.
        work = partial(copy_context().run, self._work)
        self._thread = Thread(target=work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, iteration: int, metrics: Metrics) -> None:
        """Have one iteration's metrics taken, at once or later."""
        self._queue.put((iteration, dict(metrics)))

    def end(self, *, failed: bool) -> None:
        """Have it closed when all is taken; of no effect the second time."""
        self._queue.put(failed)

    def wait(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until it is closed, or for so many seconds."""
        self._thread.join(max(0.0, patience_s))

    def _work(self) -> None:
        self._try(self._pass_on)
        while not isinstance(item := self._queue.get(), bool):
            self._waiting.append(item)
            if self._queue.empty() and time.monotonic() - self._tried >= RETRY_S:
                self._try(self._pass_on)
        self._try(self._pass_on)
        self._try(partial(self._close, failed=item))

    def _pass_on(self) -> None:
        if self._tracker is None:
            self._tracker = self._make()
        while self._waiting:
            self._tracker.log(*self._waiting[0])
            self._waiting.popleft()

    def _close(self, *, failed: bool) -> None:
        if self._tracker is not None:
            self._tracker.close(failed=failed)

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            # Another program's library may raise anything, and a view is worth no run.
            self._tried = time.monotonic()
            if not self._told:
                log.warning(
                    "%s does not take the run's metrics (%s: %s); the run goes on without, and "
                    "what is missing there is sent when it takes them again, or on the next resume",
                    self.name,
                    type(error).__name__,
                    " ".join(str(error).split()),
                )
            self._told = True


def close_all(trackers: Iterable[Aside], *, failed: bool, patience_s: float = PATIENCE_S) -> None:
    """Close trackers side by side.

    Args:
        trackers: any number.
        failed: how the run ended.
        patience_s: seconds that all of them together may take; a slow one goes on by itself.
    """
    there = list(trackers)
    until = time.monotonic() + patience_s
    for tracker in there:
        tracker.end(failed=failed)
    for tracker in there:
        tracker.wait(until - time.monotonic())


def _split(one: Mapping[str, Any]) -> tuple[int, Metrics]:
    return int(one["iteration"]), {k: v for k, v in one.items() if k != "iteration"}
