"""The short run that nothing happens to: others are compared with it, and it is asked questions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_runs import Sluice, short

ITERATIONS = 6


@dataclass(frozen=True)
class Undisturbed:
    """Run `calm`, complete and alone in its root; whoever uses it only reads."""

    sluice: Sluice
    """With a server and a Ray of its own, where it starts any."""
    config: Path
    printed: str
    """What training it printed."""
    shown: dict[str, Any]
    """What `sluice show` says."""

    @property
    def rewards(self) -> list[float]:
        """Of each iteration."""
        return [metrics["reward"] for metrics in self.shown["metrics"]]


def undisturbed(folder: Path) -> Undisturbed:
    """Make it."""
    sluice, config = Sluice(folder / "root", cwd=folder), short(folder, ITERATIONS)
    printed = sluice("train", str(config), "--run-id", "calm")
    return Undisturbed(sluice, config, printed, sluice.json("show", "calm"))
