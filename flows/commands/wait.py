"""`sluice wait`: until a run has ended, with an exit code that says how.

It asks the store, which knows even where Prefect's database is lost, and Prefect where it can be
reached: for what is to be started again, and for flow runs that ended before they opened the run.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from flows.commands.stack import Stack
from flows.exit_codes import BAD_INPUT, CANCELLED, CRASHED, DONE, FAILED, TIMEOUT
from rlcore.config.load import dotted
from rlcore.errors import Corrupt, NotFound
from rlcore.observe.history import iterations_asked, last_outcome, status_of
from rlcore.store.objects import Objects
from rlcore.store.run_store import RunStore

POLL_S = 1.0
GRACE_S = 30.0
"""Seconds for which a run may look crashed, or not be there, before it counts as such: a new driver
needs some to come up.
"""
LINE_INTERVAL_S = 10.0
ENDINGS = {
    "completed": DONE,
    "failed": FAILED,
    "crashed": CRASHED,
    "cancelled": CANCELLED,
    "timeout": TIMEOUT,
    "unknown": BAD_INPUT,
}
PREFECT_SAYS = {"FAILED": "failed", "CRASHED": "crashed", "CANCELLED": "cancelled"}
"""How flow runs end before they have opened the run."""

out = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Seen:
    """A run at one moment."""

    status: str
    committed: int = 0
    total: int = 0
    message: str = ""


@dataclass(frozen=True)
class FlowRunSeen:
    """The newest flow run of a run."""

    state_type: str
    state_name: str
    message: str

    @property
    def active(self) -> bool:
        """Whether it goes on, or is about to."""
        return self.state_type in ("SCHEDULED", "PENDING", "RUNNING", "CANCELLING", "PAUSED")


Ask = Callable[[], FlowRunSeen | None]


def wait_for_run(root: str, run_id: str, *, timeout_s: float | None, as_json: bool) -> int:
    """Wait for a run and say how it ended.

    Args:
        root: of all runs.
        run_id: the run; it need not be there yet.
        timeout_s: give up after this many seconds; None: never.
        as_json: print one JSON object at the end instead of lines.

    Returns:
        0 completed, 1 failed, 2 there is no such run or nobody has started it, 4 crashed,
        5 cancelled, 6 timeout.
    """
    url = prefect_url(root)
    ask: Ask = (lambda: newest_flow_run(url, run_id)) if url else lambda: None
    objects = Objects.open(root)
    seen = watch(lambda: look(objects, run_id), ask, timeout_s, None if as_json else print_line)
    code = ENDINGS[seen.status]
    if as_json:
        json.dump({"run_id": run_id, **asdict(seen), "exit_code": code}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        print_line(seen)
    return code


def watch(
    look: Callable[[], Seen],
    ask: Ask,
    timeout_s: float | None,
    say: Callable[[Seen], None] | None,
    *,
    poll_s: float = POLL_S,
    grace_s: float = GRACE_S,
) -> Seen:
    """Look until the run has ended.

    A failed or cancelled run that Prefect is about to start again has not ended. One that looks
    crashed, or is not there, has, if it does so for `grace_s` seconds.
    """
    began = time.monotonic()
    doubtful_since: float | None = None
    said: tuple[str, int] | None = None
    said_at = began
    while True:
        now, seen = time.monotonic(), look()
        if seen.status == "completed":
            return seen
        if seen.status == "running":
            doubtful_since = None
        elif (flow_run := ask()) is not None and flow_run.active:
            doubtful_since = None
            seen = Seen(f"{flow_run.state_name.lower()} in Prefect", seen.committed, seen.total)
        elif seen.status in ("failed", "cancelled"):
            return seen
        else:
            doubtful_since = doubtful_since or now
            if now - doubtful_since > grace_s:
                return ending(seen, flow_run)
        news = said != (seen.status, seen.committed)
        due = said is None or said[0] != seen.status or now - said_at > LINE_INTERVAL_S
        if say is not None and news and due:
            said, said_at = (seen.status, seen.committed), now
            say(seen)
        if timeout_s is not None and time.monotonic() - began > timeout_s:
            return Seen("timeout", seen.committed, seen.total, f"was {seen.status}")
        time.sleep(poll_s)


def ending(seen: Seen, flow_run: FlowRunSeen | None) -> Seen:
    """How a run ended that has not said so itself."""
    if flow_run is not None and flow_run.state_type in PREFECT_SAYS:
        return Seen(PREFECT_SAYS[flow_run.state_type], seen.committed, seen.total, flow_run.message)
    if seen.status == "missing":
        return Seen("unknown", message=seen.message)
    if seen.status == "new":
        waits = "nobody has started it; `sluice resume` does"
        return Seen("unknown", seen.committed, seen.total, waits)
    return Seen(
        "crashed", seen.committed, seen.total, "its driver is gone; go on with `sluice resume`"
    )


def look(objects: Objects, run_id: str) -> Seen:
    """What the store says of a run."""
    store = RunStore(objects, run_id)
    try:
        total = iterations_asked(store)
        last = store.last_committed()
        committed = 0 if last is None else last + 1
        status, message = status_of(objects, run_id, committed, total)
        outcome = last_outcome(store)
    except NotFound as error:
        return Seen("missing", message=str(error))
    except Corrupt as error:
        return Seen("failed", message=str(error))
    if status == "interrupted" and outcome is not None and outcome["status"] == "completed":
        status = "running"  # One iteration at a time, and none at this moment.
    return Seen(status, committed, total, message)


def print_line(seen: Seen) -> None:
    """One line of what happens."""
    clock = time.strftime("%H:%M:%S")
    message = f": {seen.message}" if seen.message else ""
    out.print(f"{clock} {seen.status}, {seen.committed}/{seen.total}{message}", markup=False)


def prefect_url(root: str) -> str | None:
    """The API that may know the run: the environment's, else that of the root's stack."""
    if url := os.environ.get("PREFECT_API_URL"):
        return url
    stack = Stack.load(root)
    return stack.api_url if stack.alive("server") else None


def newest_flow_run(url: str, run_id: str) -> FlowRunSeen | None:
    """The newest flow run of `rl-train` that is of this run; None where Prefect does not say."""
    from prefect import get_client
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName
    from prefect.client.schemas.sorting import FlowRunSort
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_CLIENT_MAX_RETRIES,
        temporary_settings,
    )

    with contextlib.suppress(Exception):
        settings: dict[Any, Any] = {PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0}
        with (
            temporary_settings(settings),
            get_client(httpx_settings={"timeout": 5}, sync_client=True) as client,
        ):
            found = client.read_flow_runs(
                flow_filter=FlowFilter(name=FlowFilterName(any_=["rl-train"])),
                sort=FlowRunSort.EXPECTED_START_TIME_DESC,
                limit=100,
            )
        for one in found:
            if is_of(run_id, one.name, str(one.id), one.parameters) and one.state is not None:
                state = one.state
                return FlowRunSeen(
                    state.type.value, state.name or state.type.value, state.message or ""
                )
    return None


def is_of(run_id: str, name: str, flow_run_id: str, parameters: dict[str, Any]) -> bool:
    """Whether a flow run is of a run: by its name or, before it has one, by its parameters."""
    if name == f"train-{run_id}":
        return True
    config = parameters.get("config")
    run = config.get("run") if isinstance(config, dict) else None
    given = run.get("id") if isinstance(run, dict) else None
    overrides = parameters.get("overrides")
    if isinstance(overrides, dict):
        given = dotted(overrides).get("run.id") or given
    return bool((given or f"run-{flow_run_id}") == run_id)
