"""An open run: what the driver holds while it walks the iterations.

Invariants:
- What is done is what the store says. This object holds caches of it and nothing else that matters.
- `with_trainer(i, ...)` and `ensure_engines(v)` bring the actors to a named state whatever they
  hold, by reloading and by replaying committed batches; nothing is generated twice for it.
- Training is identified by a chain: the state's id after iteration i is a digest of the id before
  it, of the batch and of the training settings.
"""

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from rlcore.cluster.fleet import MAX_TOKENS, Fleet, TrainInputs
from rlcore.config import RunConfig, config_digest
from rlcore.config.digest import STAGE_SECTIONS
from rlcore.errors import (
    ClusterError,
    ConfigError,
    Corrupt,
    EngineError,
    OutOfMemory,
    SyncError,
)
from rlcore.fork_state import check_repeatable
from rlcore.store.branch import forks_of, kept_state
from rlcore.store.lease import Lease
from rlcore.store.manifest import Manifest, StageRef, chain_state_id
from rlcore.store.retention import prune
from rlcore.store.run_store import RunStore
from rlcore.stored_runs import check_media, check_vocabulary, stored_batch
from rlcore.train.trainer import BatchFiles
from rlcore.work import Work

log = logging.getLogger("sluice.run")

T = TypeVar("T")
SECONDS = "seconds"
SYNC_TRIES = 3
"""How often weights are pushed to engines that did not answer and yet seem to run."""
TRAINER_STARTS = 3
"""How often the trainer is started for one piece of work."""


@dataclass(frozen=True)
class IterationRef:
    """A committed iteration."""

    run_id: str
    iteration: int
    metrics: dict[str, float] = field(default_factory=dict)


class Timing(NamedTuple):
    """Seconds of one stage: in all, and those that engines and trainers computed."""

    total: float
    compute: float


