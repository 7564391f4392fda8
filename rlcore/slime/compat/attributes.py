"""slime's `args` made of our settings: the table of `sluice slime`, read in reverse.

Invariant: an attribute says what is so here. A flag of slime whose thing does not exist here is
False; one whose thing is always so is True; any other attribute without a counterpart is an error.
"""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from rlcore.config.tree import WITHOUT_ENGINES
from rlcore.slime import convert
from rlcore.slime.megatron import OPTIONS
from rlcore.slime.rules import Argument, Held, Joined, Refused, Setting, same
from rlcore.slime.table import BY_NAME

Tree = Mapping[str, Any]

BACK: dict[Callable[[Any], Any], Callable[[Any], Any]] = {
    same: same,
    convert.negated: convert.negated,
    convert.rollout_only: lambda mode: mode == "debug-rollout-only",
    convert.train_only: lambda mode: mode in WITHOUT_ENGINES,
    convert.stored_run: lambda name: name or None,
    convert.engine_urls: lambda urls: [url.partition("://")[2] for url in urls] or None,
    convert.minutes: lambda seconds: seconds / convert.MINUTE_S,
    convert.positive_or_none: lambda value: -1 if value is None else value,
    convert.dynamic_filter: lambda name: next(
        (slime for slime, ours in convert.BUILT_IN_FILTERS.items() if ours == name), name
    ),
    convert.schedule: same,
    convert.without_advantages: lambda name: name == "sft_loss",
    convert.scalars: same,
    float: same,
}
"""From a setting's value back to slime's, by what leads there."""

SEVERAL: dict[str, Callable[[Tree], Any]] = {
    "eps_clip": lambda tree: tree["algorithm"]["clip_low"],
    "calculate_per_token_loss": lambda tree: tree["algorithm"]["loss_aggregation"] == "token_mean",
    "eval_reward_key": lambda tree: (
        tree["eval"].get("reward_key") or tree["reward"].get("reward_key")
    ),
    "loss_type": lambda tree: (
        "custom_loss"
        if tree["algorithm"].get("custom_loss_function_path")
        else tree["algorithm"].get("loss_type", "policy_loss")
    ),
    "rollout_num_engines": lambda tree: (
        len(tree["rollout"].get("engine_urls", ()))
        or tree["rollout"].get("num_engines")
        or tree["cluster"]["rollout_num_gpus"] // tree["cluster"]["rollout_num_gpus_per_engine"]
    ),
    "world_size": lambda tree: (
        tree["cluster"]["actor_num_nodes"] * tree["cluster"]["actor_num_gpus_per_node"]
    ),
    "eval_prompt_data": lambda tree: (
        [word for one in tree["eval"]["datasets"] for word in (one["name"], one["path"])] or None
    ),
    "save": lambda tree: f"{tree['storage']['root']}",
    "load": lambda tree: f"{tree['storage']['root']}",
    "rollout_global_dataset": lambda tree: True,
    "offload_train": lambda tree: _gives_back(tree, "offload_train"),
    "offload_rollout": lambda tree: _gives_back(tree, "offload_rollout"),
    "sglang_server_concurrency": lambda tree: tree["rollout"]["concurrency"],
}
"""Attributes that no single row of the table gives."""


def _gives_back(tree: Tree, name: str) -> bool:
    """Whether one side gives its memory back on GPUs that are shared."""
    chosen = tree["cluster"].get(name)
    return bool(tree["cluster"]["colocate"] if chosen is None else chosen)


def slime_args_of(config: Any) -> dict[str, Any] | None:
    """slime's attributes for a run, a `RunConfig`; None: it does not ask for them."""
    return slime_args(config.model_dump(mode="json")) if config.compat.slime else None


def slime_args(tree: Tree) -> dict[str, Any]:
    """slime's attributes of a configuration, by name.

    Args:
        tree: `RunConfig.model_dump(mode="json")`. Its `compat.args` come first.
    """
    made: dict[str, Any] = {}
    for argument in [*OPTIONS.values(), *BY_NAME.values()]:
        found = _value(argument, tree)
        if found is not None:
            made[_attribute(argument.name)] = found[0]
    made |= {f"sglang_{name}": value for name, value in tree.get("sglang", {}).items()}
    made |= {name: value(tree) for name, value in SEVERAL.items()}
    made |= {_attribute(name): value for name, value in tree["compat"]["args"].items()}
    return made


def why_missing(name: str, known: Mapping[str, Any]) -> str:
    """Why `args` has no such attribute, and the nearest thing."""
    argument = next((a for n, a in (BY_NAME | OPTIONS).items() if _attribute(n) == name), None)
    if argument is None:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "slime has no argument of this name"
        return f"{hint}; a plugin's own settings go into [compat.args]"
    rule = argument.rule
    if isinstance(rule, Refused):
        return f"--{argument.name} has no counterpart: {rule.why}"
    if isinstance(rule, Held):
        return f"--{argument.name} is no setting here: {rule.why}"
    return f"the nearest is {rule}; [compat.args] can give {name} a value"


def _attribute(name: str) -> str:
    return name.replace("-", "_")


def _value(argument: Argument, tree: Tree) -> tuple[Any] | None:
    """The value of an argument, in a tuple; None: it has none here."""
    rule = argument.rule
    if isinstance(rule, Setting):
        back = BACK.get(rule.convert)
        found = _at(tree, rule.key)
        return None if back is None or found is None else (back(found[0]),)
    if isinstance(rule, Joined):
        keys = rule.keys.split()
        return _at(tree, keys[0]) if len(keys) == 1 else None
    if argument.takes in ("flag", "switch"):
        return (isinstance(rule, Held),)
    if isinstance(rule, Held) and rule.only:
        return (rule.only[0],)
    return None


def _at(tree: Tree, key: str) -> tuple[Any] | None:
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
    return (node,)
