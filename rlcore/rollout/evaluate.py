"""Evaluation: the policy on held-out prompts, with settings of their own.

Invariants:
- The seeds do not depend on the iteration, so two evaluations differ by the policy alone.
- A sample without a reward counts in no mean; how many there are is a metric of its own.
"""

import json
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlcore.config.tree import EvalDataset, RolloutConfig
from rlcore.data import Dataset
from rlcore.rollout.buffer import Group, number
from rlcore.rollout.generate import Generator
from rlcore.rollout.groups import execution_rewards, split_groups
from rlcore.rollout.metrics import length_metrics, pass_at_k
from rlcore.rollout.pool import EnginePool
from rlcore.rollout.rewards.protocol import Score
from rlcore.rollout.rewards.scorer import Scorer
from rlcore.rollout.supply import make_groups
from rlcore.rollout.together import all_of
from rlcore.sample import Sample, Status

if TYPE_CHECKING:
    from rlcore.rollout.own_evaluation import OwnEvaluation


@dataclass(frozen=True)
class EvalSet:
    """One held-out data set: its settings and its prompts."""

    config: EvalDataset
    dataset: Dataset


@dataclass(frozen=True)
class EvalResult:
    """What an evaluation gave.

    Attributes:
        names: of the data sets.
        samples: of each data set, rewards set.
        metrics: `eval/NAME` (mean reward), `eval/NAME/pass@k` and the like.
        generation_s: seconds in which engines generated.
    """

    names: list[str]
    samples: list[list[Sample]]
    metrics: dict[str, float]
    generation_s: float


async def evaluate(
    sets: list[EvalSet],
    rollout: RolloutConfig,
    tokenizer: Any,
    pool: EnginePool,
    scorer: Scorer,
    *,
    run_seed: int,
    version: str | None,
    iteration: int = 0,
    own: "OwnEvaluation | None" = None,
) -> EvalResult:
    """Generate and score responses to all prompts of all data sets.

    Args:
        sets: the data sets.
        rollout: the rollout section, for what a data set does not say.
        tokenizer: of the model.
        pool: the engines.
        scorer: of the run's reward function.
        run_seed: of the run.
        version: policy version that the engines must report.
        iteration: told to functions of one's own.
        own: that function, where there is one.

    Raises:
        EngineError, DataError, PluginError, RewardError: as rollouts and rewards do.
    """
    began = time.perf_counter()
    metrics: dict[str, float] = {}
    if own is not None:
        from rlcore.rollout.own_evaluation import Serving

        serving = Serving(sets, rollout, tokenizer, pool, run_seed, version, iteration)
        found = await own.make(serving)
        parts, metrics = found.parts, found.metrics
    else:
        generators = [eval_generator(one, rollout, tokenizer, pool, iteration) for one in sets]
        pairs = zip(sets, generators, strict=True)
        made = await all_of(_generate(*pair, run_seed, version) for pair in pairs)
        parts = [(one.config, samples) for one, samples in zip(sets, made, strict=True)]
    seconds = time.perf_counter() - began
    for config, samples in parts:
        scores = await scorer.score(samples)
        metrics |= eval_metrics(config, samples, scores)
        for sample, score in zip(samples, scores, strict=True):
            set_score(sample, score)
    names = [config.name for config, _ in parts]
    return EvalResult(names, [samples for _, samples in parts], metrics, seconds)


async def _generate(
    one: EvalSet, generator: Generator, run_seed: int, version: str | None
) -> list[Sample]:
    samples = eval_samples(one, generator.tokenizer, run_seed)
    made = await generator.run(samples, one.config.n_samples_per_eval_prompt, version)
    return number([Group((0, k), group) for k, group in enumerate(split_groups(made))])


def eval_samples(one: EvalSet, tokenizer: Any, run_seed: int) -> list[Sample]:
    """Pending samples of all prompts of a data set, in whole groups."""
    config = one.config
    prompts = one.dataset.tokenized(range(len(one.dataset)), tokenizer)
    samples = make_groups(
        prompts, config.n_samples_per_eval_prompt, run_seed, f"eval-{config.name}"
    )
    for sample in samples:
        sample.custom_rm_path = config.custom_rm_path or sample.custom_rm_path
        sample.metadata |= config.metadata_overrides
        if config.rm_type is not None:
            sample.metadata["rm_type"] = config.rm_type
    return samples


def eval_generator(
    one: EvalSet, rollout: RolloutConfig, tokenizer: Any, pool: EnginePool, iteration: int
) -> Generator:
    """What fills in the responses of a data set's samples."""
    own, more = eval_settings(one.config, rollout)
    return Generator(own, tokenizer, pool, iteration=iteration, evaluation=True, more=more)


def eval_settings(
    config: EvalDataset, rollout: RolloutConfig
) -> tuple[RolloutConfig, dict[str, Any]]:
    """How a data set's responses are generated: the section, and sampling parameters beside it.

    What the data set does not say is as in the section `rollout`.
    """
    names = (
        "temperature",
        "top_p",
        "top_k",
        "max_response_len",
        "stop",
        "stop_token_ids",
        "skip_special_tokens",
        "custom_generate_function_path",
    )
    own = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    if config.custom_generate_function_path is not None:
        own["group_generate"] = False
    beside = ("min_new_tokens", "repetition_penalty", "no_stop_trim")
    more = {name: getattr(config, name) for name in beside if getattr(config, name) is not None}
    return rollout.model_copy(update=own), more


def eval_metrics(
    config: EvalDataset, samples: list[Sample], scores: list[Score]
) -> dict[str, float]:
    """Mean reward, pass@k for powers of two, exactness and lengths of one data set.

    pass@k is the mean of the unbiased estimator (arXiv 2107.03374) over the prompts with at least k
    scored samples.
    """
    name = f"eval/{config.name}"
    out = length_metrics(name, samples)
    groups = execution_rewards(samples, [score.reward for score in scores])
    rewards = [r for group in groups for r in group if r is not None]
    out[f"{name}/unscored"] = float(sum(map(len, groups)) - len(rewards))
    if not rewards:
        return out
    out[name] = statistics.fmean(rewards)
    out[f"{name}/exact"] = sum(r >= 1 for r in rewards) / len(rewards)
    scored = [[r for r in group if r is not None] for group in groups]
    counts = [(len(found), sum(r >= config.pass_threshold for r in found)) for found in scored]
    k = 1
    while k <= config.n_samples_per_eval_prompt:
        passes = [pass_at_k(n, c, k) for n, c in counts if n >= k]
        if passes:
            out[f"{name}/pass@{k}"] = statistics.fmean(passes)
        k *= 2
    return out


def set_score(sample: Sample, score: Score) -> None:
    """Put a score into its sample; one without a reward is marked failed, with the reason."""
    sample.reward = json.loads(score.details) if score.details is not None else score.reward
    if score.error is not None:
        sample.metadata = sample.metadata | {"reward_error": score.error}
        sample.status = scored_status(sample.status, score)


def scored_status(status: Status, score: Score) -> Status:
    """The status of a sample after scoring."""
    return Status.FAILED if score.error is not None and status != Status.ABORTED else status
