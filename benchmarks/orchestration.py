"""What orchestration costs: an iteration's time on the wall less generation and training compute.

The quickstart's task runs 200 iterations with all seven stages in each. An iteration lasts from the
commit of the one before to its own, so whatever happens between two iterations counts; compute is
the metric `compute_seconds` (engines generating, for evaluation too, and the trainer's forward,
backward and optimizer step). Scoring and checkpoints are no compute here.

The parts of an iteration add up to its overhead:

- prefect_between: from the commit before to the iteration's first line: the subflow's run, progress
  artifacts, waiting for the server to record the last task, removal of old states;
- prefect_within: from there to the commit, less the stages: task runs, looking for manifests;
- commits: checking the lease and putting the manifests, of all stages;
- parquet: writing the samples and the scores;
- scoring: the reward function in its worker process;
- ray: the calls of the rollout worker, and preparing what it generates or scores;
- filter, evaluate, sync, checkpoint: these stages' work less generation, Ray calls included;
- train_state: reading the batch, saving the trainer's state, Ray calls included.

Run: python -m benchmarks.orchestration [--iterations N]
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from itertools import pairwise
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

CONFIG = REPO / "benchmarks" / "orchestration.toml"
STAGES = ("rollout", "reward", "filter", "train", "weight_sync", "evaluate", "checkpoint")
EARLY, LATE = range(10, 60), range(150, 200)
HICCUP_S = 1.5
"""Prefect's client sleeps two seconds and more where the server answered 503."""
MEDIAN_GOAL_S, P95_GOAL_S, FLAT_GOAL = 0.35, 1.0, 1.1
Timings = Mapping[str, Mapping[str, float]]


def parts_of(wall: float, metrics: Mapping[str, float], timings: Timings) -> dict[str, float]:
    """The named parts of one iteration's overhead, in seconds; their sum is the overhead.

    Args:
        wall: from the commit before to this one.
        metrics: of the iteration.
        timings: of the stages' manifests.
    """
    total = {name: metrics[f"perf/{name}_time"] for name in STAGES}
    own = {name: timings[name]["seconds"] - timings[name]["compute"] for name in STAGES}
    rollout, reward = timings["rollout"], timings["reward"]
    parquet = rollout["write"] + reward["write"]
    return {
        "prefect_between": wall - metrics["seconds"],
        "prefect_within": metrics["seconds"] - sum(total.values()),
        "commits": sum(total[name] - timings[name]["seconds"] for name in STAGES),
        "parquet": parquet,
        "scoring": reward["score"],
        "ray": own["rollout"] + own["reward"] - parquet - reward["score"],
        "filter": own["filter"],
        "train_state": own["train"],
        "sync": own["weight_sync"],
        "evaluate": own["evaluate"],
        "checkpoint": own["checkpoint"],
    }


def stage_timings(root: Path, record: Mapping[str, Any]) -> Timings:
    """Stage -> timings, as its manifest has them."""
    return {
        name: json.loads((root / ref["key"]).read_text())["timings"]
        for name, ref in record["stages"].items()
    }


def measure(root: Path, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Overheads, their parts and their course over the iterations; the first is left out, since
    nothing was committed before it.
    """
    overheads, parts, stages = [], [], []
    for before, record in pairwise(records):
        metrics, timings = record["metrics"], stage_timings(root, record)
        compute = {name: timings[name]["compute"] for name in STAGES}
        if abs(sum(compute.values()) - metrics["compute_seconds"]) > 1e-6:
            raise SystemExit(f"iteration {record['iteration']}: compute_seconds is not its stages'")
        wall = created(record) - created(before)
        overheads.append(wall - metrics["compute_seconds"])
        parts.append(parts_of(wall, metrics, timings))
        stages.append({n: (metrics[f"perf/{n}_time"], compute[n]) for n in STAGES})
    return {
        "overhead_s": spread(overheads),
        "hiccups": sum(one > HICCUP_S for one in overheads),
        "flatness": flatness(overheads),
        "compute_s": spread([r["metrics"]["compute_seconds"] for r in records[1:]]),
        "parts_s": {name: spread([one[name] for one in parts]) for name in parts[0]},
        "stages_s": {
            name: {
                "total_median": round(statistics.median(s[name][0] for s in stages), 4),
                "compute_median": round(statistics.median(s[name][1] for s in stages), 4),
            }
            for name in STAGES
        },
        "overhead_each_10_s": [
            round(statistics.median(overheads[i : i + 10]), 3) for i in range(0, len(overheads), 10)
        ],
    }


def flatness(overheads: list[float]) -> dict[str, float] | None:
    """Late iterations against early ones; None where the run was too short to say.

    Args:
        overheads: of iterations 1, 2, ...
    """
    if len(overheads) < LATE.stop - 1:
        return None
    early, late = ([overheads[i - 1] for i in span] for span in (EARLY, LATE))
    return {
        "of_medians": round(statistics.median(late) / statistics.median(early), 3),
        "of_means": round(statistics.fmean(late) / statistics.fmean(early), 3),
    }


def main() -> int:
    """Measure, write the JSON, say whether the goals are met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=LATE.stop)
    parser.add_argument("--result", type=Path, default=RESULTS / "orchestration.json")
    args = parser.parse_args()
    facts = machine("torch", "ray", "prefect", "pyarrow")
    with tempfile.TemporaryDirectory(prefix="sluice-orchestration-") as name:
        more = ["--root", name, "--run-id", "bench"]
        sluice("train", CONFIG, *more, "--set", f"train.num_iterations={args.iterations}")
        measured = measure(Path(name), read_records(Path(name), "bench"))
    overhead, flat = measured["overhead_s"], measured["flatness"]
    result = {
        "benchmark": "orchestration",
        "what": "seconds of an iteration on the wall less generation and training compute, all "
        f"seven stages in each; flatness: overhead of iterations {LATE.start}-{LATE.stop} over "
        f"that of {EARLY.start}-{EARLY.stop}; hiccups: iterations of more than {HICCUP_S} s; "
        "ray is below 0 by what a rollout had done before its task came for it",
        "goal": f"median <= {MEDIAN_GOAL_S}; p95 <= {P95_GOAL_S:g}; flatness of medians <= "
        f"{FLAT_GOAL}",
        "met": overhead["median"] <= MEDIAN_GOAL_S
        and overhead["p95"] <= P95_GOAL_S
        and flat is not None
        and flat["of_medians"] <= FLAT_GOAL,
        "iterations": args.iterations,
        **measured,
        "machine": facts,
    }
    return finish(result, args.result)


if __name__ == "__main__":
    sys.exit(main())
