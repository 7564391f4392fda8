"""A scorer process: loads the user's function once and calls it for chunks of samples.

Run as `python -m rlcore.rollout.rewards.worker SOCKET_FD PROGRESS_FD`. It imports neither torch nor
ray nor pydantic, and ends when its parent does, whatever the user's function is doing.
"""

import asyncio
import contextlib
import ctypes
import inspect
import json
import math
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from rlcore.errors import PluginError
from rlcore.plugins import is_async
from rlcore.rollout.args import PluginArgs
from rlcore.rollout.rewards.dispatch import Dispatch
from rlcore.rollout.rewards.protocol import NoRewardError, Progress, Score
from rlcore.sample import Sample
from rlcore.slime.compat import state as slime

FLUSH_S = 0.005
PR_SET_PDEATHSIG = 1
Results = list[tuple[int, list[Score]]]
"""(number of the call, a score for each of its samples)."""


def main(socket_fd: int, progress_fd: int) -> None:
    """Serve one parent until it hangs up."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # An interrupt at the terminal goes to the whole group; the parent decides when scoring ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link, progress = Connection(socket_fd), Progress(progress_fd)
    progress.idle()
    with contextlib.suppress(EOFError, ConnectionError):
        settings = link.recv()
        try:
            scorer = _Scorer(settings, link, progress)
        except PluginError as error:
            link.send(("bad", str(error)))
            return
        link.send(("ready", os.getpid()))
        while True:
            scorer.score(link.recv())


@dataclass(frozen=True, slots=True)
class _Call:
    """A call to make: its number, its samples, and the function that scores them."""

    number: int
    samples: list[Sample]
    function: Callable[..., Any]


class _Scorer:
    def __init__(self, settings: dict[str, Any], link: Connection, progress: Progress) -> None:
        slime.activate(settings.pop("slime"))
        self._args = PluginArgs(settings)
        self._batched = settings["batched"]
        self._key = settings["reward_key"]
        self._timeout_s = settings["timeout_s"]
        self._concurrency = settings["concurrency"]
        self._dispatch = Dispatch(settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._link = link
        self._progress = progress

    def score(self, calls: list[tuple[int, list[Sample]]]) -> None:
        """Make calls and report their results: slow ones at once, quick ones together."""
        plain, waiting, failed = list[_Call](), list[_Call](), Results()
        for number, samples in calls:
            # Loading a function that only this row names may hang as well as calling it.
            self._progress.begin(number)
            try:
                function = self._dispatch.function_of(samples)
            except (PluginError, NoRewardError) as error:
                failed.append((number, [Score(error=str(error))] * len(samples)))
                continue
            (waiting if is_async(function) else plain).append(_Call(number, samples, function))
        if failed:
            self._link.send(("scores", failed))
        if plain:
            self._score_sync(plain)
        if waiting:
            self._loop = self._loop or asyncio.new_event_loop()
            self._loop.run_until_complete(self._score_async(waiting))
        self._progress.idle()

    def _score_sync(self, calls: "list[_Call]") -> None:
        waiting: Results = []
        sent = time.monotonic()
        for call in calls:
            self._progress.begin(call.number)
            waiting.append((call.number, self._call(call)))
            now = time.monotonic()
            if now - sent > FLUSH_S:
                self._link.send(("scores", waiting))
                waiting, sent = [], now
        self._link.send(("scores", waiting))

    def _call(self, call: "_Call") -> list[Score]:
        try:
            answer = call.function(self._args, self._given(call))
            if inspect.isawaitable(answer):
                answer = asyncio.run(_awaited(answer))
            return self._scores(answer, len(call.samples))
        except Exception as error:
            # Whatever a scorer raises is a sample without a reward, which the parent counts.
            return [Score(error=_text(error))] * len(call.samples)

    def _given(self, call: "_Call") -> Any:
        return call.samples if self._batched else call.samples[0]

    async def _score_async(self, calls: "list[_Call]") -> None:
        # The time of a call that waits for its turn does not run.
        turns = asyncio.Semaphore(self._concurrency)

        async def one(call: _Call) -> None:
            try:
                async with turns, asyncio.timeout(self._timeout_s):
                    answer = await call.function(self._args, self._given(call))
                scores = self._scores(answer, len(call.samples))
            except TimeoutError as error:
                met = [str(error.__cause__)] if str(error.__cause__ or "") else []
                said = "; ".join([timeout_text(self._timeout_s), *met])
                scores = [Score(error=said)] * len(call.samples)
            except Exception as error:
                scores = [Score(error=_text(error))] * len(call.samples)
            self._link.send(("scores", [(call.number, scores)]))

        # While the loop turns, the page says "just begun": a function that blocks the loop stops
        # that.
        beat = asyncio.create_task(self._beat())
        await asyncio.gather(*(one(call) for call in calls))
        beat.cancel()

    async def _beat(self) -> None:
        while True:
            self._progress.begin(Progress.UNKNOWN)
            await asyncio.sleep(min(0.1, self._timeout_s / 4))

    def _scores(self, answer: Any, n: int) -> list[Score]:
        if not self._batched:
            return [to_score(answer, self._key)]
        answers = answer.tolist() if hasattr(answer, "tolist") else answer
        if not isinstance(answers, (list, tuple)):
            raise NoRewardError(f"it returned a {type(answer).__name__}, not a list of rewards")
        if len(answers) != n:
            raise NoRewardError(f"it returned {len(answers)} rewards for {n} samples")
        return [self._score_or_error(one) for one in answers]

    def _score_or_error(self, answer: Any) -> Score:
        try:
            return to_score(answer, self._key)
        except NoRewardError as error:
            return Score(error=_text(error))


def to_score(answer: Any, reward_key: str | None) -> Score:
    """A reward function's answer for one sample as a score.

    Raises:
        NoRewardError: the answer is no finite number, or holds none.
    """
    details = None
    if isinstance(answer, dict):
        if reward_key is None:
            keys = sorted(map(str, answer))
            raise NoRewardError(f"it returned a dict with the keys {keys}; set reward.reward_key")
        if reward_key not in answer:
            keys = sorted(map(str, answer))
            raise NoRewardError(
                f"it returned a dict without reward.reward_key = {reward_key!r}, but with {keys}"
            )
        details = json.dumps(_plain(answer), ensure_ascii=False)
        answer = answer[reward_key]
    if answer is None or isinstance(answer, (str, bytes)) or not hasattr(answer, "__float__"):
        raise NoRewardError(f"it returned {answer!r:.80}, not a number")
    number = float(answer)
    if not math.isfinite(number):
        raise NoRewardError(f"it returned {number}, not a finite number")
    return Score(number, details)


def timeout_text(timeout_s: float) -> str:
    """Why a sample has no reward when its call took too long."""
    return f"it took longer than reward.timeout_s = {timeout_s:g} s"


def _plain(value: Any) -> Any:
    """What JSON can hold of a value: arrays as lists, NaN and infinity as null, others as text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _text(error: Exception) -> str:
    if isinstance(error, NoRewardError):
        return str(error)
    return f"it raised {type(error).__name__}: {error}"[:500]


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
