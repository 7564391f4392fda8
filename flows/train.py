"""The training run: iterations one after another, until all are committed."""

import asyncio
import time
from functools import partial
from typing import Any
from uuid import UUID

import httpx
from prefect import flow, get_client, tags
from prefect.client.orchestration import PrefectClient
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Failed, State

from flows.iteration import iteration
from flows.operation.attempts import Attempts
from flows.operation.credentials import fetch_credentials
from flows.operation.deployed import (
    Ending,
    asked_for,
    asked_to_cancel,
    cancelled_state,
    cancelled_when_asked,
)
from flows.operation.leftovers import root_tag, take_over
from flows.reporting.logs import logs_to_prefect
from flows.reporting.report import Reporter, report_failure
from rlcore.collector import keep_loaded
from rlcore.config import RunConfig
from rlcore.config.load import dotted
from rlcore.errors import ClusterError, Conflict, Fenced
from rlcore.opening import is_complete, open_run
from rlcore.preflight import preflight
from rlcore.run import Run, find_open

API_PATIENCE_S = 600.0
DRAIN_PATIENCE_S = 2.0
NO_OVERRIDES: dict[str, Any] = {}


def flow_run_name() -> str:
    """`train-RUN`; a run without a name of its own is called after the flow run."""
    config = flow_run.parameters["config"]
    run = config["run"] if isinstance(config, dict) else config.run.model_dump()
    overrides = dotted(flow_run.parameters.get("overrides") or {})
    return f"train-{overrides.get('run.id') or run.get('id') or flow_run.id}"


@flow(name="rl-train", flow_run_name=flow_run_name, retries=0, persist_result=False)
async def rl_train(
    config: RunConfig, overrides: dict[str, Any] = NO_OVERRIDES
) -> dict[str, Any] | State[Any]:
    """Train a model by reinforcement learning.

    A run of the same name goes on from what is committed, whichever flow run or machine began it.

    Args:
        config: All settings, filled in as the deployment has them. Given as JSON, it takes the
            place of the deployment's as a whole.
        overrides: Single settings in place of those of `config`, by their dotted names, as in
            {"run.id": "first", "train.num_iterations": 20}. Meant for schedules and the command
            line: in a form, change the fields and leave this empty.

    Returns:
        The run's id, the number of committed iterations and the last iteration's metrics.
    """
    logs_to_prefect()
    if find_open(config.run.id) is not None:
        # The command line has checked the configuration and opened the run.
        return await train(config)
    config = asked_for(config, overrides, flow_run.id)
    await fetch_credentials(config.storage)
    attempts = Attempts(config, flow_run.id)
    cancelled = partial(asked_to_cancel, UUID(flow_run.id))
    while (end := await attempts.stand_by(cancelled)) is None:
        try:
            return await attempt(config, attempts)
        except Fenced:
            if not attempts.another_drives():
                raise
    return end


async def attempt(config: RunConfig, attempts: Attempts) -> dict[str, Any] | State[Any]:
    """Drive the run from a flow run of its own, unless that has crashed too often."""
    if (excuse := attempts.too_many(attempts.count())) is not None:
        attempts.forget()
        await report_failure(config, excuse, UUID(flow_run.id))
        return Failed(message=excuse)
    try:
        preflight(config)
        result = await train(config)
    except Exception as error:
        if not (isinstance(error, Fenced) and attempts.another_drives()):
            attempts.forget()
            await report_failure(config, str(error), UUID(flow_run.id))
        raise
    attempts.forget()
    return result


async def train(config: RunConfig) -> dict[str, Any] | State[Any]:
    """Run all iterations that are not committed."""
    own = UUID(flow_run.id)
    if is_complete(config):
        async with get_client() as client:
            await take_over(client, config, own)
        return {"run_id": config.run.id, "committed": config.train.num_iterations, "metrics": {}}
    ending = Ending(own)
    try:
        async with (
            get_client() as client,
            cancelled_when_asked(client, own),
            open_run(config, ending) as run,
        ):
            return await walk(run, client, own)
    except BaseException as error:
        if isinstance(error, Exception) or not ending.cancelled:
            raise
        return await cancelled_state(config, own)


async def walk(run: Run, client: PrefectClient, own: UUID) -> dict[str, Any]:
    """The iterations of an open run, one after another."""
    await take_over(client, run.config, own)
    metrics: dict[str, float] = {}
    last = run.config.train.num_iterations
    keep_loaded()
    async with Reporter(run, client, own) as report:
        for i in range(run.first_uncommitted(), last):
            await wait_for_api(client)
            with tags(root_tag(run.config)):
                done = await iteration(run.id, i)
            if done.iteration != i:
                raise Conflict(
                    f"Prefect returned iteration {done.iteration} for iteration {i}; retry the run"
                )
            metrics = done.metrics
            await report.iteration(done)
            await drain(client, run)
    return {"run_id": run.id, "committed": last, "metrics": metrics}


async def wait_for_api(client: PrefectClient) -> None:
    """Wait until Prefect's API answers: a subflow that starts during an outage fails at once.

    Raises:
        ClusterError: after ten minutes without an answer.
    """
    deadline, pause = time.monotonic() + API_PATIENCE_S, 0.5
    while (error := await client.api_healthcheck()) is not None:
        if not isinstance(error, httpx.HTTPError | OSError) or time.monotonic() > deadline:
            raise ClusterError(f"Prefect's API at {client.api_url} does not answer: {error!r}")
        await asyncio.sleep(pause)
        pause = min(pause * 2, 10.0)


async def drain(client: PrefectClient, run: Run) -> None:
    """Wait until the server has recorded the iteration's last task run.

    On SQLite the next subflow would otherwise meet the recorder's transaction and be refused. A
    server of Sluice's tries it again; any other answers 503, and the client sleeps two seconds.
    """
    if run.last_task_run is None:
        return
    deadline = time.monotonic() + DRAIN_PATIENCE_S
    while time.monotonic() < deadline:
        try:
            seen = await client.read_task_run(run.last_task_run)
        except ObjectNotFound:
            pass
        else:
            if seen.state is not None and seen.state.is_final():
                return
        await asyncio.sleep(0.02)
