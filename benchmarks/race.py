"""The race: seconds of an iteration of Sluice and of TRL's GRPOTrainer, turn by turn on one GPU.

Both train the same model of a published shape with random weights: so many prompts, samples and new
tokens an iteration, no end of sequence, one optimizer step, no divergence from a reference. Sluice
is a whole run as a user starts it, engine and trainer sharing the GPU, with its store on a disk and
its Prefect server. TRL is a process of its own. Each waits while the other works: TRL for a line on
its input, Sluice at the gate in its reward function.

An iteration of Sluice lasts from the opening of one gate to the arrival at the next, so that all of
it counts: train, sync, commit, Prefect between two iterations, and the next rollout with its store.
Its parts come from what the run committed. Neither side saves the optimizer's state meanwhile.

Run: python -m benchmarks.race [--iterations N] [--set KEY=VALUE ...] [--tiny]
"""

import argparse
import json
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import _shapes
from benchmarks._common import (
    REPO,
    RESULTS,
    SLUICE,
    beside,
    finish,
    gpu_used_gb,
    keep,
    machine,
    say,
    spread,
    tail,
    write_config,
)
from benchmarks._gate import Gate
from benchmarks._runs import Size, run_config
from benchmarks._server import START_S
from rlcore.store.manifest import Manifest
from rlcore.store.objects import Objects
from rlcore.store.run_store import RunStore

GOAL, STORE_AND_PREFECT_GOAL_S = 5.0, 0.2
RUN = "race"
TURN_S = 240.0


FULL = Size("qwen3-0.6B", 32, 8, 64, 512, cuda=True)
TINY = Size("tiny", 2, 4, 8, 8, cuda=False)
MICRO_BATCH = 32
"""Of TRL."""


def gated(size: Size, model: Path, data: Path, iterations: int) -> dict[str, Any]:
    """The run's settings: its reward function waits at the gate."""
    tree = run_config(size, model, data, iterations)
    reward = f"{REPO / 'benchmarks' / '_gate.py'}:reward"
    tree["reward"] = {"custom_rm_path": reward, "batched": True, "timeout_s": 2 * TURN_S}
    tree["weights"] = {"transport": "tensor"}
    if size.cuda:
        # All have room on the GPU: nothing has to move.
        tree["cluster"] |= {"colocate": True, "offload_train": False, "offload_rollout": False}
        # Enough for all samples at once; TRL has to find room beside both.
        tree["sglang"]["mem_fraction_static"] = 0.2
    return tree


