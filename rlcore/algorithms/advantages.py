"""Advantages from rewards: a few numbers a sample, in float64, over the whole rollout batch.

GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2), for the rewards r of one prompt's samples:

    A_i = (r_i - mean(r)) / (std(r) + eps)       std with Bessel's correction (ddof = 1), eps = 1e-6

Dr.GRPO (arXiv 2503.20783, section 3.2) and the baseline of REINFORCE++ (arXiv 2501.03262, section
3) leave out the division: `std_normalization = False`. Without a group's baseline (`baseline =
False`: REINFORCE++, or rewards that are advantages already) A_i = r_i. What becomes of these
numbers token by token is for `rlcore.algorithms.returns`.

Where several samples were cut from one execution, the statistics are those of executions: each
counts once in mean and standard deviation, however many samples it has, each of which weighs
1 / (samples of its execution with a reward). A sample's own reward is compared with them.

A sample without a reward (None, NaN, infinite: the scorer failed) takes no part: the statistics of
its group are those of the others, and it is not trainable, so that it has no weight in the loss. It
is never taken for a reward of 0.

Invariants:
- A group of equal rewards, or with one execution, has advantages of exactly 0 (with the baseline).
- Advantages depend on the rewards of their own group alone, and not on the order of the samples.
- A sample that is not trainable has advantage 0 and changes no other sample's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rlcore.errors import DataError

STD_EPS = 1e-6
"""Added to the standard deviation before dividing."""


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """Rewards of a rollout batch, one entry a sample."""

    rewards: Sequence[float | None]
    groups: Sequence[Hashable]
    """Samples with equal ids are one group; groups may differ in size and need not be adjacent."""
    std_normalization: bool = True
    """Divide by the standard deviation of the group; False is Dr.GRPO."""
    baseline: bool = True
    """Take off the mean of the group; without it nothing is divided either."""
    executions: Sequence[Hashable] | None = None
    """Samples with equal ids were cut from one execution; None: each is one by itself."""


@dataclass(frozen=True, slots=True)
class AdvantageOutputs:
    """Advantages of a rollout batch, in the order of the rewards."""

    advantages: tuple[float, ...]
    trainable: tuple[bool, ...]
    """False where there is no reward to learn from."""
    num_groups: int
    num_equal_groups: int
    """Groups that teach nothing: fewer than two different rewards, or executions."""

    @property
    def num_failed(self) -> int:
        """Samples without a reward."""
        return self.trainable.count(False)


def sample_advantages(inputs: AdvantageInputs) -> AdvantageOutputs:
    """One advantage a sample; formulas in the module docstring.

    Raises:
        DataError: the number of group ids, or of execution ids, is not that of the rewards.
    """
    rewards = inputs.rewards
    executions = range(len(rewards)) if inputs.executions is None else inputs.executions
    for name, ids in (("group", inputs.groups), ("execution", executions)):
        if len(rewards) != len(ids):
            raise DataError(
                f"{len(rewards)} rewards but {len(ids)} {name} ids; there must be one each"
            )
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(inputs.groups):
        members.setdefault(group, []).append(i)

    advantages = [0.0] * len(rewards)
    trainable = [False] * len(rewards)
    equal = 0
    for samples in members.values():
        scored = [(i, float(r)) for i in samples if (r := rewards[i]) is not None]
        scored = [(i, r) for i, r in scored if math.isfinite(r)]
        values = [r for _, r in scored]
        own = [executions[i] for i, _ in scored]
        if inputs.baseline:
            values = _group_advantages(values, own, inputs.std_normalization)
        equal += len({r for _, r in scored}) < 2 or len(set(own)) < 2
        for (i, _), value in zip(scored, values, strict=True):
            advantages[i], trainable[i] = value, True
    return AdvantageOutputs(tuple(advantages), tuple(trainable), len(members), equal)


def _group_advantages(
    rewards: list[float], executions: list[Hashable], std_normalization: bool
) -> list[float]:
    """Advantages of one group's finite rewards."""
    sizes = Counter(executions)
    # Compared and not computed: the mean of equal numbers need not be that number (0.1 three
    # times), and dividing the rest by a standard deviation of its own size would make a signal of
    # it.
    if len(set(rewards)) < 2 or len(sizes) < 2:
        return [0.0] * len(rewards)
    weights = [1 / sizes[execution] for execution in executions]
    # fsum rounds once, so the order of the samples cannot show.
    mean = math.fsum(w * r for w, r in zip(weights, rewards, strict=True)) / len(sizes)
    centred = [r - mean for r in rewards]
    if not std_normalization:
        return centred
    squares = math.fsum(w * (c * c) for w, c in zip(weights, centred, strict=True))
    std = math.sqrt(squares / (len(sizes) - 1))
    return [c / (std + STD_EPS) for c in centred]