@dataclass
class Run:
    """The driver's hold on a run; made by `rlcore.open_run`."""

    config: RunConfig
    store: RunStore
    lease: Lease
    fleet: Fleet
    last_task_run: uuid.UUID | None = None
    """The newest Prefect task run, for whoever must wait until the server has seen it."""
    ahead: bool = True
    """Whether the next rollout is begun when an iteration is committed."""
    _ahead: "dict[int, asyncio.Future[Work]]" = field(default_factory=dict)
    _same_tokens: bool = False
    _training: asyncio.Lock = field(default_factory=asyncio.Lock)
    _timings: dict[tuple[int, str], Timing] = field(default_factory=dict)
    _began: dict[int, float] = field(default_factory=dict)
    _records: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The run's name."""
        return self.config.run.id

    # --- what the store says
    # ------------------------------------------------------------------------

    def first_uncommitted(self) -> int:
        """The iteration to go on with."""
        last = self.store.last_committed()
        return 0 if last is None else last + 1

    def record(self, i: int) -> dict[str, Any] | None:
        """The commit record of iteration i."""
        if i not in self._records:
            found = self.store.committed(i)
            if found is None:
                return None
            self._records = {k: v for k, v in self._records.items() if k >= i - 1} | {i: found}
        return self._records[i]

    def committed(self, i: int) -> IterationRef | None:
        """Iteration i, if it is committed."""
        record = self.record(i)
        if record is None:
            self._began.setdefault(i, time.perf_counter())
            return None
        return IterationRef(self.id, i, record["metrics"])

    def stage(self, i: int, name: str) -> Manifest:
        """The manifest of a stage of iteration i, which may itself not be committed yet."""
        record = self.record(i)
        if record is not None:
            return self.store.manifest(StageRef.model_validate(record["stages"][name]))
        found = self.store.stage(i, name)
        if found is None:
            raise Corrupt(f"run {self.id}: iteration {i} has no committed {name} stage")
        return found[0]

    def policy_before(self, i: int) -> StageRef | None:
        """The weight sync that made the policy of iteration i; None for the starting model."""
        syncs, version = self.config.trains and self.config.generates, self.version_before(i)
        record = self.record(version - 1) if version and syncs else None
        return StageRef.model_validate(record["stages"]["weight_sync"]) if record else None

    def version_before(self, i: int) -> int:
        """The policy version of iteration i's rollout: the iterations of training that made it."""
        return self.config.policy_version(i)

    def cursor_before(self, i: int) -> dict[str, Any] | None:
        """Where the data stands before iteration i; None at the start.

        `buffer` in it is what the rollout before began and did not use, `source` the state of a
        source of one's own.
        """
        if not i:
            return None
        return cursor_after(self.stage(i - 1, "rollout"))

    def stored_batch(self, i: int) -> dict[str, StageRef]:
        """Rollout, reward and filter of iteration i of the run that this one trains from.

        Raises:
            NotFound: that iteration is not committed there.
            ConfigError: the other run's token ids are not this one's.
        """
        if not self._same_tokens:
            check_vocabulary(self.store, self.config)
            check_media(self.store, self.config)
            self._same_tokens = True
        return stored_batch(self.store, self.config.run.train_from, i)

    def state_id_before(self, i: int) -> str:
        """The id of the trainer's state before iteration i."""
        return str(self.stage(i - 1, "train").extra["state_id"]) if i else self.fleet.start_state

    # --- bringing the actors to a state
    # ---------------------------------------------------------------

    async def with_trainer(self, i: int, work: Callable[[], Awaitable[T]]) -> T:
        """Do work with a trainer that holds the state before iteration i.

        When a rank dies, all are started again, brought to that state, and the work begins anew.

        Raises:
            ActorDied: it happened `TRAINER_STARTS` times.
        """
        async with self._training:
            for left in reversed(range(TRAINER_STARTS)):
                try:
                    await self.fleet.trainer_up()
                    await self._ensure_trainer(i)
                    return await work()
                except ClusterError as error:
                    if not (left and self.fleet.trainer_is_lost):
                        raise
                    log.error("%s; the trainer is started again", error)
                    await self.fleet.restart_trainer()
        raise AssertionError("unreachable")

    async def _ensure_trainer(self, i: int) -> None:
        """Have the trainer hold the state before iteration i.

        Walks back to the newest saved state and replays the committed batches after it.
        """
        if self.fleet.trainer_state == self.state_id_before(i):
            return
        base = i
        while base and not await self._restored(base):
            base -= 1
        if not base and self.fleet.trainer_state != self.fleet.start_state:
            await self.fleet.load_start()
        for k in range(base, i):
            check_repeatable(self.store, k, self.config)
            manifests = {name: self.stage(k, name) for name in ("rollout", "reward", "filter")}
            inputs = self._train_inputs(k, manifests, self.state_id_before(k + 1))
            most = self.stage(k, "train").extra.get(MAX_TOKENS)
            await self.fleet.train(replace(inputs, max_tokens=most), save=False, again=True)

    async def _restored(self, i: int) -> bool:
        """Have the trainer load the state before iteration i, if it was saved and is whole."""
        saved = self._saved_state(i - 1)
        if saved is None:
            return False
        try:
            await self.fleet.restore(saved, state_id=self.state_id_before(i))
        except Corrupt as error:
            log.error("%s; it is made again from an older state and the batches since", error)
            return False
        return True

    def _saved_state(self, i: int) -> dict[str, Any] | None:
        return kept_state(self.store, i, self.stage(i, "train"))

    async def ensure_engines(self, version: int) -> None:
        """Have every engine hold policy `version`: the model after that many iterations."""
        if self.fleet.engine_version != version or not await self.fleet.engines_take_over():
            await self.sync_engines(version)

    async def sync_engines(self, version: int) -> Work:
        """Push policy `version` to the engines; one that goes down meanwhile is brought back."""
        for left in itertools.count(SYNC_TRIES - 1, -1):
            before = self.fleet.engine_restarts
            try:
                return await self.with_trainer(version, lambda: self.fleet.sync(version))
            except (EngineError, SyncError) as error:
                await self.fleet.mend_engines()
                # Or whoever watches them has brought one back in between.
                restarted = self.fleet.engine_restarts != before
                if not restarted and (left <= 0 or isinstance(error, SyncError)):
                    raise
                log.error("%s; the weights are pushed again", error)
        raise AssertionError("unreachable")

    async def refill(self, urls: Sequence[str]) -> None:
        """Give the weights that the other engines hold to engines that were started again.

        The starting model is what they hold already. Where the trainer has gone on since, the
        weight sync to come gives them newer ones; asynchronously that waits for a rollout by the
        older ones, to which the trainer goes back for a moment.
        """
        version = self.fleet.engine_version
        if version is None or not self.config.trains or (self.config.is_async and not version):
            return

        async def push() -> None:
            if self.fleet.engine_version == version:
                await self.fleet.refill(urls)

        goes_on = self.config.is_async or self.fleet.trainer_state is None
        if goes_on or self.fleet.trainer_state == self.state_id_before(version):
            await self.with_trainer(version, push)

    # --- generating ahead -------------------------------------------------------------------------

    async def generate(self, i: int) -> Work:
        """The rollout of iteration i: the one begun ahead, else a new one; where nothing is
        generated, the next rows of the data set.
        """
        if not self.config.generates:
            return await self.fleet.demonstrate(i, self.cursor_before(i))
        begun = self._ahead.pop(i, None)
        if begun is not None:
            return await begun
        # What was begun after one that failed goes on from nothing that will be committed.
        await self.close()
        return await self._make(i)

    async def _make(self, i: int, before: "asyncio.Future[Work] | None" = None) -> Work:
        """A rollout by its policy, after the one `before`, where that is not committed yet."""
        cursor = self.cursor_before(i) if before is None else cursor_after(await before)
        version = self.version_before(i)
        # Before the trainer is asked for: another iteration may train while they come up.
        await self.fleet.engines_up()
        await self.ensure_engines(version)
        return await self.fleet.generate(i, cursor, version)

    def begin_rollout(self, i: int) -> None:
        """Begin the rollout of iteration i while Prefect closes the one before and opens this one.

        Nothing else is asked of the actors in that time, the engines have proved that they hold
        policy i, and the cursor is committed: the rollout is the one that would be made later.
        """
        asked = self.ahead and self.config.generates and i < self.config.train.num_iterations
        version = self.version_before(i)
        if asked and i not in self._ahead and self.fleet.engine_version == version:
            self._ahead[i] = asyncio.ensure_future(self._make(i))

    def begin_ahead(self, i: int) -> None:
        """Begin the rollouts after that of iteration i, one after another, while it is trained on.

        Each is by the policy that its settings say, so it is the one that would be made after a
        kill; one that is due for more than one iteration is begun already.
        """
        last = min(i + self.config.rollout.async_buffer_size, self.config.train.num_iterations - 1)
        for k in range(i + 1, last + 1) if self.ahead else ():
            if k not in self._ahead:
                self._ahead[k] = asyncio.ensure_future(self._make(k, self._ahead.get(k - 1)))

    async def generated_ahead(self) -> None:
        """Wait until nothing is generated any more, so that the engines may get other weights.

        How it ended is for the stage to find that comes for it.
        """
        if self._ahead:
            await asyncio.wait(self._ahead.values())

    async def close(self) -> None:
        """Give up rollouts that were begun ahead and that nobody came for."""
        begun, self._ahead = self._ahead, {}
        for work in begun.values():
            work.cancel()
        # Their own errors do not matter any more: whoever ends the run has one, or is done.
        await asyncio.gather(*begun.values(), return_exceptions=True)

    # --- stages that need more than one actor
    # -----------------------------------------------------------

    async def train(self, i: int, rollout: StageRef, reward: StageRef, selection: StageRef) -> Work:
        """Optimizer steps of iteration i; saves the state when due."""
        refs = {"rollout": rollout, "reward": reward, "filter": selection}
        manifests = {name: self.store.manifest(ref) for name, ref in refs.items()}
        self._check_age(i, manifests["rollout"])
        before = self.state_id_before(i)
        after = chain_state_id(
            before,
            [ref.sha256 for ref in refs.values()],
            config_digest(self.config, *STAGE_SECTIONS["train"]),
        )
        inputs = self._train_inputs(i, manifests, after, before=before)
        try:
            return await self._train(i, inputs)
        except OutOfMemory as error:
            most = self.config.train.max_tokens_per_gpu // 2
            if not most:
                raise
            log.error(
                "%s; the batch is trained once more, from the state before it by new ranks, with "
                "micro-batches of at most %d tokens",
                error,
                most,
            )
            async with self._training:
                await self.fleet.restart_trainer()
            return await self._train(i, replace(inputs, max_tokens=most))

    async def _train(self, i: int, inputs: TrainInputs) -> Work:
        return await self.with_trainer(i, lambda: self.fleet.train(inputs, save=self.state_due(i)))

    def _check_age(self, i: int, rollout: Manifest) -> None:
        """Refuse a rollout that is too old to be trained on."""
        most, version = self.config.max_staleness, rollout.policy_version
        if most is not None and version is not None and i - version > most:
            raise ConfigError(
                f"iteration {i}: its rollout was made by policy version {version}, {i - version} "
                f"iterations before, but rollout.max_staleness = {most}; remove the stage's "
                "manifest, and a resume makes it anew"
            )

    def _train_inputs(
        self, i: int, manifests: dict[str, Manifest], after: str, before: str | None = None
    ) -> TrainInputs:
        files = BatchFiles(
            iteration=i,
            rollout=manifests["rollout"].files,
            reward=manifests["reward"].files,
            selection=manifests["filter"].files,
        )
        return TrainInputs(before=before or self.state_id_before(i), after=after, files=files)

    async def export(self, i: int) -> Work:
        """Write the model after iteration i as a Hugging Face folder."""
        return await self.with_trainer(i + 1, lambda: self.fleet.export(i))

    # --- commits
    # ------------------------------------------------------------------------------------------

    def manifest(
        self, i: int, name: str, inputs: dict[str, str], digest: str, work: Work, *, seconds: float
    ) -> Manifest:
        """The manifest of a stage's work, ready to be committed."""
        return Manifest(
            run_id=self.id,
            iteration=i,
            stage=name,
            files=list(work.files),
            inputs=inputs,
            config_digest=digest,
            epoch=self.lease.epoch,
            attempt=work.attempt,
            policy_version=work.policy_version,
            cursor=work.cursor,
            metrics=work.metrics,
            extra=work.extra,
            timings={SECONDS: seconds, "compute": work.compute_seconds, **work.timings},
        )

    def note_timing(self, i: int, name: str, *, total: float, compute: float) -> None:
        """Remember how long a stage took, for the iteration's metrics."""
        self._timings[i, name] = Timing(total, compute)

    async def commit(self, i: int, stages: dict[str, StageRef]) -> IterationRef:
        """Commit the iteration: its stages' refs and metrics. The last write of an iteration."""
        metrics: dict[str, float] = {}
        for ref in stages.values():
            metrics |= self.store.manifest(ref).metrics
        taken = {
            name: self._timings.pop((i, name)) for name in stages if (i, name) in self._timings
        }
        metrics[SECONDS] = time.perf_counter() - self._began.pop(i, time.perf_counter())
        metrics["compute_seconds"] = sum(t.compute for t in taken.values())
        metrics |= {f"perf/{name}_time": t.total for name, t in taken.items()}
        metrics |= self.fleet.progressed()
        record = {
            "run_id": self.id,
            "iteration": i,
            "stages": {name: ref.model_dump(mode="json") for name, ref in stages.items()},
            "metrics": metrics,
        }
        self.store.commit_iteration(i, record, self.lease)
        self._prune(i)
        self.begin_rollout(i + 1)
        return IterationRef(self.id, i, metrics)

    def _prune(self, i: int) -> None:
        """Remove the trainer states and checkpoints that are no longer kept."""
        for stage, folder, due in (
            ("train", "state", self.state_due),
            ("checkpoint", "checkpoint", self.checkpoint_due),
        ):
            if due(i) and self.config.trains:
                states = self.config.states_kept
                keep = states if stage == "train" else self.config.checkpoint.keep_last
                prune(self.store.objects, self._newest_first(i, stage, folder, due), keep)

    def _newest_first(
        self, i: int, stage: str, folder: str, due: Callable[[int], bool]
    ) -> Iterator[str]:
        """The run's own folders, but for the states that forks of it begin with."""
        forks = forks_of(self.store.objects, self.id) if stage == "train" else []
        kept = {max((k for k in range(n + 1) if due(k)), default=-1) for _, n in forks}
        for k in range(i, self.store.first_own - 1, -1):
            if due(k) and k not in kept:
                yield str(self.stage(k, stage).extra[folder]["key_prefix"])

    def state_due(self, i: int) -> bool:
        """Whether the trainer's state after iteration i is saved."""
        return self.config.due(self.config.checkpoint.state_interval, i, last=True)

    def sync_due(self, i: int) -> bool:
        """Whether the engines get the weights after iteration i, where not all iterations do."""
        return self.config.due(self.config.rollout.update_weights_interval, i, last=True)

    def eval_due(self, i: int) -> bool:
        """Whether iteration i ends with an evaluation."""
        return self.config.due(
            self.config.eval.eval_interval, i, last=bool(self.config.eval.eval_interval)
        )

    def checkpoint_due(self, i: int) -> bool:
        """Whether iteration i ends with a checkpoint."""
        return self.config.due(self.config.checkpoint.save_interval, i, last=True)


def cursor_after(rollout: Manifest | Work) -> dict[str, Any]:
    """Where the data stands after a rollout."""
    beside = {name: rollout.extra.get(name) for name in ("buffer", "source")}
    return (rollout.cursor or {}) | beside


_open: dict[str, Run] = {}


def current(run_id: str) -> Run:
    """The open run of that name in this process."""
    if run_id not in _open:
        raise ConfigError(f"run {run_id!r} is not open in this process; call it from rl-train")
    return _open[run_id]


def find_open(run_id: str) -> Run | None:
    """The run of that name, if it is open in this process."""
    return _open.get(run_id)


def set_current(run: Run) -> None:
    """Make an open run known to `current`."""
    _open[run.id] = run


def forget(run_id: str) -> None:
    """Undo `set_current`."""
    _open.pop(run_id, None)
