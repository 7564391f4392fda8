"""The quickstart as a user runs it: how soon it begins, how soon it has learned, how soon it ends.

Everything is measured from outside: by the clock when the command starts and ends, and by the
`created` and `seconds` of the iterations' commit records. The first iteration begins `seconds`
before the record of iteration 0 was made. Each run gets a fresh root and its own Prefect and Ray.

Run: python -m benchmarks.quickstart [--iterations N] [--starts N]
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._common import (
    REPO,
    RESULTS,
    created,
    finish,
    machine,
    read_records,
    sluice,
    spread,
)

CONFIG = REPO / "examples" / "quickstart" / "run.toml"
REWARD, WINDOW = 0.9, 5
START_GOAL_S, REWARD_GOAL_S = 20.0, 120.0


@dataclass(frozen=True)
class Timed:
    """A run, and when its command started and ended."""

    began: float
    opened: float
    """When the run's record was made: Prefect and Ray are up, the flow runs, no actor yet."""
    ended: float
    records: list[dict[str, Any]]

    @property
    def first(self) -> float:
        """When the first iteration began."""
        return created(self.records[0]) - float(self.records[0]["metrics"]["seconds"])

    @property
    def start_s(self) -> float:
        """Seconds from the command to the first iteration."""
        return self.first - self.began

    @property
    def end_s(self) -> float:
        """Seconds from the last iteration's commit to the end of the process."""
        return self.ended - created(self.records[-1])


def train(iterations: int | None) -> Timed:
    """Run the command in a fresh root; None: as many iterations as the example says."""
    more = [] if iterations is None else ["--set", f"train.num_iterations={iterations}"]
    with tempfile.TemporaryDirectory(prefix="sluice-quickstart-") as root:
        began = time.time()
        sluice("train", CONFIG, "--root", root, "--run-id", "quickstart", *more)
        ended = time.time()
        opened = json.loads((Path(root) / "runs" / "quickstart" / "run.json").read_text())
        return Timed(began, created(opened), ended, read_records(Path(root), "quickstart"))


def learning(run: Timed) -> dict[str, Any]:
    """When the reward got there, and what came of it."""
    rewards = [float(r["metrics"]["rollout/raw_reward"]) for r in run.records]
    at = [created(r) - run.first for r in run.records]
    means = [statistics.fmean(rewards[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(rewards))]

    def reached(values: list[float]) -> dict[str, float] | None:
        for i, value in enumerate(values):
            if value >= REWARD:
                return {"iteration": i, "seconds": round(at[i], 2)}
        return None

    return {
        "reached": reached(rewards),
        f"reached_by_mean_of_{WINDOW}": reached(means),
        "final_reward": round(rewards[-1], 4),
        "final_exact": round(float(run.records[-1]["metrics"]["rollout/exact"]), 4),
        "iterations": len(rewards),
        "training_s": round(at[-1], 2),
        "iteration_s": spread([float(r["metrics"]["seconds"]) for r in run.records]),
        "reward_each_10": [round(r, 3) for r in rewards[::10]],
    }


def median(values: Iterable[float]) -> float:
    """Rounded."""
    return round(statistics.median(values), 2)


def main() -> int:
    """Measure, write the JSON, say whether the goals are met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, help="fewer than the example has, for a trial")
    parser.add_argument("--starts", type=int, default=4, help="runs of 1 iteration besides")
    parser.add_argument("--result", type=Path, default=RESULTS / "quickstart.json")
    args = parser.parse_args()
    facts = machine("torch", "transformers", "ray", "prefect")
    whole = train(args.iterations)
    runs = [whole, *(train(1) for _ in range(args.starts))]
    start = spread([run.start_s for run in runs])
    learned = learning(whole)
    reached = learned["reached"]
    result = {
        "benchmark": "quickstart",
        "what": "start_s: seconds from the command to the first iteration's start, of the whole "
        "run and of runs of one iteration (until_opened: Prefect, Ray and the flow; then the "
        "actors); reached: first iteration with the reward, in seconds "
        "from the first iteration's start; end_s: from the last commit to the process's end",
        "goal": f"median start_s < {START_GOAL_S:g}; reward {REWARD} reached within "
        f"{REWARD_GOAL_S:g} s",
        "met": start["median"] < START_GOAL_S
        and reached is not None
        and reached["seconds"] <= REWARD_GOAL_S,
        "start_s": {
            "by_run": [round(run.start_s, 2) for run in runs],
            **start,
            "until_opened_median": median(run.opened - run.began for run in runs),
            "actors_median": median(run.first - run.opened for run in runs),
        },
        "end_s": {
            "by_run": [round(run.end_s, 2) for run in runs],
            **spread([run.end_s for run in runs]),
        },
        **learned,
        "machine": facts,
    }
    return finish(result, args.result)


if __name__ == "__main__":
    sys.exit(main())
