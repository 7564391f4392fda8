"""Opening a run: create or find it, take its lease, make its model folder, start its actors."""

import logging
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rlcore import __version__
from rlcore.cluster import ray_session
from rlcore.cluster.fleet import Fleet
from rlcore.cluster.plan import FleetPlan
from rlcore.config import RunConfig, build_config, config_digest
from rlcore.config.digest import NOT_COMPUTED
from rlcore.errors import ConfigError, Conflict, Corrupt, StoreAway, StoreError
from rlcore.fork_state import make_base_state
from rlcore.observe.history import iterations_asked
from rlcore.run import Run, find_open, forget, set_current
from rlcore.scratch import make_scratch, sweep_scratch
from rlcore.sources import Sources, sources_of
from rlcore.store.branch import refer_to_parent
from rlcore.store.credentials import all_options
from rlcore.store.lease import Lease
from rlcore.store.manifest import SCHEMA_VERSION, canonical_json, utc_now
from rlcore.store.objects import Objects
from rlcore.store.paths import STAGES, driver_key, outcome_key
from rlcore.store.run_store import RunStore

log = logging.getLogger("sluice")


@asynccontextmanager
async def open_run(
    config: RunConfig, ending: Callable[[], str] = lambda: "interrupted"
) -> AsyncIterator[Run]:
    """Open a run for training: everything it holds is given back when the block ends.

    A run that is open in this process already is used as it is and stays open.

    Args:
        config: of the run.
        ending: says how a run ends that is stopped from outside.

    Raises:
        ConfigError: the run exists with another configuration.
        Fenced: another driver holds the run and is alive.
    """
    if (opened := find_open(config.run.id)) is not None:
        # From here on in the flow run that has the run, so that it shows what happens to engines.
        opened.fleet.watch(opened.refill)
        yield opened
        return
    store = open_store(config)
    sources = sources_of(config)
    create_or_check(store, config, sources)
    lease = await Lease.acquired(store.objects, config.run.id, config.storage.lease_ttl_s)
    sweep_scratch()
    scratch = make_scratch(config.run.id)
    lease.start()
    # Until another word replaces it: a driver that is killed leaves none.
    put_outcome(store, config, "interrupted", "", lease.epoch)
    put_driver(store, lease, sources)
    outcome, message, away = "interrupted", "", False
    try:
        refer_to_parent(store, lease)
        connected = ray_session.connect(config.cluster.ray_address)
        try:
            plan = FleetPlan(config, store, lease.epoch, scratch)
            if config.trains:
                await make_base_state(plan, lease)
            async with Fleet.start(plan, goes_on_with(store)) as fleet:
                run = Run(config, store, lease, fleet)
                set_current(run)
                fleet.watch(run.refill)
                try:
                    yield run
                finally:
                    forget(run.id)
                    await run.close()
        finally:
            if connected:
                ray_session.disconnect()
        # A driver that slept may have found every stage done by the one that took over.
        lease.check()
        outcome = "completed"
    except Exception as error:
        outcome, message = "failed", f"{type(error).__name__}: {error}"
        away = isinstance(error, StoreAway)
        raise
    except BaseException:
        outcome = ending()
        raise
    finally:
        lease.stop()
        shutil.rmtree(scratch, ignore_errors=True)
        # A store that is away takes no last word, and the run was to end by now.
        if not away:
            leave(store, config, lease, outcome, message)


def named(config: RunConfig, root: str | None, run_id: str) -> RunConfig:
    """The configuration with an absolute root and a run id.

    Args:
        config: may lack both.
        root: in place of the configuration's own.
        run_id: the name where the configuration gives none.
    """
    where = absolute_root(root or config.storage.root)
    storage = config.storage.model_copy(update={"root": where})
    run = config.run.model_copy(update={"id": config.run.id or run_id})
    return config.model_copy(update={"storage": storage, "run": run})


def absolute_root(root: str) -> str:
    """A URL as it is, a path without `file://` and from the root of the file system."""
    path = root.removeprefix("file://")
    return path if "://" in path else str(Path(path).expanduser().resolve())


