"""All actors of a run: engines, trainer ranks and the rollout worker.

The fleet knows what its actors hold (`engine_version`, `trainer_state`); `rlcore.run` decides what
they should hold. Every method returns `Work`: what a stage will commit.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.cluster.actor_logs import Relay
from rlcore.cluster.engine_actor import EngineSpec
from rlcore.cluster.engines import START_VERSION, Engines, Refill
from rlcore.cluster.ray_session import NAMESPACE, actor_class, call, first_of, gather
from rlcore.cluster.rollout_actor import RolloutActor, RolloutPlan, StageReport
from rlcore.cluster.trainer_actor import SavedState, TrainerSpec
from rlcore.cluster.trainer_group import TrainerGroup
from rlcore.config import RunConfig, config_digest
from rlcore.errors import ActorDied, ClusterError
from rlcore.rollout.limits import Limits
from rlcore.starting_model import model_digest, model_path
from rlcore.store.credentials import all_options
from rlcore.store.manifest import FileRef, chain_state_id, sha256_hex
from rlcore.store.paths import new_attempt, run_prefix, stage_prefix, state_prefix
from rlcore.store.run_store import RunStore
from rlcore.train.trainer import BatchFiles, DType
from rlcore.weights.sync import SyncSpec
from rlcore.work import Work

log = logging.getLogger("sluice.cluster")

CONTROL_DEADLINE_S = 300.0
ROLLOUT_DEADLINE_S = 24 * 3600.0
WORKER_STARTS = 3
"""How often the rollout worker is started for one call."""


@dataclass(frozen=True)
class FleetPlan:
    """What a fleet is started with."""

    config: RunConfig
    store: RunStore
    epoch: int
    scratch: Path
    """Local folder of this driver, removed when it ends."""

    def local(self, name: str) -> Path:
        """A folder of the run if the store is local, where others can see it, else of the
        scratch.
        """
        key = f"{run_prefix(self.config.run.id)}/{name}"
        return self.store.objects.local_path(key) or self.scratch / name

    @property
    def model_folder(self) -> Path:
        """The local folder of the starting model."""
        config = self.config
        return model_path(self.store.objects, self.store.origin, config.model, self.scratch)

    def start_state(self) -> str:
        """The id of the trainer's state before the first iteration."""
        config = self.config
        source = model_digest(self.store.objects, self.store.origin, config.model)
        digest = config_digest(config, "run", "model")
        return chain_state_id("start", [sha256_hex(source.encode())], digest)

    @property
    def cuda(self) -> bool:
        """Whether trainers compute on GPUs."""
        device = self.config.cluster.device
        return device == "cuda" or (device == "auto" and self.config.rollout.engine == "sglang")

    @property
    def engine_dtype(self) -> DType:
        """In which the engines hold weights."""
        return "bfloat16" if self.config.rollout.engine == "sglang" else "float32"


@dataclass(frozen=True)
class TrainInputs:
    """One batch to train on: from the state `before` to the state `after`."""

    before: str
    after: str
    files: BatchFiles


