"""Dynamic sampling's judge: scores groups while others are generated, and asks the filter.

Invariants:
- Scores and verdicts are those that the stages reward and filter would give; they are stored with
  the rollout that they chose, and those stages take them from there.
- More than `reward.max_failed` of an iteration's samples failed: the rollout stops.
"""

import asyncio

from rlcore.config.digest import STAGE_SECTIONS, tree_digest
from rlcore.config.tree import FilterConfig, RewardConfig, RolloutConfig
from rlcore.errors import RewardError
from rlcore.rollout.buffer import Group
from rlcore.rollout.collect import Judged
from rlcore.rollout.filters import GroupRule, Scored, Verdict, decide
from rlcore.rollout.rewards.protocol import Score
from rlcore.rollout.rewards.scorer import Scorer
from rlcore.rollout.stored import samples_with_scores, score_rows, scored_of
from rlcore.sample import Sample


def samples_dynamically(rollout: RolloutConfig, filter: FilterConfig) -> bool:
    """Whether rollouts go on until enough groups pass the filter."""
    chosen = filter.dynamic_sampling_filter_path
    return rollout.over_sampling_batch_size is not None and chosen is not None


def judged_by(reward: RewardConfig, filter: FilterConfig, *, filtered: bool) -> dict[str, str]:
    """The digests of the stages whose work a judge does, for the rollout's manifest.

    Args:
        reward, filter: the sections.
        filtered: the judge asks the filter, too; else the digest of that stage is empty.
    """
    tree = {"reward": reward.model_dump(mode="json"), "filter": filter.model_dump(mode="json")}
    digests = {f"{name}_digest": tree_digest(tree, *STAGE_SECTIONS[name]) for name in tree}
    return digests if filtered else digests | {"filter_digest": ""}


class GroupJudge:
    """Judges the groups of one rollout.

    Args:
        scorer: of the run's reward function.
        rule: of the run's filter; None: every group is kept.
        config: the reward section.
        batch: samples of a batch, of which a share may fail.
    """

    def __init__(
        self, scorer: Scorer, rule: GroupRule | None, config: RewardConfig, batch: int
    ) -> None:
        self._scorer = scorer
        self._rule = rule
        self._config = config
        self._batch = batch
        self._scored = self._failed = 0

    async def __call__(self, groups: list[Group]) -> list[Judged]:
        """Score and filter whole groups.

        Raises:
            RewardError: too many samples of this rollout could not be scored.
            PluginError: the filter or the reward function cannot be used.
        """
        samples = [sample for group in groups for sample in group.samples]
        scores = await self._scorer.score(samples, max_failed=1.0)
        self._count(samples, scores)
        verdicts = await asyncio.to_thread(self._verdicts, groups, samples, scores)
        rest = iter(scores)
        return [
            Judged([next(rest) for _ in group.samples], verdict)
            for group, verdict in zip(groups, verdicts, strict=True)
        ]

    def _verdicts(
        self, groups: list[Group], samples: list[Sample], scores: list[Score]
    ) -> list[Verdict]:
        if self._rule is None:
            return [Verdict(True)] * len(groups)
        scored, start = scored_of(score_rows(samples, scores)), 0
        samples_of = samples_with_scores(samples, scores)
        verdicts = []
        for group in groups:
            part: list[Scored] = scored[start : start + len(group.samples)]
            verdicts.append(decide(part, self._rule, samples_of))
            start += len(group.samples)
        return verdicts

    def _count(self, samples: list[Sample], scores: list[Score]) -> None:
        failed = [k for k, score in enumerate(scores) if score.error is not None]
        self._scored += len(scores)
        self._failed += len(failed)
        total = max(self._batch, self._scored)
        if failed and self._failed > self._config.max_failed * total:
            sample, score = samples[failed[0]], scores[failed[0]]
            raise RewardError(
                f"the reward function gave no reward for {self._failed} of {self._scored} samples "
                f"of the rollout, more than reward.max_failed = {self._config.max_failed:g} of a "
                f"batch allows; one is of prompt {sample.prompt_id}: {score.error}"
            )
