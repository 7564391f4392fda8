"""Draw what runs of this example learned beside what a peer learned, and write the figures down.

    python examples/smollm2/curve.py ROOT RUN [RUN ...] [--out curve.png]

The peer is TRL 1.16.0's GRPOTrainer with `generate`, float32 weights and bfloat16 autocast, on one
H200, with the data and settings of run.toml (110 steps). Seconds are of the clock on the wall, and
neither counts the start of its program.
"""

import argparse
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rlcore.observe.history import records
from rlcore.store.objects import Objects

PEER_REWARD = {1: 0.012, 21: 0.068, 41: 0.219, 61: 0.248, 81: 0.248, 101: 0.273}
"""Mean reward by step, counted from 1."""
PEER_BEFORE, PEER_AFTER, PEER_SECONDS = 0.156, 0.348, 283.0
"""Held-out accuracy before and after its 110 steps, and how long they took."""
GOAL = 0.35
COLORS = ("#1f6feb", "#2da44e", "#bf5700")


@dataclass(frozen=True)
class Curve:
    """A run's figures, one an iteration."""

    run_id: str
    reward: list[float]
    seconds: list[float]
    """From the beginning of the first iteration to the commit of each."""
    held_out: dict[int, float]
    """Accuracy by the iterations after which it was measured."""

    @property
    def reached(self) -> str:
        """When held-out accuracy came to the goal."""
        for n, accuracy in sorted(self.held_out.items()):
            if accuracy >= GOAL:
                return f"after {n} iterations, {self.seconds[n - 1]:.0f} s"
        return "never"


def read(root: str, run_id: str) -> Curve:
    """A run's curve out of its store."""
    found = records(Objects.open(root), run_id)
    if not found:
        raise SystemExit(f"{run_id} of {root} has no committed iteration")
    rows = [record["metrics"] for record in found]
    times = [datetime.fromisoformat(record["created"]).timestamp() for record in found]
    accuracy = {n: r["eval/held-out"] for n, r in enumerate(rows, 1) if "eval/held-out" in r}
    return Curve(
        run_id=run_id,
        reward=[r["rollout/raw_reward"] for r in rows],
        seconds=[rows[0]["seconds"] + time - times[0] for time in times],
        held_out=accuracy,
    )


def table(curves: list[Curve]) -> str:
    """The figures as a table in Markdown."""
    heads = ["mean reward at iteration", "peer", *(c.run_id for c in curves)]
    lines = [heads, ["---"] * len(heads)]
    for step, peer in PEER_REWARD.items():
        own = [f"{c.reward[step - 1]:.3f}" if step <= len(c.reward) else "" for c in curves]
        lines.append([str(step), f"{peer:.3f}", *own])
    last = [f"{c.held_out[max(c.held_out)]:.3f}" if c.held_out else "" for c in curves]
    best = [f"{max(c.held_out.values()):.3f}" if c.held_out else "" for c in curves]
    lines += [
        ["held-out accuracy in the end", f"{PEER_AFTER}", *last],
        ["the same at its best", "", *best],
        [f"held-out accuracy of {GOAL}", "never", *(c.reached for c in curves)],
        ["seconds", f"{PEER_SECONDS:.0f}", *(f"{c.seconds[-1]:.0f}" for c in curves)],
    ]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def draw(curves: list[Curve], out: Path) -> None:
    """Reward by iteration, and held-out accuracy by time, as a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), dpi=130)
    peer = {"color": "#57606a", "marker": "s", "markersize": 4, "label": "peer"}
    left.plot(list(PEER_REWARD), list(PEER_REWARD.values()), "--", **peer)
    right.plot([0, PEER_SECONDS], [PEER_BEFORE, PEER_AFTER], "--", **peer)
    right.axhline(GOAL, color="#d0d7de", linewidth=1)
    for curve, color in zip(curves, COLORS, strict=False):
        steps = range(1, len(curve.reward) + 1)
        left.plot(steps, curve.reward, color=color, label=curve.run_id)
        times = [curve.seconds[n - 1] for n in curve.held_out]
        right.plot(times, list(curve.held_out.values()), "o-", color=color, label=curve.run_id)
    left.set(xlabel="iteration", ylabel="mean reward")
    right.set(xlabel="seconds", ylabel="held-out accuracy, greedy")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out)
    pyplot.close(figure)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Curves of SmolLM2 beside a peer's.")
    parser.add_argument("root")
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, default=Path("curve.png"))
    options = parser.parse_args()
    curves = [read(options.root, run_id) for run_id in options.runs]
    draw(curves, options.out)
    sys.stdout.write(table(curves))


if __name__ == "__main__":
    main()
