"""An evaluation by a function of one's own: it generates, and may score, as it likes.

Invariants:
- What it returns is stored and measured as any evaluation is; a sample without a reward is scored
  by the run's reward function.
- Every response came from the policy that is evaluated.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcore.config.tree import EvalDataset, RolloutConfig
from rlcore.errors import EngineError, PluginError, SluiceError
from rlcore.plugins import is_async, load_checked, takes
from rlcore.rollout.evaluate import EvalSet, eval_generator, eval_samples
from rlcore.rollout.generate import Generator
from rlcore.rollout.groups import split_executions, split_groups
from rlcore.rollout.hooks import RolloutArgs
from rlcore.rollout.pool import EnginePool
from rlcore.sample import Sample, Status

SETTING = "eval.eval_function_path"
Samples = list[Sample]


@dataclass(frozen=True)
class Serving:
    """What an evaluation is made with.

    Attributes:
        version: policy version that the engines must report; None: any.
        iteration: told to functions of one's own.
    """

    sets: Sequence[EvalSet]
    rollout: RolloutConfig
    tokenizer: Any
    pool: EnginePool
    run_seed: int
    version: str | None
    iteration: int


class EvalSource:
    """What an evaluation function takes prompts from: the data sets of `eval.datasets`."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._sets = {one.config.name: one for one in serving.sets}

    @property
    def names(self) -> list[str]:
        """Of the data sets."""
        return list(self._sets)

    def __len__(self) -> int:
        return sum(len(one.dataset) for one in self._sets.values())

    def get_samples(self, name: str) -> list[Samples]:
        """A group of pending samples for each prompt of a data set, as its settings say."""
        serving = self._serving
        return split_groups(eval_samples(self._set(name), serving.tokenizer, serving.run_seed))

    async def generate(self, name: str, samples: Samples) -> Samples:
        """Responses to samples of a data set, with its own settings."""
        serving, one = self._serving, self._set(name)
        generator = eval_generator(
            one, serving.rollout, serving.tokenizer, serving.pool, serving.iteration
        )
        size = one.config.n_samples_per_eval_prompt
        return await generator.run(samples, size, serving.version)

    def _set(self, name: str) -> EvalSet:
        if name not in self._sets:
            there = ", ".join(self._sets) or "none"
            raise PluginError(f"eval.datasets has no {name!r}; there are: {there}")
        return self._sets[name]


@dataclass(frozen=True)
class MadeEvaluation:
    """What an evaluation function gave: a data set and its samples for each name; figures."""

    parts: list[tuple[EvalDataset, Samples]]
    metrics: dict[str, float] = field(default_factory=dict)


class OwnEvaluation:
    """The function that a run evaluates with.

    Args:
        path: of the function, `eval.eval_function_path`.

    Raises:
        PluginError: it cannot be loaded or called.
    """

    def __init__(self, path: str) -> None:
        self._function: Callable[..., Any] = load_checked(path, SETTING, "rollout")
        self._what = f"{SETTING} = {path!r}"

    async def make(self, serving: Serving) -> MadeEvaluation:
        """Have the function generate.

        Raises:
            PluginError: it failed, or gave something else than samples by name.
            EngineError: a response came from another policy.
        """
        generator = Generator(
            serving.rollout,
            serving.tokenizer,
            serving.pool,
            iteration=serving.iteration,
            evaluation=True,
        )
        args = RolloutArgs(serving.rollout, serving.tokenizer, generator, serving.version)
        more = {"evaluation": True} if takes(self._function, "evaluation") else {}
        given = (args, serving.iteration, EvalSource(serving))
        try:
            if is_async(self._function):
                answer = await self._function(*given, **more)
            else:
                answer = await asyncio.to_thread(self._function, *given, **more)
        except SluiceError:
            raise
        except Exception as error:
            # A custom function may raise anything; there is no evaluation without it.
            raise PluginError(f"{self._what} raised {type(error).__name__}: {error}") from error
        data, metrics = getattr(answer, "data", answer), getattr(answer, "metrics", None)
        if not isinstance(data, dict) or not data:
            raise PluginError(
                f"{self._what} must return samples by the name of their data set, not "
                f"{'an empty dict' if data == {} else type(data).__name__}"
            )
        known = {one.config.name: one.config for one in serving.sets}
        parts = [self._part(known, str(name), found, serving) for name, found in data.items()]
        return MadeEvaluation(parts, self._figures(metrics or {}))

    def _part(
        self, known: dict[str, EvalDataset], name: str, found: Any, serving: Serving
    ) -> tuple[EvalDataset, Samples]:
        what = f"{self._what}: {name!r}"
        table = found if isinstance(found, dict) else {"samples": found}
        listed = table.get("samples")
        if not isinstance(listed, list) or not listed:
            raise PluginError(
                f"{what} must be a list of samples, or a table with some in `samples`"
            )
        nested = [one if isinstance(one, list) else [one] for one in listed]
        samples = [sample for group in nested for sample in group]
        if not all(isinstance(sample, Sample) for sample in samples):
            raise PluginError(f"{what} holds other things than samples")
        rewards = table.get("rewards")
        if rewards is not None and len(rewards) != len(samples):
            raise PluginError(f"{what} has {len(rewards)} rewards for {len(samples)} samples")
        for k, reward in enumerate(rewards or ()):
            samples[k].reward = reward
        _number(samples, name)
        for sample in samples:
            self._check(sample, what, serving)
        size = max(len(split_executions(group)) for group in split_groups(samples))
        try:
            own = known.get(name) or EvalDataset(
                name=name, path="-", n_samples_per_eval_prompt=size
            )
        except ValueError:
            raise PluginError(
                f"{what}: the name of a data set has letters, digits, '.', '_' and '-'"
            ) from None
        return own, samples

    def _check(self, sample: Sample, what: str, serving: Serving) -> None:
        sample.validate()
        if sample.status == Status.PENDING:
            raise PluginError(
                f"{what}: sample {sample.index} has status pending; set completed, truncated, "
                "aborted or failed"
            )
        for version in sample.weight_versions:
            if serving.version not in (None, version):
                raise EngineError(
                    f"{what}: sample {sample.index} was generated by policy version {version!r}, "
                    f"but the evaluation is of version {serving.version!r}"
                )

    def _figures(self, metrics: dict[str, Any]) -> dict[str, float]:
        figures = {}
        for name, value in metrics.items():
            if isinstance(value, bool | str) or not hasattr(value, "__float__"):
                raise PluginError(f"{self._what}: the metric {name!r} is {value!r}, not a number")
            number = float(value)
            if not math.isfinite(number):
                raise PluginError(f"{self._what}: the metric {name!r} is {number}")
            figures[str(name)] = number
        return figures


def _number(samples: Samples, name: str) -> None:
    """Number samples in their order; those side by side of one prompt are a group."""
    group, before = -1, None
    for k, sample in enumerate(samples):
        sample.index = k
    for execution in split_executions(samples):
        prompt = execution[0].group_index, execution[0].prompt_id, str(execution[0].prompt)
        group += prompt != before
        before = prompt
        for sample in execution:
            sample.group_index = group
            sample.prompt_id = sample.prompt_id or f"{name}-{group}"
