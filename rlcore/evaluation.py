"""Evaluation of a run's checkpoint, beside the run: no lease, no trainer, nothing of it changed.

Invariants:
- The engines load the checkpoint's own files, whose digests are compared first.
- Parts and manifest lie in a folder of their own below `evals/`; a manifest says that it is whole.
"""

import dataclasses
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlcore.cluster import ray_session
from rlcore.cluster.actors import CONTROL_DEADLINE_S
from rlcore.cluster.engines import START_VERSION, Engines
from rlcore.cluster.fleet import ROLLOUT_DEADLINE_S
from rlcore.cluster.placement import Demand, Placement
from rlcore.cluster.plan import FleetPlan, engine_spec, rollout_plan
from rlcore.cluster.ray_session import actor_class, call, gather
from rlcore.cluster.rollout_actor import RolloutActor
from rlcore.cluster.rollout_plan import StageReport
from rlcore.config import EvalDataset, RunConfig, config_digest
from rlcore.config.digest import STAGE_SECTIONS
from rlcore.config.reward import NO_REWARD
from rlcore.errors import ConfigError, Corrupt, NotFound
from rlcore.scratch import make_scratch
from rlcore.store.files import download_folder, find_damage
from rlcore.store.manifest import FileRef, Manifest, StageRef
from rlcore.store.paths import evaluation_prefix, new_attempt
from rlcore.store.retention import is_pruned
from rlcore.store.run_store import RunStore

log = logging.getLogger("sluice")


