"""Several engines as one: the least loaded takes the next call, a failed call goes elsewhere.

Invariants:
- Results come back in the order of the requests, all of them or an error.
- No engine has more than `concurrency` samples in flight, save a single call that is larger.
- An engine that failed twice in a row gets no calls until it answers again, with the policy version
  that is asked for: one that was started again holds another until the weights are pushed to it.
- While no engine answers, calls wait for one, and none of their attempts is used up.
- With a router it alone gets calls, and counts as an engine that is well when all engines are.
- A request that an engine aborted without being asked to counts as failed and is sent again. One
  that `abort_all` ended is answered with what it had; nothing is sent while it runs.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from rlcore.errors import EngineError
from rlcore.rollout.client import (
    EngineClient,
    EngineUnavailable,
    GenerateRequest,
    GenerateResult,
    adapter_of,
)
from rlcore.rollout.limits import Limits
from rlcore.rollout.router import RoutedClient, Router
from rlcore.rollout.together import all_of

log = logging.getLogger("sluice.rollout")

FAILURES_UNTIL_UNHEALTHY = 2
RECHECK_S = 1.0
ABORT_AGAIN_S = 0.5
"""Seconds after which engines are told again to abort: a request may have been on its way."""
LONGEST_PAUSE_S = 10.0
CALL_TOKENS = 1 << 20
"""Most tokens that a call may generate, unless a single group may generate more."""
REFILLS = 8
"""Calls that share an engine's concurrency when there is more to do: as one ends, the next
begins."""

NOTHING = GenerateResult(tokens=[], log_probs=[], finish_reason="abort")
"""The answer to a request that was ended before an engine took it."""

Done = Callable[[int, list[GenerateResult]], None]


@dataclass(eq=False)
class _Engine:
    client: EngineClient
    in_flight: int = 0
    failures: int = 0
    checked: float = 0.0

    @property
    def healthy(self) -> bool:
        return self.failures < FAILURES_UNTIL_UNHEALTHY


class EnginePool:
    """Engines of one policy. Use it within one event loop and close it there.

    Args:
        urls: of the engines.
        limits: of the model, checked before anything is sent.
        concurrency: samples in flight at one engine.
        retries: how often a failed call is sent again.
        timeout_s: seconds until a call counts as failed.
        pause_s: seconds before the first retry; doubled each time.
        patience_s: seconds to wait for an engine to come back while none answers.
        adapters: policies are adapters of the model that engines hold.
        router: that spreads calls over the engines, where there is one.

    Attributes:
        version: policy version that the engines must hold; None: any.
        oldest: where weights change while requests are in flight, the oldest version that will do;
            `version` is then the newest that is known of.
        aborting: whether all requests are being ended, as somebody asked.
    """

    def __init__(
        self,
        urls: Sequence[str],
        limits: Limits,
        *,
        concurrency: int = 512,
        retries: int = 3,
        timeout_s: float = 600.0,
        pause_s: float = 0.5,
        patience_s: float = 0.0,
        adapters: bool = False,
        router: Router | None = None,
    ) -> None:
        if not urls:
            raise EngineError("there is no engine to generate with")
        self.limits = limits
        self.concurrency = concurrency
        self._retries = retries
        self._pause_s = pause_s
        self._patience_s = patience_s
        self._adapters = adapters
        self.version: str | None = None
        self.oldest: int | None = None
        self.aborting = False
        self._engines = [_Engine(EngineClient(url, limits, timeout_s)) for url in urls]
        self._router = router
        routed = router and [_Engine(RoutedClient(router, limits, timeout_s))]
        self._takers = routed or self._engines
        """What gets calls."""
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def urls(self) -> list[str]:
        """Of the engines."""
        return [engine.client.url for engine in self._engines]

    @property
    def address(self) -> str:
        """Where one who wants something generated may send it: the router, or an engine."""
        return self._takers[0].client.url

    @property
    def total_concurrency(self) -> int:
        """Samples in flight at all engines."""
        return self.concurrency * len(self._engines)

    @property
    def goes_on(self) -> bool:
        """Whether weights change while requests are in flight."""
        return self.oldest is not None

    def accepts(self, version: str) -> bool:
        """Whether what a policy version generates will do."""
        if self.oldest is not None:
            return version.isdecimal() and int(version) >= self.oldest
        return self.version is None or version == self.version

    async def close(self) -> None:
        """Close the connections."""
        clients = {engine.client for engine in (*self._engines, *self._takers)}
        await asyncio.gather(*(client.close() for client in clients))

    async def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        group: int = 1,
        done: Done | None = None,
    ) -> list[GenerateResult]:
        """Continue many prompts in few HTTP calls, spread evenly over the engines.

        Args:
            requests: in any number.
            group: this many neighbours travel together, so that they share their prompt's cache.
            done: is told of each call's results as they come: where they begin, and what they are.

        Raises:
            EngineError: a request failed on every attempt.
        """
        longest = max((r.sampling_params.get("max_new_tokens", 0) for r in requests), default=0)
        size = self._call_size(len(requests), group, longest)

        async def call(start: int) -> list[GenerateResult]:
            found = await self._deliver(list(requests[start : start + size]))
            if done is not None:
                done(start, found)
            return found

        found = await all_of(call(start) for start in range(0, len(requests), size))
        return [result for results in found for result in results]

    async def abort_all(self, calls: Collection[asyncio.Task[Any]]) -> None:
        """End all requests, those that wait for an engine too. Each is answered with what it has.

        Args:
            calls: the tasks that generate; waits until all have ended.
        """
        open_ = set(calls)
        self.aborting = True
        try:
            while open_:
                # An engine that does not answer fails its calls by itself.
                aborts = (engine.client.abort() for engine in self._engines)
                await asyncio.gather(*aborts, return_exceptions=True)
                _, open_ = await asyncio.wait(open_, timeout=ABORT_AGAIN_S)
        finally:
            self.aborting = False

    def _call_size(self, total: int, group: int, longest: int) -> int:
        """Requests a call: an even share of whole groups, small enough to refill a busy engine.

        Long responses travel in smaller calls, so that the first can be stored while others are
        generated.
        """
        groups = -(-total // group)
        share = -(-groups // len(self._engines))
        if share * group > self.concurrency:
            share = max(1, self.concurrency // REFILLS // group)
        if longest:
            share = min(share, max(1, CALL_TOKENS // longest // group))
        return max(1, min(share * group, self.concurrency))

    async def _deliver(self, requests: list[GenerateRequest]) -> list[GenerateResult]:
        """One call, repeated for what failed, on another engine where there is one."""
        results: dict[int, GenerateResult] = {}
        open_ = list(range(len(requests)))
        failed_on: _Engine | None = None
        last = ""
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(min(LONGEST_PAUSE_S, self._pause_s * 2 ** (attempt - 1)))
            try:
                async with self._lease(len(open_), avoid=failed_on) as engine:
                    failed_on = engine
                    sent = self.version
                    adapter = adapter_of(sent) if self._adapters else None
                    found = await engine.client.generate([requests[k] for k in open_], adapter)
                    self._check_version(engine, found)
                    if self.goes_on:
                        found = [_with_first(result, sent) for result in found]
            except EngineUnavailable as error:
                if self.aborting:
                    break
                last = str(error)
                log.warning("attempt %d of %d: %s", attempt + 1, self._retries + 1, last)
                continue
            results.update(zip(open_, found, strict=True))
            open_ = [k for k in open_ if results[k].finish_reason == "abort"]
            if not open_ or self.aborting:
                break
            detail = results[open_[0]].detail.get("message", "no reason given")
            last = f"{failed_on.client.url} aborted {len(open_)} requests: {detail}"
            log.warning("attempt %d of %d: %s", attempt + 1, self._retries + 1, last)
        if not open_ or self.aborting:
            return [results.get(k, NOTHING) for k in range(len(requests))]
        raise EngineError(
            f"{len(open_)} requests failed {self._retries + 1} times (rollout.request_retries = "
            f"{self._retries}); the last time: {last}"
        )

    def _check_version(self, engine: _Engine, found: Sequence[GenerateResult]) -> None:
        """Have an engine with other weights left alone until it holds the right ones."""
        # What was ended before it began came from no policy.
        other = {v for r in found if r.tokens for v in r.weight_versions if not self.accepts(v)}
        if other:
            engine.failures = FAILURES_UNTIL_UNHEALTHY
            raise EngineUnavailable(
                f"{engine.client.url} generated with policy version {min(other)!r}, not "
                f"{self.version!r}"
            )

    @asynccontextmanager
    async def _lease(self, samples: int, avoid: _Engine | None) -> AsyncIterator[_Engine]:
        """Room for a call at the least loaded healthy engine."""
        engine = await self._choose(samples, avoid)
        try:
            yield engine
            engine.failures = 0
        except EngineUnavailable:
            engine.failures += 1
            engine.checked = time.monotonic()
            raise
        finally:
            async with self._changed:
                engine.in_flight -= samples
                self._changed.notify_all()

    async def _choose(self, samples: int, avoid: _Engine | None) -> _Engine:
        deadline = time.monotonic() + self._patience_s
        while True:
            await self._recheck()
            # Looked at under the lock, so that no release between the look and the wait is missed.
            async with self._changed:
                if self.aborting:
                    raise EngineUnavailable("all requests are being ended")
                healthy = [e for e in self._takers if e.healthy]
                others = [e for e in healthy if e is not avoid] or healthy
                if others:
                    engine = min(others, key=lambda e: e.in_flight)
                    if engine.in_flight == 0 or engine.in_flight + samples <= self._room:
                        engine.in_flight += samples
                        return engine
                    await self._changed.wait()
                    continue
            if time.monotonic() >= deadline:
                urls = ", ".join(e.client.url for e in self._engines)
                held = "" if self.version is None else f" with policy version {self.version!r}"
                raise EngineUnavailable(f"no engine answers{held} ({urls})")
            await asyncio.sleep(RECHECK_S)

    @property
    def _room(self) -> int:
        """Samples in flight at one that gets calls."""
        return self.concurrency if self._router is None else self.total_concurrency

    async def _recheck(self) -> None:
        now = time.monotonic()
        due = [e for e in self._takers if not e.healthy and now - e.checked >= RECHECK_S]
        if not due and not any(e.healthy for e in self._takers):
            due = self._takers
        for engine in due:
            engine.checked = now
            if await self._is_ready(engine.client):
                log.info("engine %s answers again", engine.client.url)
                # One more failure is enough to take it out again.
                engine.failures = FAILURES_UNTIL_UNHEALTHY - 1

    async def _is_ready(self, client: EngineClient) -> bool:
        try:
            if isinstance(client, RoutedClient):
                await client.router.revive()
                ready = [await self._is_ready(engine.client) for engine in self._engines]
                return all(ready) and await client.health()
            if not await client.health():
                return False
            any_will_do = self.version is None and self.oldest is None
            return any_will_do or self.accepts(await client.weight_version())
        except EngineError:
            return False


def _with_first(result: GenerateResult, sent: str | None) -> GenerateResult:
    """An answer that names the policy by which it may have begun.

    SGLang tells the last one alone. What was known when the request was sent is not newer than the
    first.
    """
    known = sent is None or result.earlier_versions or result.weight_version == sent
    return result if known else replace(result, earlier_versions=[str(sent)])
