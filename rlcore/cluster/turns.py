"""Who has the memory of GPUs that trainer and engines share.

    generate, evaluate      trainer: nothing              engines: all
    train, restore          trainer: all                  engines: nothing
    push weights            trainer: at least its weights engines: weights, to be overwritten
    export                  trainer: at least its weights engines: weights, which stay
    refill one engine       trainer: its weights          engines: all, since others generate

Whoever needs the actors says which of these rows he needs; what is too much is given back first,
and only then is taken what is missing. Where nothing is shared, or `cluster.offload_train` and
`cluster.offload_rollout` are off, nothing moves.

Invariants:
- Memory moves for one at a time.
- An engine that was started again, and a trainer, hold all: what they gave back is known of the
  processes that run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from rlcore.cluster.actors import Actors
from rlcore.cluster.engines import MEMORY, WEIGHTS, Tags
from rlcore.errors import ClusterError, EngineError

log = logging.getLogger("sluice.cluster")

Held = Literal["nothing", "weights", "all"]
"""What the trainer has on its device."""
ORDER: tuple[Held, ...] = ("nothing", "weights", "all")


class Turns:
    """Moves memory between the trainer and the engines of a run.

    Args:
        actors: of the run.
        trainer: whether the trainer gives its memory back; the actors have let it do so at first.
        engines: whether the engines do.
    """

    def __init__(self, actors: Actors, *, trainer: bool, engines: bool) -> None:
        self._actors = actors
        self._trainer_moves = trainer
        self._engines_move = engines
        self._lock = asyncio.Lock()
        self._held: Held = "nothing" if trainer else "all"
        self._ahead: asyncio.Future[None] | None = None
        self._figures: dict[str, float] = {}

    # --- turns ------------------------------------------------------------------------------------

    async def generating(self) -> None:
        """The engines hold all, the trainer nothing.

        Raises:
            EngineError: an engine did not take its memory; mend it.
        """
        await self._hold("nothing", MEMORY)

    async def training(self) -> None:
        """The trainer holds all, the engines nothing: what their weights were is lost."""
        await self._hold("all", frozenset(), resume=False)

    async def pushing(self) -> None:
        """Weights on both sides; those of engines that gave them back have no values.

        Raises:
            EngineError: an engine did not take its memory; mend it.
        """
        await self._hold("weights", WEIGHTS)

    async def exporting(self) -> None:
        """The trainer holds its weights. Engines keep theirs, if they have any."""
        await self._hold("weights", WEIGHTS, resume=False)

    async def refilling(self) -> None:
        """The trainer holds its weights beside engines that generate."""
        await self._hold("weights", MEMORY, resume=False)

    async def mending(self) -> None:
        """The trainer holds nothing, so that engines can be started."""
        await self._hold("nothing", MEMORY, resume=False)

    def begin_pushing(self) -> None:
        """Have the engines take memory for their weights while the trainer does something else.

        How that ends is for `pushing` to find.
        """

        async def ahead() -> None:
            with contextlib.suppress(EngineError, ClusterError):
                await self._move("weights", WEIGHTS, resume=True)

        if self._engines_move:
            self._ahead = asyncio.ensure_future(ahead())

    def trainer_restarted(self) -> None:
        """The trainer's processes are new: what they load lies on the device."""
        self._held = "all"

    def take_figures(self) -> dict[str, float]:
        """What was measured at switches since the last call: metrics by name."""
        figures, self._figures = self._figures, {}
        return figures

    async def close(self) -> None:
        """Wait for nothing any more."""
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)

    # --- moves ------------------------------------------------------------------------------------

    async def _hold(self, trainer: Held, engines: Tags, *, resume: bool = True) -> None:
        if not (self._trainer_moves or self._engines_move):
            return
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            await ahead
        await self._move(trainer, engines, resume=resume)

    async def _move(self, trainer: Held, engines: Tags, *, resume: bool) -> None:
        async with self._lock, self._actors.engines.lock:
            if self._engines_move:
                with self._timed("release") as moved:
                    moved.append(await self._actors.engines.release(engines))
            if self._trainer_moves:
                await self._move_trainer(trainer)
            if self._engines_move and resume:
                with self._timed("resume_weights" if engines == WEIGHTS else "resume") as moved:
                    moved.append(await self._actors.engines.resume(engines))

    async def _move_trainer(self, wanted: Held) -> None:
        if wanted == "nothing":
            if self._held != "nothing":
                with self._timed("offload") as moved:
                    moved.append(await self._offload())
                self._held = "nothing"
        elif ORDER.index(self._held) < ORDER.index(wanted):
            with self._timed("onload") as moved:
                self._note(await self._actors.trainer.onload(weights_only=wanted == "weights"))
                moved.append(True)
            self._held = wanted

    async def _offload(self) -> bool:
        try:
            self._note(await self._actors.trainer.offload())
        except ClusterError as error:
            if not self._actors.trainer_is_lost:
                raise
            # Its memory is free then; whoever needs it next starts it again.
            log.error("%s, and with it its memory", error)
            return False
        return True

    def _note(self, found: dict[str, float]) -> None:
        self._figures |= {f"memory/{name}": value for name, value in found.items()}

    @contextmanager
    def _timed(self, move: str) -> Iterator[list[bool]]:
        """Count a move's seconds if what it appends says that something moved."""
        start, moved = time.perf_counter(), list[bool]()
        yield moved
        if any(moved):
            name = f"memory/seconds_{move}"
            self._figures[name] = self._figures.get(name, 0.0) + time.perf_counter() - start
