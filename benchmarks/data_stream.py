"""How fast a large JSONL file is checked and indexed, what memory that takes, and how fast rows
are read by the index.

Each step runs in a process of its own, so that its peak memory is its own; times are those of its
CPU, so that they are the same on a machine that does something else, too. Writes
benchmarks/results/data_stream.json. `--mb` sets the size of the file that is made.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import RESULTS, finish, machine, own_env

ROW_BYTES = 1024
GOAL_MB = 100
"""Of which the shuffle and the index of a million rows take 20, and sorting its keys 24."""

STEP = """
import json, resource, sys, time
import numpy
from rlcore.config.tree import DataConfig
from rlcore.data import Cursor, check_dataset, load_dataset

step, path, n = sys.argv[1], sys.argv[2], 2000
config = DataConfig(path=path)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def tokenize(texts, add_special_tokens):
    return {"input_ids": [[1] for _ in texts]}

clock = time.process_time
before, began = peak(), clock()
if step == "check":
    rows = check_dataset(config).rows
    out = {"cpu_seconds": clock() - began}
else:
    data = load_dataset(config, lambda: None)
    out = {"cpu_seconds": clock() - began}
    began = clock()
    picked, _ = data.order(0, True).plan(Cursor(), n)
    out["shuffle_cpu_seconds"] = clock() - began
    began = clock()
    data.tokenized(picked, tokenize)
    out["rows_per_cpu_second_at_use"] = n / (clock() - began)
    rows = len(data)
print(json.dumps(out | {"rows": rows, "peak_growth_mb": (peak() - before) / 1e6}))
"""


def make(path: Path, megabytes: int) -> None:
    """A file of rows of about `ROW_BYTES`."""
    text = "a word or two " * (ROW_BYTES // 14 - 5)
    with path.open("w") as out:
        for k in range(megabytes * 1_000_000 // ROW_BYTES):
            out.write(json.dumps({"prompt": f"{k}: {text}", "label": str(k)}) + "\n")


def run(step: str, path: Path) -> dict[str, float]:
    """One step in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", STEP, step, str(path)],
        env=own_env(),
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=1000, help="size of the file")
    asked = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "goal": f"peak growth under {GOAL_MB} MB"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        make(path, asked.mb)
        megabytes = path.stat().st_size / 1e6
        result["file_mb"] = round(megabytes, 1)
        for step in ("check", "load"):
            found = run(step, path)
            found["mb_per_cpu_second"] = megabytes / found["cpu_seconds"]
            result[step] = {name: round(value, 2) for name, value in found.items()}
    result["met"] = all(result[step]["peak_growth_mb"] < GOAL_MB for step in ("check", "load"))
    return finish(result, RESULTS / "data_stream.json")


if __name__ == "__main__":
    sys.exit(main())
