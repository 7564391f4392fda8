"""Rewards: scores of responses, computed in worker processes.

This file imports nothing but the two calls that others need, and those only when they are asked
for: worker processes load the package too, and must start at once.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.rollout.rewards.scorer import Scorer, check_reward, try_reward

__all__ = ["Scorer", "check_reward", "try_reward"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from rlcore.rollout.rewards import scorer

        return getattr(scorer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
