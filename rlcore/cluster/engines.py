"""The engines of a run: started, watched, and brought back when one has died or hangs.

Invariants:
- An engine keeps its address for as long as the run is open, however often it is started again.
- One that was started again holds the starting model and says so by its weight version; nobody
  generates with it until it has the current weights (`EnginePool` looks at the version).
- One that somebody else started (`rollout.engine_urls`) is waited for instead, and never ended.
- `lock` is held while engines are started again and while weights are pushed, so that neither meets
  the other half done.
- An engine that goes down again and again without an iteration between them ends the run.
- What memory each holds is known here alone: a server that is told twice to give the same back
  ends. While some is given back nobody asks whether it answers, and none is started for want of
  room.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

from rlcore.cluster.engine_actor import EngineSpec
from rlcore.cluster.engine_parts import START_VERSION as START_VERSION
from rlcore.cluster.engine_parts import STOP_PATIENCE_S, EngineParts
from rlcore.cluster.placement import Place
from rlcore.cluster.ray_session import gather
from rlcore.errors import ClusterError, EngineError
from rlcore.rollout.client import EngineClient

log = logging.getLogger("sluice.engines")

RESTARTS = 3
"""How often an engine is started again before an iteration is committed."""
MEMORY_PATIENCE_S = 120.0
"""How long an engine may take to give memory back or to take it."""
IDLE_PATIENCE_S = 10.0
"""How long an engine may take to see that all its requests have been answered."""
Tags = frozenset[str]
WEIGHTS: Tags = frozenset(("weights",))
MEMORY: Tags = WEIGHTS | {"kv_cache", "cuda_graph"}
"""What an engine holds on its GPUs, by SGLang's names."""

Refill = Callable[[Sequence[str]], Awaitable[None]]


