"""One engine of a run: the actors that make it up, one on each of its nodes.

Invariants:
- The first part answers requests; the others only compute for it.
- All parts are started together and ended together: without one of them the others are of no use.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from rlcore.cluster.actor_logs import Relay
from rlcore.cluster.engine_actor import EngineActor, EngineSpec, Part
from rlcore.cluster.external_engine import ExternalEngine
from rlcore.cluster.placement import Place
from rlcore.cluster.ray_session import actor_class, call, gather
from rlcore.errors import ClusterError

START_VERSION = 0
"""Policy version of the starting model."""
STOP_PATIENCE_S = 10.0
START_GRACE_S = 30.0
"""What an engine's own limit for its start does not cover: the start of its actor."""


class EngineParts:
    """Engine number `rank` of a run.

    Args:
        spec: what it is started with.
        rank: its number.
        places: where its parts are put, a node each.
    """

    def __init__(self, spec: EngineSpec, rank: int, places: Sequence[Place]) -> None:
        self._spec = spec
        self._rank = rank
        self._places = places
        self._relay = Relay()
        self._actors = [self._make(place) for place in places]
        self.mirror = ""
        """Address of the mirror of weights beside it, where it has one."""

    async def start(self, port: int | None) -> str:
        """Start all parts side by side, and wait until the first one answers.

        Args:
            port: of the first one; None: a free one.

        Returns:
            The engine's URL.

        Raises:
            EngineError, ClusterError: a part did not come up.
        """
        first, count = self._actors[0], len(self._actors)
        deadline_s = self._spec.start_timeout_s + START_GRACE_S
        parts: list[Part | None] = [None]
        if count > 1:
            meeting = first.meeting.remote()
            address = await call(meeting, deadline_s=deadline_s, what=self._name(0))
            parts = [Part(k, count, address) for k in range(count)]
        starting = [
            call(
                actor.start.remote(str(START_VERSION), None if k else port, part),
                deadline_s=deadline_s,
                what=self._name(k),
            )
            for k, (actor, part) in enumerate(zip(self._actors, parts, strict=True))
        ]
        try:
            url = (await self._all_of(starting))[0]
            if self._spec.mirror is not None:
                # An actor that was made anew has another one.
                asked = first.mirror.remote()
                self.mirror = await call(asked, deadline_s=deadline_s, what=self._name(0))
            return url
        finally:
            for k, actor in enumerate(self._actors):
                self._relay.fetch(actor, self._name(k))

    async def probe(self, *, ask: bool) -> str | None:
        """What is wrong with the engine; None if nothing is.

        Args:
            ask: whether it is to answer, for which it may have to generate.
        """
        found = await gather(*(self._probe(k, ask) for k in range(len(self._actors))))
        return next(filter(None, found), None)

    async def stop(self) -> None:
        """End what is left of it, so that it may be started again."""
        await gather(*(self._stop(k) for k in range(len(self._actors))))

    def end(self) -> list[Any]:
        """Begin to end its servers; what to wait for."""
        return [actor.stop.remote() for actor in self._actors]

    def kill(self) -> None:
        """End its actors, and whatever server of theirs still runs."""
        import ray

        for actor in self._actors:
            ray.kill(actor)

    async def _all_of(self, starting: Sequence[Awaitable[str]]) -> list[str]:
        """All URLs. When a part does not come up the others are ended, which would wait for it."""
        waiting = [asyncio.ensure_future(one) for one in starting]
        try:
            done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            if left:
                await self.stop()
                await asyncio.gather(*left, return_exceptions=True)
            failed = [one for one in done if one.exception()]
            return [one.result() for one in failed or waiting]
        finally:
            for one in waiting:
                one.cancel()

    def _name(self, k: int) -> str:
        engine = f"engine {self._rank}"
        return engine if len(self._actors) == 1 else f"{engine} (node {k})"

    def _make(self, place: Place) -> Any:
        if self._spec.urls:
            return actor_class(ExternalEngine).remote(self._spec, self._rank)
        maker = actor_class(EngineActor).options(**place.options)
        return maker.remote(self._spec, self._rank, place.gpus, place.host)

    async def _probe(self, k: int, ask: bool) -> str | None:
        patience = self._spec.check_timeout_s
        try:
            return await call(
                self._actors[k].probe.remote(patience, ask),
                deadline_s=2 * patience,
                what=f"the actor of {self._name(k)}",
            )
        except ClusterError as error:
            return str(error)

    async def _stop(self, k: int) -> None:
        import ray

        actor = self._actors[k]
        try:
            # What hangs would not end by itself.
            await call(actor.stop.remote(0.0), deadline_s=STOP_PATIENCE_S, what=self._name(k))
        except ClusterError:
            # The actor is gone or hangs as well. Its server goes with it.
            ray.kill(actor)
            self._actors[k] = self._make(self._places[k])
