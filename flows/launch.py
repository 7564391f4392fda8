"""Run a training in this process: check it, give it a Prefect server, show its progress, sum it
up.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from flows.server import start_server, stop, wait_healthy
from rlcore.config import RunConfig, with_sets
from rlcore.errors import SluiceError

FAILED, INTERRUPTED = 1, 3
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
    from rlcore.preflight import preflight

    began = time.perf_counter()
    config = named(config, root)
    preflight(config)
    from flows.progress import Progress

    shown = Progress(config, began, quiet=as_json)
    try:
        with private_prefect(config, shown):
            from rlcore.cluster.ray_session import connect

            connect(config.cluster.ray_address)
            result = asyncio.run(_train(config, shown))
    except (KeyboardInterrupt, asyncio.CancelledError):
        shown.interrupted()
        return INTERRUPTED
    except SluiceError as error:
        shown.failed(error)
        return FAILED
    finally:
        _leave_ray()
    if as_json:
        json.dump(result, sys.stdout, indent=2)
        print()
    else:
        shown.summary()
    return 0


def named(config: RunConfig, root: str | None) -> RunConfig:
    """The configuration with an absolute root and a run id."""
    where = root or config.storage.root
    where = where if "://" in where else str(Path(where).expanduser().resolve())
    sets = [f"storage.root={json.dumps(where)}"]
    if not config.run.id:
        sets.append(f"run.id={datetime.now():%Y%m%d-%H%M%S}")
    return with_sets(config, sets)


async def _train(config: RunConfig, shown: Any) -> dict[str, Any]:
    from flows.report import on_iteration
    from flows.train import rl_train

    on_iteration(shown.iteration)
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    result: dict[str, Any] = await rl_train(config)
    return result


@contextmanager
def private_prefect(config: RunConfig, shown: Any) -> Iterator[None]:
    """A Prefect server for as long as the block runs, unless the environment names one."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "WARNING")
    os.environ.setdefault("PREFECT_LOGGING_EXTRA_LOGGERS", "sluice")
    if os.environ.get("PREFECT_API_URL"):
        shown.prefect(os.environ["PREFECT_API_URL"], own=False)
        yield
        return
    root = config.storage.root.removeprefix("file://")
    home = (Path(root) if "://" not in root else Path.home() / ".cache" / "sluice") / "prefect"
    process, url = start_server(home)
    os.environ["PREFECT_API_URL"] = url
    try:
        from rlcore.cluster.ray_session import connect

        connect(config.cluster.ray_address)
        import flows.train  # noqa: F401  (imported while the server starts)

        wait_healthy(process, url, home)
        shown.prefect(url, own=True)
        yield
    finally:
        drain_prefect()
        del os.environ["PREFECT_API_URL"]
        stop(process)


def drain_prefect() -> None:
    """Send what this process still has to say to the server, before that goes away."""
    if "prefect.logging.handlers" in sys.modules:
        from prefect.events.worker import EventsWorker
        from prefect.logging.handlers import APILogWorker

        APILogWorker.drain_all(timeout=DRAIN_S)
        EventsWorker.drain_all(timeout=DRAIN_S)


def _leave_ray() -> None:
    if "ray" in sys.modules:
        import ray

        ray.shutdown()