class Engines:
    """All engines. `start` them, run `watch` beside the work, `end` them."""

    def __init__(self, spec: EngineSpec, places: Sequence[Sequence[Place]]) -> None:
        """
        Args:
            spec: what each is started with.
            places: where each is put: the nodes of its parts.
        """
        self.urls: list[str] = []
        self.lock = asyncio.Lock()
        self.restarts = 0
        """Since the last iteration was committed, of all engines."""
        self._spec = spec
        self._engines = [EngineParts(spec, rank, nodes) for rank, nodes in enumerate(places)]
        self._starts = [0] * len(places)
        self._launches = [0] * len(places)
        self._holds = [MEMORY] * len(places)
        self._ended: dict[int, str] = {}
        """Those that were ended since they did not give memory back or take it, and why."""

    async def start(self) -> None:
        """Start all, side by side.

        Raises:
            EngineError, ClusterError: one did not come up.
        """
        self.urls = await gather(*(self._launch(rank, None) for rank in range(len(self._engines))))

    async def watch(self, refill: Refill) -> None:
        """Look after the engines until cancelled.

        Args:
            refill: gives the current weights to the engines of these addresses.

        Raises:
            EngineError: one goes down again and again, or does not come up.
        """
        while True:
            await asyncio.sleep(self._spec.check_interval_s)
            if back := await self.mend(released=False):
                await refill(back)

    async def mend(self, *, released: bool = True) -> list[str]:
        """Start every engine again that has died or hangs; the addresses of those.

        Args:
            released: also while engines have given memory back; the caller has made room.

        Raises:
            EngineError: one went down too often, or does not come up.
        """
        async with self.lock:
            if not (released or self._are_whole):
                return []
            reasons = await gather(*(self._probe(rank) for rank in range(len(self._engines))))
            down = {rank: reason for rank, reason in enumerate(reasons) if reason}
            await gather(*(self._restart(rank, reason) for rank, reason in down.items()))
            return [self.urls[rank] for rank in down]

    def launches(self, urls: Sequence[str]) -> tuple[int, ...]:
        """How often the engines of these addresses were started, in all."""
        return tuple(self._launches[self.urls.index(url)] for url in urls)

    def mirrors(self, urls: Sequence[str]) -> tuple[str, ...]:
        """Addresses of the mirrors of weights beside the engines of these addresses."""
        return tuple(self._engines[self.urls.index(url)].mirror for url in urls)

    def progressed(self) -> None:
        """An iteration was committed: what went down before it does not count any more."""
        self.restarts = 0
        self._starts = [0] * len(self._engines)

    def end(self) -> None:
        """End all servers and actors."""
        import ray

        # Actors that still wait for their servers would not hear it.
        stops = [stop for engine in self._engines for stop in engine.end()] if self.urls else []
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=STOP_PATIENCE_S)
        for engine in self._engines:
            engine.kill()

    # --- memory -----------------------------------------------------------------------------------

    async def release(self, keep: Tags) -> bool:
        """Have every engine give back all memory but some; whether any had more. One that does not
        is ended, which frees its memory too, and waits for `mend`. The caller has the lock, and
        nothing is generated.
        """
        more = any(held - keep for held in self._holds)
        await gather(*(self._release(rank, keep) for rank in range(len(self._engines))))
        return more

    async def resume(self, tags: Tags) -> bool:
        """Have every engine hold memory again; whether any had less. Weights come back without
        values. The caller has the lock.

        Raises:
            EngineError: one does not, or was ended before; `mend` brings it back.
        """
        less = any(tags - held for held in self._holds)
        await gather(*(self._resume(rank, tags) for rank in range(len(self._engines))))
        return less

    @property
    def _are_whole(self) -> bool:
        return not self._ended and all(held == MEMORY for held in self._holds)

    async def _release(self, rank: int, keep: Tags) -> None:
        if given := self._holds[rank] - keep:
            try:
                async with self._client(rank) as client:
                    if "kv_cache" in given:
                        await client.flush_cache(IDLE_PATIENCE_S)
                    await client.release_memory(sorted(given))
            except EngineError as error:
                await self._end(rank, error)
        self._holds[rank] &= keep

    async def _resume(self, rank: int, tags: Tags) -> None:
        if rank in self._ended:
            raise EngineError(f"engine {rank} ({self.urls[rank]}) is down: {self._ended[rank]}")
        if taken := tags - self._holds[rank]:
            try:
                async with self._client(rank) as client:
                    await client.resume_memory(sorted(taken))
            except EngineError as error:
                await self._end(rank, error)
                raise
        self._holds[rank] |= tags

    def _client(self, rank: int) -> EngineClient:
        return EngineClient(self.urls[rank], timeout_s=MEMORY_PATIENCE_S)

    async def _end(self, rank: int, error: EngineError) -> None:
        log.error("engine %d is ended, and started again when there is room: %s", rank, error)
        await self._engines[rank].stop()
        self._ended[rank], self._holds[rank] = str(error), frozenset()

    # --- one engine -------------------------------------------------------------------------------

    async def _launch(self, rank: int, port: int | None) -> str:
        self._launches[rank] += 1
        self._holds[rank] = MEMORY
        self._ended.pop(rank, None)
        return await self._engines[rank].start(port)

    async def _probe(self, rank: int) -> str | None:
        """What is wrong with an engine; None if nothing is."""
        if rank in self._ended:
            return self._ended[rank]
        return await self._engines[rank].probe(ask=self._holds[rank] == MEMORY)

    async def _restart(self, rank: int, reason: str) -> None:
        """Start an engine again; one that goes down meanwhile as well is tried again."""
        url = self.urls[rank]
        while True:
            if self._starts[rank] >= RESTARTS:
                raise EngineError(
                    f"engine {rank} ({url}) went down {RESTARTS + 1} times within one iteration, "
                    f"the last time since {reason}; its log is in {self._spec.log_dir}"
                )
            self._starts[rank] += 1
            self.restarts += 1
            log.error("engine %d (%s) is down: %s; it is started again", rank, url, reason)
            try:
                await self._engines[rank].stop()
                await self._launch(rank, urlsplit(url).port)
            except (EngineError, ClusterError) as error:
                reason = str(error)
            else:
                log.warning("engine %d (%s) answers again", rank, url)
                return
