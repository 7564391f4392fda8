"""Groups generated without end, across the iterations that train on them.

The producer keeps as many groups begun as its room allows, and begins the next one when one is
taken. An iteration takes the first that are whole; the others stay as they are, at the engines or
finished. Weights change under way.

Invariants:
- With each batch goes what the producer holds beside it: whole groups, and the prompts of those
  that are not. A producer that is made of that goes on where this one was; what was in flight is
  generated anew. So every prompt is in exactly one place, whatever is killed.
- No group is taken that is older than `max_staleness`: it is begun anew, as soon as it is known.
- A group that fails ends the producer: the next `take` raises, and nothing is left out.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlcore.config.tree import RolloutConfig
from rlcore.rollout.buffer import Group, in_order, number
from rlcore.rollout.generate import Generator
from rlcore.rollout.loop import RolloutBatch
from rlcore.rollout.metrics import rollout_metrics
from rlcore.rollout.staleness import is_too_old, staleness_metrics
from rlcore.rollout.supply import RolloutRequest, Supply
from rlcore.sample import Sample


@dataclass(frozen=True)
class _Begun:
    """A group at the engines."""

    group: Group
    version: int
    """The newest policy that was known of when it was begun: none of its tokens is older."""


class Producer:
    """Goes on from one rollout to the next; `close` it.

    Args:
        supply: of groups, as the first rollout begins.
        config: the rollout section, with `max_staleness`.
        generator: fills in responses, by a pool that nobody else uses.
        iterations: of the run: no more is begun than these need.
        num_gpus: of all engines, for the metrics.
    """

    def __init__(
        self,
        supply: Supply,
        config: RolloutConfig,
        generator: Generator,
        iterations: int,
        num_gpus: int = 1,
    ) -> None:
        assert config.max_staleness is not None
        self._supply = supply
        self._config = config
        self._most = config.max_staleness
        self._generator = generator
        self._pool = generator.pool
        self._iterations = iterations
        self._num_gpus = num_gpus
        self._open: dict[asyncio.Task[list[Sample]], _Begun] = {}
        self._whole: list[Group] = []
        self._failure: BaseException | None = None
        self._news = asyncio.Event()
        self._room = 0
        self._version = 0
        self._too_old = 0
        self._since = time.perf_counter()
        self._end: dict[str, int] | None = None
        self._after: tuple[object, ...] | None = None

    def follows(self, request: RolloutRequest) -> bool:
        """Whether a request goes on from the batch that was taken last."""
        return self._after == _place_of(request.iteration, request.cursor, request.buffer)

    async def take(self, request: RolloutRequest) -> RolloutBatch:
        """The next whole groups, in the order of the data plan, and what is held beside them.

        Raises:
            EngineError, DataError, PluginError: a group could not be generated.
        """
        began, want = time.perf_counter(), self._config.rollout_batch_size
        i = request.iteration
        self._set_policy(i, int(request.version or 0))
        self._make_room(i)
        while len(self._whole) < want and self._failure is None:
            self._news.clear()
            await self._news.wait()
        if self._failure is not None:
            raise self._failure
        taken, self._whole = in_order(self._whole[:want]), self._whole[want:]
        batch = self._batch(request, taken, waited=time.perf_counter() - began)
        self._after = _place_of(i + 1, batch.cursor, batch.left)
        self._make_room(i + 1)
        return batch

    async def close(self) -> None:
        """End what is at the engines."""
        tasks, self._open, self._room = list(self._open), {}, 0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.close()

    # --- keeping on -------------------------------------------------------------------------------

    def _set_policy(self, iteration: int, version: int) -> None:
        """The engines hold a policy; what is too old for an iteration by now is begun anew."""
        self._version = version
        self._pool.version, self._pool.oldest = str(version), max(0, iteration - self._most)
        whole, old, self._whole = self._whole, list[Group](), []
        for group in whole:
            too_old = is_too_old(group.samples, iteration, self._most)
            (old if too_old else self._whole).append(group)
        for task, begun in list(self._open.items()):
            if iteration - begun.version > self._most:
                del self._open[task]
                task.cancel()
                old.append(begun.group)
        self._too_old += len(old)
        anew = [Group(group.place, self._supply.anew(group.place)) for group in in_order(old)]
        self._supply.waiting = anew + self._supply.waiting

    def _make_room(self, iteration: int) -> None:
        """Room for a batch and those made ahead of it, as far as the run goes; fill it."""
        ahead = min(self._config.async_buffer_size, self._iterations - 1 - iteration)
        self._room = max(0, ahead + 1) * self._config.rollout_batch_size
        self._fill()

    def _fill(self) -> None:
        missing = self._room - len(self._open) - len(self._whole)
        for group in self._supply.take(missing) if missing > 0 else ():
            made = self._generator.run(group.samples, len(group.samples), self._pool.version)
            task = asyncio.ensure_future(made)
            self._open[task] = _Begun(group, self._version)
            task.add_done_callback(self._ended)
        # The supply remembers what it gave, which here has no end.
        self._supply.forget()

    def _ended(self, task: asyncio.Task[list[Sample]]) -> None:
        begun = self._open.pop(task, None)
        if begun is None or task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._failure, self._room = self._failure or error, 0
        else:
            self._whole.append(Group(begun.group.place, task.result()))
        self._news.set()

    # --- what a rollout is ------------------------------------------------------------------------

    def _batch(self, request: RolloutRequest, taken: list[Group], waited: float) -> RolloutBatch:
        """Whole groups as a rollout, with what is held beside them at this moment."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        samples = number(taken)
        cursor = self._span()
        # What is in flight is generated anew by whoever goes on from here.
        in_flight = [begun.group.place for begun in self._open.values()]
        blank = [Group(place, self._supply.anew(place)) for place in in_flight]
        metrics = rollout_metrics(
            samples, seconds, self._num_gpus, [sample.response_length for sample in samples]
        )
        if self._config.custom_generate_function_path is None:
            # Several policies of one request are no turns.
            metrics = {k: v for k, v in metrics.items() if not k.startswith("multi_turn/")}
        metrics |= staleness_metrics(samples, request.iteration, self._most)
        metrics |= {
            "rollout/epoch": cursor["epoch"] + cursor["offset"] / cursor["size"],
            "rollout/producer/in_flight_groups": float(len(in_flight)),
            "rollout/producer/whole_groups": float(len(self._whole)),
            "rollout/producer/too_old_groups": float(self._too_old + self._supply.too_old),
            "rollout/producer/wait_seconds": waited,
        }
        self._too_old = self._supply.too_old = 0
        left = in_order([*self._whole, *blank, *self._supply.waiting])
        return RolloutBatch(samples, cursor, metrics, seconds, left)

    def _span(self) -> dict[str, int]:
        """Where the prompts begun since the last batch begin, and where the next ones do."""
        whole = self._supply.cursor
        before = self._end or {"next_epoch": whole["epoch"], "next_offset": whole["offset"]}
        self._end = whole
        return whole | {"epoch": before["next_epoch"], "offset": before["next_offset"]}


class Endless:
    """The producer that there is, if any, for one rollout at a time."""

    def __init__(self) -> None:
        self._producer: Producer | None = None
        self._taking = asyncio.Lock()

    async def take(self, request: RolloutRequest, make: Callable[[], Producer]) -> RolloutBatch:
        """The next groups: of the producer that goes on from there, else of a new one.

        Args:
            request: which rollout, and where the store says that it begins.
            make: makes a producer that begins there.
        """
        async with self._taking:
            if self._producer is None or not self._producer.follows(request):
                await self._close()
                self._producer = make()
            try:
                return await self._producer.take(request)
            except BaseException:
                await self._close()
                raise

    async def close(self) -> None:
        """End what is at the engines."""
        async with self._taking:
            await self._close()

    async def _close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await producer.close()


def _place_of(
    iteration: int, cursor: dict[str, int] | None, buffer: Sequence[Group]
) -> tuple[object, ...]:
    """Where a rollout stands: its number, the next new prompt, and the groups left before it."""
    ends = (cursor or {}).get("next_epoch"), (cursor or {}).get("next_offset")
    return (iteration, *ends, tuple(group.place for group in buffer))