class Fleet:
    """The actors of one open run. Make it with `start`."""

    def __init__(self, plan: FleetPlan, actors: "Actors", start_state: str) -> None:
        self._plan = plan
        self._config = plan.config
        self._actors = actors
        self._watching: asyncio.Future[None] | None = None
        self._relay = Relay()
        self._limits = Limits.of_model(str(plan.model_folder), plan.config.rollout.context_length)
        self.start_state = start_state
        self.engine_version: int | None = START_VERSION
        self.trainer_state: str | None = start_state

    @classmethod
    @asynccontextmanager
    async def start(cls, plan: FleetPlan) -> AsyncIterator["Fleet"]:
        """Start all actors side by side; end them when the block ends.

        Raises:
            EngineError, ClusterError: one of them did not come up, or there are too few GPUs.
        """
        actors = Actors(plan)
        try:
            fleet = cls(plan, actors, await actors.start())
            try:
                yield fleet
            finally:
                if fleet._watching is not None:
                    fleet._watching.cancel()
                    await asyncio.gather(fleet._watching, return_exceptions=True)
                await fleet._relay.drain()
        finally:
            actors.end()

    # --- failures ---------------------------------------------------------------------------------

    def watch(self, refill: Refill) -> None:
        """Look after the engines from now on, and log what happens where the caller's lines go.

        Args:
            refill: gives weights to engines that were started again.
        """
        if self._watching is not None:
            self._watching.cancel()
        self._watching = asyncio.ensure_future(self._actors.engines.watch(refill))

    async def mend_engines(self) -> None:
        """Start the engines again that are down."""
        await self._actors.engines.mend()

    @property
    def engine_restarts(self) -> int:
        """How often an engine was started again since the last iteration was committed."""
        return self._actors.engines.restarts

    @property
    def trainer_is_lost(self) -> bool:
        """Whether a rank of the trainer has died, and the others were ended with it."""
        return self._actors.trainer.broken

    async def restart_trainer(self) -> None:
        """Start the trainer's ranks again. They hold nothing yet."""
        self.trainer_state = None
        await self._actors.restart_trainer()

    def tell_worker_lines(self) -> None:
        """Have the rollout worker's log lines told where the caller's go."""
        self._relay.fetch(self._actors.worker, "rollout worker")

    def progressed(self) -> dict[str, float]:
        """An iteration was committed.

        Returns:
            How often actors had to be started again in it.
        """
        counts = {
            "cluster/engine_restarts": float(self._actors.engines.restarts),
            "cluster/trainer_restarts": float(self._actors.trainer_restarts),
        }
        self._actors.engines.progressed()
        self._actors.trainer_restarts = 0
        return counts

    # --- rollout, reward, filter, evaluate
    # ----------------------------------------------------------

    async def generate(self, i: int, cursor: dict[str, Any] | None) -> Work:
        """Responses to the prompts of the buffer and after `cursor`, by policy version i."""
        work = await self._by_worker("rollout", i, cursor, i)
        tokens = work.metrics["perf/tokens_per_gpu_per_sec"] * self._config.cluster.rollout_num_gpus
        return work.with_metrics({"perf/tokens_per_s": tokens}, policy_version=i)

    async def score(self, i: int, rollout: tuple[FileRef, ...]) -> Work:
        """A score for each sample of a rollout."""
        return await self._by_worker("reward", i, rollout)

    async def select(
        self, i: int, rollout: tuple[FileRef, ...], scores: tuple[FileRef, ...]
    ) -> Work:
        """The groups to train on."""
        return await self._by_worker("filter", i, rollout, scores)

    async def evaluate(self, i: int) -> Work:
        """Responses to the evaluation prompts by policy version i + 1, scored."""
        work = await self._by_worker("evaluate", i, i + 1)
        return work.with_metrics({}, policy_version=i + 1)

    async def _by_worker(self, stage: str, i: int, *args: Any) -> Work:
        attempt = new_attempt()
        for left in reversed(range(WORKER_STARTS)):
            method = getattr(self._actors.worker, stage)
            calling = call(
                method.remote(self._plan.epoch, i, attempt, *args),
                deadline_s=ROLLOUT_DEADLINE_S,
                what=f"the rollout worker ({stage} of iteration {i})",
            )
            try:
                # Engines that cannot be brought back end a call that would wait for them.
                report: StageReport = await first_of(calling, self._watching)
                break
            except ActorDied as error:
                if not left:
                    raise
                log.error("%s; it is started again and the stage begins anew", error)
                await self._actors.restart_worker()
        return Work(
            attempt=attempt,
            files=report.files,
            metrics=report.metrics,
            compute_seconds=report.compute_seconds,
            timings=report.timings,
            cursor=report.cursor,
            extra=report.extra,
        )

    # --- train, sync, export
    # --------------------------------------------------------------------------

    async def train(self, inputs: TrainInputs, *, save: bool) -> Work:
        """From one named state to the next; saves it if asked."""
        attempt, i = new_attempt(), inputs.files.iteration
        self.trainer_state = None
        report = await self._actors.trainer.train(inputs.before, inputs.after, inputs.files)
        self.trainer_state = inputs.after
        state: dict[str, Any] | None = None
        if save:
            saved = await self._actors.trainer.save_state(
                state_prefix(self._config.run.id, i, attempt)
            )
            state = {
                "key_prefix": saved.key_prefix,
                "files": [file.model_dump(mode="json") for file in saved.files],
                "model_sha256": saved.model_sha256,
                "optimizer_sha256": saved.optimizer_sha256,
            }
        return Work(
            attempt=attempt,
            metrics={f"train/{name}": value for name, value in report.metrics.items()},
            compute_seconds=report.metrics["seconds_train"],
            extra={
                "prev_state_id": inputs.before,
                "state_id": inputs.after,
                "samples": int(report.metrics["samples"]),
                "state": state,
            },
        )

    async def restore(self, state: dict[str, Any], state_id: str) -> None:
        """Have the trainer load a saved state."""
        self.trainer_state = None
        files = tuple(FileRef.model_validate(file) for file in state["files"])
        saved = SavedState(
            state["key_prefix"], files, state["model_sha256"], state["optimizer_sha256"]
        )
        await self._actors.trainer.restore(saved, state_id)
        self.trainer_state = state_id

    async def load_start(self) -> None:
        """Have the trainer load the starting model again."""
        self.trainer_state = None
        await self._actors.trainer.load(self.start_state)
        self.trainer_state = self.start_state

    async def sync(self, version: int) -> Work:
        """Push the trainer's weights to every engine as policy `version`."""
        async with self._actors.engines.lock:
            self.engine_version = None
            report = await self._actors.trainer.sync(self._sync_spec(version, self._actors.urls))
            self.engine_version = version
        metrics = {f"sync/{name}": value for name, value in report.metrics.items()}
        return Work(attempt=new_attempt(), metrics=metrics, policy_version=version)

    async def refill(self, urls: Sequence[str]) -> None:
        """Push the trainer's weights to some engines as the version that the others hold."""
        async with self._actors.engines.lock:
            if self.engine_version is not None:
                await self._actors.trainer.sync(self._sync_spec(self.engine_version, urls))

    def _sync_spec(self, version: int, urls: Sequence[str]) -> SyncSpec:
        weights, plan = self._config.weights, self._plan
        return SyncSpec(
            urls=tuple(urls),
            version=str(version),
            transport=weights.transport,
            dtype=plan.engine_dtype,
            model_folder=plan.model_folder,
            scratch=plan.local("weights"),
            canary_prompts=weights.canary_prompts,
            canary_tolerance=self._config.canary_tolerance,
            vocab_size=self._limits.vocab_size,
            context_length=self._limits.context_length,
        )

    async def export(self, i: int) -> Work:
        """The model as a Hugging Face folder in the store."""
        attempt = new_attempt()
        prefix = f"{stage_prefix(self._config.run.id, i, 'checkpoint')}/hf-{attempt}"
        dtype = self._config.train.precision
        files = await self._actors.trainer.export_hf(prefix, dtype)
        folder = {"key_prefix": prefix, "files": [file.model_dump(mode="json") for file in files]}
        return Work(attempt=attempt, extra={"checkpoint": folder})


