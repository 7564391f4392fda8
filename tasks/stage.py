"""The one decorator that makes a stage of an RL iteration a Prefect task.

A stage is a function `(committed inputs, its own config) -> ref`. Called again, anywhere and after
any crash, it looks for its manifest first and returns that; else it works and commits. Invariants:
- Only `commit` makes a manifest, and only while the run's lease is held.
- A stage that failed for a reason that trying again cannot mend is never retried.
- Nothing but small refs passes through Prefect: no tensor, table or sample list.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.tasks import Task, exponential_backoff

from rlcore.config import config_digest
from rlcore.errors import NEVER_RETRIED
from rlcore.run import Run, current
from rlcore.store.manifest import StageRef
from rlcore.work import Work

log = logging.getLogger("sluice.stage")

Inputs = dict[str, StageRef | None]
Body = Callable[..., Awaitable[Work]]


class StageTask(Protocol):
    """A stage as the flow calls it: inputs by name, each the ref of the stage that made it."""

    def __call__(self, run_id: str, i: int, **inputs: StageRef | None) -> Awaitable[StageRef]: ...


def stage(name: str, *, sections: tuple[str, ...], retries: int = 0) -> Callable[[Body], StageTask]:
    """Make a stage of a body `async (run, i, **inputs) -> Work`.

    Args:
        name: the stage's name: of its task, its folder in the store and its metrics.
        sections: the config sections that its result depends on.
        retries: how often Prefect runs it again after an error that may pass.
    """

    def wrap(body: Body) -> StageTask:
        async def run_stage(run_id: str, i: int, **inputs: StageRef | None) -> StageRef:
            run = current(run_id)
            context = TaskRunContext.get()
            if context is not None:
                run.last_task_run = context.task_run.id
            return await look_or_work(run, name, sections, i, inputs, body)

        run_stage.__doc__ = body.__doc__
        # Prefect makes a task's key from it: seven stages must not share one.
        run_stage.__qualname__ = name
        made: StageTask = task(
            name=name,
            task_run_name=name + "-it{i:06d}",
            cache_policy=NO_CACHE,
            persist_result=False,
            retries=retries,
            retry_delay_seconds=exponential_backoff(backoff_factor=1),
            retry_condition_fn=may_pass,
        )(run_stage)
        return made

    return wrap


async def look_or_work(
    run: Run, name: str, sections: tuple[str, ...], i: int, inputs: Inputs, body: Body
) -> StageRef:
    """The ref of a committed stage, found or made."""
    digest = config_digest(run.config, *sections)
    shas = {key: ref.sha256 for key, ref in inputs.items() if ref is not None}
    found = await asyncio.to_thread(run.store.lookup, i, name, shas, digest)
    if found is not None:
        log.info("%s of iteration %d was committed before; going on from it", name, i)
        return found
    start = time.perf_counter()
    try:
        work: Work = await body(run, i, **inputs)
    finally:
        run.fleet.tell_worker_lines()
    worked = time.perf_counter()
    manifest = run.manifest(i, name, shas, digest, work, seconds=worked - start)
    ref = await asyncio.to_thread(run.store.commit, manifest, run.lease)
    run.note_timing(i, name, total=time.perf_counter() - start, compute=work.compute_seconds)
    return ref


async def may_pass(_task: Task[Any, Any], _run: TaskRun, state: State[Any]) -> bool:
    """Whether an error may be gone at the next try."""
    error = await state.aresult(raise_on_failure=False)
    return not isinstance(error, NEVER_RETRIED)
