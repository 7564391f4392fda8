"""The texts of a run's artifacts in Prefect, as Markdown.

Invariant: what a model or a data set says never becomes markup: it stands in code spans.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.reporting.chart import Series, data_uri, line_chart
from flows.reporting.curve import is_eval_reward

LONGEST_CELL = 160
"""Characters of a prompt or a response in a table."""
NO_SPACE = "\u200b"


@dataclass(frozen=True)
class Place:
    """Where a run lies and where to read on."""

    run_id: str
    root: str
    total: int
    """Iterations asked for."""
    links: Mapping[str, str]
    """Addresses in Prefect by what they show; empty where its pages are not known."""

    def command(self, name: str, more: str = "") -> str:
        """A `sluice` command for this run."""
        return f"sluice {name} {self.run_id}{more} --root {self.root}"

    @property
    def linked(self) -> str:
        """The links in one line."""
        return " · ".join(f"[{what}]({address})" for what, address in self.links.items())


def quoted(text: str, limit: int = LONGEST_CELL) -> str:
    """Text as a code span, which Markdown shows as it is, on one line and in a table's cell too.

    Prefect's pages do not read entities, so that a code span is the one thing that they all show
    alike. A pipe is escaped as tables want it; a backslash before one is kept off it.
    """
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    line = cut.replace("\r\n", "\n").replace("\n", " ⏎ ").replace("\t", " ").strip()
    if not line:
        return ""
    line = line.replace("\\|", f"\\{NO_SPACE}|").replace("|", "\\|")
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    edge = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{edge}{line}{edge}{fence}"


def row(iteration: int, m: Mapping[str, float]) -> dict[str, Any]:
    """An iteration's figures as people read them: one row of the table."""
    return {
        "iteration": iteration,
        "reward": _short(m.get("rollout/raw_reward")),
        "exact": _short(m.get("rollout/exact")),
        "response length": _short(m.get("rollout/response_len/mean")),
        "loss": _short(m.get("train/loss")),
        "grad norm": _short(m.get("train/grad_norm")),
        "log-prob gap": _short(m.get("train/train_rollout_logprob_abs_diff")),
        "tokens/s": round(m.get("perf/tokens_per_s", 0.0)),
        "seconds": _short(m["seconds"]),
    }


def curve_page(place: Place, history: Sequence[Mapping[str, float]]) -> str:
    """The reward curve as a picture within the text.

    Args:
        place: of the run.
        history: an iteration each, with `iteration` and its metrics.
    """
    series = []
    for name, label in (
        ("rollout/raw_reward", "mean reward"),
        ("rollout/exact", "reward of 1 or more"),
        ("train/perplexity", "perplexity"),
    ):
        series.append(Series(label, [(m["iteration"], m[name]) for m in history if name in m]))
    for name in sorted({k for m in history for k in m if is_eval_reward(k)}):
        points = [(m["iteration"], m[name]) for m in history if name in m]
        series.append(Series(name.replace("eval/", "eval ", 1), points, marks=True))
    shown = [one for one in series if one.points]
    svg = line_chart(f"Reward of {place.run_id}", shown, "iteration", "reward")
    return f"![reward by iteration]({data_uri(svg)})\n\n{place.linked}\n"


def summary_page(
    place: Place,
    last: Mapping[str, Any],
    samples: Sequence[Mapping[str, Any]],
    checkpoint: tuple[int, str] | None,
) -> str:
    """What a run has come to: samples of the newest iteration, the model, commands to look further.

    Args:
        place: of the run.
        last: the newest iteration's row.
        samples: some of its samples, as `read_samples` gives them.
        checkpoint: the newest one's iteration and address.
    """
    i = last["iteration"]
    reward = "" if last["reward"] is None else f", reward of the last **{last['reward']:g}**"
    model = f"`{checkpoint[1]}`, made by iteration {checkpoint[0]}" if checkpoint else "none yet"
    lines = [
        f"# {place.run_id}",
        "",
        f"**{i + 1} of {place.total} iterations** committed{reward}.",
        "",
        place.linked,
        "",
        f"## Samples of iteration {i}",
        "",
        "| reward | prompt | response | label |",
        "|---:|---|---|---|",
        *(_sample_line(sample) for sample in samples),
        "",
        "## Where things are",
        "",
        f"- model (Hugging Face folder): {model}",
        f"- everything else, as Parquet and JSON: `{place.root}/runs/{place.run_id}`",
        "",
        "## Look further",
        "",
        "```",
        place.command("show") + "  # every iteration",
        place.command("samples", f" --iter {i}") + "  # more samples",
        place.command("verify") + "  # every file against its digest",
        "```",
    ]
    return "\n".join(lines) + "\n"


def failure_page(place: Place, error: str, committed: int, deployed: bool) -> str:
    """Why a run stopped, what is kept, and what goes on with it.

    Args:
        place: of the run.
        error: one sentence.
        committed: iterations committed.
        deployed: whether the page has a Retry button.
    """
    kept = {0: "No iteration is committed yet", 1: "Iteration 0 is committed"}.get(
        committed, f"Iterations 0 to {committed - 1} are committed"
    )
    resume = place.command("resume")
    go_on = (
        f"Mend the cause, then press **Retry** at the top of the flow run's page; or `{resume}`."
        if deployed
        else f"Mend the cause, then: `{resume}`."
    )
    said = quoted(error, limit=1000).replace("\\|", "|")
    lines = [
        f"# {place.run_id} stopped at iteration {committed}",
        "",
        f"> {said}",
        "",
        place.linked,
        "",
        f"**What is kept.** {kept} ({committed} of {place.total}), and with them the finished "
        f"stages of iteration {committed}. They are in `{place.root}/runs/{place.run_id}`.",
        "",
        f"**Going on.** {go_on} It begins with the first stage that is not committed; what is done "
        "is not done again.",
        "",
        "**Other settings.** Retry keeps the run's settings, which is what makes it the same run. "
        "For others start a new one under another `run.id`.",
    ]
    return "\n".join(lines) + "\n"


def past_failure_page(place: Place, committed: int) -> str:
    """What takes the place of a failure's page once the run goes on."""
    return (
        f"# {place.run_id} goes on\n\nIt had stopped at iteration {committed} and was started "
        f"again from there; the log of the earlier attempt says why.\n\n{place.linked}\n"
    )


def _sample_line(sample: Mapping[str, Any]) -> str:
    prompt = sample["prompt"]
    if not isinstance(prompt, str):
        prompt = str(prompt[-1].get("content", "")) if prompt else ""
    reward = "failed" if sample["reward"] is None else f"{sample['reward']:.3g}"
    label = "" if sample["label"] is None else quoted(str(sample["label"]), 40)
    return f"| {reward} | {quoted(prompt)} | {quoted(sample['response'])} | {label} |"


def _short(value: float | None) -> float | None:
    """A figure with four digits; none for one that is missing or no number."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
