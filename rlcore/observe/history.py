"""A run's past and present, read from the store alone."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from rlcore.errors import Corrupt, NotFound
from rlcore.store.lease import is_held, read_lease
from rlcore.store.manifest import Manifest, StageRef, parse_record
from rlcore.store.objects import Objects
from rlcore.store.paths import outcome_key
from rlcore.store.run_store import RunStore

READERS = 8


@dataclass(frozen=True)
class RunSummary:
    """What a run has come to."""

    run_id: str
    status: str
    """running, completed, failed, interrupted, or new."""
    message: str
    """Why it failed, where it did."""
    committed: int
    """Iterations committed."""
    total: int
    """Iterations asked for."""
    state_sha256: str | None
    """Digest of the last committed model and optimizer state that was saved."""
    metrics: list[dict[str, float]]
    """One object an iteration: iteration, reward, seconds and all metrics."""
    parent: dict[str, Any] | None
    """What it is a fork of, {run_id, iteration, digest}; None for any other run."""


def records(objects: Objects, run_id: str) -> list[dict[str, Any]]:
    """The records of all committed iterations, in order."""
    store = RunStore(objects, run_id)
    last = store.last_committed()
    if last is None:
        return []
    with ThreadPoolExecutor(READERS) as pool:
        found = pool.map(store.committed, range(last + 1))
    return [record for record in found if record is not None]


def iterations(objects: Objects, run_id: str) -> list[dict[str, float]]:
    """One object a committed iteration: `iteration` and its metrics."""
    return [{"iteration": r["iteration"], **r["metrics"]} for r in records(objects, run_id)]


def summarise(objects: Objects, run_id: str) -> RunSummary:
    """All that `sluice show RUN` says.

    Raises:
        NotFound: there is no such run.
    """
    store = RunStore(objects, run_id)
    found = records(objects, run_id)
    total = iterations_asked(store)
    status, message = status_of(objects, run_id, len(found), total)
    rows = [
        {
            "iteration": r["iteration"],
            "reward": r["metrics"].get("rollout/raw_reward"),
            **r["metrics"],
        }
        for r in found
    ]
    return RunSummary(
        run_id=run_id,
        status=status,
        message=message,
        committed=len(found),
        total=total,
        state_sha256=_state_digest(store, found),
        metrics=rows,
        parent=asdict(store.parent) if store.parent else None,
    )


def iterations_asked(store: RunStore) -> int:
    """Iterations that the newest driver was asked for: a resumed run may be made longer."""
    outcome = last_outcome(store)
    if outcome is not None and isinstance(outcome.get("num_iterations"), int):
        return int(outcome["num_iterations"])
    return int(store.load_run()["config"]["train"]["num_iterations"])


def last_outcome(store: RunStore) -> dict[str, Any] | None:
    """What the newest driver left of how it ended; None where it left nothing that can be read."""
    key = outcome_key(store.run_id)
    try:
        return parse_record(store.objects.get(key), store.objects.url(key))
    except (NotFound, Corrupt):
        return None


def status_of(objects: Objects, run_id: str, committed: int, total: int) -> tuple[str, str]:
    """The run's status and, where it failed, why."""
    try:
        lease = read_lease(objects, run_id)
    except Corrupt:
        lease = None  # The next driver makes it anew.
    if is_held(lease):
        return "running", ""
    if committed >= total:
        return "completed", ""
    outcome = last_outcome(RunStore(objects, run_id))
    if lease is None and outcome is None:
        return "new", ""
    if outcome is None or lease is None or outcome["epoch"] != lease["epoch"]:
        # A later driver took the run and left without a word: it was killed.
        return "interrupted", ""
    if outcome["status"] == "completed":
        return "interrupted", ""  # It was asked for one iteration, and more are left.
    return str(outcome["status"]), str(outcome["message"])


def _state_digest(store: RunStore, found: list[dict[str, Any]]) -> str | None:
    for record in reversed([one for one in found if "train" in one["stages"]]):
        manifest: Manifest = store.manifest(StageRef.model_validate(record["stages"]["train"]))
        state = manifest.extra.get("state")
        if state:
            joined = state["model_sha256"] + state["optimizer_sha256"]
            return sha256(joined.encode()).hexdigest()
    return None
