"""What a run shows while it goes: a line an iteration, and artifacts on its page in Prefect.

Invariants:
- Reporting never fails a run. An artifact that cannot be written is logged and left out.
- Reporting never holds up a run: texts and the picture are made in a thread, and a slow store or
  server is not waited for.
- A flow run has one artifact of each kind, written over as the run goes on, a retry included.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from types import TracebackType
from typing import Any
from uuid import UUID

from prefect import get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.events import emit_event
from prefect.runtime import deployment
from prefect.utilities.urls import url_for

from flows.reporting.curve import is_eval_reward
from flows.reporting.pages import (
    Place,
    curve_page,
    failure_page,
    past_failure_page,
    row,
    summary_page,
)
from rlcore.config import RunConfig
from rlcore.observe.aside import PATIENCE_S as TRACKERS_PATIENCE_S
from rlcore.observe.aside import Aside, close_all
from rlcore.observe.history import iterations
from rlcore.observe.trackers import open_trackers
from rlcore.opening import open_store
from rlcore.run import IterationRef, Run
from rlcore.store.batch import read_samples
from rlcore.store.manifest import Manifest, StageRef

log = logging.getLogger("sluice")

ARTIFACT_INTERVAL_S = 10.0
"""Seconds between updates of the artifacts, so that a fast run does not spend its time on them."""
PATIENCE_S = 0.3
PATIENCE_SHARE = 0.02
"""What an update may take of an iteration's time before the run goes on beside it."""
FAILURE_PATIENCE_S = 10.0
CANCELLED_PATIENCE_S = 1.0
TABLE_ROWS = 50
SAMPLES_SHOWN = 6
CURVE = ("iteration", "rollout/raw_reward", "rollout/exact", "train/perplexity")

Listener = Callable[[IterationRef, Run], None]
_listeners: list[Listener] = []


def on_iteration(listener: Listener) -> None:
    """Call `listener` after each iteration of any run in this process."""
    _listeners.append(listener)


class Shelf:
    """The artifacts of one flow run: each is made once and then written over."""

    def __init__(self, client: PrefectClient, run_id: str, flow_run_id: UUID) -> None:
        self._client = client
        self._flow_run_id = flow_run_id
        self._prefix = re.sub(r"[^a-z0-9-]+", "-", run_id)
        self._ids: dict[str, UUID] | None = None

    def key(self, kind: str) -> str:
        """The key of an artifact, such as `first-metrics`."""
        return f"{self._prefix}-{kind}"

    async def has(self, kind: str) -> bool:
        """Whether the flow run has such an artifact."""
        return self.key(kind) in await self._known()

    async def put(self, kind: str, type_: str, data: Any, description: str) -> None:
        """Make an artifact, or write over it."""
        known, key = await self._known(), self.key(kind)
        if key in known:
            change = ArtifactUpdate(data=data, description=description)
            await self._client.update_artifact(known[key], change)
            return
        made = await self._client.create_artifact(
            ArtifactCreate(
                key=key,
                type=type_,
                data=data,
                description=description,
                flow_run_id=self._flow_run_id,
            )
        )
        known[key] = made.id

    async def _known(self) -> dict[str, UUID]:
        if self._ids is None:
            mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[self._flow_run_id]))
            found = await self._client.read_artifacts(artifact_filter=mine)
            self._ids = {one.key: one.id for one in found if one.key}
        return self._ids