def open_store(config: RunConfig) -> RunStore:
    """The store of a run's artifacts."""
    objects = Objects.open(config.storage.root, all_options(config.storage))
    return RunStore(objects, config.run.id)


def goes_on_with(store: RunStore) -> str:
    """The first stage that is not committed.

    What is there may turn out to be of no use: then a stage before it is done again.
    """
    last = store.last_committed()
    i = 0 if last is None else last + 1
    try:
        return next((name for name in STAGES if store.stage(i, name) is None), STAGES[-1])
    except Corrupt:
        return STAGES[0]


def is_complete(config: RunConfig) -> bool:
    """Whether every iteration of the run is committed, so that nothing needs to be started.

    Raises:
        ConfigError: a run of this name exists with another configuration.
    """
    store = open_store(config)
    last = store.last_committed()
    if last is None or last + 1 < config.train.num_iterations:
        return False
    check_same(config, store.load_run())
    return True


def create_or_check(store: RunStore, config: RunConfig, sources: Sources) -> None:
    """Make the run's record, or make sure that the one there is of the same configuration.

    Raises:
        ConfigError: a run of this name exists with another configuration; names what differs.
    """
    record = {
        "config": config.model_dump(mode="json"),
        "config_digest": config_digest(config),
        "code": __version__,
        "parent": None,
        "sources": sources,
    }
    try:
        store.create_run(record)
    except Conflict:
        check_same(config, store.load_run())


def check_same(config: RunConfig, record: dict[str, Any]) -> None:
    """Refuse a configuration that would compute something else than the run's own."""
    if record["config_digest"] == config_digest(config):
        return
    other = build_config(record["config"])
    differ = [
        f"{section}.{key} is {theirs!r} there and {mine!r} here"
        for section, keys in config.model_dump().items()
        if isinstance(keys, dict)
        for key, mine in keys.items()
        if (theirs := getattr(getattr(other, section), key, None))
        != getattr(getattr(config, section), key, None)
        and section not in NOT_COMPUTED
    ]
    raise ConfigError(
        f"run {config.run.id!r} exists in {config.storage.root} with another configuration: "
        f"{'; '.join(differ[:5]) or 'its digest differs'}. Give it another --run-id"
    )


def existing_config(root: str, run_id: str, options: dict[str, Any] | None = None) -> RunConfig:
    """The configuration that a stored run was made with, pointed at the root it is found under.

    Raises:
        NotFound: there is no such run.
    """
    store = RunStore(Objects.open(root, options or {}), run_id)
    record = store.load_run()
    tree = record["config"]
    tree["train"]["num_iterations"] = iterations_asked(store)
    tree["storage"] |= {"root": root} | ({"options": options} if options else {})
    return build_config(tree)


def leave(store: RunStore, config: RunConfig, lease: Lease, status: str, message: str) -> None:
    """Note how this driver ended, and give the lease back.

    A store that takes neither, such as a full disk, must not hide the error that ends the run: both
    are only for show, since the next driver looks whether this process is alive. A driver that was
    fenced notes nothing: its word would stand for that of the one that took over.
    """
    try:
        lease.check()
        put_outcome(store, config, status, message, lease.epoch)
        lease.release()
    except StoreError as error:
        log.warning("how run %s ended could not be noted: %s", store.run_id, error)


def put_driver(store: RunStore, lease: Lease, sources: Sources) -> None:
    """Note who drives the run from here on, by which code. Manifests name it by its epoch."""
    record = {
        "schema_version": SCHEMA_VERSION,
        "epoch": lease.epoch,
        "holder": lease.holder,
        "opened": utc_now(),
        "code": __version__,
        "sources": sources,
    }
    store.objects.put(driver_key(store.run_id, lease.epoch), canonical_json(record))


def put_outcome(store: RunStore, config: RunConfig, status: str, message: str, epoch: int) -> None:
    """Note how the driver of this epoch ended and how far it was to go.

    For `sluice runs`, and for a plain resume of a run that was made longer.
    """
    record = {
        "schema_version": SCHEMA_VERSION,
        "status": status,
        "message": message,
        "epoch": epoch,
        "num_iterations": config.train.num_iterations,
    }
    store.objects.put(outcome_key(store.run_id), canonical_json(record))
