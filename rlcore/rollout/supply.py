"""Where the groups of a rollout come from: what the rollout before left, then new prompts.

Invariants:
- What is handed out depends on the request, the data and how often was asked, never on time.
- A group is handed out once. What was not handed out is left: `waiting`, or behind the cursor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.config.tree import RolloutConfig
from rlcore.data import Cursor, Dataset, Place, Prompt, places, span
from rlcore.rollout.buffer import Group, go_on, line_up, number
from rlcore.rollout.generate import sample_seed
from rlcore.rollout.groups import response_lengths, split_executions
from rlcore.rollout.staleness import is_too_old
from rlcore.sample import Sample, Status


@dataclass(frozen=True)
class RolloutRequest:
    """Which rollout to make.

    Attributes:
        iteration: counted from 0; sets its samples' seeds apart.
        run_seed: shuffles the data and seeds the samples.
        shuffle: visit each epoch in a drawn order.
        cursor: of the rollout before; None at the start.
        version: policy version that the engines must report.
        buffer: what the rollout before left.
    """

    iteration: int
    run_seed: int
    shuffle: bool
    cursor: dict[str, int] | None
    version: str | None
    buffer: Sequence[Group] = ()


@dataclass(frozen=True)
class Picked:
    """A buffer as somebody has sorted it: what goes on, what waits, what is given up."""

    groups: list[Group]
    waiting: list[Group]
    gone: list[Group]


Pick = Callable[[int, Sequence[Group], int], Picked | None]
"""Sorts a buffer, given iteration, buffer and how many may go on; None: in its order."""


class Supply:
    """Hands out groups, numbered and seeded, ready to be generated.

    Args:
        request: of the rollout.
        dataset: the prompts.
        tokenizer: of the model.
        config: the rollout section.
        pick: sorts the buffer.

    Attributes:
        waiting: groups of the buffer that were not handed out.
        gone: groups of the buffer that `pick` gave up.
        groups: all that were, in that order.
        before: response tokens that each execution had then, by its place.
        from_buffer: how many came from the buffer.
        too_old: how many of those were begun anew, being older than `max_staleness`.
    """

    def __init__(
        self,
        request: RolloutRequest,
        dataset: Dataset,
        tokenizer: Any,
        config: RolloutConfig,
        pick: Pick = lambda iteration, buffer, n: None,
    ) -> None:
        self._request = request
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._config = config
        self._order = dataset.order(request.run_seed, request.shuffle)
        self._start = self._end = Cursor.after(request.cursor)
        self._seen: dict[str, int] = {}
        self._pick = pick
        self.waiting = list(request.buffer)
        self.gone: list[Group] = []
        self.groups: list[Group] = []
        self.before: dict[Place, list[int]] = {}
        self.from_buffer = 0
        self.too_old = 0

    def __len__(self) -> int:
        return len(self._dataset)

    def first(self) -> list[Group]:
        """What a rollout begins with: see `rlcore.rollout.buffer.line_up`."""
        want, room = self._config.rollout_batch_size, self._at_a_time
        picked = self._pick(self._request.iteration, self.waiting, room)
        if picked is None:
            line = line_up(self.waiting, self._config)
            self.waiting = line.waiting
            return self._ready(line.groups, line.new)
        self._sort(picked)
        whole = sum(group.is_whole for group in picked.groups)
        return self._ready(picked.groups, 0 if whole >= want else room - len(picked.groups))

    def more(self) -> list[Group]:
        """As many prompts again as a rollout begins at a time."""
        return self.take(self._at_a_time)

    def take(self, n: int) -> list[Group]:
        """The next `n` groups: of the buffer first, then new ones."""
        picked = self._pick(self._request.iteration, self.waiting, n)
        if picked is None:
            picked = Picked(self.waiting[:n], self.waiting[n:], [])
        self._sort(picked)
        return self._ready(picked.groups, n - len(picked.groups))

    def forget(self) -> None:
        """Drop `groups` and `before`: whoever asks without end has no use for them."""
        self.groups, self.before = [], {}

    def _sort(self, picked: Picked) -> None:
        self.waiting = picked.waiting
        self.gone += picked.gone

    @property
    def _at_a_time(self) -> int:
        return self._config.over_sampling_batch_size or self._config.rollout_batch_size

    def anew(self, place: Place) -> list[Sample]:
        """Samples of the prompt at a place, nothing generated."""
        position = self._order.position_at(place)
        return self._new(self._dataset.tokenized([position], self._tokenizer)[0])

    @property
    def cursor(self) -> dict[str, int]:
        """Where the new prompts began and where the next ones do."""
        return span(self._start, self._end)

    @property
    def epoch(self) -> float:
        """Epochs before the first new prompt."""
        return self._start.epoch + self._start.offset / len(self._dataset)

    def _new(self, prompt: Prompt) -> list[Sample]:
        return new_samples(prompt, self._config.n_samples_per_prompt)

    def _begin(self, n: int) -> list[Group]:
        """The next `n` prompts, nothing generated."""
        size, start = len(self._dataset), self._end
        picked, self._end = self._order.plan(start, n)
        prompts = self._dataset.tokenized(picked, self._tokenizer)
        pairs = zip(places(start, size, n), prompts, strict=True)
        return [Group(place, self._new(prompt)) for place, prompt in pairs]

    def _ready(self, old: Sequence[Group], new: int) -> list[Group]:
        request = self._request
        begun = self._begin(new)
        groups = go_on(self._fresh(old), request.version, self._config, self.anew) + begun
        set_seeds(groups, request.run_seed, f"rollout-{request.iteration}", self._seen)
        number(groups, (len(self.groups), sum(len(group.samples) for group in self.groups)))
        for group in groups:
            self.before[group.place] = response_lengths(group.samples)
        self.groups += groups
        self.from_buffer += len(old)
        return groups

    def _fresh(self, old: Sequence[Group]) -> list[Group]:
        """Groups of the buffer; what is too old to be trained on is begun anew."""
        most, out = self._config.max_staleness, []
        for group in old:
            too_old = is_too_old(group.samples, self._request.iteration, most)
            self.too_old += too_old
            out.append(Group(group.place, self.anew(group.place)) if too_old else group)
        return out


def make_groups(prompts: list[Prompt], n: int, run_seed: int, scope: str) -> list[Sample]:
    """`n` pending samples of each prompt, numbered, each with a seed of its own."""
    groups = [Group((0, k), new_samples(prompt, n)) for k, prompt in enumerate(prompts)]
    set_seeds(groups, run_seed, scope)
    return number(groups)


def new_samples(prompt: Prompt, n: int) -> list[Sample]:
    """`n` pending samples of a prompt."""
    return [prompt.sample() for _ in range(n)]


def set_seeds(
    groups: Sequence[Group], run_seed: int, scope: str, seen: dict[str, int] | None = None
) -> None:
    """Give every sample that was not begun a seed; one that was goes on with its own.

    A prompt that comes twice in one batch (at the end of an epoch) gets other seeds the second
    time.

    Args:
        groups: in order.
        run_seed, scope: as of `sample_seed`.
        seen: how many executions of each prompt the batch has already; is added to.
    """
    seen = {} if seen is None else seen
    for group in groups:
        prompt_id = group.samples[0].prompt_id
        first = seen.get(prompt_id, 0)
        executions = split_executions(group.samples)
        seen[prompt_id] = first + len(executions)
        for k, (sample, *_) in enumerate(executions, first):
            if sample.status == Status.PENDING:
                sample.seed = sample_seed(run_seed, scope, prompt_id, k)
