"""All actors of a run: engines, trainer ranks and the rollout worker.

The fleet knows what its actors hold (`engine_version`, `trainer_state`); `rlcore.run` decides what
they should hold. Every method returns `Work`: what a stage will commit.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from rlcore.cluster.actor_logs import Relay
from rlcore.cluster.actors import KINDS, Actors, Kinds
from rlcore.cluster.engines import START_VERSION, Refill
from rlcore.cluster.plan import FleetPlan
from rlcore.cluster.ray_session import call, first_of
from rlcore.cluster.rollout_plan import StageReport
from rlcore.cluster.trainer_actor import SavedState
from rlcore.cluster.turns import Turns
from rlcore.errors import ActorDied, EngineError
from rlcore.rollout.limits import Limits
from rlcore.store.manifest import FileRef
from rlcore.store.paths import new_attempt, stage_prefix, state_prefix
from rlcore.train.trainer import BatchFiles
from rlcore.weights.sync import SyncSpec
from rlcore.work import Work

log = logging.getLogger("sluice.cluster")

ROLLOUT_DEADLINE_S = 24 * 3600.0
MAX_TOKENS = "max_tokens_per_gpu"
"""In a train stage's extra: the limit that a batch needed, to be trained again in the same way."""
WORKER_STARTS = 3
"""How often the rollout worker is started for one call."""

ACTORS_OF: dict[str, Kinds] = {
    "reward": ("worker",),
    "filter": ("worker",),
    "train": ("trainer",),
    "checkpoint": ("trainer",),
}
"""What a stage works with; all actors where it is not here."""


@dataclass(frozen=True)
class TrainInputs:
    """One batch to train on: from the state `before` to the state `after`."""

    before: str
    after: str
    files: BatchFiles
    max_tokens: int | None = None
    """Of a micro-batch, where the configuration's were too large; all ranks take it."""


