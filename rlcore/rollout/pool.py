"""Several engines as one: the least loaded takes the next call, a failed call goes elsewhere.

Invariants:
- Results come back in the order of the requests, all of them or an error.
- No engine has more than `concurrency` samples in flight, save a single call that is larger.
- An engine that failed twice in a row gets no calls until it answers a health check again.
- A request that an engine aborted without being asked to counts as failed and is sent again.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rlcore.errors import EngineError
from rlcore.rollout.client import EngineClient, EngineUnavailable, GenerateRequest, GenerateResult
from rlcore.rollout.limits import Limits
from rlcore.rollout.together import all_of

log = logging.getLogger("sluice.rollout")

FAILURES_UNTIL_UNHEALTHY = 2
RECHECK_S = 1.0
LONGEST_PAUSE_S = 10.0
REFILLS = 8
"""Calls that share an engine's concurrency when there is more to do: as one ends, the next
begins."""


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
    ) -> None:
        if not urls:
            raise EngineError("there is no engine to generate with")
        self.limits = limits
        self.concurrency = concurrency
        self._retries = retries
        self._pause_s = pause_s
        self._engines = [_Engine(EngineClient(url, limits, timeout_s)) for url in urls]
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def total_concurrency(self) -> int:
        """Samples in flight at all engines."""
        return self.concurrency * len(self._engines)

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(engine.client.close() for engine in self._engines))

    async def generate(
        self, requests: Sequence[GenerateRequest], *, group: int = 1
    ) -> list[GenerateResult]:
        """Continue many prompts in few HTTP calls, spread evenly over the engines.

        Args:
            requests: in any number.
            group: this many neighbours travel together, so that they share their prompt's cache.

        Raises:
            EngineError: a request failed on every attempt.
        """
        size = self._call_size(len(requests), group)
        chunks = [requests[i : i + size] for i in range(0, len(requests), size)]
        found = await all_of(self._deliver(list(chunk)) for chunk in chunks)
        return [result for results in found for result in results]

    def _call_size(self, total: int, group: int) -> int:
        """Requests a call: an even share of whole groups, small enough to refill a busy engine."""
        groups = -(-total // group)
        share = -(-groups // len(self._engines))
        if share * group > self.concurrency:
            share = max(1, self.concurrency // REFILLS // group)
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
                    found = await engine.client.generate([requests[k] for k in open_])
            except EngineUnavailable as error:
                last = str(error)
                log.warning("attempt %d of %d: %s", attempt + 1, self._retries + 1, last)
                continue
            results.update(zip(open_, found, strict=True))
            open_ = [k for k in open_ if results[k].finish_reason == "abort"]
            if not open_:
                return [results[k] for k in range(len(requests))]
            detail = results[open_[0]].detail.get("message", "no reason given")
            last = f"{failed_on.client.url} aborted {len(open_)} requests: {detail}"
            log.warning("attempt %d of %d: %s", attempt + 1, self._retries + 1, last)
        raise EngineError(
            f"{len(open_)} requests failed {self._retries + 1} times (rollout.request_retries = "
            f"{self._retries}); the last time: {last}"
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
        while True:
            await self._recheck()
            # Looked at under the lock, so that no release between the look and the wait is missed.
            async with self._changed:
                healthy = [e for e in self._engines if e.healthy]
                if not healthy:
                    urls = ", ".join(e.client.url for e in self._engines)
                    raise EngineUnavailable(f"no engine answers ({urls})")
                others = [e for e in healthy if e is not avoid] or healthy
                engine = min(others, key=lambda e: e.in_flight)
                if engine.in_flight == 0 or engine.in_flight + samples <= self.concurrency:
                    engine.in_flight += samples
                    return engine
                await self._changed.wait()

    async def _recheck(self) -> None:
        now = time.monotonic()
        due = [e for e in self._engines if not e.healthy and now - e.checked >= RECHECK_S]
        if not due and not any(e.healthy for e in self._engines):
            due = self._engines
        for engine in due:
            engine.checked = now
            if await engine.client.health():
                log.info("engine %s answers again", engine.client.url)
                # One more failure is enough to take it out again.
                engine.failures = FAILURES_UNTIL_UNHEALTHY - 1
