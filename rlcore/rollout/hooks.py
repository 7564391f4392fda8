"""Functions of one's own around a rollout: what is taken from the buffer, which samples are
removed, who looks at all groups, and the rollout itself.

Invariants:
- Whatever a function does, every prompt that was handed out is in the batch, left for the next
  rollout, or dropped with a reason.
- A function gets copies of scored samples; of what it changes in them, `remove_sample` is kept.
- A rollout that is done again calls them again: what they do beside is not undone.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlcore.config.tree import RolloutConfig
from rlcore.errors import PluginError, SluiceError
from rlcore.plugins import Kind, is_async, load_checked, takes
from rlcore.rollout.args import PluginArgs
from rlcore.rollout.buffer import Group
from rlcore.rollout.collect import Collected, Judged
from rlcore.rollout.evaluate import set_score
from rlcore.rollout.filters import Verdict
from rlcore.rollout.generate import OPEN, GenerateArgs, Generator, check_distinct, check_made
from rlcore.rollout.groups import Identity, identity_of, join_execution, split_executions
from rlcore.rollout.supply import Picked, Supply
from rlcore.sample import Sample

SETTINGS: dict[str, Kind] = {
    "custom_rollout_function_path": "rollout",
    "buffer_filter_path": "buffer_filter",
    "rollout_sample_filter_path": "sample_filter",
    "rollout_all_samples_process_path": "all_samples",
}
NOT_USED = "not_used"
"""Why a group is dropped that a rollout function took and neither returned nor gave back."""

Samples = list[Sample]


class RolloutArgs(GenerateArgs):
    """`args` of a rollout function: those of a generate function, and `generate_group`."""

    def __init__(
        self, config: RolloutConfig, tokenizer: Any, generator: Generator, version: str | None
    ) -> None:
        super().__init__(config, tokenizer, generator.pool)
        self.__dict__["_run"] = lambda samples: generator.run(samples, len(samples), version)

    async def generate_group(self, samples: Samples) -> Samples:
        """Responses to the samples of a group, as the rollout would make them."""
        made: Samples = await self.__dict__["_run"](samples)
        return made


class DataSource:
    """What a rollout function takes groups from: first what the rollout before left, then the data.

    Its methods have slime's names.
    """

    def __init__(self, supply: Supply, what: str) -> None:
        self._supply = supply
        self._what = what
        self.given: dict[int | None, Group] = {}
        """Groups that were taken and not given back, by their `group_index`."""
        self._origins: dict[int | None, list[Identity]] = {}
        """Which sample each execution of a group was when it was taken."""
        self.back: list[Group] = []
        self.is_open = True

    def __len__(self) -> int:
        return len(self._supply)

    def get_samples(self, num_samples: int) -> list[Samples]:
        """The next `num_samples` groups, nothing generated but in what was cut off before."""
        if not self.is_open:
            raise PluginError(f"{self._what} asks for samples, but the batch is complete")
        groups = self._supply.take(num_samples)
        for group in groups:
            index = group.samples[0].group_index
            self.given[index] = group
            self._origins[index] = [identity_of(e[0]) for e in split_executions(group.samples)]
        return [group.samples for group in groups]

    def add_samples(self, samples: list[Samples]) -> None:
        """Give groups back, whole or in part generated, for the next rollout."""
        for group in samples:
            self.back.append(self.known(group))

    def known(self, parts: Sequence[Sample | Samples]) -> Group:
        """The group that these samples are of, taken out of those `given`.

        Args:
            parts: of one group; those that were cut from one may be a list of their own.

        Raises:
            PluginError: there is none, or it lacks some.
        """
        samples = [s for one in parts for s in (one if isinstance(one, list) else [one])]
        index = samples[0].group_index if samples else None
        group = self.given.pop(index, None)
        if group is None:
            raise PluginError(
                f"{self._what} gives a group with group_index {index}, which it was not given, or "
                "gave before; return the samples of data_source.get_samples"
            )
        made, origins = split_executions(samples), self._origins[index]
        if len(made) != len(origins):
            raise PluginError(
                f"{self._what} gives {len(made)} samples of group {index}, which has "
                f"{len(origins)}; those alone that were cut from one share a rollout_id"
            )
        for execution, origin in zip(made, origins, strict=True):
            join_execution(execution, origin)
            if len(execution) > 1 and any(sample.status in OPEN for sample in execution):
                raise PluginError(
                    f"{self._what} gives several samples of one execution, one of which is not "
                    "whole; give the sample that they were made of, as it was"
                )
        return Group(group.place, samples)


@dataclass(frozen=True)
class Made:
    """What a rollout function gave."""

    found: Collected
    metrics: dict[str, float]


class Hooks:
    """The functions that a run has.

    Args:
        config: the rollout section.
        reward_key: of the reward section; an attribute of `args`.

    Raises:
        PluginError: a function cannot be loaded or called.
    """

    def __init__(self, config: RolloutConfig, reward_key: str | None) -> None:
        self._config = config
        self._args = PluginArgs(config.model_dump() | {"reward_key": reward_key})
        self._functions: dict[Kind, tuple[Callable[..., Any], str]] = {}
        for name, kind in SETTINGS.items():
            path = getattr(config, name)
            if path is not None:
                setting = f"rollout.{name}"
                loaded = load_checked(path, setting, kind)
                self._functions[kind] = loaded, f"{setting} = {path!r}"

    @property
    def need_scores(self) -> bool:
        """Whether a function looks at a scored batch."""
        return not self._functions.keys().isdisjoint(("sample_filter", "all_samples"))

    @property
    def makes_batch(self) -> bool:
        """Whether a function makes the whole batch."""
        return "rollout" in self._functions

    def pick(self, iteration: int, buffer: Sequence[Group], n: int) -> Picked | None:
        """What a buffer filter takes; None where there is none.

        Raises:
            PluginError: it failed, or returned what is not in the buffer, or too much.
        """
        if "buffer_filter" not in self._functions:
            return None
        function, what = self._functions["buffer_filter"]
        groups = [group.samples for group in buffer]
        by_id = {id(group.samples): group for group in buffer}
        taken = _call(what, function, self._args, iteration, groups, n)
        if not isinstance(taken, list) or any(id(samples) not in by_id for samples in taken):
            raise PluginError(f"{what} must return a list of groups of the buffer")
        if len(taken) > n or len({id(samples) for samples in taken}) < len(taken):
            raise PluginError(f"{what} returned {len(taken)} groups, some twice, or over {n}")
        left = {id(samples) for samples in groups} - {id(samples) for samples in taken}
        chosen = [by_id[id(samples)] for samples in taken]
        waiting = [group for group in buffer if id(group.samples) in left]
        gone = by_id.keys() - left - {id(samples) for samples in taken}
        return Picked(chosen, waiting, [group for group in buffer if id(group.samples) in gone])

    async def look(self, found: Collected, supply: Supply) -> None:
        """Have the functions for a scored batch look at it; marks samples as removed.

        Raises:
            PluginError: one failed.
        """
        for kind in ("sample_filter", "all_samples"):
            if kind not in self._functions:
                continue
            function, what = self._functions[kind]
            if kind == "sample_filter":
                groups, more = found.taken, []
            else:
                source = DataSource(supply, what)
                source.is_open = False
                groups, more = [*found.taken, *found.dropped], [source]
            copies = [_scored(group, found.judged[group.place]) for group in groups]
            shown = [list(seen) for seen in copies]
            await asyncio.to_thread(_call, what, function, self._args, shown, *more)
            if {id(s) for seen in shown for s in seen} != {id(s) for seen in copies for s in seen}:
                raise PluginError(
                    f"{what} took samples out of the lists that it was given, or put others in; "
                    "set remove_sample of what is not to be trained on"
                )
            for group, seen in zip(groups, copies, strict=True):
                for sample, copy in zip(group.samples, seen, strict=True):
                    sample.remove_sample = bool(copy.remove_sample)

    async def make(self, args: RolloutArgs, iteration: int, supply: Supply) -> Made:
        """Have the rollout function make the batch.

        Raises:
            PluginError: it failed, or what it returned is no batch.
        """
        function, what = self._functions["rollout"]
        source = DataSource(supply, what)
        more = {"evaluation": False} if takes(function, "evaluation") else {}
        if is_async(function):
            try:
                answer = await function(args, iteration, source, **more)
            except SluiceError:
                raise
            except Exception as error:
                raise _failed(what, error) from error
        else:
            answer = await asyncio.to_thread(_call, what, function, args, iteration, source, **more)
        source.is_open = False
        groups, metrics = getattr(answer, "samples", answer), getattr(answer, "metrics", None)
        want = self._config.rollout_batch_size
        if not isinstance(groups, list) or len(groups) != want:
            count = f"{len(groups)} groups" if isinstance(groups, list) else type(groups).__name__
            raise PluginError(f"{what} returned {count}; a batch is a list of {want} groups")
        taken = [source.known(samples) for samples in groups]
        check_distinct([s for group in taken for s in group.samples], what)
        for sample in (s for group in taken for s in group.samples):
            check_made(sample, what, args.limits.vocab_size)
        lost = list(source.given.values())
        judged = {group.place: Judged([], Verdict(False, NOT_USED)) for group in lost}
        found = Collected(taken, source.back, lost, judged)
        return Made(found, _numbers(metrics or {}, what))


def _numbers(metrics: Any, what: str) -> dict[str, float]:
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise PluginError(
            f"{what}: its metrics must be a dict of numbers, not {metrics!r:.80}"
        ) from error


def _scored(group: Group, judged: Judged) -> Samples:
    copies = [replace(sample, metadata=dict(sample.metadata)) for sample in group.samples]
    for sample, score in zip(copies, judged.scores, strict=True):
        set_score(sample, score)
    return copies


def _call(what: str, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    try:
        return function(*args, **more)
    except SluiceError:
        raise
    except Exception as error:
        # A custom function may raise anything; the rollout cannot go on without it.
        raise _failed(what, error) from error


def _failed(what: str, error: Exception) -> PluginError:
    return PluginError(f"{what} raised {type(error).__name__}: {error}")
