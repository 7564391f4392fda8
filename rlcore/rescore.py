"""Scoring a stored rollout again: no engine, no trainer and no Ray, only the reward function.

The new scores and the selection that follows from them are committed as stages of a fork, whose
next stage is to train on them; what has changed is told from the stored tables.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any

from rlcore.algorithms.advantages import AdvantageInputs, sample_advantages
from rlcore.config import AlgorithmConfig, RunConfig, config_digest
from rlcore.config.digest import STAGE_SECTIONS
from rlcore.rollout.groups import execution_of
from rlcore.rollout.rewards.scorer import Scorer
from rlcore.rollout.stored import (
    choose,
    filter_rule,
    read_rollout,
    read_scores,
    score_metrics,
    score_rows,
    write_rows,
)
from rlcore.sample import Sample, Status
from rlcore.slime.compat import state as slime
from rlcore.slime.compat.attributes import slime_args_of
from rlcore.store.batch import read_parts
from rlcore.store.branch import refer_to_parent
from rlcore.store.lease import Lease
from rlcore.store.manifest import FileRef, Manifest, StageRef
from rlcore.store.paths import new_attempt, part_key
from rlcore.store.run_store import RunStore


def rescore(store: RunStore, config: RunConfig, lease: Lease) -> None:
    """Commit reward and filter of a re-run's first own iteration, where that was not done.

    Raises:
        PluginError, RewardError: the function cannot be loaded, or failed for too many samples.
        Fenced: another driver holds the run.
    """
    with slime.active(slime_args_of(config)):
        _rescore(store, config, lease)


def _rescore(store: RunStore, config: RunConfig, lease: Lease) -> None:
    rollout = refer_to_parent(store, lease)["rollout"]
    i, objects = store.first_own, store.objects
    files = store.manifest(rollout).files
    reward_digest, filter_digest = (
        config_digest(config, *STAGE_SECTIONS[name]) for name in ("reward", "filter")
    )
    reward = store.lookup(i, "reward", {"rollout": rollout.sha256}, reward_digest)
    if reward is None:
        began, attempt, samples = time.perf_counter(), new_attempt(), read_rollout(objects, files)
        scorer = Scorer(config.reward)
        try:
            scores = scorer.score_now(samples)
        finally:
            scorer.close()
        key = part_key(store.run_id, i, "reward", 0, attempt)
        ref = write_rows(objects, key, "reward", score_rows(samples, scores))
        metrics = score_metrics(samples, scores)
        made = _Made(attempt, ref, metrics, {}, time.perf_counter() - began)
        reward = _commit(store, "reward", {"rollout": rollout}, reward_digest, made, lease)
    inputs = {"rollout": rollout, "reward": reward}
    shas = {name: ref.sha256 for name, ref in inputs.items()}
    if store.lookup(i, "filter", shas, filter_digest) is None:
        began, attempt = time.perf_counter(), new_attempt()
        key = part_key(store.run_id, i, "filter", 0, attempt)
        scored, stored = read_scores(objects, store.manifest(reward).files)
        rule = filter_rule(
            config.filter, config.reward.reward_key, config.rollout.n_samples_per_prompt
        )
        samples = read_rollout(objects, files) if rule.needs_samples else []
        chosen = choose(rule, scored, stored, samples)
        ref = write_rows(objects, key, "filter", chosen.rows)
        seconds = time.perf_counter() - began
        made = _Made(attempt, ref, chosen.metrics, {"kept": chosen.kept}, seconds)
        _commit(store, "filter", inputs, filter_digest, made, lease)


@dataclass(frozen=True)
class _Made:
    attempt: str
    file: FileRef
    metrics: dict[str, float]
    extra: dict[str, Any]
    seconds: float


def _commit(
    store: RunStore,
    stage: str,
    inputs: dict[str, StageRef],
    digest: str,
    made: _Made,
    lease: Lease,
) -> StageRef:
    manifest = Manifest(
        run_id=store.run_id,
        iteration=store.first_own,
        stage=stage,
        files=(made.file,),
        inputs={name: ref.sha256 for name, ref in inputs.items()},
        config_digest=digest,
        epoch=lease.epoch,
        attempt=made.attempt,
        metrics=made.metrics,
        extra=made.extra,
        timings={"seconds": made.seconds, "compute": 0.0},
    )
    return store.commit(manifest, lease)


# --- what has changed -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdicts:
    """What a run makes of the samples of a rollout: an entry each."""

    rewards: list[float | None]
    advantages: tuple[float, ...]
    """0 where the sample is not trained on."""
    errors: list[str | None]

    @property
    def mean(self) -> float | None:
        """Mean reward of those that have one."""
        found = [r for r in self.rewards if r is not None]
        return statistics.fmean(found) if found else None

    @property
    def kept(self) -> int:
        """Samples with a signal: they are trained on, and their advantage is not 0."""
        return sum(a != 0 for a in self.advantages)


@dataclass(frozen=True)
class Change:
    """The samples of one rollout, as two runs score them."""

    samples: list[Sample]
    before: Verdicts
    after: Verdicts

    @property
    def changed(self) -> list[int]:
        """Rows whose reward is another."""
        pairs = zip(self.before.rewards, self.after.rewards, strict=True)
        return [row for row, (old, new) in enumerate(pairs) if old != new]

    @property
    def flipped(self) -> list[int]:
        """Rows whose advantage has the other sign, the largest change first."""
        pairs = list(zip(self.before.advantages, self.after.advantages, strict=True))
        rows = [row for row, (old, new) in enumerate(pairs) if old * new < 0]
        return sorted(rows, key=lambda row: -abs(pairs[row][0] - pairs[row][1]))

    @property
    def groups(self) -> list[int | None]:
        """Groups that have another advantage somewhere."""
        triples = zip(self.samples, self.before.advantages, self.after.advantages, strict=True)
        return list(dict.fromkeys(s.group_index for s, old, new in triples if old != new))

    @property
    def rewarded_before(self) -> int:
        """Samples that a generate function has given a reward, which no reward function changes."""
        return sum(s.reward is not None for s in self.samples)


def compare_scores(
    old: RunStore,
    new: RunStore,
    iteration: int,
    algorithms: tuple[AlgorithmConfig, AlgorithmConfig],
) -> Change:
    """What two runs that share a rollout make of it.

    Args:
        old, new: the runs.
        iteration: the one whose rollout they share.
        algorithms: of each.
    """
    samples = read_rollout(new.objects, _files(new, iteration, "rollout"))
    return Change(
        samples,
        _verdicts(old, iteration, samples, algorithms[0]),
        _verdicts(new, iteration, samples, algorithms[1]),
    )


def _verdicts(
    store: RunStore, i: int, samples: list[Sample], algorithm: AlgorithmConfig
) -> Verdicts:
    scores = read_parts(store.objects, _files(store, i, "reward"), ("status", "error"))
    chosen = read_parts(store.objects, _files(store, i, "filter"), ("reward", "keep"))
    failed = [status == Status.FAILED for status in scores["status"].to_pylist()]
    pairs = zip(chosen["reward"].to_pylist(), failed, strict=True)
    rewards = [None if bad else reward for reward, bad in pairs]
    groups = [sample.group_index for sample in samples]
    executions = execution_of(groups, [sample.rollout_id for sample in samples])
    std, baseline = algorithm.group_std, algorithm.group_baseline
    inputs = AdvantageInputs(rewards, groups, std, baseline, executions)
    found = sample_advantages(inputs).advantages
    keep = chosen["keep"].to_pylist()
    trained = tuple(a if k else 0.0 for a, k in zip(found, keep, strict=True))
    return Verdicts(rewards, trained, scores["error"].to_pylist())


def _files(store: RunStore, i: int, name: str) -> tuple[FileRef, ...]:
    found = store.stage(i, name)
    assert found is not None
    return found[0].files
