"""Rules that decide over one group: the built-in ones, and custom functions made into one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlcore.config.tree import FilterConfig
from rlcore.errors import PluginError
from rlcore.plugins import load_checked
from rlcore.rollout.args import PluginArgs
from rlcore.rollout.metrics import has_spread
from rlcore.sample import Sample

SETTING = "filter.dynamic_sampling_filter_path"
BUILT_IN = ("nonzero_std", "nonzero_std_with_fallback")


@dataclass(frozen=True)
class Verdict:
    """Whether a group is trained on, and why not.

    Attributes:
        keep: it is.
        reason: why it is not.
        keep_when_insufficient: keep it all the same where more prompts would have to be begun in
            its place. Of no effect where none are.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


@dataclass(frozen=True)
class GroupRule:
    """A rule over the scored samples of one group.

    Attributes:
        decide: takes the rewards, and the samples with their rewards set where `needs_samples`.
        needs_samples: False: `decide` is given no samples, so that none need to be read.
    """

    decide: Callable[[Sequence[float], list[Sample]], Verdict]
    needs_samples: bool = False


def make_rule(config: FilterConfig, settings: dict[str, Any]) -> GroupRule:
    """The rule that the settings ask for.

    Args:
        config: the filter section.
        settings: more attributes of a custom function's `args`.

    Raises:
        PluginError: a custom function cannot be loaded or called.
    """
    path = config.dynamic_sampling_filter_path
    if path is None:
        return GroupRule(lambda rewards, samples: Verdict(True))
    if path == "nonzero_std":
        return GroupRule(lambda rewards, samples: nonzero_std(rewards))
    if path == "nonzero_std_with_fallback":
        return GroupRule(
            lambda rewards, samples: replace(nonzero_std(rewards), keep_when_insufficient=True)
        )
    function = load_checked(path, SETTING, "filter")
    args = PluginArgs(config.model_dump() | settings)
    what = f"{SETTING} = {path!r}"
    return GroupRule(lambda rewards, samples: _custom(function, args, samples, what), True)


def nonzero_std(rewards: Sequence[float]) -> Verdict:
    """Keep groups whose standard deviation (ddof 1, float64) exceeds 1e-6; no other can teach."""
    if has_spread(rewards):
        return Verdict(True)
    return Verdict(False, f"zero_std_{rewards[0]:.1f}")


def _custom(
    function: Callable[..., Any], args: PluginArgs, samples: list[Sample], what: str
) -> Verdict:
    where = f"on group {samples[0].group_index} (prompt {samples[0].prompt_id})"
    try:
        answer = function(args, samples)
    except Exception as error:
        # A custom function may raise anything; without its verdict the stage cannot go on.
        raise PluginError(f"{what} raised {type(error).__name__}: {error} {where}") from error
    reason: Any = None
    fallback = bool(getattr(answer, "keep_when_insufficient", False))
    if isinstance(answer, tuple) and len(answer) == 2:
        answer, reason = answer
    elif hasattr(answer, "keep"):
        answer, reason = answer.keep, getattr(answer, "reason", None)
    if type(answer).__name__ not in ("bool", "bool_"):
        raise PluginError(
            f"{what} returned {answer!r:.80} {where}; return a bool, (bool, reason), or an object "
            "with .keep and .reason"
        )
    return Verdict(bool(answer), None if answer else str(reason or "filter"), fallback)
