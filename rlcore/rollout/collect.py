"""Groups generated side by side until enough are taken; what is left is cut off.

With a judge, a group is scored and filtered once it is whole, and more prompts are begun where
what is still in play cannot fill the batch.

Invariants:
- Which groups are taken depends on which are whole first; their order does not: it is the plan's.
- Every group that was judged is taken or dropped: none is scored whose scores are not kept.
- Prompts are begun for one batch in at most 1 + `max_refills` rounds.
- When a collection ends, well or not, nothing that it began runs at an engine any more.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rlcore.data import Place
from rlcore.errors import FilterError
from rlcore.rollout.buffer import Group, in_order
from rlcore.rollout.filters.rules import Verdict
from rlcore.rollout.pool import EnginePool
from rlcore.rollout.rewards.protocol import Score
from rlcore.sample import Sample

log = logging.getLogger("sluice.rollout")

PROGRESS_S = 10.0
"""Seconds between two lines on how far a collection is."""

Generate = Callable[[list[Sample]], Awaitable[list[Sample]]]
More = Callable[[], list[Group]]
"""Gives the groups of one more round."""


@dataclass(frozen=True)
class Judged:
    """What was said of a whole group: a score for each sample, and whether it is trained on."""

    scores: list[Score]
    verdict: Verdict


Judge = Callable[[list[Group]], Awaitable[list[Judged]]]
"""Scores and filters whole groups."""


@dataclass
class Collected:
    """What a collection gave; groups in the order of the plan.

    Attributes:
        taken: make the batch.
        rest: as far as they came.
        dropped: by the filter.
        judged: of those taken and dropped, where there was a judge.
        refills: rounds after the first.
    """

    taken: list[Group] = field(default_factory=list)
    rest: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    judged: dict[Place, Judged] = field(default_factory=dict)
    refills: int = 0

    @property
    def reasons(self) -> Counter[str]:
        """Groups dropped, by reason."""
        return Counter(self.reason_of(group) for group in self.dropped)

    def reason_of(self, group: Group) -> str:
        """Why a group was dropped."""
        return self.judged[group.place].verdict.reason or "filter"


@dataclass(frozen=True)
class Filtering:
    """How a collection decides over whole groups.

    Attributes:
        judge: scores and filters them.
        more: gives more groups.
        max_refills: how often it may be asked.
        what: the filter's setting and value, for errors.
    """

    judge: Judge
    more: More
    max_refills: int
    what: str


async def collect(
    groups: Sequence[Group],
    want: int,
    generate: Generate,
    pool: EnginePool,
    filtering: Filtering | None = None,
) -> Collected:
    """Generate many groups and take those that are whole, and that a filter passes, first.

    Args:
        groups: to begin with, in the order of the plan; without `filtering` at least `want`.
        want: how many to take.
        generate: fills in the samples of one group.
        pool: the engines that `generate` uses; nobody else uses them meanwhile.
        filtering: None: whole groups are taken as they are.

    Raises:
        FilterError: the filter passed too few groups of all rounds.
        EngineError, DataError, PluginError, RewardError: as `generate` and the judge; the first
            that fails ends the others.
    """
    work = _Collection(want, generate, filtering)
    work.begin(groups)
    try:
        while len(work.out.taken) < want:
            await work.step()
        await pool.abort_all(work.open)
        work.end()
    finally:
        for task in work.tasks:
            task.cancel()
        # Their connections close with them, and an engine ends a request that nobody waits for.
        await asyncio.gather(*work.tasks, return_exceptions=True)
    found = work.out
    for part in (found.taken, found.rest, found.dropped):
        part[:] = in_order(part)
    return found


class _Collection:
    """A collection at work."""

    def __init__(self, want: int, generate: Generate, filtering: Filtering | None) -> None:
        self.out = Collected()
        self.open: dict[asyncio.Task[Group], None] = {}
        """Groups that are generated, in the order in which they were begun."""
        self._want = want
        self._generate = generate
        self._filtering = filtering
        self._whole: list[Group] = []
        self._judging: asyncio.Task[list[Judged]] | None = None
        self._judged: list[Group] = []
        self._begun = 0
        self._told = time.monotonic()

    @property
    def tasks(self) -> list[asyncio.Task[Group] | asyncio.Task[list[Judged]]]:
        """All that runs."""
        return [*self.open, *([self._judging] if self._judging else [])]

    @property
    def _in_play(self) -> int:
        """Groups that were begun and not dropped."""
        return self._begun - len(self.out.dropped)

    def begin(self, groups: Sequence[Group]) -> None:
        """Have groups generated."""

        async def one(group: Group) -> Group:
            return Group(group.place, await self._generate(group.samples))

        for group in groups:
            self.open[asyncio.create_task(one(group))] = None
            self._begun += 1

    async def step(self) -> None:
        """Begin what is needed, wait for news and take it in."""
        self._refill()
        if self._filtering is not None:
            self._begin_judging(self._filtering.judge)
        done, _ = await asyncio.wait(self.tasks, return_when=asyncio.FIRST_COMPLETED)
        if self._judging in done and self._judging is not None:
            for group, judged in zip(self._judged, self._judging.result(), strict=True):
                self._decide(group, judged)
            self._judging = None
        for task in [task for task in self.open if task in done]:
            del self.open[task]
            self._whole.append(task.result())
        if self._filtering is None:
            room = self._want - len(self.out.taken)
            self.out.taken += self._whole[:room]
            del self._whole[:room]
        self._tell()

    def end(self) -> None:
        """Take in what has ended otherwise."""
        self.out.rest = [*self._whole, *(task.result() for task in self.open)]

    def _begin_judging(self, judge: Judge) -> None:
        """Have as many groups judged as there is room for: more would be scored for nothing."""
        room = self._want - len(self.out.taken)
        if self._judging is None and self._whole:
            self._judged, self._whole = self._whole[:room], self._whole[room:]
            self._judging = asyncio.ensure_future(judge(self._judged))

    def _decide(self, group: Group, judged: Judged) -> None:
        verdict = judged.verdict
        self.out.judged[group.place] = judged
        needed = verdict.keep_when_insufficient and self._in_play <= self._want
        (self.out.taken if verdict.keep or needed else self.out.dropped).append(group)

    def _refill(self) -> None:
        filtering = self._filtering
        while filtering is not None and self._in_play < self._want:
            if self.out.refills == filtering.max_refills:
                raise FilterError(
                    f"{filtering.what} passed {len(self.out.taken)} of {self._counts()}, and a "
                    f"batch needs rollout.rollout_batch_size = {self._want}; no more prompts are "
                    f"begun for it after rollout.max_refills = {filtering.max_refills} rounds: use "
                    "a filter that keeps more, prompts that are neither too easy nor too hard, or "
                    "raise rollout.max_refills"
                )
            self.out.refills += 1
            self.begin(filtering.more())

    def _counts(self) -> str:
        reasons = ", ".join(f"{n} by {name}" for name, n in sorted(self.out.reasons.items()))
        return (
            f"{len(self.out.judged)} groups that were judged (dropped: {reasons or 'none'}; "
            f"{self._begun} begun)"
        )

    def _tell(self) -> None:
        if time.monotonic() - self._told > PROGRESS_S:
            self._told = time.monotonic()
            judged = f", of {self._counts()}" if self._filtering else ""
            log.info("rollout: %d of %d groups%s", len(self.out.taken), self._want, judged)
