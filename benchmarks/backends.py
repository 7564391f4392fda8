"""The quickstart with each training backend, from the same seed: both learn, and as soon.

The curves begin alike and part where a sampled token turns out otherwise, since sums are made in
another order; what is compared is where they get to.

Run: python -m benchmarks.backends [--iterations N] [--keep FOLDER]
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._common import (
    REPO,
    RESULTS,
    finish,
    keep,
    machine,
    read_records,
    say,
    sluice,
)

CONFIG = REPO / "examples" / "quickstart" / "run.toml"
BACKENDS = ("fsdp", "megatron")
GOAL, WINDOW = 0.9, 10
HELD_OUT = "eval/greedy/exact"


def train(backend: str, root: Path, iterations: int | None) -> list[dict[str, Any]]:
    """The commit records of a run in a root; one that was there before goes on."""
    more = ["--set", f"train.backend={backend}"]
    if iterations is not None:
        more += ["--set", f"train.num_iterations={iterations}"]
    sluice("train", CONFIG, "--root", root, "--run-id", backend, *more)
    return read_records(root, backend)


def curve(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What a run came to: rewards of all iterations, accuracy of those that were evaluated."""
    metrics = [record["metrics"] for record in records]
    rewards = [float(found["rollout/raw_reward"]) for found in metrics]
    means = [statistics.fmean(rewards[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(rewards))]
    reached = next((i for i, mean in enumerate(means) if mean >= GOAL), None)
    held_out = [[i, round(m[HELD_OUT], 4)] for i, m in enumerate(metrics) if HELD_OUT in m]
    return {
        "iterations": len(records),
        "reward_reached": reached,
        "final_reward": round(means[-1], 4),
        "final_held_out": held_out[-1][1] if held_out else None,
        "held_out": held_out,
        "rewards": [round(reward, 4) for reward in rewards],
    }


def main() -> int:
    """Train with each, write the JSON, say whether both have learned."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, help="fewer than the example has, for a trial")
    parser.add_argument("--keep", type=Path, help="a root for the runs, which then go on in it")
    parser.add_argument("--result", type=Path, default=RESULTS / "backends.json")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "benchmark": "backends",
        "what": "the quickstart with each train.backend, from one seed: rewards by iteration; "
        f"held_out: [iteration, {HELD_OUT}]; reward_reached: the first iteration where the mean "
        f"reward of the last {WINDOW} is {GOAL}; final_reward: of the last {WINDOW}",
        "goal": f"final reward and held-out accuracy of both from {GOAL} on",
        "machine": machine("torch", "transformers", "megatron-core", "ray", "prefect"),
    }
    with tempfile.TemporaryDirectory(prefix="sluice-backends-") as scratch:
        for backend in BACKENDS:
            result[backend] = curve(train(backend, args.keep or Path(scratch), args.iterations))
            say(f"{backend}: {result[backend]['final_reward']}")
            keep(result, args.result)
    ends = [result[b][name] for b in BACKENDS for name in ("final_reward", "final_held_out")]
    result["met"] = all(end is not None and end >= GOAL for end in ends)
    return finish(result, args.result)


if __name__ == "__main__":
    sys.exit(main())
