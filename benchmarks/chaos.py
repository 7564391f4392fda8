"""The whole chaos suite: a kill at every point of an iteration and of each part of the stack.

It calls pytest on `tests/chaos` and sums up what the runs recorded, each once it had ended as it
should. `seconds` are from the SIGKILL of a driver to the first stage that the next one begins.
Faults which the driver may live through are counted apart: `actors` from the signal to the manifest
of the stage that it struck, `stack` to the next stage that anyone begins.

Run: python -m benchmarks.chaos [--repeats N] [-k EXPRESSION]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._common import REPO, RESULTS, finish, machine, spread

GOAL_S, POINTS_GOAL = 15.0, 60
DRIVER_KILLED = ("PostgreSQL", "deployed", "driver", "store alone")
"""Scenarios in which each kill ends a driver."""


def suite(number: int, only: str | None) -> dict[str, Any]:
    """One pass: its exit code, length and kills by scenario."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="sluice-chaos-") as folder:
        record = Path(folder) / "record.jsonl"
        argv = [sys.executable, "-m", "pytest", "tests/chaos", "-m", "not slow", "-q"]
        # The fast subset's points are among those of the whole.
        argv += ["--deselect", "tests/chaos/test_driver_killed.py::test_killed_at_some_points"]
        argv += ["--basetemp", f"{folder}/runs", *(["-k", only] if only else [])]
        env = os.environ | {"SLUICE_CHAOS_RECORD": str(record)}
        code = subprocess.run(argv, cwd=REPO, env=env, stdout=sys.stderr).returncode
        lines = record.read_text().splitlines() if record.exists() else []
    kills = [
        {"scenario": line["scenario"], **kill}
        for line in map(json.loads, lines)
        for kill in line["kills"]
    ]
    for kill in kills:
        del kill["at"]
    return {
        "repeat": number,
        "passed": code == 0,
        "minutes": round((time.perf_counter() - began) / 60, 2),
        "kill_points": len(kills),
        "kills": kills,
    }


def main() -> int:
    """Run, write the JSON, say whether the goals are met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("-k", dest="only", help="as pytest takes it")
    parser.add_argument("--result", type=Path, default=RESULTS / "chaos.json")
    args = parser.parse_args()
    facts = machine("prefect", "ray", "torch")
    passes = [suite(number, args.only) for number in range(args.repeats)]
    kills = [kill for one in passes for kill in one["kills"]]
    drivers = [kill for kill in kills if kill["scenario"] in DRIVER_KILLED]
    scenarios = sorted({kill["scenario"] for kill in kills})
    by_scenario = {
        name: seconds(
            [kill for kill in kills if kill["scenario"] == name],
            "to_manifest" if name == "actors" else "to_stage",
        )
        for name in scenarios
    }
    over_all = seconds(drivers, "to_stage")
    result = {
        "benchmark": "chaos",
        "what": "from the SIGKILL of a driver to the first stage that the next one begins, in "
        "seconds; `actors`: from the signal to the manifest of the stage that it struck; `stack`: "
        "to the next stage that anyone begins; late: the stage was done before half its usual time",
        "goal": f"all passes green; {POINTS_GOAL} kill points in each; median <= {GOAL_S:g} s",
        "met": all(one["passed"] and one["kill_points"] >= POINTS_GOAL for one in passes)
        and over_all.get("median", GOAL_S + 1) <= GOAL_S,
        "repeats": len(passes),
        "green": sum(one["passed"] for one in passes),
        "late": sum(kill["late"] for kill in kills),
        "seconds": over_all,
        "by_scenario": by_scenario,
        "passes": passes,
        "machine": facts,
    }
    return finish(result, args.result)


def seconds(kills: list[dict[str, Any]], key: str) -> dict[str, float]:
    """The spread of a time over the kills that have it."""
    values = [kill[key] for kill in kills if kill[key] is not None]
    return spread(values) if values else {"count": 0}


if __name__ == "__main__":
    sys.exit(main())