# --- what the actors are made of
# ----------------------------------------------------------------------


class Actors:
    """The actors themselves: how they come up, come back, and end."""

    def __init__(self, plan: FleetPlan) -> None:
        self.worker: Any = None
        self.trainer_restarts = 0
        """Since the last iteration was committed."""
        self._plan = plan
        self._trainers = 0
        self._engines: Engines | None = None
        self._group: TrainerGroup | None = None

    @property
    def engines(self) -> Engines:
        """The engines."""
        if self._engines is None:
            raise ClusterError("the engines have not been started")
        return self._engines

    @property
    def urls(self) -> list[str]:
        """Addresses of the engines."""
        return self.engines.urls

    @property
    def trainer(self) -> TrainerGroup:
        """The trainer's ranks."""
        if self._group is None:
            raise ClusterError("the trainer has not been started")
        return self._group

    async def start(self) -> str:
        """Bring up all actors.

        Returns:
            The id of the state that the trainer holds.
        """
        plan, config = self._plan, self._plan.config
        check_gpus(plan)
        gpus = engine_gpus(config) if config.rollout.engine == "sglang" else 0.0
        self._engines = Engines(engine_spec(plan), config.num_engines, gpus)
        self._group = await self._new_trainer()
        # The trainer's first rank builds the model, since it has torch loaded already.
        await self._group.prepare_model(plan.store.origin, config.model)
        state = plan.start_state()
        self.worker = actor_class(RolloutActor).remote(rollout_plan(plan))
        await gather(self._engines.start(), self._group.load(state), self._worker_ready())
        await self._set_engines()
        return state

    async def restart_trainer(self) -> None:
        """New ranks in place of those that are gone."""
        self.trainer.kill()
        self.trainer_restarts += 1
        self._group = await self._new_trainer()

    async def restart_worker(self) -> None:
        """A new rollout worker in place of the one that is gone."""
        self.worker = actor_class(RolloutActor).remote(rollout_plan(self._plan))
        await self._worker_ready()
        await self._set_engines()

    def end(self) -> None:
        """End all actors, and the servers of the engines."""
        import ray

        if self._group is not None:
            self._group.kill()
        if self.worker is not None:
            ray.kill(self.worker)
        if self._engines is not None:
            self._engines.end()

    async def _new_trainer(self) -> TrainerGroup:
        self._trainers += 1
        return await start_trainer(self._plan, self._trainers)

    async def _worker_ready(self) -> None:
        ping = self.worker.ping.remote()
        await call(ping, deadline_s=CONTROL_DEADLINE_S, what="the rollout worker")

    async def _set_engines(self) -> None:
        setting = self.worker.set_engines.remote(self.urls)
        await call(setting, deadline_s=CONTROL_DEADLINE_S, what="the rollout worker")


