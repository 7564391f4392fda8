"""Weights by broadcast: rank 0 of the trainer and all engines in one group, a bucket at a time.

Invariants:
- While a bucket is on its way the next is gathered; nothing beyond these two and the tensor that
  comes then is held.
- Until the last bucket is in, the engines report the version with `PARTIAL` behind it.
- The group lasts from sync to sync as long as its engines are the same and none was started again;
  after any failure it is given up, and the next sync makes a new one.
- A member that is gone or hangs ends the sync with an error that names it. An SGLang engine that
  still waits for it answers no more, and is started again by whoever watches it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlcore.errors import EngineError
from rlcore.rollout.client import EngineClient, EngineUnavailable
from rlcore.weights.export import buckets_and_last
from rlcore.weights.group import Backend, WeightGroup, open_group
from rlcore.weights.transport import Buckets, Tensors, in_turn

if TYPE_CHECKING:
    from torch import Tensor

GROUP = "sluice-weights"
GRACE_S = 10.0
"""For engines to answer once a bucket's delivery has failed."""
ADVICE = (
    "an engine that is down is started again and the weights are sent again; where this goes on, "
    "look into the engine's log, or set weights.transport = 'disk', which needs no group"
)


@dataclass(frozen=True, slots=True)
class Members:
    """Whom a group is made of."""

    urls: tuple[str, ...]
    """The engines."""
    starts: tuple[int, ...]
    """How often each was started: one that was started again is in no group."""
    ranks_per_engine: int
    backend: Backend
    address: str
    """Of the trainer, as the engines see it."""


class Group:
    """The trainer's end of the group, from sync to sync."""

    def __init__(self) -> None:
        self._members: Members | None = None
        self._group: WeightGroup | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a group."""
        return self._group is not None

    async def form(self, engines: Sequence[EngineClient], members: Members) -> None:
        """Have a group of these members: the one that there is, or a new one.

        Raises:
            EngineError: an engine did not join.
        """
        if self._group is not None and self._members == members:
            return
        self.close()
        for engine in engines:
            # One of a trainer before this one, or of other engines.
            with contextlib.suppress(EngineError):
                await engine.destroy_weights_update_group(GROUP)
        each = members.ranks_per_engine
        opening = open_group(members.address, 1 + each * len(engines), GROUP, members.backend)
        bodies = [
            {
                "master_address": opening.meeting.master_address,
                "master_port": opening.meeting.master_port,
                "rank_offset": 1 + each * k,
                "world_size": opening.meeting.world_size,
                "group_name": GROUP,
                "backend": members.backend,
            }
            for k in range(len(engines))
        ]
        asked = [
            asyncio.ensure_future(engine.init_weights_update_group(body))
            for engine, body in zip(engines, bodies, strict=True)
        ]
        self._group = await self._both(engines, asked, asyncio.to_thread(opening.join))
        self._members = members

    async def deliver(
        self, engines: Sequence[EngineClient], bucket: dict[str, Tensor], version: str
    ) -> None:
        """Give a bucket to all engines.

        Raises:
            EngineError: one did not take it; the group is given up.
        """
        group = self._group
        assert group is not None
        what = [(name, _dtype(t), list(t.shape)) for name, t in bucket.items()]
        asked = [
            asyncio.ensure_future(engine.update_weights_from_distributed(what, GROUP, version))
            for engine in engines
        ]
        await self._both(engines, asked, asyncio.to_thread(group.broadcast, list(bucket.values())))

    def close(self) -> None:
        """Leave the group; engines that wait for it are told."""
        if self._group is not None:
            self._group.close()
        self._group = self._members = None

    async def _both(
        self, engines: Sequence[EngineClient], asked: Sequence[asyncio.Future[None]], ours: Any
    ) -> Any:
        """Wait for the engines' answers and for our own part; whichever fails ends the others.

        Raises:
            EngineError: one failed.
        """
        own = asyncio.ensure_future(ours)
        tasks = [own, *asked]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if not any(task.done() and task.exception() for task in tasks):
            return own.result()
        # Engines that wait for nobody leave, and so tell those that wait for them.
        leaving = [
            asyncio.ensure_future(engine.destroy_weights_update_group(GROUP))
            for engine, task in zip(engines, asked, strict=True)
            if task.done()
        ]
        self.close()
        await asyncio.gather(_settle(leaving), _settle(tasks))
        raise _failure(engines, asked, own)


async def _settle(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Wait for tasks, well or not; what takes longer than `GRACE_S` is given up."""
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=GRACE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _failure(
    engines: Sequence[EngineClient], asked: Sequence[asyncio.Future[None]], own: Any
) -> EngineError:
    """What is to blame: an engine that is gone, one that hangs, one that says something, we."""
    errors = [task.exception() for task in asked if not task.cancelled()]
    gone = next((error for error in errors if isinstance(error, EngineUnavailable)), None)
    hung = [e.url for e, task in zip(engines, asked, strict=True) if task.cancelled()]
    said = next((error for error in errors if error is not None), None)
    if gone is None and hung:
        what = f"{', '.join(hung)} did not take the weights that were broadcast"
    else:
        what = str(gone or said or own.exception())
    return EngineError(f"{what}; {ADVICE}")


class DistributedTransport:
    """Buckets by broadcast.

    Args:
        group: the trainer's end, which outlasts this sync.
        members: whom it is to have.
        version: of the weights.
        bucket_bytes: most bytes of a bucket.
    """

    def __init__(self, group: Group, members: Members, version: str, bucket_bytes: int) -> None:
        self._group = group
        self._members = members
        self._version = version
        self._bucket_bytes = bucket_bytes

    def parts(self, tensors: Tensors) -> Buckets:
        """Buckets."""
        return buckets_and_last(tensors, self._bucket_bytes)

    def prepare(self, parts: Buckets) -> dict[str, float]:
        """Nothing: tensors are gathered while they are sent."""
        return {}

    async def send(self, engines: Sequence[EngineClient], parts: Buckets) -> None:
        """Bucket by bucket, each to all engines at once."""
        await self._group.form(engines, self._members)

        async def deliver(bucket: dict[str, Tensor], version: str) -> None:
            await self._group.deliver(engines, bucket, version)

        await in_turn(parts, self._version, deliver)

    def confirmed(self) -> None:
        """The group stays for the next sync."""


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
