"""A rule applied to all groups of a scored rollout."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rlcore.rollout.filters.rules import GroupRule, Verdict
from rlcore.sample import Sample

UNSCORED = "unscored"
TOO_FEW = "too_few_scored"


@dataclass(frozen=True, slots=True)
class Scored:
    """One row of the scores, as far as a filter needs it."""

    row: int
    group_index: int | None
    index: int | None
    reward: float | None


@dataclass(frozen=True)
class Selection:
    """Which samples are trained on.

    Attributes:
        rows: of schema SELECTION, one a sample of the rollout, in its order.
        kept: samples kept.
        metrics: groups kept and dropped, by reason.
    """

    rows: list[dict[str, Any]]
    kept: int
    metrics: dict[str, float]


def select(
    scored: Sequence[Scored],
    rule: GroupRule,
    samples_of: Callable[[list[Scored]], list[Sample]],
) -> Selection:
    """Decide over every group.

    Args:
        scored: the rollout's samples in order, groups adjacent.
        rule: decides over a group's scored samples.
        samples_of: gives the samples of rows, rewards set; called only for rules that need it.

    Raises:
        PluginError: a custom filter failed.
    """
    rows: list[dict[str, Any]] = []
    dropped = Counter[str]()
    groups = kept = 0
    for _, members in groupby(scored, key=lambda s: s.group_index):
        group = list(members)
        verdict = decide(group, rule, samples_of)
        groups += 1
        if not verdict.keep:
            dropped[verdict.reason or "filter"] += 1
        for one in group:
            keep = verdict.keep and one.reward is not None
            kept += keep
            reason = None if keep else UNSCORED if one.reward is None else verdict.reason
            rows.append(
                {
                    "row": one.row,
                    "group_index": one.group_index,
                    "index": one.index,
                    "reward": one.reward,
                    "keep": keep,
                    "reason": reason,
                }
            )
    metrics = {
        "filter/groups": float(groups),
        "filter/groups_kept": float(groups - dropped.total()),
        "filter/samples_kept": float(kept),
    }
    for reason, count in sorted(dropped.items()):
        metrics[f"rollout/dynamic_filter/drop_{reason}"] = float(count)
    return Selection(rows, kept, metrics)


def decide(
    group: list[Scored], rule: GroupRule, samples_of: Callable[[list[Scored]], list[Sample]]
) -> Verdict:
    """A rule's verdict over one group; the arguments are those of `select`."""
    scored = [one for one in group if one.reward is not None]
    if not scored:
        return Verdict(False, UNSCORED)
    if len(scored) == 1 < len(group):
        # One sample that is left of a group has nothing to be compared with.
        return Verdict(False, TOO_FEW)
    rewards = [one.reward for one in scored if one.reward is not None]
    return rule.decide(rewards, samples_of(scored) if rule.needs_samples else [])
