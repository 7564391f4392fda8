"""Figures of a rollout and its scores, by slime's names where slime has them."""

import math
import statistics
import zlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from rlcore.sample import Sample, Status

LONG_TEXT = 10_000
"""Characters of a response from which on, and of whose end, repetition is looked at."""
REPEATED = 10.0
"""How many times smaller zlib makes a text that repeats itself."""


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
    effective = [s.effective_response_length for s in samples]
    seconds = max(seconds, 1e-9)
    return {
        **length_metrics("rollout", samples),
        **turn_metrics(samples),
        **speculation_metrics(samples),
        "rollout/total_lengths": statistics.fmean(len(s.tokens) for s in samples),
        "rollout/repetition_frac": sum(repeats(s.response) for s in samples) / len(samples),
        "rollout/prefix_cache_hit_rate": cached / prompt_tokens if prompt_tokens else 0.0,
        "rollout/avg_cached_tokens_per_sample": cached / len(samples),
        "perf/rollout_time": seconds,
        "perf/tokens_per_gpu_per_sec": sum(made) / seconds / num_gpus,
        "perf/effective_tokens_per_gpu_per_sec": sum(effective) / seconds / num_gpus,
        "perf/longest_sample_tokens_per_sec": max(made) / seconds,
        "perf/longest_effective_sample_tokens_per_sec": max(effective) / seconds,
    }


def turn_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Tokens of tools and seconds outside the engine; empty where no sample has any."""
    out: dict[str, float] = {}
    if any(s.effective_response_length < s.response_length for s in samples):
        out |= spread("multi_turn/raw_response_length", [s.response_length for s in samples])
        out |= spread(
            "multi_turn/wo_obs_response_length", [s.effective_response_length for s in samples]
        )
    turns = [len(s.weight_versions) for s in samples]
    if out or any(count > 1 for count in turns):
        out |= spread("multi_turn/round_number", turns)
    outside = [s.non_generation_time for s in samples]
    if any(outside):
        out |= spread("perf/non_generation_time", outside)
    return out


def speculation_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """How much of what was drafted was accepted; empty where nothing was."""
    total = Counter[str]()
    for sample in samples:
        total.update(sample.spec_info)
    out = {}
    if total["draft_token_num"]:
        out["rollout/spec_accept_rate"] = total["accept_token_num"] / total["draft_token_num"]
    if total["verify_ct"]:
        out["rollout/spec_accept_length"] = total["completion_token_num"] / total["verify_ct"]
    return out


def repeats(text: str) -> bool:
    """Whether a long response ends in repetition: zlib makes its end ten times smaller."""
    if len(text) <= LONG_TEXT:
        return False
    end = text[-LONG_TEXT:].encode()
    return len(end) > REPEATED * len(zlib.compress(end))


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, median, largest and smallest of what is not empty."""
    return {
        f"{name}/mean": statistics.fmean(values),
        f"{name}/median": float(statistics.median(values)),
        f"{name}/max": float(max(values)),
        f"{name}/min": float(min(values)),
    }


def length_metrics(prefix: str, samples: Sequence[Sample]) -> dict[str, float]:
    """Effective response lengths in tokens, and how the samples ended."""
    lengths = [s.effective_response_length for s in samples]
    ended = Counter(s.status for s in samples)
    return {
        **spread(f"{prefix}/response_len", lengths),
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
    out |= pass_rates(groups)
    same = Counter[str]()
    for group in groups:
        scored = [r for r in group if r is not None]
        if len(scored) > 1 and not has_spread(scored):
            same[f"{scored[0]:.1f}"] += 1
    for text, count in sorted(same.items()):
        out[f"rollout/zero_std/count_{text}"] = float(count)
    out["rollout/zero_std/count"] = float(sum(same.values()))
    return out


def pass_rates(groups: Sequence[Sequence[float | None]]) -> dict[str, float]:
    """`passrate/pass@k` for the powers of two up to the size of the smallest group.

    A sample is right whose reward is exactly 1; one without a reward is wrong.
    """
    smallest = min(len(group) for group in groups)
    right = [(len(group), sum(r == 1 for r in group)) for group in groups]
    return {
        f"passrate/pass@{k}": statistics.fmean(pass_at_k(n, c, k) for n, c in right)
        for k in (2**power for power in range(smallest.bit_length()))
        if k <= smallest
    }


def correct_length_metrics(lengths: Sequence[int]) -> dict[str, float]:
    """Quartiles of the tokens of right responses; empty where there is none."""
    if not lengths:
        return {}
    quartiles = np.percentile(lengths, (25, 50, 75, 100))
    return {
        f"rollout/correct_length/p{percent}": float(length)
        for percent, length in zip((25, 50, 75, 100), quartiles, strict=True)
    }


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
