"""How far the policies that made a sample lie behind the one that is trained on it.

Policy version v is the model after v iterations of training, and iteration i trains version i: a
token by version v is i - v iterations old there. A sample is as old as its oldest token.
"""

from collections.abc import Sequence

from rlcore.errors import EngineError
from rlcore.sample import Sample


def staleness(sample: Sample, iteration: int) -> int:
    """Iterations that a sample's oldest token lies behind; 0 of one that nothing was generated of.

    Args:
        sample: its versions are those that the engines reported.
        iteration: that is to train on it.
    """
    versions = [int(version) for version in sample.weight_versions if version.isdecimal()]
    return max(0, iteration - min(versions)) if versions else 0


def is_too_old(samples: Sequence[Sample], iteration: int, most: int | None) -> bool:
    """Whether any of the samples is older than `most` iterations; never where that is None."""
    return most is not None and any(staleness(one, iteration) > most for one in samples)


def staleness_metrics(
    samples: Sequence[Sample], iteration: int, most: int | None
) -> dict[str, float]:
    """How old a batch is; nothing where no bound is set.

    Raises:
        EngineError: a sample is older than the bound.
    """
    if most is None:
        return {}
    ages = [staleness(sample, iteration) for sample in samples]
    oldest = max(ages)
    if oldest > most:
        sample = samples[ages.index(oldest)]
        raise EngineError(
            f"iteration {iteration}: sample {sample.index} has tokens of policy versions "
            f"{', '.join(sample.weight_versions)}, the oldest {oldest} iterations behind, but "
            f"rollout.max_staleness = {most}; a custom rollout function must give no older ones"
        )
    return {
        "rollout/staleness/mean": sum(ages) / len(ages),
        "rollout/staleness/max": float(oldest),
    }
