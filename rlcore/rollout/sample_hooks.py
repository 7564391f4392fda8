"""Functions of one's own between generation and reward: each is given a sample and may change it.

Invariants:
- A sample is given to all of them once, in their order, when it is whole; one that was cut off not
  before it has gone on to its end.
- A rollout that is done again calls them again.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from rlcore.errors import PluginError, SluiceError
from rlcore.plugins import load_checked, takes
from rlcore.sample import Sample

SETTING = "rollout.sample_hook_paths"


class SampleHooks:
    """The hooks of a run.

    Args:
        paths: of the functions.
        iteration: told to one that has a parameter `rollout_id`.
        evaluation: told to one that has a parameter of this name.

    Raises:
        PluginError: one cannot be loaded or called.
    """

    def __init__(
        self, paths: Sequence[str], iteration: int = 0, *, evaluation: bool = False
    ) -> None:
        named = {"rollout_id": iteration, "evaluation": evaluation}
        self._hooks: list[tuple[Callable[..., Any], str, dict[str, Any]]] = []
        for k, path in enumerate(paths):
            function = load_checked(path, f"{SETTING}[{k}]", "sample_hook")
            more = {name: value for name, value in named.items() if takes(function, name)}
            self._hooks.append((function, f"{SETTING}[{k}] = {path!r}", more))

    def __bool__(self) -> bool:
        return bool(self._hooks)

    async def __call__(self, args: Any, sample: Sample) -> Sample:
        """What the hooks make of a sample: the same, or another in its place.

        Raises:
            PluginError: one failed, or returned something else than a sample or None.
        """
        for function, what, more in self._hooks:
            where = f"on sample {sample.index} (prompt {sample.prompt_id})"
            try:
                answer = function(args, sample, **more)
                if inspect.isawaitable(answer):
                    answer = await answer
            except SluiceError:
                raise
            except Exception as error:
                # A custom function may raise anything; nothing tells whether it would work again.
                raise PluginError(
                    f"{what} raised {type(error).__name__}: {error} {where}"
                ) from error
            if answer is not None and not isinstance(answer, Sample):
                raise PluginError(
                    f"{what} returned a {type(answer).__name__} {where}; return the sample, "
                    "another, or None for the one that it was given"
                )
            sample = answer or sample
        return sample
