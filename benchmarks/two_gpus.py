"""Two GPUs, one for the engine and one for the trainer: one-step-off against synchronous.

The same run twice, `run.mode = "sync"` and `run.mode = "async"`, weights by NCCL. An iteration
lasts from the commit before to its own; the first ones and the last, which has no rollout to make
beside it, are left out.

What there is to gain depends on how equal generation and training are. Generation hardly depends on
the number of prompts and training is proportional to it, so the number is chosen: the synchronous
run is made with 32 prompts first, and where its training is longer or shorter than its generation
by more than `CLOSE`, both modes get that many times fewer or more. `--prompts` says it instead.

Run: python -m benchmarks.two_gpus [--shape NAME] [--new-tokens N] [--prompts N] [--iterations N]
    [--set KEY=VALUE ...] [--tiny]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import _shapes
from benchmarks._common import (
    REPO,
    RESULTS,
    SLUICE,
    beside,
    created,
    finish,
    gpus,
    keep,
    machine,
    read_records,
    say,
    spread,
    tail,
    write_config,
)
from benchmarks._runs import Size, run_config

GOAL = 1.5
CLOSE = 0.15
WARM_UP = 2
RUN_S = 330.0
"""Most seconds of a run, its start included."""
FULL = Size("qwen3-0.6B", 32, 8, 64, 512, cuda=True)
TINY = Size("tiny", 4, 4, 8, 16, cuda=False)


def train(size: Size, mode: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A run; what its iterations took."""
    folder.mkdir()
    model = _shapes.build(size.shape, folder.parent / "model")
    ids = _shapes.prompts(size.shape, size.prompts * 4, size.prompt_tokens)
    data = _shapes.write_prompts(folder / "prompts.jsonl", ids)
    iterations = WARM_UP + args.iterations + 1
    # The last iteration saves a state, 48 GB at 4B: it is never come to.
    tree = run_config(size, model, data, iterations + 100)
    tree["run"] = {"mode": mode}
    tree["reward"] = {"custom_rm_path": f"{REPO / 'benchmarks' / '_parity.py'}:reward"}
    tree["weights"] = {"transport": "distributed"}
    config, log = write_config(folder / "run.toml", tree), folder / "sluice.log"
    sets = [part for one in args.set for part in ("--set", one)]
    argv = [*SLUICE, "train", config, "--root", folder / "root", "--run-id", mode, *sets]
    say(f"{mode} with {size.prompts} prompts")
    with beside(argv, log) as process:
        wait(process, folder / "root", mode, iterations - 1, log)
    return figures(read_records(folder / "root", mode)[: iterations - 1], folder / "root")


def wait(process: subprocess.Popen[Any], root: Path, run: str, count: int, log: Path) -> None:
    """Until so many iterations are committed: the last one's checkpoint is not waited for."""
    deadline, seen = time.monotonic() + RUN_S, 0
    while seen < count:
        records = read_records(root, run)
        for record in records[seen:]:
            say(f"{run} iteration {record['iteration']}: {record['metrics']['seconds']:.2f} s")
        seen = len(records)
        if process.poll() is not None and seen < count:
            raise RuntimeError(f"sluice train ended with {process.returncode}:\n{tail(log, 60)}")
        if time.monotonic() > deadline:
            if seen > WARM_UP:
                return
            raise TimeoutError(f"{seen} iterations in {RUN_S:.0f} s:\n{tail(log, 60)}")
        time.sleep(0.1)


def figures(records: list[dict[str, Any]], root: Path) -> dict[str, Any]:
    """Seconds of the iterations after the first ones, and of their parts."""
    pairs = list(pairwise(records))[WARM_UP - 1 :]
    walls = [created(after) - created(before) for before, after in pairs]
    parts = [parts_of(root, after) for _, after in pairs]
    return {
        "iteration_s": {"by_turn": [round(s, 3) for s in walls], **spread(walls)},
        "parts_s": {name: spread([one[name] for one in parts]) for name in parts[0]},
        "staleness": records[-1]["metrics"].get("rollout/staleness/max"),
    }


