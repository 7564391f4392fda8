"""What a long run costs its driver: memory and time of 1,000 quickstart iterations in one flow run.

The driver's resident memory is read every two seconds while it works, together with the number of
committed iterations. An iteration lasts from the commit of the one before to its own; those without
an evaluation are compared, late ones against early ones, both after the policy has learnt the task,
so that responses are of one length.

Run: python -m benchmarks.long_run [--iterations N]
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks._common import REPO, RESULTS, SLUICE, created, finish, machine, read_records, spread

CONFIG = REPO / "examples" / "quickstart" / "run.toml"
SETTLED = 100
"""Memory is compared from this iteration on."""
WINDOW = 100
"""Iterations compared at the start, after those that settle, and at the end."""
GROWTH_GOAL_MB, FLAT_GOAL = 50.0, 1.1
MB = 2**20
POLL_S = 2.0

Reading = tuple[int, float]
"""Committed iterations and the driver's resident memory in MB."""


def watch(process: subprocess.Popen[bytes], root: Path, run_id: str) -> list[Reading]:
    """The driver's memory while it runs."""
    driver, readings, done = psutil.Process(process.pid), [], 0
    folder = root / "runs" / run_id / "it"
    while process.poll() is None:
        while (folder / f"{done:06d}" / "_COMMITTED.json").exists():
            done += 1
        try:
            readings.append((done, driver.memory_info().rss / MB))
        except psutil.NoSuchProcess:
            break
        time.sleep(POLL_S)
    return readings


def memory(readings: list[Reading], iterations: int) -> dict[str, float]:
    """Megabytes at the settled point and over the last window, and their difference."""
    early = [rss for done, rss in readings if SETTLED <= done < SETTLED + WINDOW // 2]
    late = [rss for done, rss in readings if iterations - WINDOW // 2 <= done < iterations]
    at, end = statistics.median(early), statistics.median(late)
    peak = max(rss for done, rss in readings if done >= SETTLED)
    return {
        "at_100_mb": round(at, 1),
        "at_end_mb": round(end, 1),
        "growth_mb": round(end - at, 1),
        "peak_mb": round(peak, 1),
    }


def course(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of an iteration on the wall: overall, and late over early ones."""
    walls = [
        (after["iteration"], created(after) - created(before))
        for before, after in pairwise(records)
        if "evaluate" not in after["stages"] and "evaluate" not in before["stages"]
    ]
    last = records[-1]["iteration"]
    early = [wall for i, wall in walls if SETTLED <= i < SETTLED + WINDOW]
    late = [wall for i, wall in walls if last - WINDOW < i <= last]
    return {
        "iteration_s": spread([wall for _, wall in walls]),
        "early_s": spread(early),
        "late_s": spread(late),
        "late_over_early": round(statistics.median(late) / statistics.median(early), 3),
    }


def main() -> int:
    """Measure, write the JSON, say whether the goals are met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--result", type=Path, default=RESULTS / "long_run.json")
    args = parser.parse_args()
    facts = machine("torch", "ray", "prefect")
    env = {k: v for k, v in os.environ.items() if k not in ("PREFECT_API_URL", "SLUICE_ROOT")}
    with tempfile.TemporaryDirectory(prefix="sluice-long-") as name:
        argv = [*SLUICE, "train", CONFIG, "--root", name, "--run-id", "long"]
        argv += ["--set", f"train.num_iterations={args.iterations}"]
        with subprocess.Popen(argv, env=env, cwd=REPO, stdout=subprocess.DEVNULL) as process:
            readings = watch(process, Path(name), "long")
        if process.returncode:
            raise SystemExit(f"the run ended with code {process.returncode}")
        records = read_records(Path(name), "long")
        database = (Path(name) / "prefect" / "prefect.db").stat().st_size / MB
    held, went = memory(readings, args.iterations), course(records)
    result = {
        "benchmark": "long_run",
        "what": "resident memory of the driver, and seconds of an iteration on the wall, over one "
        f"flow run of {args.iterations} quickstart iterations",
        "goal": f"memory grows less than {GROWTH_GOAL_MB:g} MB after iteration {SETTLED}; late "
        f"iterations cost no more than {FLAT_GOAL} x early ones (medians)",
        "met": held["growth_mb"] < GROWTH_GOAL_MB and went["late_over_early"] <= FLAT_GOAL,
        "iterations": args.iterations,
        "driver": held,
        **went,
        "prefect_database_mb": round(database, 1),
        "machine": facts,
    }
    return finish(result, args.result)


if __name__ == "__main__":
    sys.exit(main())
