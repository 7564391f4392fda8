"""Close what killed drivers of a run left open in Prefect.

A driver that is killed cannot say so: its flow runs and task runs stay Running for ever, unless the
worker that started it lives on and notices, and then only its outermost flow run is closed. Whoever
holds the run's lease knows that every other driver is gone or must end, so it may close them.

A server may show runs of one name from several roots, so flow runs have their root as a tag. One
without a tag was killed before it came to the store.
"""

import logging
from collections.abc import Callable
from typing import Any
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterName,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType

from rlcore.config import RunConfig
from rlcore.opening import absolute_root

log = logging.getLogger("sluice.flows")

OPEN = [StateType.RUNNING, StateType.PENDING]
PAGE = 200
ROOT_TAG = "root: "
Choose = Callable[[FlowRun], bool]


def root_tag(config: RunConfig) -> str:
    """What marks the flow runs and task runs of a root."""
    return ROOT_TAG + absolute_root(config.storage.root)


async def take_over(client: PrefectClient, config: RunConfig, own: UUID) -> None:
    """Mark the caller's flow run as a driver of the run, and close what earlier ones left."""
    mine = await client.read_flow_run(own)
    await client.update_flow_run(own, tags={*mine.tags, root_tag(config)})
    await close_leftovers(client, config, own)


async def close_leftovers(
    client: PrefectClient, config: RunConfig, own: UUID, why: str = "its process is gone"
) -> int:
    """Close the flow runs and task runs of a run's earlier drivers that are still open.

    They get a state of type Crashed and of a name of its own, so that an automation which starts
    crashed runs again does not start a second driver beside this one.

    Args:
        client: of the server that shows the run.
        config: of the run, whose lease the caller holds.
        own: the caller's flow run, which stays open.
        why: what to say of what was left open.

    Returns:
        How many were closed.
    """

    run_id, tag = config.run.id, root_tag(config)

    def state() -> State[Any]:
        message = f"{why}; run {run_id} is in the hands of flow run {own}"
        return State(type=StateType.CRASHED, name="Superseded", message=message)

    def is_driver(found: FlowRun) -> bool:
        running = found.state is not None and found.state.is_running()
        here = tag in found.tags or not any(one.startswith(ROOT_TAG) for one in found.tags)
        return found.name == f"train-{run_id}" and running and found.id != own and here

    def is_iteration(found: FlowRun) -> bool:
        head, _, number = found.name.rpartition("-it")
        return head == run_id and number.isdigit() and tag in found.tags

    iterations = await _flow_runs(client, f"{run_id}-it", is_iteration)
    drivers = await _flow_runs(client, f"train-{run_id}", is_driver)
    ids = [own, *(found.id for found in (*drivers, *iterations))]
    tasks = await client.read_task_runs(
        flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": ids}}),
        task_run_filter=TaskRunFilter(
            state=TaskRunFilterState(type=TaskRunFilterStateType(any_=OPEN))
        ),
        limit=PAGE,
    )
    for task in tasks:
        await client.set_task_run_state(task.id, state(), force=True)
    for found in (*iterations, *drivers):
        await client.set_flow_run_state(found.id, state(), force=True)
    closed = len(tasks) + len(iterations) + len(drivers)
    if closed:
        log.info("closed %d flow and task runs that killed drivers of %s had left", closed, run_id)
    return closed


async def _flow_runs(client: PrefectClient, name: str, choose: Choose) -> list[FlowRun]:
    """The open flow runs whose name holds `name` and that are chosen."""
    found = await client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            name=FlowRunFilterName(like_=name),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=OPEN)),
        ),
        limit=PAGE,
    )
    return [one for one in found if choose(one)]