def parts_of(root: Path, record: dict[str, Any]) -> dict[str, float]:
    """Generation, training and sync of an iteration; asynchronously they overlap."""
    metrics = record["metrics"]
    rollout = json.loads((root / record["stages"]["rollout"]["key"]).read_text())
    return {
        "generate": rollout["timings"]["generate"],
        "train": metrics["perf/train_time"],
        "sync": metrics["perf/weight_sync_time"],
        "sync_paused": metrics["sync/seconds_paused"],
    }


def balanced(size: Size, found: dict[str, Any]) -> Size:
    """The size at which training takes as long as generation did."""
    generate, train = (found["parts_s"][name]["median"] for name in ("generate", "train"))
    say(f"generation {generate:.2f} s, training {train:.2f} s with {size.prompts} prompts")
    if abs(train / generate - 1) <= CLOSE:
        return size
    # More than the engine's graphs of decoding take would be slower by the sample.
    most = 256 // size.samples
    return replace(size, prompts=min(most, max(4, round(size.prompts * generate / train))))


def compare(result: dict[str, Any], size: Size, folder: Path, args: argparse.Namespace) -> None:
    """Both modes, into the result."""
    end = time.monotonic() + args.limit_s
    found = train(size, "sync", folder / "sync", args)
    result["before_balancing"] = {"prompts": size.prompts, **found}
    keep(result, args.result)
    chosen = size if args.prompts or args.tiny else balanced(size, found)
    # Each run needs its start; where the time is short, the sizes stay as they are.
    if chosen != size and end - time.monotonic() > RUN_S:
        size = chosen
        found = train(size, "sync", folder / "sync-balanced", args)
    result |= {"size": vars(size), "modes": {"sync": found}}
    keep(result, args.result)
    result["modes"]["async"] = train(size, "async", folder / "async", args)
    taken = [result["modes"][mode]["iteration_s"]["median"] for mode in ("sync", "async")]
    result["times_faster"] = round(taken[0] / taken[1], 3)
    parts = found["parts_s"]
    generate, trained = parts["generate"]["median"], parts["train"]["median"]
    result["most_to_gain"] = round(taken[0] / (taken[0] - min(generate, trained)), 3)


def main() -> int:
    """Measure, write the JSON, say whether the goals are met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=3, help="measured, after some to warm up")
    parser.add_argument("--prompts", type=int, help="of an iteration, instead of choosing them")
    parser.add_argument("--shape", choices=_shapes.SHAPES)
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--set", action="append", default=[], help="a setting of both runs")
    parser.add_argument("--limit-s", type=float, default=570.0, help="seconds there are in all")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to see that it works")
    parser.add_argument("--result", type=Path, default=RESULTS / "two_gpus.json")
    args = parser.parse_args()
    size = TINY if args.tiny else FULL
    size = replace(
        size,
        shape=args.shape or size.shape,
        prompts=args.prompts or size.prompts,
        new_tokens=args.new_tokens or size.new_tokens,
    )
    if not args.tiny and len(gpus()) < 2:
        say(f"skipped: it needs two GPUs, and there are {len(gpus())}")
        return 0
    result: dict[str, Any] = {
        "benchmark": "two_gpus",
        "what": "seconds of an iteration on two GPUs, from commit to commit; times_faster: "
        "synchronous over one-step-off; most_to_gain: if the shorter of generation and training "
        "cost nothing",
        "goal": f"times_faster >= {GOAL}",
        "met": False,
        "settings": args.set,
        "errors": {},
        "machine": machine("torch", "transformers", "sglang", "ray", "prefect"),
    }
    with tempfile.TemporaryDirectory(prefix="sluice-two-") as folder:
        try:
            compare(result, size, Path(folder), args)
            result["met"] = result["times_faster"] >= GOAL
        except Exception as error:
            result["errors"]["all"] = f"{type(error).__name__}: {error}"
            say(f"failed: {error}")
    return finish(result, args.result)


if __name__ == "__main__":
    sys.exit(main())
