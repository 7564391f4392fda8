"""The Ray actor that makes rollouts, scores, selections and evaluations, and writes their parts.

Invariants:
- It holds nothing that the store does not: the batch it keeps in memory is one whose file it wrote
  or read, found by that file's digest. After a restart it reads, and verifies, instead.
- It writes parts and commits nothing: the driver commits.
- A call of a driver with an older lease than one seen before is refused.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.cluster.actor_logs import Line, Lines, shown
from rlcore.cluster.rollout_plan import Loaded, RolloutPlan, StageReport, load
from rlcore.collector import keep_loaded
from rlcore.errors import EngineError, Fenced
from rlcore.rollout.buffer import Group, read_buffer, write_buffer
from rlcore.rollout.demonstrate import demonstrate
from rlcore.rollout.evaluate import evaluate, set_score
from rlcore.rollout.filters import GroupRule, Scored
from rlcore.rollout.generate import Generator
from rlcore.rollout.hooks import Hooks
from rlcore.rollout.judge import GroupJudge, judged_by, samples_dynamically
from rlcore.rollout.limits import Limits
from rlcore.rollout.loop import Dropped, DynamicFilter, RolloutBatch, rollout
from rlcore.rollout.own_evaluation import OwnEvaluation
from rlcore.rollout.own_source import OwnSource, SourceArgs
from rlcore.rollout.pool import EnginePool
from rlcore.rollout.producer import Endless, Producer
from rlcore.rollout.rewards.protocol import Score
from rlcore.rollout.rewards.scorer import Scorer
from rlcore.rollout.router import Router
from rlcore.rollout.stored import (
    DECIDED,
    choose,
    filter_rule,
    read_rollout,
    read_scores,
    score_metrics,
    score_rows,
    scored_of,
    write_rows,
)
from rlcore.rollout.supply import RolloutRequest, Supply
from rlcore.rollout.teacher import ask_teacher
from rlcore.sample import Sample
from rlcore.slime.compat import state as slime
from rlcore.store.manifest import FileRef
from rlcore.store.objects import Objects
from rlcore.store.paths import buffer_prefix, dropped_prefix, part_key, scores_prefix

if TYPE_CHECKING:
    from rlcore.store.batch import SamplesWriter

log = logging.getLogger("sluice.rollout")

BATCHES = 2
"""Batches that are kept in memory."""

Files = Sequence[FileRef]


class RolloutActor:
    """Serves one run. All its calls are async, but a driver makes one at a time."""

    def __init__(self, plan: RolloutPlan) -> None:
        self._lines = Lines()
        self._plan = plan
        self._objects = Objects.open(plan.root, plan.options)
        self._epoch = -1
        self._pool: EnginePool | None = None
        self._router: Router | None = None
        self._endless = Endless()
        slime.activate(plan.slime)
        self._scorer = Scorer(plan.reward)
        if not plan.supervised:
            self._scorer.start()
        self._eval_scorer = self._scorer
        if plan.eval.reward_key is not None:
            own = {"reward_key": plan.eval.reward_key}
            # Its processes start with the first evaluation.
            self._eval_scorer = Scorer(plan.reward.model_copy(update=own))
        # Tokenizer and data load while the engines start.
        self._loading: Future[Loaded] = ThreadPoolExecutor(1).submit(load, plan)
        self._batches: dict[tuple[str, ...], list[Sample]] = {}
        self._scores: tuple[tuple[str, ...], list[Scored], list[Score]] = ((), [], [])

    async def lines(self) -> list[Line]:
        """What was logged since the last call."""
        return self._lines.take()

    async def ping(self) -> dict[str, int]:
        """Wait until tokenizer and data are loaded.

        Returns:
            Rows of the training data: `rows`, `skipped`, `too_long`.

        Raises:
            DataError, ConfigError: they cannot be loaded.
        """
        data = (await self._loaded()).dataset
        keep_loaded()
        return {"rows": len(data), "skipped": data.skipped, "too_long": data.too_long}

    async def set_engines(self, urls: list[str]) -> None:
        """Generate with these engines from now on."""
        await self._open_router(urls)
        old, self._pool = self._pool, self._new_pool(urls, (await self._loaded()).limits)
        if old is not None:
            await old.close()

    async def rollout(
        self,
        epoch: int,
        iteration: int,
        attempt: str,
        cursor: dict[str, Any] | None,
        policy_version: int,
    ) -> StageReport:
        """Make the rollout that follows `cursor` and write its parts.

        Args:
            epoch: of the driver's lease.
            iteration: counted from 0.
            attempt: name of this execution.
            cursor: of the rollout before; None at the start. Its `buffer`, where it has one, is
                what that rollout left (`rlcore.rollout.buffer`); its `source` the state of a source
                of one's own.
            policy_version: that every engine must report.
        """
        self._fence(epoch)
        plan, loaded = self._plan, await self._loaded()
        began = time.perf_counter()
        # Read even by the worker that wrote it: what follows depends on the store alone.
        buffer = await asyncio.to_thread(read_buffer, self._objects, (cursor or {}).get("buffer"))
        request = RolloutRequest(
            iteration, plan.seed, plan.data.shuffle, cursor, str(policy_version), buffer
        )
        with self._writer(iteration, attempt) as writer:
            made = await self._make(request, loaded, writer)
            log.info("iteration %d: %s", iteration, shown(made.metrics))
            asked = time.perf_counter()
            if plan.rollout.teacher_url is not None:
                await ask_teacher(made.samples, plan.rollout)
            rolled = time.perf_counter()
            writer.add(made.samples[writer.count :])
            files = await asyncio.to_thread(writer.finish)
        self._keep(files, made.samples)
        extra = await asyncio.to_thread(self._write_beside, iteration, attempt, made)
        data = loaded.dataset
        if data.sizes:
            extra["mix"] = {"sizes": list(data.sizes), "weights": list(data.weights)}
        counts = {"data/skipped_rows": data.skipped, "data/too_long_prompts": data.too_long}
        return StageReport(
            files=files,
            metrics=made.metrics | {name: float(n) for name, n in counts.items()},
            compute_seconds=made.generation_s,
            timings={
                "generate": made.generation_s,
                "prepare": asked - began - made.generation_s,
                "teacher": rolled - asked,
                "write": time.perf_counter() - rolled,
            },
            cursor=made.cursor,
            prompts=plan.rollout.rollout_batch_size,
            extra=extra,
        )

    async def _make(
        self, request: RolloutRequest, loaded: Loaded, writer: "SamplesWriter"
    ) -> RolloutBatch:
        plan = self._plan
        if plan.supervised:
            count, limits = plan.rollout.rollout_batch_size, loaded.limits
            return await asyncio.to_thread(
                demonstrate, request, loaded.dataset, loaded.tokenizer, plan.data, count, limits
            )
        if plan.keep_on_for is not None:
            new = partial(self._producer, request, loaded, plan.keep_on_for)
            return await self._endless.take(request, new)
        pool = self._engines()
        self._hooks = Hooks(plan.rollout, plan.reward.reward_key)
        return await rollout(
            request,
            loaded.dataset,
            loaded.tokenizer,
            plan.rollout,
            Generator(plan.rollout, loaded.tokenizer, pool, iteration=request.iteration),
            plan.num_gpus,
            # A sample is stored with what the teacher says of it.
            ready=writer.add if plan.rollout.teacher_url is None else None,
            dynamic=self._dynamic(),
            hooks=self._hooks,
            source=self._source(loaded, (request.cursor or {}).get("source")),
        )

    def _producer(self, request: RolloutRequest, loaded: Loaded, iterations: int) -> Producer:
        plan = self._plan
        # Of its own, since it takes what others may not: policies that change under way.
        pool = self._new_pool(self._engines().urls, loaded.limits)
        generator = Generator(plan.rollout, loaded.tokenizer, pool)
        supply = Supply(request, loaded.dataset, loaded.tokenizer, plan.rollout)
        return Producer(supply, plan.rollout, generator, iterations, plan.num_gpus)

    async def reward(
        self,
        epoch: int,
        iteration: int,
        attempt: str,
        rollout_files: Files,
        early: Files | None = None,
    ) -> StageReport:
        """Score a committed rollout and write one narrow row a sample; 0, where rows are learned.

        Args:
            epoch, iteration, attempt: as those of `rollout`.
            rollout_files: of the rollout.
            early: the scores that its groups were chosen by; None: it has none that fit.
        """
        self._fence(epoch)
        began = time.perf_counter()
        samples = await self._samples(rollout_files)
        read = time.perf_counter()
        if self._plan.supervised:
            scores = [Score(0.0)] * len(samples)
        elif early is None:
            scores = await self._scorer.score(samples)
        else:
            scores = (await asyncio.to_thread(read_scores, self._objects, early))[1]
        scored = time.perf_counter()
        rows = score_rows(samples, scores)
        ref = await self._write_rows("reward", iteration, attempt, rows)
        self._scores = (_digests([ref]), scored_of(rows), scores)
        return StageReport(
            files=[ref],
            metrics={} if self._plan.supervised else score_metrics(samples, scores),
            timings={
                "read": read - began,
                "score": scored - read,
                "write": time.perf_counter() - scored,
            },
            extra={} if early is None else {"scored_by": "rollout"},
        )

    async def filter(
        self,
        epoch: int,
        iteration: int,
        attempt: str,
        rollout_files: Files,
        reward_files: Files,
        decided: bool = False,
    ) -> StageReport:
        """Choose the groups to train on and write one narrow row a sample.

        Args:
            epoch, iteration, attempt: as those of `rollout`.
            rollout_files, reward_files: of the stages before.
            decided: the rollout has chosen its groups by this filter and these scores.
        """
        self._fence(epoch)
        rule = DECIDED if decided or self._plan.supervised else self._rule()
        scored, scores = await self._read_scores(reward_files)
        samples = await self._samples(rollout_files) if rule.needs_samples else []
        chosen = await asyncio.to_thread(choose, rule, scored, scores, samples)
        ref = await self._write_rows("filter", iteration, attempt, chosen.rows)
        return StageReport(files=[ref], metrics=chosen.metrics, extra={"kept": chosen.kept})

    async def evaluate(
        self,
        epoch: int,
        iteration: int,
        attempt: str,
        policy_version: int,
        folder: str | None = None,
    ) -> StageReport:
        """Generate and score all evaluation prompts; a part each for `extra["datasets"]`.

        Args:
            epoch, iteration, attempt, policy_version: as those of `rollout`.
            folder: of the parts; None: the iteration's own.
        """
        self._fence(epoch)
        loaded, pool = await self._loaded(), self._engines()
        own = self._plan.eval.eval_function_path
        result = await evaluate(
            loaded.eval_sets,
            self._plan.rollout,
            loaded.tokenizer,
            pool,
            self._eval_scorer,
            run_seed=self._plan.seed,
            version=str(policy_version),
            iteration=iteration,
            own=None if own is None else OwnEvaluation(own),
        )
        files = [
            await self._write_samples("evaluate", iteration, shard, attempt, samples, folder)
            for shard, samples in enumerate(result.samples)
        ]
        return StageReport(
            files=files,
            metrics=result.metrics,
            compute_seconds=result.generation_s,
            timings={"generate": result.generation_s},
            prompts=sum(len(one.dataset) for one in loaded.eval_sets),
            extra={"datasets": result.names},
        )

    async def close(self) -> None:
        """End the scorer processes and close the connections."""
        for scorer in {self._scorer, self._eval_scorer}:
            await asyncio.to_thread(scorer.close)
        await self._endless.close()
        if self._pool is not None:
            await self._pool.close()
        if self._router is not None:
            await self._router.close()

    # --- what is held -----------------------------------------------------------------------------

    def _fence(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise Fenced(
                f"run {self._plan.run_id}: a driver of lease epoch {epoch} called, but epoch "
                f"{self._epoch} has taken over"
            )
        self._epoch = epoch

    async def _loaded(self) -> Loaded:
        return await asyncio.wrap_future(self._loading)

    def _rule(self) -> GroupRule:
        plan = self._plan
        return filter_rule(plan.filter, plan.reward.reward_key, plan.rollout.n_samples_per_prompt)

    @property
    def _is_dynamic(self) -> bool:
        return samples_dynamically(self._plan.rollout, self._plan.filter)

    def _dynamic(self) -> DynamicFilter | None:
        plan = self._plan
        if not (self._is_dynamic or self._hooks.need_scores):
            return None
        batch = plan.rollout.rollout_batch_size * plan.rollout.n_samples_per_prompt
        rule = self._rule() if self._is_dynamic else None
        judge = GroupJudge(self._scorer, rule, plan.reward, batch)
        chosen = plan.filter.dynamic_sampling_filter_path
        return DynamicFilter(judge, f"filter.dynamic_sampling_filter_path = {chosen!r}")

    def _source(self, loaded: Loaded, state: Any) -> OwnSource | None:
        plan, path = self._plan, self._plan.rollout.data_source_path
        if path is None:
            return None
        args = SourceArgs(plan.rollout, plan.data, loaded.dataset, loaded.tokenizer, plan.seed)
        return OwnSource(path, args, state)

    def _new_pool(self, urls: Sequence[str], limits: Limits) -> EnginePool:
        config = self._plan.rollout
        return EnginePool(
            urls,
            limits,
            concurrency=config.concurrency,
            retries=config.request_retries,
            timeout_s=config.request_timeout_s,
            patience_s=config.start_timeout_s,
            adapters=self._plan.adapters,
            router=self._router,
        )

    async def _open_router(self, urls: Sequence[str]) -> None:
        """Put a router before the engines, where one is asked for."""
        config = self._plan.rollout
        if self._router is not None:
            await self._router.close()
        if config.use_sglang_router or config.sglang_router_url is not None:
            log_path = Path(self._plan.log_dir) / "router.log"
            self._router = Router(config.sglang_router_url, log_path, config.request_timeout_s)
            await self._router.open(urls)

    def _engines(self) -> EnginePool:
        if self._pool is None:
            raise EngineError(f"run {self._plan.run_id}: the rollout worker was given no engines")
        return self._pool

    async def _samples(self, files: Files) -> list[Sample]:
        if _digests(files) not in self._batches:
            self._keep(files, await asyncio.to_thread(read_rollout, self._objects, files))
        return self._batches[_digests(files)]

    def _keep(self, files: Files, samples: list[Sample]) -> None:
        """Remember a batch, and the one before: its scoring may go on while the next is made."""
        kept = list(self._batches.items())[1 - BATCHES :]
        self._batches = {**dict(kept), _digests(files): samples}

    async def _read_scores(self, files: Files) -> tuple[list[Scored], list[Score]]:
        if self._scores[0] != _digests(files):
            read = await asyncio.to_thread(read_scores, self._objects, files)
            self._scores = (_digests(files), *read)
        return self._scores[1], self._scores[2]

    def _writer(self, iteration: int, attempt: str) -> "closing[SamplesWriter]":
        from rlcore.store.batch import SamplesWriter

        def key_of(part: int) -> str:
            return part_key(self._plan.run_id, iteration, "rollout", part, attempt)

        return closing(SamplesWriter(self._objects, key_of))

    async def _write_samples(
        self,
        stage: str,
        iteration: int,
        shard: int,
        attempt: str,
        samples: list[Sample],
        folder: str | None = None,
    ) -> FileRef:
        from rlcore.store.batch import samples_to_table, write_table

        key = part_key(self._plan.run_id, iteration, stage, shard, attempt)
        if folder is not None:
            key = f"{folder}/part-{shard:05d}.parquet"
        return await asyncio.to_thread(
            lambda: write_table(self._objects, key, samples_to_table(samples))
        )

    def _write_beside(self, iteration: int, attempt: str, made: RolloutBatch) -> dict[str, Any]:
        """What belongs to a rollout beside its samples: `extra` of its manifest."""
        where, extra = (self._plan.run_id, iteration, attempt), {}
        if made.left:
            extra["buffer"] = write_buffer(self._objects, buffer_prefix(*where), made.left)
        if self._plan.rollout.data_source_path is not None:
            extra["source"] = made.source
        if made.dropped:
            groups = [_with_scores(one) for one in made.dropped]
            extra["dropped"] = write_buffer(self._objects, dropped_prefix(*where), groups)
            extra["dropped"]["reasons"] = [one.reason for one in made.dropped]
        if made.scores is not None:
            prefix = scores_prefix(*where)
            rows = score_rows(made.samples, made.scores)
            ref = write_rows(self._objects, f"{prefix}/part-00000.parquet", "reward", rows)
            extra["scores"] = {
                "key_prefix": prefix,
                "files": [ref.model_dump(mode="json")],
                **judged_by(self._plan.reward, self._plan.filter, filtered=self._is_dynamic),
            }
        return extra

    async def _write_rows(
        self, stage: str, iteration: int, attempt: str, rows: list[dict[str, Any]]
    ) -> FileRef:
        key = part_key(self._plan.run_id, iteration, stage, 0, attempt)
        return await asyncio.to_thread(write_rows, self._objects, key, stage, rows)


def _with_scores(dropped: Dropped) -> Group:
    if dropped.scores:
        for sample, score in zip(dropped.group.samples, dropped.scores, strict=True):
            set_score(sample, score)
    return dropped.group


def _digests(files: Files) -> tuple[str, ...]:
    return tuple(ref.sha256 for ref in files)
