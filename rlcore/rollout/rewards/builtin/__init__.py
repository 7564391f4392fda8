"""The built-in reward types, found by name. Each is a plain function `(args, sample)`.

This file imports none of them: worker processes load what they need, and must start at once.
"""

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlcore.errors import PluginError

BOXED = "boxed_"


@dataclass(frozen=True, slots=True)
class Builtin:
    """A built-in reward type.

    Attributes:
        module: last name of its module in this package.
        function: its name there.
        reads_boxes: it takes `boxed=True`: the response is the answer itself.
        key: the entry of its dict that is the reward; None where it gives a number.
        loads: a function of its module that raises PluginError where something is not installed.
        remote: it waits for a server, so many calls go side by side.
    """

    module: str
    function: str
    reads_boxes: bool = False
    key: str | None = None
    loads: str | None = None
    remote: bool = False


BUILTINS = {
    "math": Builtin("mathematics", "math", reads_boxes=True),
    "math_verify": Builtin(
        "mathematics", "math_verify", reads_boxes=True, loads="load_math_verify"
    ),
    "deepscaler": Builtin("mathematics", "deepscaler", reads_boxes=True),
    "dapo": Builtin("mathematics", "dapo", reads_boxes=True, key="score"),
    "f1": Builtin("texts", "f1"),
    "gpqa": Builtin("choices", "gpqa"),
    "ifbench": Builtin("ifbench", "ifbench", loads="load_ifbench"),
    "random": Builtin("texts", "coin"),
    "remote_rm": Builtin("remote", "remote_rm", remote=True),
    "judge": Builtin("judge", "judge", key="score", remote=True),
}


def split_name(rm_type: str) -> tuple[str, bool]:
    """The name of a type without the prefix `boxed_`, and whether it had that.

    Raises:
        PluginError: there is no such type; names the nearest.
    """
    name = rm_type.strip()
    boxed = name.startswith(BOXED)
    name = name.removeprefix(BOXED)
    if name not in BUILTINS:
        near = difflib.get_close_matches(name, BUILTINS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(BUILTINS)}"
        raise PluginError(
            f"there is no reward type {rm_type!r}; {hint} (each may have the prefix {BOXED!r})"
        )
    return name, boxed


def find(rm_type: str) -> Builtin:
    """What is known of a type, with or without the prefix `boxed_`.

    Raises:
        PluginError: there is no such type.
    """
    return BUILTINS[split_name(rm_type)[0]]


def load(rm_type: str) -> Callable[[Any, Any], Any]:
    """The function of a type, called as `(args, sample)`.

    Raises:
        PluginError: there is no such type, or what it needs is not installed.
    """
    name, boxed = split_name(rm_type)
    builtin = BUILTINS[name]
    module = importlib.import_module(f"{__name__}.{builtin.module}")
    if builtin.loads:
        getattr(module, builtin.loads)()
    function: Callable[..., Any] = getattr(module, builtin.function)
    if not boxed:
        return function
    if builtin.reads_boxes:
        function = partial(function, boxed=True)
    return partial(_wait_for_boxed if builtin.remote else _boxed, function)


def _boxed(function: Callable[[Any, Any], Any], args: Any, sample: Any) -> Any:
    """Score what the last box of the response holds; nothing where there is none."""
    from rlcore.rollout.rewards.builtin.extract import last_box

    return function(args, replace(sample, response=last_box(sample.response) or ""))


async def _wait_for_boxed(function: Callable[[Any, Any], Any], args: Any, sample: Any) -> Any:
    return await _boxed(function, args, sample)