@dataclass(frozen=True)
class Checkpoint:
    """A committed Hugging Face folder of a run."""

    iteration: int
    manifest_sha256: str
    prefix: str
    files: tuple[FileRef, ...]


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation gave."""

    run_id: str
    iteration: int
    manifest: str
    """Its key."""
    metrics: dict[str, float]


def find_checkpoint(store: RunStore, iteration: int | None) -> Checkpoint:
    """The checkpoint after an iteration; None: the newest that is kept.

    Raises:
        NotFound: the run has none there; says which it has.
    """
    store.load_run()
    last = store.last_committed()
    there: list[int] = []
    for i in range(-1 if last is None else last, -1, -1):
        record = store.committed(i)
        if record is None or "checkpoint" not in record["stages"]:
            continue
        ref = StageRef.model_validate(record["stages"]["checkpoint"])
        folder = store.manifest(ref).extra["checkpoint"]
        if is_pruned(store.objects, folder["key_prefix"]):
            continue
        there.append(i)
        if iteration in (None, i):
            files = tuple(FileRef.model_validate(file) for file in folder["files"])
            return Checkpoint(i, ref.sha256, folder["key_prefix"], files)
    kept = ", ".join(map(str, reversed(there))) or "none"
    which = "no checkpoint" if iteration is None else f"no checkpoint of iteration {iteration}"
    raise NotFound(
        f"run {store.run_id} keeps {which}; kept are: {kept} "
        "(checkpoint.save_interval and checkpoint.keep_last say which are)"
    )


async def evaluate_checkpoint(
    config: RunConfig,
    store: RunStore,
    checkpoint: Checkpoint,
    datasets: Sequence[EvalDataset],
) -> Evaluation:
    """Generate and score responses to held-out prompts with a checkpoint; commit what they gave.

    Connects this process to the run's Ray for as long as it takes.

    Args:
        config: the run's.
        store: the run's.
        checkpoint: of the run.
        datasets: what to evaluate on.

    Raises:
        ConfigError: there is no data set, or no reward to score by.
        Corrupt: a file of the checkpoint was altered.
        EngineError, ClusterError, DataError, RewardError: as in a run.
    """
    if not datasets and config.eval.eval_function_path is None:
        raise ConfigError(
            f"run {config.run.id} has no eval.datasets; name the data sets to evaluate on"
        )
    if config.reward.rm_type == NO_REWARD:
        raise ConfigError(
            f"run {config.run.id} was made without [reward], so nothing can score its responses; "
            "a run of run.mode = 'sft' may have one for this"
        )
    own = config.rollout.model_copy(update={"engine_urls": []})
    config = config.model_copy(
        update={
            "eval": config.eval.model_copy(update={"datasets": list(datasets)}),
            # Engines that others started hold weights of a run.
            "rollout": own,
        }
    )
    attempt = new_attempt()
    prefix = evaluation_prefix(config.run.id, checkpoint.iteration, attempt)
    report = await _beside(config, store, checkpoint, attempt, prefix)
    manifest = Manifest(
        run_id=config.run.id,
        iteration=checkpoint.iteration,
        stage="evaluate",
        files=tuple(report.files),
        inputs={"checkpoint": checkpoint.manifest_sha256},
        config_digest=config_digest(config, *STAGE_SECTIONS["evaluate"]),
        epoch=0,
        attempt=attempt,
        policy_version=checkpoint.iteration + 1,
        metrics=report.metrics,
        extra=report.extra,
        timings=report.timings,
    )
    key = f"{prefix}/_MANIFEST.json"
    store.objects.put(key, manifest.to_bytes())
    return Evaluation(config.run.id, checkpoint.iteration, key, report.metrics)


def model_folder(store: RunStore, checkpoint: Checkpoint, scratch: Path) -> Path:
    """The checkpoint as a local folder, every file compared with its digest."""
    local = store.objects.local_path(checkpoint.prefix)
    if local is None:
        local = scratch / "checkpoint"
        download_folder(store.objects, list(checkpoint.files), checkpoint.prefix, local)
    for ref in checkpoint.files:
        if damage := find_damage(store.objects, ref):
            raise Corrupt(f"the checkpoint of iteration {checkpoint.iteration}: {damage}")
    return local


async def _beside(
    config: RunConfig, store: RunStore, checkpoint: Checkpoint, attempt: str, prefix: str
) -> StageReport:
    """Generate and score with Ray and a scratch folder for as long as that takes."""
    scratch = make_scratch(config.run.id)
    connected = ray_session.connect(config.cluster.ray_address)
    try:
        folder = model_folder(store, checkpoint, scratch)
        plan = FleetPlan(config, store, 0, scratch)
        return await _generate(plan, folder, checkpoint.iteration, attempt, prefix)
    finally:
        if connected:
            ray_session.disconnect()
        shutil.rmtree(scratch, ignore_errors=True)


async def _generate(
    plan: FleetPlan, folder: Path, iteration: int, attempt: str, prefix: str
) -> StageReport:
    """Engines and a rollout worker of their own, for this one piece of work."""
    import ray

    config = plan.config
    # On one node, which sees the checkpoint.
    demand = dataclasses.replace(Demand.of(plan, trainer=False, engines=True), nodes=1)
    placement = await Placement.reserve(demand, config.cluster.ray_address)
    spec = dataclasses.replace(
        engine_spec(plan),
        model_path=str(folder),
        log_dir=str(plan.local("logs") / attempt),
        # There is no trainer beside them.
        releases_memory=False,
    )
    engines = Engines(spec, [placement.engine(rank) for rank in range(config.num_engines)])
    whole = rollout_plan(plan)
    # A router is the run's, whose engines it knows.
    alone = {"use_sglang_router": False, "sglang_router_url": None}
    own = dataclasses.replace(
        whole,
        model_folder=str(folder),
        supervised=False,
        rollout=whole.rollout.model_copy(update=alone),
    )
    worker = actor_class(RolloutActor).options(**placement.worker().options).remote(own)
    what = "the evaluation's worker"
    try:
        ready = call(worker.ping.remote(), deadline_s=CONTROL_DEADLINE_S, what=what)
        await gather(engines.start(), ready)
        setting = worker.set_engines.remote(engines.urls)
        await call(setting, deadline_s=CONTROL_DEADLINE_S, what=what)
        log.info("evaluating iteration %d of run %s", iteration, config.run.id)
        made = worker.evaluate.remote(0, iteration, attempt, START_VERSION, prefix)
        return await call(made, deadline_s=ROLLOUT_DEADLINE_S, what=what)
    finally:
        ray.kill(worker)
        engines.end()
        placement.release()