def check_gpus(plan: FleetPlan) -> None:
    """The cluster has the GPUs that the actors will ask for: Ray would wait for them for ever.

    Raises:
        ClusterError: it has not.
    """
    import ray

    config = plan.config
    needed = config.world_size * trainer_gpus(config) if plan.cuda else 0.0
    if config.rollout.engine == "sglang":
        needed += config.num_engines * engine_gpus(config)
    there = ray.cluster_resources().get("GPU", 0.0)
    if needed > there:
        raise ClusterError(
            f"engines and trainer ask for {needed:g} GPUs, and the Ray cluster "
            f"({config.cluster.ray_address}) has {there:g}; set cluster.device = 'cpu' and "
            "rollout.engine = 'embedded', ask for fewer, or name another cluster.ray_address"
        )


async def start_trainer(plan: FleetPlan, number: int) -> TrainerGroup:
    """The trainer's ranks, with no model yet; `number` tells them from those started before."""
    config = plan.config
    return await TrainerGroup.start(
        TrainerSpec(
            train=config.train,
            algorithm=config.algorithm,
            temperature=config.rollout.temperature,
            seed=config.run.seed,
            device="cuda" if plan.cuda else "cpu",
            model_folder=str(plan.model_folder),
            storage_root=config.storage.root,
            storage_options=all_options(config.storage),
            scratch=str(plan.scratch),
            trust_remote_code=config.model.trust_remote_code,
            timeout_s=config.train.deadline_s,
        ),
        world_size=config.world_size,
        epoch=plan.epoch,
        name=f"{config.run.id}/trainer/{plan.epoch}.{number}",
        namespace=NAMESPACE,
        num_gpus=trainer_gpus(config) if plan.cuda else 0.0,
        deadline_s=config.train.deadline_s,
    )


def engine_spec(plan: FleetPlan) -> EngineSpec:
    """What each engine is started with."""
    rollout = plan.config.rollout
    return EngineSpec(
        engine=rollout.engine,
        model_path=str(plan.model_folder),
        log_dir=str(plan.local("logs") / f"epoch-{plan.epoch:04d}"),
        dtype=plan.engine_dtype,
        context_length=rollout.context_length,
        max_running_requests=rollout.max_running_requests,
        tensor_parallel=plan.config.cluster.rollout_num_gpus_per_engine,
        random_seed=plan.config.run.seed,
        start_timeout_s=rollout.start_timeout_s,
        check_interval_s=rollout.health_check_interval_s,
        check_timeout_s=rollout.health_check_timeout_s,
        sglang=plan.config.sglang,
    )


def rollout_plan(plan: FleetPlan) -> RolloutPlan:
    """What the rollout worker is made with."""
    config = plan.config
    return RolloutPlan(
        run_id=config.run.id,
        seed=config.run.seed,
        root=config.storage.root,
        options=all_options(config.storage),
        model_folder=str(plan.model_folder),
        model=config.model,
        data=config.data,
        rollout=config.rollout,
        reward=config.reward,
        filter=config.filter,
        eval=config.eval,
        num_gpus=config.cluster.rollout_num_gpus,
    )


def engine_gpus(config: RunConfig) -> float:
    """GPUs of one engine; half of each where the trainer shares them."""
    each = config.cluster.rollout_num_gpus_per_engine
    return each * 0.5 if config.cluster.colocate else float(each)


def trainer_gpus(config: RunConfig) -> float:
    """GPUs of one trainer rank."""
    return 0.5 if config.cluster.colocate else 1.0
