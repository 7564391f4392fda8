"""Where the groups of a rollout come from: what the rollout before left, then new prompts.

Invariants:
- What is handed out depends on the request, the data and how often was asked, never on time.
- A group is handed out once. What was not handed out is left: `waiting`, or behind the cursor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.config.tree import RolloutConfig
from rlcore.data import Cursor, Dataset, Place, Prompt, places, span
from rlcore.rollout.buffer import Group, go_on, line_up, number
from rlcore.rollout.generate import sample_seed
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


class Supply:
    """Hands out groups, numbered and seeded, ready to be generated.

    Args:
        request: of the rollout.
        dataset: the prompts.
        tokenizer: of the model.
        config: the rollout section.

    Attributes:
        waiting: groups of the buffer that were not handed out.
        groups: all that were, in that order.
        before: response tokens that each had then, by its place.
        from_buffer: how many came from the buffer.
    """

    def __init__(
        self, request: RolloutRequest, dataset: Dataset, tokenizer: Any, config: RolloutConfig
    ) -> None:
        self._request = request
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._config = config
        self._order = dataset.order(request.run_seed, request.shuffle)
        self._start = self._end = Cursor.after(request.cursor)
        self._seen: dict[str, int] = {}
        self._line = line_up(request.buffer, config)
        self.waiting = list(self._line.waiting)
        self.groups: list[Group] = []
        self.before: dict[Place, list[int]] = {}
        self.from_buffer = 0

    def first(self) -> list[Group]:
        """What a rollout begins with."""
        return self._ready(self._line.groups, self._line.new)

    def more(self) -> list[Group]:
        """As many prompts again as a rollout begins at a time."""
        n = self._config.over_sampling_batch_size or self._config.rollout_batch_size
        old, self.waiting = self.waiting[:n], self.waiting[n:]
        return self._ready(old, n - len(old))

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

    def _ready(self, old: Sequence[Group], new: int) -> list[Group]:
        request, size, start = self._request, len(self._dataset), self._end
        picked, self._end = self._order.plan(start, new)
        prompts = self._dataset.tokenized(picked, self._tokenizer)
        groups = go_on(old, request.version, self._config, self.anew)
        pairs = zip(places(start, size, new), prompts, strict=True)
        groups += [Group(place, self._new(prompt)) for place, prompt in pairs]
        set_seeds(groups, request.run_seed, f"rollout-{request.iteration}", self._seen)
        number(groups, (len(self.groups), sum(len(group.samples) for group in self.groups)))
        for group in groups:
            self.before[group.place] = [sample.response_length for sample in group.samples]
        self.groups += groups
        self.from_buffer += len(old)
        return groups


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
        seen: how many samples of each prompt the batch has already; is added to.
    """
    seen = {} if seen is None else seen
    for group in groups:
        prompt_id = group.samples[0].prompt_id
        first = seen.get(prompt_id, 0)
        seen[prompt_id] = first + len(group.samples)
        for k, sample in enumerate(group.samples, first):
            if sample.status == Status.PENDING:
                sample.seed = sample_seed(run_seed, scope, prompt_id, k)