class Sluice:
    """The run, which waits at its gates."""

    def __init__(self, process: subprocess.Popen[Any], gate: Gate, root: Path, log: Path) -> None:
        self._process, self._gate, self._log = process, gate, log
        self._store = RunStore(Objects.open(str(root)), RUN)
        self._next = 0

    def arrive(self, seconds: float) -> float:
        """When the run came to its next gate."""
        return self._gate.wait_reached(self._next, seconds, self._check)

    def turn(self) -> float:
        """Seconds of an iteration."""
        began = self._gate.open(self._next)
        self._next += 1
        return self.arrive(TURN_S) - began

    def parts(self, n: int) -> dict[str, float]:
        """Where the time went between the gates of the iterations n and n + 1."""
        record = self._store.committed(n)
        rollout = self._store.stage(n + 1, "rollout")
        if record is None or rollout is None:
            return {}
        stages = {name: self._store.stage(n, name) for name in record["stages"]}
        manifests = {name: found[0] for name, found in stages.items() if found is not None}
        waited = self._gate.opened(n) - self._gate.wait_reached(n, 1.0, self._check)
        whole = self._gate.wait_reached(n + 1, 1.0, self._check) - self._gate.opened(n)
        return split(whole, record["metrics"], manifests, rollout[0], waited)

    def _check(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(
                f"sluice train ended with code {self._process.returncode}:\n{tail(self._log)}"
            )


def split(
    whole: float,
    metrics: dict[str, float],
    stages: dict[str, Manifest],
    rollout: Manifest,
    waited: float,
) -> dict[str, float]:
    """The parts of an iteration, in seconds; they add up to it.

    Args:
        whole: seconds from gate to gate.
        metrics: of the iteration whose gate was opened.
        stages: its manifests.
        rollout: that of the next iteration.
        waited: seconds at the gate, which are the reward's.
    """
    log_probs = metrics.get("train/seconds_log_probs", 0.0)
    steps = metrics["train/seconds_forward_backward"] + metrics["train/seconds_optimizer"]
    reward = stages["reward"].timings
    made = rollout.timings
    commits = sum(
        metrics[f"perf/{name}_time"] - manifest.timings["seconds"]
        for name, manifest in stages.items()
    )
    parts = {
        "generate": made["generate"],
        "log_prob": log_probs,
        "train": steps,
        "train_beside": stages["train"].timings["seconds"] - log_probs - steps,
        "sync": stages["weight_sync"].timings["seconds"],
        "store": made["write"] + reward["write"] + commits,
        "rollout_beside": made["prepare"],
        "reward_and_filter": reward["score"] - waited + stages["filter"].timings["seconds"],
    }
    return parts | {"prefect_and_rest": whole - sum(parts.values())}


class Peer:
    """TRL, which waits for its turn."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def answer(self, seconds: float) -> dict[str, Any]:
        """What it says next."""
        try:
            said = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"TRL said nothing for {seconds:.0f} s") from None
        if said is None or "error" in said:
            why = tail(self._log) if said is None else said["error"]
            raise RuntimeError(f"TRL ended: {why}")
        return said

    def turn(self) -> dict[str, Any]:
        """A step: its seconds and the GPU's peak memory."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self.answer(TURN_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("PEER "):
                self._answers.put(json.loads(line.removeprefix("PEER ")))
        self._answers.put(None)


@contextmanager
def sluice_run(
    size: Size, model: Path, folder: Path, turns: int, more: list[str]
) -> Iterator[Sluice]:
    """Start the run; it goes on until its first gate."""
    gate, log = Gate(folder / "gate"), folder / "sluice.log"
    gate.folder.mkdir()
    ids = _shapes.prompts(size.shape, size.prompts * 4, size.prompt_tokens)
    data = _shapes.write_prompts(folder / "prompts.jsonl", ids, str(gate.folder))
    # One iteration more than turns: the last turn ends at the gate of the one after it.
    config = write_config(folder / "run.toml", gated(size, model, data, turns + 1))
    sets = [part for one in more for part in ("--set", one)]
    argv = [*SLUICE, "train", config, "--root", folder / "root", "--run-id", RUN, *sets]
    with beside(argv, log) as process:
        yield Sluice(process, gate, folder / "root", log)


@contextmanager
def peer_run(size: Size, model: Path, folder: Path, turns: int) -> Iterator[Peer]:
    """Start TRL."""
    ids = _shapes.prompts(size.shape, size.prompts * 4, size.prompt_tokens)
    task = {
        "model": str(model),
        "prompts": [_shapes.text(one) for one in ids],
        "prompts_a_step": size.prompts,
        "samples": size.samples,
        "tokens": size.new_tokens,
        "micro_batch": min(MICRO_BATCH, size.batch),
        "max_steps": turns + 1,
        "cuda": size.cuda,
    }
    file, log = folder / "peer.json", folder / "peer.log"
    file.write_text(json.dumps(task))
    argv = [sys.executable, "-m", "benchmarks._peer", file]
    with beside(
        argv, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        yield Peer(process, log)


class Race:
    """Both sides, and what came of it; a side that fails leaves the other alone."""

    def __init__(self, turns: int, deadline: float, note: Callable[["Race"], None]) -> None:
        """`note` keeps what there is, after each turn."""
        self.turns = turns
        self.found: dict[str, Any] = {}
        self.ours: list[float] = []
        self.theirs: list[dict[str, Any]] = []
        self.errors: dict[str, str] = {}
        self._deadline = deadline
        self._note = note

    def run(self, sluice: Sluice, peer: Peer | None) -> None:
        """Turn by turn, the first one of each to warm up."""
        for turn in range(self.turns):
            if time.monotonic() > self._deadline:
                self.errors["time"] = f"the time was over after {turn} turns"
                return
            self._note(self)
            self.ours.append(sluice.turn())
            say(f"turn {turn}: Sluice {self.ours[-1]:.2f} s")
            if peer is not None and "peer" not in self.errors:
                self._peer_turn(peer)
            self.found["gpu_used_gb"] = gpu_used_gb()

    def _peer_turn(self, peer: Peer) -> None:
        try:
            self.theirs.append(peer.turn())
            say(f"TRL {self.theirs[-1]['seconds']:.2f} s")
        except (RuntimeError, TimeoutError, OSError) as error:
            self.failed("peer", error)

    def failed(self, who: str, error: BaseException) -> None:
        """Note it, and go on."""
        self.errors[who] = f"{type(error).__name__}: {error}"
        say(f"{who} failed: {self.errors[who]}")


def hold(race: Race, size: Size, folder: Path, args: argparse.Namespace) -> None:
    """Both sides side by side, whatever fails."""
    try:
        say(f"building the model {size.shape}")
        model = _shapes.build(size.shape, folder / "model")
        say("starting Sluice")
        with sluice_run(size, model, folder, race.turns, args.set) as sluice:
            sluice.arrive(START_S)
            say("Sluice has made its first rollout")
            if args.no_peer:
                race.run(sluice, None)
            else:
                # After the engine, which takes its share of the memory that is free.
                with peer_run(size, model, folder, race.turns) as peer:
                    try:
                        race.found["peer"] = peer.answer(START_S)
                        say(f"TRL is ready: {race.found['peer']}")
                    except (RuntimeError, TimeoutError) as error:
                        race.failed("peer", error)
                    race.run(sluice, peer)
            race.found["parts_by_turn_s"] = [sluice.parts(n) for n in range(1, len(race.ours))]
            say("ending Sluice")
    except Exception as error:
        race.failed("sluice", error)
        traceback.print_exc()
        for log in ("sluice.log", "peer.log"):
            say(f"the end of {log}:\n{tail(folder / log, 60)}")


def summary(race: Race) -> dict[str, Any]:
    """Medians, split and ratio of the turns after the first."""
    ours, theirs = race.ours[1:], [one["seconds"] for one in race.theirs[1:]]
    parts = [one for one in race.found.get("parts_by_turn_s", []) if one]
    out: dict[str, Any] = {
        "sluice_s": by_turn(race.ours),
        "trl_s": by_turn([one["seconds"] for one in race.theirs]),
        "trl": race.found.get("peer"),
        "gpu_used_gb": race.found.get("gpu_used_gb"),
        "trl_peak_gb": max((one["peak_gb"] for one in race.theirs), default=None),
        "errors": race.errors,
    }
    if ours and theirs:
        out["times_faster"] = round(statistics.median(theirs) / statistics.median(ours), 2)
    if parts:
        both = [one["store"] + one["prefect_and_rest"] for one in parts]
        out["store_and_prefect_s"] = spread(both)
        out["parts_s"] = {name: spread([one[name] for one in parts]) for name in parts[0]}
    return out


def by_turn(taken: list[float]) -> dict[str, Any]:
    """Seconds of all turns, and the spread of those after the first."""
    measured = spread(taken[1:]) if len(taken) > 1 else {}
    return {"by_turn": [round(s, 3) for s in taken], **measured}


def report(race: Race, size: Size, settings: list[str], facts: dict[str, Any]) -> dict[str, Any]:
    """The result as it stands."""
    of = summary(race)
    beside_s = of.get("store_and_prefect_s", {}).get("median", float("inf"))
    return {
        "benchmark": "race",
        "what": f"seconds of an iteration: {size.prompts} prompts x {size.samples} samples x "
        f"{size.new_tokens} new tokens, {size.shape}, one optimizer step; TRL by model.generate; "
        "trl_s / sluice_s = times_faster; the first turn of each is left out",
        "goal": f"times_faster >= {GOAL:g}; store and Prefect together <= "
        f"{STORE_AND_PREFECT_GOAL_S} s, 2 % of 10 s",
        "met": of.get("times_faster", 0.0) >= GOAL and beside_s <= STORE_AND_PREFECT_GOAL_S,
        "size": vars(size),
        "settings": settings,
        **of,
        "machine": facts,
    }


def main() -> int:
    """Race, write the JSON, say whether the goals are met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=3, help="measured, after one to warm up")
    parser.add_argument("--set", action="append", default=[], help="a setting of the run")
    parser.add_argument("--no-peer", action="store_true", help="without TRL")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to see that it works")
    parser.add_argument("--limit-s", type=float, default=500.0, help="no turn begins after this")
    parser.add_argument("--result", type=Path, default=RESULTS / "race.json")
    args = parser.parse_args()
    size = TINY if args.tiny else FULL
    facts = machine("torch", "transformers", "sglang", "trl", "liger-kernel", "ray", "prefect")

    def note(race: Race) -> None:
        keep(report(race, size, args.set, facts), args.result)

    race = Race(args.iterations + 1, time.monotonic() + args.limit_s, note)
    with tempfile.TemporaryDirectory(prefix="sluice-race-") as name:
        hold(race, size, Path(name), args)
    return finish(report(race, size, args.set, facts), args.result)


if __name__ == "__main__":
    sys.exit(main())
