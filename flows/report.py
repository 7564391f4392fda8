"""What a run shows while it goes: a line an iteration, and artifacts on its page in Prefect.

Invariant: reporting never fails a run. An artifact that cannot be written is logged and left out.
"""

import logging
import re
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)
from prefect.events import emit_event

from rlcore.run import IterationRef, Run

log = logging.getLogger("sluice")

ARTIFACT_INTERVAL_S = 5.0
"""Seconds between updates of the artifacts, so that a fast run does not spend its time on them."""
TABLE_ROWS = 50

Listener = Callable[[IterationRef, Run], None]
_listeners: list[Listener] = []


def on_iteration(listener: Listener) -> None:
    """Call `listener` after each iteration of any run in this process."""
    _listeners.append(listener)


class Reporter:
    """Reports one run's progress to Prefect and to the listeners of this process."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._key = re.sub(r"[^a-z0-9-]+", "-", run.id)
        self._rows: list[dict[str, Any]] = []
        self._progress: UUID | None = None
        self._written = 0.0

    async def __aenter__(self) -> "Reporter":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._rows and error is None:
            await self._write()
            await self._summary()

    async def iteration(self, done: IterationRef) -> None:
        """Report a committed iteration."""
        self._rows = [*self._rows[-TABLE_ROWS + 1 :], row(done)]
        for listener in _listeners:
            listener(done, self._run)
        emit_event(
            "rl.iteration.committed",
            resource={"prefect.resource.id": f"rl.run.{self._run.id}"},
            payload={"iteration": done.iteration, "metrics": done.metrics},
        )
        if time.monotonic() - self._written >= ARTIFACT_INTERVAL_S:
            await self._write()

    async def _write(self) -> None:
        self._written = time.monotonic()
        done, total = self._rows[-1]["iteration"] + 1, self._run.config.train.num_iterations
        try:
            if self._progress is None:
                self._progress = await acreate_progress_artifact(
                    progress=100 * done / total,
                    key=f"{self._key}-progress",
                    description=f"Iterations of {self._run.id}",
                )
            else:
                await aupdate_progress_artifact(self._progress, progress=100 * done / total)
            await acreate_table_artifact(
                table=self._rows,
                key=f"{self._key}-metrics",
                description=f"Latest iterations of {self._run.id}",
            )
        except Exception as error:
            log.warning("Prefect did not take the artifacts of iteration %d: %s", done - 1, error)

    async def _summary(self) -> None:
        last = self._rows[-1]
        text = (
            f"# {self._run.id}\n\n{last['iteration'] + 1} iterations are committed in "
            f"`{self._run.store.url}`.\n\nReward of the last: **{last['reward']:.3f}**.\n\n"
            f"Look further: `sluice show {self._run.id}`, `sluice samples {self._run.id} "
            f"--iter {last['iteration']}`, `sluice verify {self._run.id}`.\n"
        )
        try:
            await acreate_markdown_artifact(markdown=text, key=f"{self._key}-summary")
        except Exception as error:
            log.warning("Prefect did not take the summary of run %s: %s", self._run.id, error)


def row(done: IterationRef) -> dict[str, Any]:
    """An iteration's figures as people read them: one row of the table."""
    m = done.metrics
    return {
        "iteration": done.iteration,
        "reward": round(m.get("rollout/raw_reward", float("nan")), 4),
        "exact": round(m.get("rollout/exact", float("nan")), 4),
        "response length": round(m.get("rollout/response_len/mean", float("nan")), 1),
        "loss": round(m.get("train/loss", float("nan")), 5),
        "grad norm": round(m.get("train/grad_norm", float("nan")), 4),
        "log-prob gap": m.get("train/train_rollout_logprob_abs_diff", float("nan")),
        "tokens/s": round(m.get("perf/tokens_per_s", 0.0)),
        "seconds": round(m["seconds"], 3),
    }
