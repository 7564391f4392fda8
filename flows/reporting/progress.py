"""What the terminal shows of a run: where to look, a line for what happened, and a summary at the
end.
"""

import shlex
import time
from pathlib import Path

from rich.console import Console

from flows.reporting.curve import draw_curve, is_eval_reward
from rlcore.config import RunConfig
from rlcore.run import IterationRef, Run

LINE_INTERVAL_S = 2.0


class Progress:
    """Prints one run's progress; with `quiet`, nothing but errors (to stderr)."""

    def __init__(self, config: RunConfig, began: float, *, quiet: bool) -> None:
        self._config = config
        self._began = began
        self._first: float | None = None
        self._first_iteration = 0
        self._said = 0.0
        self._last: IterationRef | None = None
        self._checkpoint: Path | str | None = None
        self._out = Console(quiet=quiet, highlight=False, soft_wrap=True)
        self._err = Console(stderr=True, highlight=False, soft_wrap=True)
        rollout = config.rollout
        engines = f"{config.num_engines} {rollout.engine} engine(s), " if config.generates else ""
        ranks = f"{config.world_size} {config.train.backend} rank(s)" if config.trains else ""
        self._out.print(f"[bold]{config.run.id}[/bold] in {config.storage.root}")
        self._out.print(
            f"{config.train.num_iterations} iterations of {rollout.rollout_batch_size} prompts x "
            f"{rollout.n_samples_per_prompt} samples, " + (engines + ranks).removesuffix(", ")
        )

    def prefect(self, url: str, *, own: bool) -> None:
        """Say where Prefect is."""
        page = url.removesuffix("/api")
        self._out.print(f"Prefect: {page}" + (" (for as long as this command runs)" if own else ""))

    def iteration(self, done: IterationRef, run: Run) -> None:
        """Show a committed iteration."""
        now = time.perf_counter()
        if self._first is None:
            self._first = now - done.metrics["seconds"]
            self._first_iteration = done.iteration
            self._out.print(
                f"first iteration began {self._first - self._began:.1f} s after the command"
            )
            self._out.print(
                "iteration   reward    exact  tokens/s  s/iteration  time left", style="dim"
            )
        self._last = done
        total = self._config.train.num_iterations
        left = total - done.iteration - 1
        if now - self._said < LINE_INTERVAL_S and left and done.iteration != self._first_iteration:
            return
        self._said = now
        m = done.metrics
        speed = m.get("perf/tokens_per_s", m.get("train/tokens_per_s", 0.0))
        each = (now - self._first) / (done.iteration + 1 - self._first_iteration)
        self._out.print(
            f"{done.iteration + 1:5d}/{total:<5d}"
            f"{_figure(m, 'rollout/raw_reward')}{_figure(m, 'rollout/exact')}"
            f"{speed:10.0f}{each:13.2f}{_clock(each * left):>11}" + _evals(m)
        )

    def interrupted(self) -> None:
        """Say that the run was stopped and how to go on."""
        self._err.print(f"interrupted; go on with: [bold]{self._command('resume')}[/bold]")

    def failed(self, error: BaseException) -> None:
        """Say what failed and how to go on."""
        self._err.print(f"error: {error}", markup=False)
        self._err.print(
            f"what was committed is kept; mend it and go on with: {self._command('resume')}"
        )

    def summary(self) -> None:
        """Where things are, and the commands to look further."""
        from flows.commands.inspect import last_checkpoint

        config = self._config
        run, root = config.run.id, config.storage.root
        facts = {"took": _clock(time.perf_counter() - self._began)}
        for name, metric in (("reward", "rollout/raw_reward"), ("loss", "train/loss")):
            if self._last is not None and metric in self._last.metrics and len(facts) == 1:
                facts[name] = f"{self._last.metrics[metric]:.3f} in the last iteration"
        facts["artifacts"] = f"{root}/runs/{run}"
        if checkpoint := last_checkpoint(root, run):
            facts["model"] = str(checkpoint)
        if curve := draw_curve(root, run):
            facts["reward curve"] = str(curve)
        self._out.print()
        self._out.print(f"[bold]{run}: {config.train.num_iterations} iterations committed[/bold]")
        for name, fact in facts.items():
            self._out.print(f"  {name:14}{fact}", markup=False)
        self._out.print("look further:")
        for text in (
            self._command("show"),
            self._command("samples") + f" --iter {config.train.num_iterations - 1}",
            self._command("verify"),
            f'sluice sql{self._root_option()} "select iteration, avg(reward) from samples '
            f"where run_id = '{run}' group by 1 order by 1\"",
        ):
            self._out.print(f"  {text}", markup=False)

    def _command(self, name: str) -> str:
        return f"sluice {name} {self._config.run.id}{self._root_option()}"

    def _root_option(self) -> str:
        root = self._config.storage.root
        return "" if root == str(Path("sluice-data").resolve()) else f" --root {shlex.quote(root)}"


def _figure(metrics: dict[str, float], name: str) -> str:
    return f"{metrics[name]:9.3f}" if name in metrics else " " * 8 + "-"


def _evals(metrics: dict[str, float]) -> str:
    """The evaluations of an iteration: mean reward, pass@1 and largest pass@k of each data set."""
    shown = []
    for key in sorted(k for k in metrics if is_eval_reward(k)):
        passes = [k for k in metrics if k.startswith(f"{key}/pass@")]
        ends = sorted(passes, key=lambda k: int(k.rpartition("@")[2]))
        picked = dict.fromkeys((ends[0], ends[-1])) if ends else {}
        figures = [f"{k.rpartition('/')[2]} {metrics[k]:.2f}" for k in picked]
        shown.append(f"{key.removeprefix('eval/')} " + ", ".join([f"{metrics[key]:.2f}", *figures]))
    return "   eval: " + "; ".join(shown) if shown else ""


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
