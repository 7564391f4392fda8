"""The trainer's state that a fork begins with, made again where its parent did not keep it.

A lost state is made again by training the committed batches from an older one. A fork may have
other training settings than the iterations that it shares, and those must be trained as they were:
so a trainer with the settings of each forefather does it, before the fork's own actors start, and
the fork keeps the state it ends with.
"""

import logging
from itertools import groupby
from typing import Any

from rlcore.cluster.actors import start_trainer
from rlcore.cluster.fleet import MAX_TOKENS
from rlcore.cluster.placement import Demand, Placement
from rlcore.cluster.plan import FleetPlan
from rlcore.cluster.trainer_actor import SavedState
from rlcore.cluster.trainer_group import TrainerGroup
from rlcore.config import RunConfig, build_config, config_digest
from rlcore.config.digest import STAGE_SECTIONS
from rlcore.errors import ConfigError, Corrupt
from rlcore.store.branch import kept_state, put_base_state
from rlcore.store.files import find_damage
from rlcore.store.lease import Lease
from rlcore.store.manifest import FileRef, Manifest, StageRef
from rlcore.store.paths import base_prefix, new_attempt
from rlcore.store.run_store import RunStore
from rlcore.train.trainer import BatchFiles

log = logging.getLogger("sluice.fork")


def check_repeatable(store: RunStore, i: int, config: RunConfig) -> None:
    """The training of a committed iteration can be repeated with the run's own settings.

    Raises:
        ConfigError: the iteration is a forefather's, which trains in another way.
    """
    if not _trains_alike(store, i, config):
        owner = store.owner(i).run_id
        raise ConfigError(
            f"run {store.run_id} cannot repeat the training of iteration {i}: it is that of run "
            f"{owner}, whose training settings differ, and the state after iteration "
            f"{store.first_own - 1} was lost meanwhile; resume the run, which makes it again"
        )


async def make_base_state(plan: FleetPlan, lease: Lease) -> None:
    """Have the state that a fork begins with, where the fork cannot make it itself later.

    Raises:
        Corrupt: what it would be made from is damaged.
    """
    store, first = plan.store, plan.store.first_own
    if _owns_state(store):
        return
    base = first
    while base and not _is_whole(store, base - 1):
        base -= 1
    if all(_trains_alike(store, i, plan.config) for i in range(base, first)):
        return
    log.warning(
        "run %s: the state after iteration %d was not kept; it is made again by training "
        "iterations %d to %d with the settings they had",
        store.run_id,
        first - 1,
        base,
        first - 1,
    )
    state: dict[str, Any] | None = None
    for number, (_, same) in enumerate(
        groupby(range(base, first), lambda i: store.owner(i).run_id)
    ):
        iterations = list(same)
        older, state = state, await _train(plan, iterations, number, state)
        if older is not None:
            store.objects.delete_tree(older["key_prefix"])
    assert state is not None
    put_base_state(store, state, lease)


async def _train(
    plan: FleetPlan, iterations: list[int], number: int, state: dict[str, Any] | None
) -> dict[str, Any]:
    """Train committed iterations of one run, from the given state or the one it kept; saves."""
    store, first = plan.store, iterations[0]
    config = build_config(store.owner(first).load_run()["config"])
    here = {"run": plan.config.run, "storage": plan.config.storage, "cluster": plan.config.cluster}
    own = FleetPlan(config.model_copy(update=here), store, plan.epoch, plan.scratch)
    if state is None and first:
        state = kept_state(store, first - 1, _stage(store, first - 1, "train"))
    demand = Demand.of(own, trainer=True, engines=False)
    placement = await Placement.reserve(demand, own.config.cluster.ray_address)
    group: TrainerGroup | None = None
    try:
        group = await start_trainer(own, placement, -1 - number)
        await group.prepare_model(store.origin, config.model)
        if state is None:
            await group.load(own.start_state())
        else:
            await _restore(group, state, _state_id(store, first - 1))
        for i in iterations:
            before = _state_id(store, i - 1) if i else own.start_state()
            names = {"rollout": "rollout", "reward": "reward", "selection": "filter"}
            files = {key: _stage(store, i, name).files for key, name in names.items()}
            most = _stage(store, i, "train").extra.get(MAX_TOKENS)
            batch = BatchFiles(iteration=i, **files)
            await group.train(before, _state_id(store, i), batch, most)
        saved = await group.save_state(base_prefix(store.run_id, new_attempt()))
    finally:
        if group is not None:
            group.kill()
        placement.release()
    return {
        "key_prefix": saved.key_prefix,
        "files": [file.model_dump(mode="json") for file in saved.files],
        "model_sha256": saved.model_sha256,
        "optimizer_sha256": saved.optimizer_sha256,
    }


async def _restore(group: TrainerGroup, state: dict[str, Any], state_id: str) -> None:
    files = tuple(FileRef.model_validate(file) for file in state["files"])
    digests = state["model_sha256"], state["optimizer_sha256"]
    await group.restore(SavedState(state["key_prefix"], files, *digests), state_id)


def _trains_alike(store: RunStore, i: int, config: RunConfig) -> bool:
    if i >= store.first_own:
        return True
    manifest = _stage(store, i, "train")
    digest = manifest.extra.get("chain_config_digest", manifest.config_digest)
    theirs = store.owner(i).load_run()["config"]["rollout"]["temperature"]
    same = config_digest(config, *STAGE_SECTIONS["train"])
    return (digest, theirs) == (same, config.rollout.temperature)


def _owns_state(store: RunStore) -> bool:
    """Whether the run needs no older state than its own."""
    last = store.last_committed()
    own = range(store.first_own, 0 if last is None else last + 1)
    if store.first_own == 0:
        return True
    return any(kept_state(store, i, _stage(store, i, "train")) for i in reversed(own))


def _is_whole(store: RunStore, i: int) -> bool:
    state = kept_state(store, i, _stage(store, i, "train"))
    if state is None:
        return False
    files = [FileRef.model_validate(file) for file in state["files"]]
    return not any(find_damage(store.objects, file) for file in files)


def _stage(store: RunStore, i: int, name: str) -> Manifest:
    record = store.committed(i)
    if record is None:
        raise Corrupt(f"run {store.run_id}: iteration {i} is not committed any more")
    return store.manifest(StageRef.model_validate(record["stages"][name]))


def _state_id(store: RunStore, i: int) -> str:
    return str(_stage(store, i, "train").extra["state_id"])
