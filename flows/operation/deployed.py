"""What a flow run that Prefect started has and one of the command line has not: parameters of its
own, attempts that nobody watches, rows of earlier attempts, and a Cancel button.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any
from uuid import UUID

from prefect import get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled

from flows.operation.leftovers import close_leftovers
from rlcore.config import RunConfig
from rlcore.config.load import dotted, with_values
from rlcore.opening import named

log = logging.getLogger("sluice")

WATCH_INTERVAL_S = 2.0
ASK_TIMEOUT_S = 3.0
CLOSING_PATIENCE_S = 4.0


def asked_for(config: RunConfig, overrides: Mapping[str, Any], flow_run_id: str) -> RunConfig:
    """The configuration that a flow run's parameters come to.

    A parameter given to Prefect takes the place of the deployment's whole `config`; what that
    leaves out comes from `overrides` and, for the root, from the worker's $SLUICE_ROOT.

    Args:
        config: the parameter.
        overrides: settings by dotted name or in tables, in place of those of `config`.
        flow_run_id: names a run that has no name: a retry of the flow run is the same run.

    Raises:
        ConfigError: naming the setting at fault.
    """
    told = "storage" in config.model_fields_set and "root" in config.storage.model_fields_set
    root = None if told and config.storage.root else os.environ.get("SLUICE_ROOT")
    if "storage.root" in dotted(overrides):
        root = None
    return named(with_values(config, overrides), root, f"run-{flow_run_id}")


# --- cancelling -----------------------------------------------------------------------------------


@asynccontextmanager
async def cancelled_when_asked(client: PrefectClient, flow_run_id: UUID) -> AsyncIterator[None]:
    """Cancel the block when Prefect says that its flow run is to be cancelled.

    The worker says so too, by a signal; but a run may have outlived its worker, or have none.
    """
    task = asyncio.current_task()
    assert task is not None

    async def watch() -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            # An outage is no reason to stop, and the next look may get an answer.
            with suppress(Exception):
                flow_run = await client.read_flow_run(flow_run_id)
                if is_cancelled(flow_run.state):
                    task.cancel()
                    return

    watching = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        watching.cancel()


class Ending:
    """How a run ends that is stopped from outside: asked when it does, by `open_run` or after it
    where the run was open before.
    """

    def __init__(self, flow_run_id: UUID) -> None:
        self._flow_run_id = flow_run_id
        self._answer: bool | None = None

    def __call__(self) -> str:
        """As the store records it."""
        return "cancelled" if self.cancelled else "interrupted"

    @property
    def cancelled(self) -> bool:
        """Whether somebody cancelled the flow run. The first answer counts."""
        if self._answer is None:
            self._answer = asked_to_cancel(self._flow_run_id)
        return self._answer


async def cancelled_state(config: RunConfig, flow_run_id: UUID) -> State[Any]:
    """The state to end a cancelled flow run with, after closing what it was interrupted in, such
    as an iteration that was being made.
    """
    if (task := asyncio.current_task()) is not None:
        task.uncancel()
    with suppress(Exception):
        async with asyncio.timeout(CLOSING_PATIENCE_S), get_client() as client:
            await close_leftovers(client, config, flow_run_id, why="interrupted by the cancelling")
    return Cancelled(message=f"What run {config.run.id} has committed is kept.")


def is_cancelled(state: State[Any] | None) -> bool:
    """Whether a flow run in this state is to stop."""
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def asked_to_cancel(flow_run_id: UUID) -> bool:
    """Whether the flow run is to be cancelled, asked once and without patience.

    Not asynchronous, since it is called while the event loop comes to its end.
    """
    with (
        suppress(Exception),
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        get_client(httpx_settings={"timeout": ASK_TIMEOUT_S}, sync_client=True) as client,
    ):
        return is_cancelled(client.read_flow_run(flow_run_id).state)
    return False
