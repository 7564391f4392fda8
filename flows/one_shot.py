"""The deployed flow that runs one iteration of a run, for who goes step by step."""

import os
from typing import Any
from uuid import UUID

from prefect import flow, get_client, tags
from prefect.runtime import flow_run
from prefect.states import State

from flows.iteration import iteration as run_iteration
from flows.operation.credentials import fetch_credentials
from flows.operation.deployed import Ending, cancelled_state, cancelled_when_asked
from flows.operation.leftovers import root_tag, take_over
from flows.reporting.logs import logs_to_prefect
from rlcore.config import RunConfig
from rlcore.errors import ConfigError
from rlcore.opening import existing_config, open_run, open_store
from rlcore.run import IterationRef


@flow(
    name="rl-iteration", flow_run_name="one-iteration-of-{run_id}", retries=0, persist_result=False
)
async def one_iteration(
    run_id: str, root: str = "", iteration: int | None = None
) -> dict[str, Any] | State[Any]:
    """Run one iteration of a run that exists, from the first stage that is not committed.

    Args:
        run_id: name of the run.
        root: folder or URL of all runs; empty: the worker's.
        iteration: which; empty: the next one. One that is committed is returned as it is.

    Returns:
        The run's id, the iteration and its metrics.
    """
    logs_to_prefect()
    config = existing_config(root or os.environ.get("SLUICE_ROOT") or "sluice-data", run_id)
    await fetch_credentials(config.storage)
    store = open_store(config)
    last = store.last_committed()
    following = 0 if last is None else last + 1
    i = following if iteration is None else iteration
    if i < following and (record := store.committed(i)) is not None:
        return result(IterationRef(run_id, i, record["metrics"]))
    check(config, i, following)
    own = UUID(flow_run.id)
    ending = Ending(own)
    try:
        async with (
            get_client() as client,
            cancelled_when_asked(client, own),
            open_run(config, ending) as run,
        ):
            run.ahead = False
            await take_over(client, config, own)
            with tags(root_tag(config)):
                return result(await run_iteration(run_id, i))
    except BaseException as error:
        if isinstance(error, Exception) or not ending.cancelled:
            raise
        return await cancelled_state(config, own)


def check(config: RunConfig, i: int, following: int) -> None:
    """Make sure that an iteration can be run now.

    Raises:
        ConfigError: it is not the next one, or the run ends before it.
    """
    run_id = config.run.id
    if i != following:
        raise ConfigError(f"iteration = {i}: the next iteration of run {run_id} is {following}")
    if i >= config.train.num_iterations:
        raise ConfigError(
            f"run {run_id} has all of its train.num_iterations = {config.train.num_iterations} "
            "iterations; make it longer with `sluice resume --set train.num_iterations=N`"
        )


def result(done: IterationRef) -> dict[str, Any]:
    """What the flow returns."""
    return {"run_id": done.run_id, "iteration": done.iteration, "metrics": done.metrics}
