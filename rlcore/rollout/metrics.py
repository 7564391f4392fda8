"""Figures of a rollout and its scores, by slime's names where slime has them."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from rlcore.sample import Sample, Status


def rollout_metrics(
    samples: Sequence[Sample], seconds: float, num_gpus: int, made: Sequence[int] | None = None
) -> dict[str, float]:
    """Lengths, truncation and speed of one rollout.

    Args:
        samples: the batch.
        seconds: that generating took.
        num_gpus: of all engines.
        made: tokens generated in those seconds, for each sample that was worked on; None: the whole
            batch, and nothing else.
    """
    made = [s.response_length for s in samples] if made is None else made
    prompt_tokens = sum(s.prefix_cache_info.get("total_prompt_tokens", 0) for s in samples)
    cached = sum(s.prefix_cache_info.get("cached_tokens", 0) for s in samples)
    seconds = max(seconds, 1e-9)
    return {
        **length_metrics("rollout", samples),
        "rollout/prefix_cache_hit_rate": cached / prompt_tokens if prompt_tokens else 0.0,
        "perf/rollout_time": seconds,
        "perf/tokens_per_gpu_per_sec": sum(made) / seconds / num_gpus,
        "perf/longest_sample_tokens_per_sec": max(made) / seconds,
    }


def length_metrics(prefix: str, samples: Sequence[Sample]) -> dict[str, float]:
    """Effective response lengths in tokens, and how the samples ended."""
    lengths = [s.effective_response_length for s in samples]
    ended = Counter(s.status for s in samples)
    return {
        f"{prefix}/response_len/mean": statistics.fmean(lengths),
        f"{prefix}/response_len/median": float(statistics.median(lengths)),
        f"{prefix}/response_len/max": float(max(lengths)),
        f"{prefix}/response_len/min": float(min(lengths)),
        f"{prefix}/truncated_ratio": ended[Status.TRUNCATED] / len(samples),
        f"{prefix}/aborted": float(ended[Status.ABORTED]),
        f"{prefix}/failed": float(ended[Status.FAILED]),
    }


def reward_metrics(groups: Sequence[Sequence[float | None]]) -> dict[str, float]:
    """Mean, spread and exactness of rewards, and groups whose rewards are all equal.

    Args:
        groups: rewards by group; None where a sample has none, which counts nowhere but in
            `reward/unscored`.
    """
    rewards = [r for group in groups for r in group if r is not None]
    total = sum(len(group) for group in groups)
    out = {"reward/unscored": float(total - len(rewards))}
    if not rewards:
        return out
    out["rollout/raw_reward"] = statistics.fmean(rewards)
    out["rollout/raw_reward/std"] = _std(rewards, ddof=0)
    out["rollout/exact"] = sum(r >= 1 for r in rewards) / len(rewards)
    same = Counter[str]()
    for group in groups:
        scored = [r for r in group if r is not None]
        if len(scored) > 1 and not has_spread(scored):
            same[f"{scored[0]:.1f}"] += 1
    for text, count in sorted(same.items()):
        out[f"rollout/zero_std/count_{text}"] = float(count)
    out["rollout/zero_std/count"] = float(sum(same.values()))
    return out


def has_spread(rewards: Sequence[float]) -> bool:
    """Whether the sample standard deviation (ddof 1, float64) exceeds 1e-6."""
    return len(rewards) > 1 and _std(rewards, ddof=1) > 1e-6


def _std(values: Sequence[float], ddof: int) -> float:
    mean = statistics.fmean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - ddof))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that one of k answers drawn from n without replacement is right.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) of arXiv 2107.03374.

    Args:
        n: answers.
        correct: of them right.
        k: drawn; at most n.
    """
    if n - correct < k:
        return 1.0
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)