class Reporter:
    """Reports one run's progress to Prefect and to the listeners of this process."""

    def __init__(self, run: Run, client: PrefectClient, flow_run_id: UUID) -> None:
        self._run = run
        self._shelf = Shelf(client, run.id, flow_run_id)
        self._place = place_of(run.config, self._shelf, flow_run_id)
        self._rows: list[dict[str, Any]] = []
        self._history: list[dict[str, float]] = []
        self._written = 0.0
        self._recalling: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._trackers: list[Aside] = []

    async def __aenter__(self) -> "Reporter":
        first, run = self._run.first_uncommitted(), self._run
        with self._harmless("open the trackers"):
            self._trackers = await asyncio.to_thread(open_trackers, run.config, run.store.objects)
        if first:
            self._recalling = asyncio.create_task(self._recall())
        with suppress(Exception):
            if await self._shelf.has("failure"):
                page = past_failure_page(self._place, first)
                await self._shelf.put("failure", "markdown", page, "A failure that is past")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        cancelled = error is not None and not isinstance(error, Exception)
        await asyncio.to_thread(
            close_all,
            self._trackers,
            failed=error is not None,
            patience_s=CANCELLED_PATIENCE_S if cancelled else TRACKERS_PATIENCE_S,
        )
        if cancelled:
            # Somebody waits for the end of a cancelled run.
            for task in filter(None, (self._recalling, self._writing)):
                task.cancel()
            return
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=FAILURE_PATIENCE_S)
        if self._rows:
            await self._write()

    async def iteration(self, done: IterationRef) -> None:
        """Report a committed iteration."""
        self._rows = [row(done.iteration, done.metrics), *self._rows[: TABLE_ROWS - 1]]
        self._history.append(figures({"iteration": done.iteration} | done.metrics))
        for listener in _listeners:
            listener(done, self._run)
        for tracker in self._trackers:
            tracker.log(done.iteration, done.metrics)
        emit_event(
            "rl.iteration.committed",
            resource={"prefect.resource.id": f"rl.run.{self._run.id}"},
            payload={"iteration": done.iteration, "metrics": done.metrics},
        )
        idle = self._writing is None or self._writing.done()
        if idle and time.monotonic() - self._written >= ARTIFACT_INTERVAL_S:
            self._writing = asyncio.create_task(self._write())
            # Mostly it is done at once; and where it is, the next subflow does not meet it in the
            # database.
            patience = max(PATIENCE_S, PATIENCE_SHARE * done.metrics["seconds"])
            await asyncio.wait({self._writing}, timeout=patience)

    @contextmanager
    def _harmless(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            log.warning("run %s could not %s: %s", self._run.id, what, error)

    async def _recall(self) -> None:
        """Fetch what earlier drivers of the run have committed, for the curve and the table."""
        past = await asyncio.to_thread(iterations, self._run.store.objects, self._run.id)
        begun = self._history[0]["iteration"] if self._history else len(past)
        past = past[: int(begun)]
        self._history[:0] = [figures(metrics) for metrics in past]
        rows = [row(int(m["iteration"]), m) for m in past[-TABLE_ROWS:]]
        self._rows = [*self._rows, *rows[::-1]][:TABLE_ROWS]

    async def _write(self) -> None:
        self._written = time.monotonic()
        last = self._rows[0]["iteration"]
        run, total = self._run.id, self._run.config.train.num_iterations
        try:
            if self._recalling is not None:
                await self._recalling
            curve, summary = await asyncio.to_thread(self._pages)
            put = self._shelf.put
            share = round(100 * (last + 1) / total, 1)
            await put("progress", "progress", share, f"{last + 1} of {total} iterations of {run}")
            await put("metrics", "table", self._rows, f"Latest iterations of {run}, newest first")
            await put("reward", "markdown", curve, f"Reward curve of {run}")
            await put("summary", "markdown", summary, f"Samples and model of {run}")
        except Exception as error:
            log.warning("Prefect did not take the artifacts of iteration %d: %s", last, error)

    def _pages(self) -> tuple[str, str]:
        """The reward curve and the summary. Reads samples of the newest iteration."""
        last = self._rows[0]
        stages = self._stages(last["iteration"], ("rollout", "reward", "filter"))
        each = self._run.config.rollout.n_samples_per_prompt
        shown = read_samples(self._run.store.objects, stages, SAMPLES_SHOWN * each)
        samples = [next(group) for _, group in groupby(shown, lambda one: one["group_index"])]
        checkpoint = self._newest_checkpoint(last["iteration"])
        return (
            curve_page(self._place, list(self._history)),
            summary_page(self._place, last, samples, checkpoint),
        )

    def _newest_checkpoint(self, last: int) -> tuple[int, str] | None:
        """The iteration and the address of the newest checkpoint."""
        due = next((i for i in range(last, -1, -1) if self._run.checkpoint_due(i)), None)
        found = {} if due is None else self._stages(due, ("checkpoint",))
        if due is None or not found:
            return None
        prefix = found["checkpoint"].extra["checkpoint"]["key_prefix"]
        objects = self._run.store.objects
        return due, str(objects.local_path(prefix) or objects.url(prefix))

    def _stages(self, i: int, names: Sequence[str]) -> dict[str, Manifest]:
        """Manifests of a committed iteration."""
        store = self._run.store
        refs = (store.committed(i) or {"stages": {}})["stages"]
        return {n: store.manifest(StageRef.model_validate(refs[n])) for n in names if n in refs}


def figures(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that the curve shows."""
    return {k: v for k, v in metrics.items() if k in CURVE or is_eval_reward(k)}


def place_of(config: RunConfig, shelf: Shelf, flow_run_id: UUID) -> Place:
    """Where a run and its pages are."""
    links = {"flow run": url_for("flow-run", flow_run_id)}
    base = (links["flow run"] or "").partition("/runs/")[0]
    for what, kind in (
        ("samples and model", "summary"),
        ("reward curve", "reward"),
        ("metrics", "metrics"),
    ):
        links[what] = f"{base}/artifacts/key/{shelf.key(kind)}"
    shown = {what: address for what, address in links.items() if base and address}
    return Place(config.run.id, config.storage.root, config.train.num_iterations, shown)


async def report_failure(config: RunConfig, error: str, flow_run_id: UUID) -> None:
    """Say on the run's page why it stopped, what is kept and what goes on with it."""
    try:
        async with asyncio.timeout(FAILURE_PATIENCE_S), get_client() as client:
            shelf = Shelf(client, config.run.id, flow_run_id)
            last = await asyncio.to_thread(open_store(config).last_committed)
            page = failure_page(
                place_of(config, shelf, flow_run_id),
                error,
                committed=0 if last is None else last + 1,
                deployed=deployment.id is not None,
            )
            await shelf.put("failure", "markdown", page, f"Why {config.run.id} stopped")
    except Exception as problem:
        log.warning("Prefect did not take the failure of run %s: %s", config.run.id, problem)
