"""Filters: which groups of a scored rollout are trained on.

Invariants:
- A group is kept or dropped as a whole, save its samples without a reward, which are never kept.
- Every sample of the rollout has its row in the selection, in the rollout's order, with the reason
  where it is not kept. What is dropped is counted by reason.
- A rollout of which nothing is kept is a valid selection; who trains on it decides what that means.
"""

from rlcore.rollout.filters.rules import GroupRule, Verdict, make_rule, nonzero_std
from rlcore.rollout.filters.select import Scored, Selection, decide, select

__all__ = [
    "GroupRule",
    "Scored",
    "Selection",
    "Verdict",
    "decide",
    "make_rule",
    "nonzero_std",
    "select",
]
