"""Scoring 10,000 mixed answers: how busy it keeps its processes, and whether generation notices.

The answers are those of mathematics questions in many spellings, some of them made to hang a
parser, each in a response of some length. They are scored by `reward.rm_type = "math"` with one
process and with one a core. Meanwhile an event loop does what a rollout does, wait for short
timers, and notes how late it is woken.

Run: python -m benchmarks.rewards [--answers N] [--workers N]
"""

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks._common import RESULTS, finish, machine, spread
from rlcore.config.tree import RewardConfig
from rlcore.rollout.rewards import Scorer
from rlcore.sample import Sample, Status

ANSWERS, TOKENS, GROUP = 10_000, 1024, 8
TICK_S = 0.005
GOAL_BUSY, GOAL_LATE_S = 0.8, 0.1
HOSTILE = (
    "(" * 900 + ")" * 900,
    "9" + "^{9" * 300 + "}" * 300,
    r"\sqrt" * 190 + "2",
    "(a+b+c+d+e+f+g)" * 60,
    "1e" + "9" * 900,
    "1" * 1_000_000,
)


def answers(count: int) -> list[tuple[str, str]]:
    """Answers with their labels, in turn easy, worth some algebra, and hostile."""
    kinds = (
        lambda k: (f"{k:,}", str(k)),
        lambda k: (rf"\frac{{{k}}}{{{k + 1}}}", f"{k}/{k + 1}"),
        lambda k: (rf"{k}\sqrt{{12}}", rf"{2 * k}\sqrt{{3}}"),
        lambda k: (rf"(x+{k})^2", f"x^2+{2 * k}x+{k * k}"),
        lambda k: (rf"\left({k}, {k + 1}\right]", f"({k},{k + 1}]"),
        lambda k: (rf"\{{{k}, {k + 1}, {k + 2}\}}", f"{k + 2},{k},{k + 1}"),
        lambda k: (rf"x = {k}\text{{ cm}}", str(k)),
        lambda k: (
            rf"\frac{{1}}{{1+\sqrt{{{k + 2}}}}}",
            rf"\frac{{\sqrt{{{k + 2}}}-1}}{{{k + 1}}}",
        ),
        lambda k: (rf"{k}\frac{{1}}{{2}}", str(k + 1)),
    )
    made = [kinds[k % len(kinds)](k) for k in range(count)]
    for k in range(0, count, 200):
        made[k] = (HOSTILE[k // 200 % len(HOSTILE)], "5")
    return made


def samples(count: int) -> list[Sample]:
    """Samples as a rollout leaves them, with ids and log-probs."""
    filler = "We compute the value step by step. " * 60
    return [
        Sample(
            group_index=k // GROUP,
            index=k,
            prompt_id=f"{k // GROUP:016x}",
            prompt="What is the value?",
            label=label,
            tokens=list(range(k, k + TOKENS)),
            response=rf"{filler}So the answer is $\boxed{{{answer}}}$.",
            response_length=TOKENS - 64,
            rollout_log_probs=[-0.25] * (TOKENS - 64),
            status=Status.COMPLETED,
        )
        for k, (answer, label) in enumerate(answers(count))
    ]


async def measure(batch: list[Sample], workers: int) -> dict[str, Any]:
    """Score the batch once, warm."""
    scorer = Scorer(RewardConfig(rm_type="math", workers=workers, max_failed=1.0))
    try:
        await scorer.score(batch[: 64 * workers])
        children = [p for p in psutil.Process().children() if p.is_running()]
        before = [sum(child.cpu_times()[:2]) for child in children]
        began = time.perf_counter()
        scoring = asyncio.ensure_future(scorer.score(batch))
        late = []
        while not scoring.done():
            at = time.perf_counter()
            await asyncio.sleep(TICK_S)
            late.append(time.perf_counter() - at - TICK_S)
        seconds = time.perf_counter() - began
        used = [sum(c.cpu_times()[:2]) - b for c, b in zip(children, before, strict=True)]
        scores = await scoring
    finally:
        await asyncio.to_thread(scorer.close)
    return {
        "workers": workers,
        "seconds": round(seconds, 3),
        "answers_per_s": round(len(batch) / seconds),
        "right": sum(s.reward == 1.0 for s in scores),
        "failed": sum(s.reward is None for s in scores),
        "cpu_s_by_worker": [round(u, 3) for u in used],
        # Of the processes that did the work: the least busy against the most.
        "balance": round(min(used) / max(used), 3),
        "busy": round(sum(used) / (seconds * min(workers, len(os.sched_getaffinity(0)))), 3),
        "loop_late_s": spread(late),
    }


def main() -> int:
    """Measure, write the JSON, say whether the goals are met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--answers", type=int, default=ANSWERS)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--result", type=Path, default=RESULTS / "rewards.json")
    args = parser.parse_args()
    facts = machine()
    batch = samples(args.answers)
    one = asyncio.run(measure(batch, 1))
    all_ = asyncio.run(measure(batch, args.workers))
    late = all_["loop_late_s"]["p95"]
    result = {
        "benchmark": "rewards",
        "what": "seconds to score mixed answers with reward.rm_type = 'math'; lower is better",
        "goal": f"every process at least {GOAL_BUSY} as busy as the busiest; 95 of 100 timers of "
        f"the event loop less than {GOAL_LATE_S} s late; none failed; the same verdicts",
        "met": all_["balance"] >= GOAL_BUSY
        and late < GOAL_LATE_S
        and one["failed"] == all_["failed"] == 0
        and one["right"] == all_["right"],
        "answers": args.answers,
        "hostile": sum(label == "5" for _, label in answers(args.answers)),
        "one_worker": one,
        "all_workers": all_,
        "speedup": round(one["seconds"] / all_["seconds"], 2),
        "machine": facts,
    }
    return finish(result, args.result)


if __name__ == "__main__":
    sys.exit(main())
