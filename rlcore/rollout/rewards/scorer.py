"""Scores samples in worker processes that a hanging or crashing reward function cannot escape.

Invariants:
- A call of the user's function that takes longer than `reward.timeout_s` costs its worker process,
  which is replaced; the call's samples are marked failed and no others are.
- A sample without a finite reward has an error text instead. It is never given 0.
- More than `reward.max_failed` of a batch failed: scoring stops at once with a RewardError.
- A batched function is called with one group at a time, so that a reward depends on its group alone
  and not on the number of workers.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait

from rlcore.config.tree import RewardConfig
from rlcore.errors import PluginError, RewardError
from rlcore.rollout.rewards.dispatch import Dispatch, function_name
from rlcore.rollout.rewards.process import WorkerProcess
from rlcore.rollout.rewards.protocol import Progress, Score
from rlcore.rollout.rewards.scoring import ScoringBatch
from rlcore.rollout.rewards.worker import timeout_text
from rlcore.sample import Sample
from rlcore.slime.compat import state as slime

GRACE_S = 0.25
"""How much longer than `timeout_s` the parent waits, so that an async function's own limit acts
first, and a call that only stood still with the whole machine ends first."""


def check_reward(config: RewardConfig) -> None:
    """See that the reward function loads and can be called.

    Raises:
        PluginError: naming the setting and what is wrong.
    """
    Dispatch(config.model_dump())


def try_reward(config: RewardConfig, sample: Sample) -> Score:
    """Score one sample in a worker process of its own, as a trial before a run.

    Raises:
        PluginError: the function cannot be loaded or called.
        RewardError: it raised, hung, crashed or gave no number.
    """
    scorer = Scorer(config.model_copy(update={"workers": 1, "max_failed": 1.0}))
    try:
        [score] = scorer.score_now([sample])
    finally:
        scorer.close()
    if score.reward is None:
        raise RewardError(str(score.error))
    return score


class Scorer:
    """Worker processes of one reward function. Close it, or they live as long as this process.

    Args:
        config: the reward section.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._settings = config.model_dump() | {"slime": slime.current()}
        # Workers are started by this one thread, which outlives them; see WorkerProcess.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._workers: list[WorkerProcess] = []

    def start(self) -> None:
        """Start the worker processes and return at once; they load the function meanwhile."""
        self._thread.submit(self._fill)

    def score_now(self, samples: Sequence[Sample]) -> list[Score]:
        """Score samples of whole groups, one score each, in order.

        A sample that has a reward already (a custom generate function set it) keeps it. One that
        was not generated to its end has none.

        Raises:
            PluginError: the function cannot be loaded or called.
            RewardError: more samples failed than `reward.max_failed` allows.
        """
        return self._thread.submit(self._score, list(samples)).result()

    async def score(
        self, samples: Sequence[Sample], max_failed: float | None = None
    ) -> list[Score]:
        """`score_now` without blocking the event loop.

        Args:
            samples: of whole groups.
            max_failed: in place of the setting, for whoever counts over more than these samples.
        """
        scoring = self._thread.submit(self._score, list(samples), max_failed)
        return await asyncio.wrap_future(scoring)

    def close(self) -> None:
        """End the worker processes."""
        self._thread.submit(self._end_all).result()
        self._thread.shutdown()

    # --- all below runs in the scorer's thread ----------------------------------------------------

    def _fill(self) -> None:
        while len(self._workers) < self._config.workers:
            self._workers.append(WorkerProcess(self._settings))

    def _end_all(self) -> None:
        while self._workers:
            self._workers.pop().close()

    def _score(self, samples: list[Sample], max_failed: float | None = None) -> list[Score]:
        config = self._config
        if max_failed is not None:
            config = config.model_copy(update={"max_failed": max_failed})
        batch = ScoringBatch(config, samples)
        batch.check_failures()
        try:
            self._fill()
            while not batch.is_done:
                self._step(batch)
        except BaseException:
            # Workers may be in the middle of calls whose results nobody wants any more.
            self._end_all()
            raise
        return batch.result()

    def _step(self, batch: ScoringBatch) -> None:
        """Hand out work, wait for news, take it in, and deal with workers that hang or are gone."""
        for worker in self._workers:
            if worker.ready and not worker.calls and batch.queue:
                worker.give(batch.queue.popleft())
        news = wait([w.link for w in self._workers], self._patience())
        for worker in [w for w in self._workers if w.link in news]:
            if not self._take(worker, batch):
                self._lose(worker, batch, None)
        for worker in list(self._workers):
            worker.check_loading()
            if worker.calls and self._is_overdue(worker):
                self._lose(worker, batch, timeout_text(self._config.timeout_s))
        batch.check_failures()

    def _patience(self) -> float:
        """Seconds to wait for news: until the next worker may be overdue."""
        shortest = 1.0
        for worker in self._workers:
            if worker.calls:
                call, seconds = worker.progress.read()
                left = self._config.timeout_s - seconds
                shortest = min(shortest, 0.05 if call == Progress.IDLE else max(0.01, left))
        return shortest

    def _is_overdue(self, worker: WorkerProcess) -> bool:
        call, seconds = worker.progress.read()
        late = call != Progress.IDLE and seconds > self._config.timeout_s
        return worker.has_been_late(call if late else None) > GRACE_S

    def _take(self, worker: WorkerProcess, batch: ScoringBatch) -> bool:
        """Take in a message. False: the worker is gone."""
        message = worker.receive()
        if message is None:
            return False
        kind, content = message
        if kind == "bad":
            raise PluginError(content)
        if kind == "ready":
            worker.ready = True
        elif kind == "scores":
            for number, scores in content:
                worker.calls.pop(number)
                batch.put(number, scores)
        return True

    def _lose(self, worker: WorkerProcess, batch: ScoringBatch, why: str | None) -> None:
        """Replace a worker that hung or crashed; blame the call it was at, repeat the others."""
        # One that hung up is about to end, and how it ends is what its samples' error says.
        how = worker.kill(patience_s=2.0 if why is None else 0.0)
        while self._take(worker, batch):
            pass
        if not worker.ready:
            name = function_name(self._config.custom_rm_path, self._config.rm_type)
            raise PluginError(f"{name}: when loaded, {how}")
        at, seconds = worker.progress.read()
        if why is not None and seconds <= self._config.timeout_s:
            at = Progress.IDLE  # It went on to another call just before it was killed.
        if at == Progress.UNKNOWN and len(worker.calls) == 1:
            [at] = worker.calls
        if at in worker.calls:
            batch.fail(worker.calls.pop(at), why or how)
        batch.again(list(worker.calls.values()), how)
        self._workers.remove(worker)
        worker.close()
        self._fill()
