"""A committed rollout read back, scored and filtered: the rows of the two narrow tables.

Shared by the rollout worker and by whoever scores stored samples again without a run's actors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlcore.config.tree import FilterConfig
from rlcore.rollout.evaluate import scored_status, set_score
from rlcore.rollout.filters import GroupRule, Scored, Selection, Verdict, make_rule, select
from rlcore.rollout.groups import execution_rewards
from rlcore.rollout.metrics import correct_length_metrics, reward_metrics
from rlcore.rollout.rewards.protocol import Score
from rlcore.sample import Sample
from rlcore.store.manifest import FileRef
from rlcore.store.objects import Objects

Files = Sequence[FileRef]
Rows = list[dict[str, Any]]


def read_rollout(objects: Objects, files: Files) -> list[Sample]:
    """The samples of a rollout, as they were generated.

    Raises:
        Corrupt: a part is not what was committed.
    """
    from rlcore.store.batch import read_parts, table_to_samples

    return table_to_samples(read_parts(objects, files))


def read_scores(objects: Objects, files: Files) -> tuple[list[Scored], list[Score]]:
    """The scores of a rollout, as a filter needs them and as the scorer gave them.

    Raises:
        Corrupt: a part is not what was committed.
    """
    from rlcore.store.batch import read_parts

    table = read_parts(objects, files)
    rows = table.select(["row", "group_index", "index", "reward"]).to_pylist()
    details, errors = table["details"].to_pylist(), table["error"].to_pylist()
    scores = [Score(row["reward"], *rest) for row, *rest in zip(rows, details, errors, strict=True)]
    return [Scored(**row) for row in rows], scores


def write_rows(objects: Objects, key: str, stage: str, rows: Rows) -> FileRef:
    """Write the part of a `reward` or `filter` stage."""
    from rlcore.store.batch import SCORES, SELECTION, rows_to_table, write_table

    return write_table(
        objects, key, rows_to_table(SCORES if stage == "reward" else SELECTION, rows)
    )


def score_rows(samples: list[Sample], scores: list[Score]) -> Rows:
    """Rows of schema SCORES."""
    return [
        {
            "row": row,
            "prompt_id": sample.prompt_id,
            "group_index": sample.group_index,
            "index": sample.index,
            "reward": score.reward,
            "status": scored_status(sample.status, score).value,
            "details": score.details,
            "error": score.error,
        }
        for row, (sample, score) in enumerate(zip(samples, scores, strict=True))
    ]


def scored_of(rows: Rows) -> list[Scored]:
    """What a filter needs of rows of schema SCORES."""
    return [Scored(r["row"], r["group_index"], r["index"], r["reward"]) for r in rows]


def score_metrics(samples: list[Sample], scores: list[Score]) -> dict[str, float]:
    """Figures of a rollout's scores."""
    rewards = [score.reward for score in scores]
    right = [s.effective_response_length for s, r in zip(samples, rewards, strict=True) if r == 1]
    return reward_metrics(execution_rewards(samples, rewards)) | correct_length_metrics(right)


def filter_rule(config: FilterConfig, reward_key: str | None, n_samples: int) -> GroupRule:
    """The run's rule.

    Args:
        config: the filter section.
        reward_key: of the reward section.
        n_samples: responses a prompt.

    Raises:
        PluginError: a custom function cannot be loaded or called.
    """
    return make_rule(config, {"reward_key": reward_key, "n_samples_per_prompt": n_samples})


def choose(
    rule: GroupRule, scored: list[Scored], scores: list[Score], samples: list[Sample]
) -> Selection:
    """Apply the rule to every group. `samples` may be empty where the rule needs none."""
    return select(scored, rule, samples_with_scores(samples, scores))


def samples_with_scores(
    samples: list[Sample], scores: list[Score]
) -> Callable[[list[Scored]], list[Sample]]:
    """What a rule is given: copies of the samples of some rows, their rewards set."""

    def samples_of(group: list[Scored]) -> list[Sample]:
        found = [replace(samples[one.row]) for one in group]
        for sample, one in zip(found, group, strict=True):
            set_score(sample, scores[one.row])
        return found

    return samples_of


DECIDED = GroupRule(lambda rewards, samples: Verdict(True))
"""The rule for groups that a rollout has chosen by the run's own."""


def early_scores(rollout: Mapping[str, Any], reward_digest: str) -> tuple[FileRef, ...] | None:
    """The scores that a rollout chose its groups by, if they are those that are asked for.

    Args:
        rollout: `extra` of its manifest.
        reward_digest: of the settings that the stage `reward` depends on.
    """
    record = rollout.get("scores")
    if record is None or record["reward_digest"] != reward_digest:
        return None
    return tuple(FileRef.model_validate(file) for file in record["files"])


def is_decided(rollout: Mapping[str, Any], reward: Mapping[str, Any], filter_digest: str) -> bool:
    """Whether the run's filter has passed all groups of a rollout, by the scores that they have.

    Args:
        rollout, reward: `extra` of their manifests.
        filter_digest: of the settings that the stage `filter` depends on.
    """
    record = rollout.get("scores")
    early = reward.get("scored_by") == "rollout"
    return bool(early and record is not None and record["filter_digest"] == filter_digest)
