"""What actors log, told again in the driver, where Prefect's handlers know which run it belongs to.

An actor keeps its lines; after each call the driver fetches them and hands them to its own loggers.

Invariants:
- Telling never delays or fails the work: it is done beside it, and an actor that is gone tells no
  more.
- An actor keeps the newest `KEPT` lines and counts those that it had to drop.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Mapping
from typing import Any, NamedTuple

from rlcore.cluster.ray_session import call
from rlcore.errors import SluiceError

KEPT = 1000
PATIENCE_S = 10.0
ROOT = "sluice"
"""Logger of all of this package."""


class Line(NamedTuple):
    """One log record, as it crosses from process to process."""

    level: int
    name: str
    text: str
    created: float
    """Unix seconds."""


class Lines(logging.Handler):
    """Keeps an actor's lines until they are fetched. Made in the actor's constructor."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._kept: deque[Line] = deque(maxlen=KEPT)
        self._dropped = 0
        root = logging.getLogger(ROOT)
        root.setLevel(logging.INFO)
        root.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
        self._dropped += len(self._kept) == KEPT
        self._kept.append(Line(record.levelno, record.name, text, record.created))

    def take(self) -> list[Line]:
        """The lines since the last call."""
        with self.lock or contextlib.nullcontext():
            lines, dropped = list(self._kept), self._dropped
            self._kept.clear()
            self._dropped = 0
        if dropped:
            text = f"{dropped} older lines were dropped"
            lines.insert(0, Line(logging.WARNING, f"{ROOT}.cluster", text, lines[0].created))
        return lines


TOLD = {
    "rollout/response_len/mean": "response length",
    "rollout/truncated_ratio": "truncated",
    "rollout/failed": "failed",
    "rollout/aborted": "aborted",
    "perf/rollout_time": "seconds",
    "train/loss": "loss",
    "train/grad_norm": "grad norm",
    "train/entropy": "entropy",
    "train/train_rollout_logprob_abs_diff": "log-prob gap",
    "train/lr": "lr",
    "train/tokens": "tokens",
    "train/samples_failed": "samples failed",
    "train/seconds_train": "seconds",
}
"""Metrics that a log line tells, by the names it gives them; all are in the manifests."""


def shown(metrics: Mapping[str, float]) -> str:
    """The figures that people look for, in one line."""
    told = [f"{name} {metrics[key]:.4g}" for key, name in TOLD.items() if key in metrics]
    return ", ".join(told)


def tell(lines: list[Line], who: str) -> None:
    """Hand an actor's lines to this process's loggers."""
    for line in lines:
        logger = logging.getLogger(line.name)
        if logger.isEnabledFor(line.level):
            text = f"{who}: {line.text}"
            record = logger.makeRecord(line.name, line.level, "", 0, text, (), None)
            record.created = line.created
            logger.handle(record)


class Relay:
    """Fetches lines beside the work."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def fetch(self, actor: Any, who: str) -> None:
        """Tell what an actor has logged so far, in the caller's context (its task run in Prefect).

        Args:
            actor: a handle with a method `lines`.
            who: it is, for the reader.
        """
        # Asked now: a call that is made after it may keep the actor busy for long.
        asked = call(actor.lines.remote(), deadline_s=PATIENCE_S, what=who)
        task = asyncio.ensure_future(_tell(asked, who))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def drain(self) -> None:
        """Wait until all that was fetched is told."""
        await asyncio.gather(*self._running)


async def _tell(asked: Awaitable[list[Line]], who: str) -> None:
    with contextlib.suppress(SluiceError):
        tell(await asked, who)
