"""Run a training in this process: check it, give it a Prefect server, show its progress, sum it
up.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import time
import traceback
from datetime import datetime
from pathlib import Path
from typing import Any

from flows.exit_codes import DONE, FAILED, INTERRUPTED
from flows.operation.credentials import fetch_credentials
from flows.operation.server import PrefectServer
from flows.reporting.progress import Progress
from rlcore.cluster.ray_session import connect, disconnect
from rlcore.config import RunConfig
from rlcore.errors import ClusterError, SluiceError, StoreError
from rlcore.opening import is_complete, named, open_run, open_store
from rlcore.preflight import preflight
from rlcore.run import Run

DRAIN_S = 5


def run_training(config: RunConfig, *, root: str | None, as_json: bool) -> int:
    """Train until done.

    Args:
        config: the run's configuration.
        root: the root given on the command line, in place of the configuration's.
        as_json: print one JSON object at the end instead of progress and a summary.

    Returns:
        The exit code: 0 done, 1 failed, 3 interrupted and resumable.

    Raises:
        ConfigError, DataError, PluginError: bad input; nothing was written.
    """
    began = time.perf_counter()
    config = named(config, root, f"{datetime.now():%Y%m%d-%H%M%S}")
    asyncio.run(fetch_credentials(config.storage))
    preflight(config)
    shown = Progress(config, began, quiet=as_json)
    result: dict[str, Any] = {"run_id": config.run.id, "committed": config.train.num_iterations}
    if not is_complete(config):
        code, result = drive(config, shown)
        if code != DONE:
            return code
    if as_json:
        json.dump(result, sys.stdout, indent=2)
        print()
    else:
        shown.summary()
    return DONE


def drive(
    config: RunConfig, shown: Progress, only: int | None = None
) -> tuple[int, dict[str, Any]]:
    """Open the run and train, with a Prefect server of this process if there is no other.

    Args:
        config: checked, with a name and an absolute root.
        shown: is told of the start, the iterations and how it ended.
        only: run this iteration and stop; None: all that are not committed.

    Returns:
        The exit code; and what `rl-train` returned, where that is 0.
    """
    server = private_server(config)
    try:
        connect(config.cluster.ray_address)
        return DONE, asyncio.run(_train(config, shown, server, only))
    except SluiceError as error:
        shown.failed(complaint_of_the_disk(config) or error)
        return FAILED, {}
    except BaseException as error:
        if is_interruption(error):
            shown.interrupted()
            return INTERRUPTED, {}
        full = complaint_of_the_disk(config)
        if full is None:
            # Nobody foresaw it, so its traceback is what a report of it needs.
            traceback.print_exc()
        shown.failed(full or error)
        return FAILED, {}
    finally:
        _leave(server)


def complaint_of_the_disk(config: RunConfig) -> StoreError | None:
    """What the store says, if it lies on a local disk and cannot be written to.

    Then it is the cause, whatever failed first: the private Prefect server's database, the
    trainer's files and the engines' logs lie on the same disk.
    """
    if not config.storage.root.startswith(("/", "file://")):
        return None
    try:
        open_store(config).objects.check_writable()
    except StoreError as error:
        return error
    return None


def is_interruption(error: BaseException) -> bool:
    """Whether a signal ended the run. Prefect turns SIGTERM into an exception of its own."""
    from prefect.exceptions import TerminationSignal

    return isinstance(error, KeyboardInterrupt | asyncio.CancelledError | TerminationSignal)


def private_server(config: RunConfig) -> PrefectServer | None:
    """A booting Prefect server for this process, unless the environment names one that runs."""
    # Prefect would print each flow's traceback; its page has them, and one sentence is enough here.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    if os.environ.get("PREFECT_API_URL"):
        return None
    root = config.storage.root.removeprefix("file://")
    parent = Path(root) if "://" not in root else Path.home() / ".cache" / "sluice"
    server = PrefectServer(parent / "prefect")
    os.environ["PREFECT_API_URL"] = server.api_url
    return server


async def _train(
    config: RunConfig, shown: Progress, server: PrefectServer | None, only: int | None
) -> dict[str, Any]:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    # The server boots, Prefect is imported and the actors come up side by side.
    ready = asyncio.ensure_future(asyncio.to_thread(_prefect_ready, server))
    watch = asyncio.ensure_future(_cancel_without(server, task))
    ending = "interrupted"
    try:
        async with open_run(config, lambda: ending) as run:
            rl_train = await ready
            shown.prefect(os.environ["PREFECT_API_URL"], own=server is not None)
            if only is not None:
                return await _one(run, only)
            _report_to(shown)
            from prefect.exceptions import CancelledRun

            try:
                result: dict[str, Any] = await rl_train(config)
            except CancelledRun:
                # Somebody pressed Cancel on its page.
                ending = "cancelled"
                raise asyncio.CancelledError from None
            return result
    except BaseException:
        if server is not None and not server.alive():
            raise ClusterError(server.obituary) from None
        if server is not None and not ready.done():
            # The thread that waits for the server would hold the loop open.
            server.end()
        raise
    finally:
        watch.cancel()


async def _one(run: Run, i: int) -> dict[str, Any]:
    from flows.iteration import iteration

    run.ahead = False
    done = await iteration(run.id, i)
    return {"run_id": run.id, "committed": i + 1, "metrics": done.metrics}


async def _cancel_without(server: PrefectServer | None, task: "asyncio.Task[Any]") -> None:
    """Cancel the task once its server has died: Prefect's client would go on asking for minutes."""
    while server is None or server.alive():
        await asyncio.sleep(1)
    task.cancel()


def _prefect_ready(server: PrefectServer | None) -> Any:
    from flows.train import rl_train

    if server is not None:
        server.wait()
    return rl_train


def _report_to(shown: Progress) -> None:
    from flows.reporting.report import on_iteration

    warnings = logging.StreamHandler()
    warnings.setLevel(logging.WARNING)
    warnings.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.getLogger("sluice").addHandler(warnings)
    on_iteration(shown.iteration)


def _leave(server: PrefectServer | None) -> None:
    """End what was started, both at once, after Prefect has heard what there still is to say."""
    if server is not None:
        if "prefect.logging.handlers" in sys.modules:
            from prefect.events.worker import EventsWorker
            from prefect.logging.handlers import APILogWorker

            APILogWorker.drain_all(timeout=DRAIN_S)
            EventsWorker.drain_all(timeout=DRAIN_S)
        del os.environ["PREFECT_API_URL"]
        server.end()
    disconnect()
    if server is not None:
        server.gone()
