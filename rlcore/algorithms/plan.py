"""Who trains what: a rollout batch cut into optimizer steps, ranks and micro-batches.

1. The executions, in their order, are cut into `num_steps` consecutive parts whose sizes differ by
   at most one: with a full batch each part is exactly the global batch size. An execution is one
   sample, or several that were cut from it.
2. Inside a step the samples are spread over the ranks by cost, each sample (dearest first) to the
   rank with the least so far (Graham's LPT rule: the dearest rank costs at most 4/3 of the best
   possible).
3. Each rank fills micro-batches up to `max_tokens` (first fit, longest first). The rank that needs
   most sets the number of micro-batches of the step; each rank then spreads its samples evenly over
   that many where the cap allows it.
4. Micro-batches run side by side on all ranks, so each rank's are ordered from dearest to cheapest.

Invariants:
- Every sample is in exactly one micro-batch of exactly one step, whole.
- A step has the same number of micro-batches on all ranks; a rank short of samples gets empty ones.
- No micro-batch exceeds `max_tokens`, but for a single sample that is longer itself.
- A slot in which all ranks would be empty does not exist unless `fixed_micro_batches` demands it.
- The plan depends on the arguments alone; samples of a micro-batch are in ascending order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlcore.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that go through the model in one pass."""

    samples: tuple[int, ...]
    """Ascending positions in the rollout batch given to `plan`; () is an empty micro-batch."""
    tokens: int
    """Sum of their lengths."""

    @property
    def empty(self) -> bool:
        """True for a pass that only keeps a rank in step with the others."""
        return not self.samples


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step."""

    samples: tuple[int, ...]
    """All samples of the step, ascending: what the loss normalisation counts."""
    ranks: tuple[tuple[MicroBatch, ...], ...]
    """`ranks[r][m]`: micro-batch m of rank r; the same number of micro-batches for every rank."""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.ranks[0])


@dataclass(frozen=True, slots=True)
class Plan:
    """All optimizer steps of one rollout batch."""

    steps: tuple[Step, ...]

    def samples_of(self, rank: int) -> tuple[int, ...]:
        """Ascending positions of every sample that a rank trains: the rows that it has to read."""
        return tuple(sorted(i for s in self.steps for m in s.ranks[rank] for i in m.samples))


def plan(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    dp_size: int,
    num_steps: int,
    executions: Sequence[int] | None = None,
    costs: Sequence[float] | None = None,
    fixed_micro_batches: int | None = None,
) -> Plan:
    """Assigns samples to steps, ranks and micro-batches.

    Args:
        lengths: tokens (prompt and response) of each sample that is to be trained, in batch order.
        max_tokens: cap on the tokens of a micro-batch.
        dp_size: data-parallel ranks.
        num_steps: optimizer steps.
        executions: the execution of each sample, those of one side by side; each its own when not
            given.
        costs: what each sample costs to train, in any unit; its length when not given
            (`rlcore.algorithms.flops` computes a better one for long sequences).
        fixed_micro_batches: exactly so many micro-batches a rank and step; `max_tokens` then does
        not
            apply.

    Raises:
        DataError: fewer executions than steps, a length below 1, or costs of another count.
        ConfigError: a count below 1.
    """
    counts = {"max_tokens": max_tokens, "dp_size": dp_size, "num_steps": num_steps}
    if fixed_micro_batches is not None:
        counts["fixed_micro_batches"] = fixed_micro_batches
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    own = range(len(lengths)) if executions is None else executions
    firsts = [i for i in range(len(lengths)) if i == 0 or own[i] != own[i - 1]]
    if len(firsts) < num_steps:
        raise DataError(
            f"{len(firsts)} samples are left to train in {num_steps} optimizer steps: each step "
            "needs at least one; lower train.num_steps_per_rollout or loosen the filters"
        )
    if min(lengths) < 1:
        shortest = min(range(len(lengths)), key=lambda i: lengths[i])
        raise DataError(f"sample {shortest} has {lengths[shortest]} tokens; it must have some")
    weights = [float(n) for n in lengths] if costs is None else list(costs)
    if len(weights) != len(lengths):
        raise DataError(f"{len(weights)} costs for {len(lengths)} samples; there must be one each")

    starts = [*firsts, len(lengths)]
    bounds = [starts[k * len(firsts) // num_steps] for k in range(num_steps + 1)]
    steps = []
    for first, last in pairwise(bounds):
        samples = range(first, last)
        shares = _spread(samples, weights, dp_size)
        if fixed_micro_batches is None:
            bins = _fill_to_cap(shares, lengths, weights, max_tokens)
        else:
            bins = [_spread(share, weights, fixed_micro_batches) for share in shares]
        ranks = tuple(tuple(_ordered(rank, lengths, weights)) for rank in bins)
        steps.append(Step(samples=tuple(samples), ranks=ranks))
    return Plan(steps=tuple(steps))


def _spread(samples: Sequence[int], costs: Sequence[float], parts: int) -> list[list[int]]:
    """LPT: dearest sample first, each to the part with the least cost, then the fewest samples."""
    heap = [(0.0, 0, part) for part in range(parts)]
    out: list[list[int]] = [[] for _ in range(parts)]
    for i in sorted(samples, key=lambda i: (-costs[i], i)):
        load, count, part = heap[0]
        out[part].append(i)
        heapq.heapreplace(heap, (load + costs[i], count + 1, part))
    return out


def _first_fit(samples: Sequence[int], lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Longest sample first, each into the first bin with room; one over the cap stays alone."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(samples, key=lambda i: (-lengths[i], i)):
        for b, left in enumerate(room):
            if lengths[i] <= left:
                bins[b].append(i)
                room[b] -= lengths[i]
                break
        else:
            bins.append([i])
            room.append(cap - lengths[i])
    return bins


def _fill_to_cap(
    shares: Sequence[Sequence[int]], lengths: Sequence[int], costs: Sequence[float], cap: int
) -> list[list[list[int]]]:
    """Micro-batches of every rank, equally many, none over the cap unless it is one sample."""
    tight = [_first_fit(share, lengths, cap) for share in shares]
    count = max(len(bins) for bins in tight)
    out = []
    for share, bins in zip(shares, tight, strict=True):
        even = _spread(share, costs, count)
        fits = all(len(b) <= 1 or sum(lengths[i] for i in b) <= cap for b in even)
        out.append(even if fits else bins + [[] for _ in range(count - len(bins))])
    return out


def _ordered(
    bins: Sequence[Sequence[int]], lengths: Sequence[int], costs: Sequence[float]
) -> list[MicroBatch]:
    """Dearest first, empty last; samples ascending."""
    order = sorted(bins, key=lambda b: (not b, -sum(costs[i] for i in b), min(b, default=0)))
    return [MicroBatch(tuple(sorted(b)), sum(lengths[i] for i in b)) for b in order]
