"""The engines of a run: started, watched, and brought back when one has died or hangs.

Invariants:
- An engine keeps its address for as long as the run is open, however often it is started again.
- One that was started again holds the starting model and says so by its weight version; nobody
  generates with it until it has the current weights (`EnginePool` looks at the version).
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
from typing import Any
from urllib.parse import urlsplit

from rlcore.cluster.actor_logs import Relay
from rlcore.cluster.engine_actor import EngineActor, EngineSpec
from rlcore.cluster.placement import Place
from rlcore.cluster.ray_session import actor_class, call, gather
from rlcore.errors import ClusterError, EngineError
from rlcore.rollout.client import EngineClient

log = logging.getLogger("sluice.engines")

START_VERSION = 0
"""Policy version of the starting model."""
RESTARTS = 3
"""How often an engine is started again before an iteration is committed."""
STOP_PATIENCE_S = 10.0
MEMORY_PATIENCE_S = 120.0
"""How long an engine may take to give memory back or to take it."""
IDLE_PATIENCE_S = 10.0
"""How long an engine may take to see that all its requests have been answered."""
Tags = frozenset[str]
WEIGHTS: Tags = frozenset(("weights",))
MEMORY: Tags = WEIGHTS | {"kv_cache", "cuda_graph"}
"""What an engine holds on its GPUs, by SGLang's names."""
START_GRACE_S = 30.0
"""What an engine's own limit for its start does not cover: the start of its actor."""

Refill = Callable[[Sequence[str]], Awaitable[None]]


class Engines:
    """All engines. `start` them, run `watch` beside the work, `end` them."""

    def __init__(self, spec: EngineSpec, places: Sequence[Place]) -> None:
        """
        Args:
            spec: what each is started with.
            places: where each is put.
        """
        self.urls: list[str] = []
        self.lock = asyncio.Lock()
        self.restarts = 0
        """Since the last iteration was committed, of all engines."""
        self._spec = spec
        self._places = places
        self._actors = [self._make(rank) for rank in range(len(places))]
        self._starts = [0] * len(places)
        self._launches = [0] * len(places)
        self._holds = [MEMORY] * len(places)
        self._ended: dict[int, str] = {}
        """Those that were ended since they did not give memory back or take it, and why."""
        self._relay = Relay()

    async def start(self) -> None:
        """Start all, side by side.

        Raises:
            EngineError, ClusterError: one did not come up.
        """
        self.urls = await gather(*(self._launch(rank, None) for rank in range(len(self._actors))))

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
            reasons = await gather(*(self._probe(rank) for rank in range(len(self._actors))))
            down = {rank: reason for rank, reason in enumerate(reasons) if reason}
            await gather(*(self._restart(rank, reason) for rank, reason in down.items()))
            return [self.urls[rank] for rank in down]

    def launches(self, urls: Sequence[str]) -> tuple[int, ...]:
        """How often the engines of these addresses were started, in all."""
        return tuple(self._launches[self.urls.index(url)] for url in urls)

    def progressed(self) -> None:
        """An iteration was committed: what went down before it does not count any more."""
        self.restarts = 0
        self._starts = [0] * len(self._actors)

    def end(self) -> None:
        """End all servers and actors."""
        import ray

        # Actors that still wait for their servers would not hear it.
        stops = [actor.stop.remote() for actor in self._actors] if self.urls else []
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=STOP_PATIENCE_S)
        for actor in self._actors:
            ray.kill(actor)

    # --- memory -----------------------------------------------------------------------------------

    async def release(self, keep: Tags) -> bool:
        """Have every engine give back all memory but some; whether any had more. One that does not
        is ended, which frees its memory too, and waits for `mend`. The caller has the lock, and
        nothing is generated.
        """
        more = any(held - keep for held in self._holds)
        await gather(*(self._release(rank, keep) for rank in range(len(self._actors))))
        return more

    async def resume(self, tags: Tags) -> bool:
        """Have every engine hold memory again; whether any had less. Weights come back without
        values. The caller has the lock.

        Raises:
            EngineError: one does not, or was ended before; `mend` brings it back.
        """
        less = any(tags - held for held in self._holds)
        await gather(*(self._resume(rank, tags) for rank in range(len(self._actors))))
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
        await self._stop(rank)
        self._ended[rank], self._holds[rank] = str(error), frozenset()

    # --- one engine -------------------------------------------------------------------------------

    def _make(self, rank: int) -> Any:
        place = self._places[rank]
        maker = actor_class(EngineActor).options(**place.options)
        return maker.remote(self._spec, rank, place.gpus)

    async def _launch(self, rank: int, port: int | None) -> str:
        actor, what = self._actors[rank], f"engine {rank}"
        self._launches[rank] += 1
        self._holds[rank] = MEMORY
        self._ended.pop(rank, None)
        starting = actor.start.remote(str(START_VERSION), port)
        deadline_s = self._spec.start_timeout_s + START_GRACE_S
        try:
            return await call(starting, deadline_s=deadline_s, what=what)
        finally:
            self._relay.fetch(actor, what)

    async def _probe(self, rank: int) -> str | None:
        """What is wrong with an engine; None if nothing is."""
        if rank in self._ended:
            return self._ended[rank]
        patience = self._spec.check_timeout_s
        try:
            return await call(
                # To say that it is well it may have to generate.
                self._actors[rank].probe.remote(patience, ask=self._holds[rank] == MEMORY),
                deadline_s=2 * patience,
                what=f"the actor of engine {rank}",
            )
        except ClusterError as error:
            return str(error)

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
                await self._stop(rank)
                await self._launch(rank, urlsplit(url).port)
            except (EngineError, ClusterError) as error:
                reason = str(error)
            else:
                log.warning("engine %d (%s) answers again", rank, url)
                return

    async def _stop(self, rank: int) -> None:
        """End what is left of an engine."""
        import ray

        actor = self._actors[rank]
        try:
            # What hangs would not end by itself.
            await call(actor.stop.remote(0.0), deadline_s=STOP_PATIENCE_S, what=f"engine {rank}")
        except ClusterError:
            # The actor is gone or hangs as well. Its server goes with it.
            ray.kill(actor)
            self._actors[rank] = self._make(rank)
