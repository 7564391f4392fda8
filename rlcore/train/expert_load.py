"""How evenly a mixture of experts is used, as metrics."""

from __future__ import annotations

from torch import Tensor


def load_figures(counts: Tensor) -> dict[str, float]:
    """What counts of tokens come to.

    `load_mean` is tokens by expert; `load_max` those of the busiest expert over that mean, 1 where
    all are used alike; `dead_experts` the share of those that had no token.

    Args:
        counts: [layers with experts, experts], over all ranks.

    Returns:
        By name; nothing where nothing was counted.
    """
    load = counts.double().cpu()
    if not load.sum():
        return {}
    mean = load.mean(1)
    busiest, dead = (load.amax(1) / mean).tolist(), (load == 0).double().mean(1).tolist()
    out = {
        "moe/load_mean": float(mean.mean()),
        "moe/load_max": max(busiest),
        "moe/dead_experts": sum(dead) / len(dead),
    }
    for k, pair in enumerate(zip(busiest, dead, strict=True)):
        out[f"moe/layer_{k}/load_max"], out[f"moe/layer_{k}/dead_experts"] = pair
    return out
