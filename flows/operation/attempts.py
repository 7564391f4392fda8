"""The attempts of a flow run: how often they crashed, and that one alone drives.

Prefect may begin a flow run again while a process of it lives: a worker reports a crash some
seconds after the runner did, when the automation has begun the next attempt already, and begins one
more. Such a process stands by: it ends as the other does, or takes over where that one is killed.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from prefect.states import Cancelled, Failed, State

from flows.operation.deployed import WATCH_INTERVAL_S
from rlcore.config import RunConfig
from rlcore.errors import NotFound
from rlcore.observe.history import status_of
from rlcore.opening import open_store
from rlcore.store.lease import is_held, read_lease, this_process
from rlcore.store.manifest import canonical_json
from rlcore.store.paths import attempts_key

log = logging.getLogger("sluice")

KEPT = 20
"""Processes that are remembered."""


class Attempts:
    """Those of one flow run at one training run, this process among them."""

    def __init__(self, config: RunConfig, flow_run_id: str) -> None:
        self._config = config
        self._store = open_store(config)
        self._key = attempts_key(config.run.id, flow_run_id)
        self._me = this_process()
        self._change(lambda _: None)

    # --- who drives -------------------------------------------------------------------------------

    def another_drives(self) -> bool:
        """Whether another process of this flow run holds the run."""
        lease = read_lease(self._store.objects, self._config.run.id)
        if lease is None or not is_held(lease) or lease["holder"] == self._me:
            return False
        return lease["holder"] in self._read()[0]["processes"]

    async def stand_by(self, cancelled: Callable[[], bool]) -> State[Any] | None:
        """Wait while another process of this flow run drives.

        Args:
            cancelled: whether somebody asked the flow run to stop.

        Returns:
            The state to end in; None where this process has to drive.
        """
        run_id = self._config.run.id
        if not self.another_drives():
            return None
        log.warning("another process of this flow run drives run %s; this one stands by", run_id)
        while self.another_drives():
            await asyncio.sleep(WATCH_INTERVAL_S)
            if await asyncio.to_thread(cancelled):
                return Cancelled(message=f"What run {run_id} has committed is kept.")
        last = self._store.last_committed()
        committed = 0 if last is None else last + 1
        total = self._config.train.num_iterations
        status, message = status_of(self._store.objects, run_id, committed, total)
        if status == "failed":
            return Failed(message=message)
        if status == "cancelled":
            return Cancelled(message=f"What run {run_id} has committed is kept.")
        return None

    # --- how often --------------------------------------------------------------------------------

    def count(self) -> int:
        """Count this attempt at the iteration that is next.

        Returns:
            How often the flow run has now begun at this iteration without having said how it
            ended: an end that was reported, or a commit, begins the count anew.
        """
        last = self._store.last_committed()
        at = 0 if last is None else last + 1

        def add(record: dict[str, Any]) -> None:
            record["attempts"] = record["attempts"] + 1 if record["iteration"] == at else 1
            record["iteration"] = at

        return int(self._change(add)["attempts"])

    def forget(self) -> None:
        """Begin the count anew: the flow run says itself how it ends."""
        self._change(lambda record: record.update(iteration=None, attempts=0))

    def too_many(self, attempts: int) -> str | None:
        """What to say when a run has been begun too often at one iteration."""
        run_id, most = self._config.run.id, self._config.run.max_attempts
        if attempts <= most:
            return None
        return (
            f"run {run_id} crashed {attempts - 1} times without a new commit, which is "
            f"run.max_attempts = {most}; look into the logs of the last attempts, mend the cause "
            "and press Retry"
        )

    # --- their record -----------------------------------------------------------------------------

    def _read(self) -> tuple[dict[str, Any], str | None]:
        record: dict[str, Any] = {"iteration": None, "attempts": 0, "processes": []}
        try:
            data, tag = self._store.objects.read_with_tag(self._key)
        except NotFound:
            return record, None
        try:
            found = json.loads(data)
        except ValueError:
            return record, tag
        return record | (found if isinstance(found, dict) else {}), tag

    def _change(self, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        while True:
            record, tag = self._read()
            change(record)
            others = [p for p in record["processes"] if p != self._me]
            record["processes"] = [*others[1 - KEPT :], self._me]
            if self._store.objects.compare_and_swap(self._key, canonical_json(record), tag):
                return record