class Fleet:
    """The actors of one open run. Make it with `start`."""

    def __init__(self, plan: FleetPlan, actors: Actors, start_state: str) -> None:
        self._plan = plan
        self._config = plan.config
        self._actors = actors
        self._watching: asyncio.Future[None] | None = None
        self._relay = Relay()
        self._turns = Turns(
            actors, trainer=plan.config.offloads_train, engines=plan.config.offloads_rollout
        )
        self._limits = Limits.of_model(str(plan.model_folder), plan.config.rollout.context_length)
        self.start_state = start_state
        # Engines that others started hold who knows what until they are given weights; those whose
        # weights are rounded as they are sent get the starting ones as well.
        config = plan.config
        unknown = bool(config.rollout.engine_urls) or config.is_on_policy_by_kernels
        self.engine_version: int | None = None if unknown else START_VERSION
        self.trainer_state: str | None = start_state

    @classmethod
    @asynccontextmanager
    async def start(cls, plan: FleetPlan, first_stage: str) -> AsyncIterator["Fleet"]:
        """Start the actors and wait for those of the first stage; end all when the block ends.

        Whoever needs another waits for it where it is used.

        Args:
            plan: of the fleet.
            first_stage: the stage to go on with.

        Raises:
            EngineError, ClusterError: one of them did not come up, or there are too few GPUs.
        """
        actors = Actors(plan)
        try:
            shares = plan.config.offloads_train or plan.config.offloads_rollout
            # Those that take turns on GPUs come up in turn, before any of them works.
            needed = KINDS if shares else ACTORS_OF.get(first_stage, KINDS)
            fleet = cls(plan, actors, await actors.start(needed))
            try:
                yield fleet
            finally:
                if fleet._watching is not None:
                    fleet._watching.cancel()
                    await asyncio.gather(fleet._watching, return_exceptions=True)
                await fleet._turns.close()
                await fleet._relay.drain()
        finally:
            await actors.end()

    # --- failures ---------------------------------------------------------------------------------

    def watch(self, refill: Refill) -> None:
        """Look after the engines from now on, and log what happens where the caller's lines go.

        Args:
            refill: gives weights to engines that were started again.
        """
        if not self._config.generates:
            return
        if self._watching is not None:
            self._watching.cancel()
        self._watching = asyncio.ensure_future(self._watch(refill))

    async def _watch(self, refill: Refill) -> None:
        await self._actors.up("engines")
        await self._actors.engines.watch(refill)

    async def mend_engines(self) -> None:
        """Start the engines again that are down."""
        await self._actors.up("engines")
        await self._turns.mending()
        await self._actors.engines.mend()

    async def engines_take_over(self) -> bool:
        """Have the engines hold all their memory.

        Returns:
            False: one could not. It was started again, and the weights must be pushed.
        """
        try:
            await self._turns.generating()
        except EngineError as error:
            log.error("%s", error)
            self.engine_version = None
            await self.mend_engines()
            return False
        return True

    @property
    def engine_restarts(self) -> int:
        """How often an engine was started again since the last iteration was committed."""
        return self._actors.engines.restarts if self._config.generates else 0

    @property
    def trainer_is_lost(self) -> bool:
        """Whether a rank of the trainer has died, and the others were ended with it."""
        return self._actors.trainer_is_lost

    async def trainer_up(self) -> None:
        """Wait until the trainer's ranks are up."""
        await self._actors.up("trainer")

    async def engines_up(self) -> None:
        """Wait until the engines are up."""
        await self._actors.up("engines")

    async def restart_trainer(self) -> None:
        """Start the trainer's ranks again. They hold nothing yet."""
        self.trainer_state = None
        await self._actors.restart_trainer()
        self._turns.trainer_restarted()

    def tell_worker_lines(self) -> None:
        """Have the rollout worker's log lines told where the caller's go."""
        if self._actors.worker is not None:
            self._relay.fetch(self._actors.worker, "rollout worker")

    def progressed(self) -> dict[str, float]:
        """An iteration was committed.

        Returns:
            How often actors had to be started again in it.
        """
        counts = {
            "cluster/engine_restarts": float(self.engine_restarts),
            "cluster/trainer_restarts": float(self._actors.trainer_restarts),
        }
        if self._config.generates:
            self._actors.engines.progressed()
        self._actors.trainer_restarts = 0
        return counts

    # --- rollout, reward, filter, evaluate
    # ----------------------------------------------------------

    async def generate(self, i: int, cursor: dict[str, Any] | None, version: int) -> Work:
        """Responses to the prompts of the buffer and after `cursor`, by a policy version."""
        work = await self._by_worker("rollout", i, cursor, version)
        tokens = work.metrics["perf/tokens_per_gpu_per_sec"] * self._config.cluster.rollout_num_gpus
        return work.with_metrics({"perf/tokens_per_s": tokens}, policy_version=version)

    async def demonstrate(self, i: int, cursor: dict[str, Any] | None) -> Work:
        """The rows after `cursor`, to be learned as they are; there is no policy in it."""
        return await self._by_worker("rollout", i, cursor, START_VERSION)

    def read_ahead(self, rollout: tuple[FileRef, ...]) -> None:
        """Have the trainer, if there is one, read a rollout while others work on it."""
        if self._config.trains and self._actors.is_up("trainer"):
            self._actors.trainer.read_ahead(rollout)

    async def score(
        self, i: int, rollout: tuple[FileRef, ...], early: tuple[FileRef, ...] | None = None
    ) -> Work:
        """A score for each sample of a rollout: its `early` ones, where it has them."""
        return await self._by_worker("reward", i, rollout, early)

    async def select(
        self,
        i: int,
        rollout: tuple[FileRef, ...],
        scores: tuple[FileRef, ...],
        *,
        decided: bool = False,
    ) -> Work:
        """The groups to train on: all that have a reward, where the rollout has `decided`."""
        return await self._by_worker("filter", i, rollout, scores, decided)

    async def evaluate(self, i: int) -> Work:
        """Responses to the evaluation prompts by policy version i + 1, scored."""
        work = await self._by_worker("evaluate", i, i + 1)
        return work.with_metrics({}, policy_version=i + 1)

    async def _by_worker(self, stage: str, i: int, *args: Any) -> Work:
        attempt = new_attempt()
        await self._actors.up(*ACTORS_OF.get(stage, ("worker", "engines")))
        for left in reversed(range(WORKER_STARTS)):
            worker = self._actors.worker
            method = getattr(worker, stage)
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
                await self._actors.restart_worker(worker)
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

    async def train(self, inputs: TrainInputs, *, save: bool, again: bool = False) -> Work:
        """From one named state to the next; saves it if asked.

        Args:
            inputs: of the step.
            save: the state.
            again: a committed step, of which others follow; else its weights are pushed next.
        """
        attempt, i = new_attempt(), inputs.files.iteration
        await self._trainer_takes_over()
        report = await self._actors.trainer.train(
            inputs.before, inputs.after, inputs.files, inputs.max_tokens
        )
        self.trainer_state = inputs.after
        if not again:
            self._turns.begin_pushing()
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
        lowered = {} if inputs.max_tokens is None else {MAX_TOKENS: inputs.max_tokens}
        told = {f"train/lowered_{name}": float(value) for name, value in lowered.items()}
        return Work(
            attempt=attempt,
            metrics=report.named | told | self._turns.take_figures(),
            compute_seconds=report.metrics["seconds_train"],
            extra={
                "prev_state_id": inputs.before,
                "state_id": inputs.after,
                "samples": int(report.metrics["samples"]),
                "state": state,
                **lowered,
            },
        )

    async def restore(self, state: dict[str, Any], state_id: str) -> None:
        """Have the trainer load a saved state."""
        await self._trainer_takes_over()
        files = tuple(FileRef.model_validate(file) for file in state["files"])
        saved = SavedState(
            state["key_prefix"], files, state["model_sha256"], state["optimizer_sha256"]
        )
        await self._actors.trainer.restore(saved, state_id)
        self.trainer_state = state_id

    async def load_start(self) -> None:
        """Have the trainer load the starting model again."""
        await self._trainer_takes_over()
        await self._actors.trainer.load(self.start_state)
        self.trainer_state = self.start_state

    async def sync(self, version: int) -> Work:
        """Push the trainer's weights to every engine as policy `version`."""
        await self._actors.up("engines")
        await self._turns.pushing()
        later = self._config.offloads_rollout
        async with self._actors.engines.lock:
            self.engine_version = None
            spec = self._sync_spec(version, self._actors.urls)
            report = await self._actors.trainer.sync(replace(spec, canary_later=later))
        await self._turns.generating()
        found = dict(report.metrics)
        if later:
            found |= await self._actors.trainer.canary(spec)
        self.engine_version = version
        metrics = {f"sync/{name}": value for name, value in found.items()}
        metrics |= self._turns.take_figures()
        return Work(attempt=new_attempt(), metrics=metrics, policy_version=version)

    async def refill(self, urls: Sequence[str]) -> None:
        """Push the trainer's weights to some engines as the version that the others hold."""
        await self._turns.refilling()
        async with self._actors.engines.lock:
            if self.engine_version is not None:
                await self._actors.trainer.sync(self._sync_spec(self.engine_version, urls))
        await self._turns.generating()

    async def _trainer_takes_over(self) -> None:
        """Have the trainer hold all, for work after which it holds another state."""
        await self._turns.training()
        self.trainer_state = None
        if self._config.offloads_rollout:
            self.engine_version = None

    def _sync_spec(self, version: int, urls: Sequence[str]) -> SyncSpec:
        weights, plan, cluster = self._config.weights, self._plan, self._config.cluster
        sglang = self._config.rollout.engine == "sglang"
        return SyncSpec(
            urls=tuple(urls),
            version=str(version),
            transport=weights.transport,
            weights=weights,
            dtype=plan.engine_dtype,
            model_folder=plan.engine_folder,
            fp8=self._config.rollout.hf_checkpoint is not None,
            scratch=plan.local("weights"),
            canary_prompts=weights.canary_prompts,
            canary_tolerance=self._config.canary_tolerance,
            vocab_size=self._limits.vocab_size,
            context_length=self._limits.context_length,
            starts=self._actors.engines.launches(urls),
            ranks_per_engine=cluster.rollout_num_gpus_per_engine if sglang else 1,
            on_gpus=sglang and plan.cuda,
            bucket_bytes=weights.update_weight_buffer_size,
            run_id=self._config.run.id,
            mirrors=self._actors.engines.mirrors(urls) if weights.transport == "delta" else (),
            as_adapter=weights.lora_as_adapter,
            pause_mode="in_place" if self._config.is_fully_async else "abort",
        )

    async def export(self, i: int) -> Work:
        """The model as a Hugging Face folder in the store."""
        attempt = new_attempt()
        prefix = f"{stage_prefix(self._config.run.id, i, 'checkpoint')}/hf-{attempt}"
        dtype = self._config.train.precision
        await self._turns.exporting()
        files = await self._actors.trainer.export_hf(prefix, dtype)
        folder = {"key_prefix": prefix, "files": [file.model_dump(mode="json") for file in files]}
        return Work(attempt=attempt, extra={"checkpoint": folder})
