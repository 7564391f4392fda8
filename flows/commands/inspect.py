"""What `sluice runs`, `show`, `samples`, `verify`, `sql` and `config` print."""

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rlcore.config import RunConfig
from rlcore.errors import ConfigError, NotFound, StoreError
from rlcore.observe.history import iterations_asked, status_of, summarise
from rlcore.store.manifest import Manifest, StageRef
from rlcore.store.objects import Objects
from rlcore.store.paths import STAGES
from rlcore.store.retention import is_pruned
from rlcore.store.run_store import RunStore, run_ids

# What goes into a file or a pipe is not cut to a terminal's width.
out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 240)
SHOWN_ROWS = 20


def list_runs(root: str, *, as_json: bool) -> None:
    """All runs of a root: status and how far they are."""
    objects = Objects.open(root)
    rows = [run_row(objects, run_id) for run_id in run_ids(objects)]
    if as_json:
        print_json(rows)
    elif rows:
        out.print(table_of(rows))
    else:
        out.print(f"no runs under {root}")


def run_row(objects: Objects, run_id: str) -> dict[str, Any]:
    """A run's line in the list. A record that is torn is said there and hides no other run."""
    store = RunStore(objects, run_id)
    row = dict.fromkeys(("run_id", "status", "committed", "total", "reward", "message"))
    try:
        store.load_run()
        last = store.last_committed()
        record = None if last is None else store.committed(last)
        committed = 0 if last is None else last + 1
        total = iterations_asked(store)
        status, message = status_of(objects, run_id, committed, total)
    except StoreError as error:
        return row | {"run_id": run_id, "status": "damaged", "message": str(error)}
    return row | {
        "run_id": run_id,
        "status": status,
        "committed": committed,
        "total": total,
        "reward": None if record is None else record["metrics"].get("rollout/raw_reward"),
        "message": message,
    }


def show_run(root: str, run_id: str, *, as_json: bool) -> None:
    """A run: status, latest iterations, what to do next."""
    summary = summarise(Objects.open(root), run_id)
    if as_json:
        print_json(dataclasses.asdict(summary))
        return
    out.print(
        f"[bold]{run_id}[/bold]  {summary.status}, "
        f"{summary.committed} of {summary.total} iterations committed"
    )
    if summary.parent:
        parent = summary.parent
        out.print(f"a fork of {parent['run_id']} after iteration {parent['iteration']}")
    if summary.message:
        out.print(summary.message, markup=False)
    if summary.state_sha256:
        out.print(f"state sha256 {summary.state_sha256}")
    step = max(1, -(-len(summary.metrics) // SHOWN_ROWS))
    picked = [
        m for n, m in enumerate(summary.metrics) if n % step == 0 or n == len(summary.metrics) - 1
    ]
    if picked:
        out.print(table_of([headline(m) for m in picked]))
    if checkpoint := last_checkpoint(root, run_id):
        out.print(f"model: {checkpoint}")


def headline(m: dict[str, float]) -> dict[str, Any]:
    """The figures of an iteration that most people want."""
    return {
        "iteration": m["iteration"],
        "reward": m.get("rollout/raw_reward"),
        "exact": m.get("rollout/exact"),
        "length": m.get("rollout/response_len/mean"),
        "loss": m.get("train/loss"),
        "grad norm": m.get("train/grad_norm"),
        "log-prob gap": m.get("train/train_rollout_logprob_abs_diff"),
        "tokens/s": m.get("perf/tokens_per_s"),
        "seconds": m.get("seconds"),
    }


def show_iteration(root: str, run_id: str, iteration: int, *, as_json: bool) -> None:
    """An iteration: its stages with files, digests and metrics."""
    store = RunStore(Objects.open(root), run_id)
    record = committed_record(store, iteration)
    manifests: dict[str, Manifest] = {
        name: store.manifest(StageRef.model_validate(record["stages"][name]))
        for name in STAGES
        if name in record["stages"]
    }
    if as_json:
        stages = {name: m.model_dump(mode="json") for name, m in manifests.items()}
        print_json(record | {"stages": stages})
        return
    out.print(f"[bold]{run_id}[/bold] iteration {iteration}")
    rows = [
        {
            "stage": name,
            "seconds": m.timings.get("seconds"),
            "rows": sum(f.rows for f in m.files),
            "bytes": sum(f.bytes for f in m.files),
            "epoch": m.epoch,
            "files": ", ".join(store.objects.url(f.key) for f in m.files),
        }
        for name, m in manifests.items()
    ]
    out.print(table_of(rows))
    metrics = [{"metric": k, "value": v} for k, v in sorted(record["metrics"].items())]
    out.print(table_of(metrics))


def show_samples(root: str, run_id: str, iteration: int, *, limit: int, as_json: bool) -> None:
    """Samples of an iteration: prompt, response, reward."""
    from rlcore.store.batch import read_samples

    store = RunStore(Objects.open(root), run_id)
    record = committed_record(store, iteration)
    manifests = {n: store.manifest(StageRef.model_validate(r)) for n, r in record["stages"].items()}
    rows = read_samples(store.objects, manifests, limit)
    if as_json:
        print_json(rows)
        return
    for row in rows:
        prompt = row["prompt"] if isinstance(row["prompt"], str) else json.dumps(row["prompt"])
        body = Text.assemble((prompt, "dim"), (row["response"], "bold"))
        reward = "failed" if row["reward"] is None else f"{row['reward']:.3f}"
        kept = "" if row["keep"] else f", dropped: {row['reason']}"
        length = f"{row['status']}, {row['response_length']} tokens"
        title = f"{row['index']}  reward {reward}  {length}{kept}"
        subtitle = f"label {row['label']}" if row["label"] is not None else None
        out.print(
            Panel(
                body,
                width=100,
                title=title,
                subtitle=subtitle,
                title_align="left",
                subtitle_align="left",
            )
        )


def verify_run_command(root: str, run_id: str, *, as_json: bool) -> bool:
    """Verify a run; prints what was checked and what is wrong."""
    from rlcore.store.lineage import verify_run

    report = verify_run(Objects.open(root), run_id)
    if as_json:
        print_json(dataclasses.asdict(report) | {"ok": report.ok})
        return report.ok
    for name, count in report.counts.items():
        out.print(f"{name}: {count}", markup=False)
    for error in report.errors:
        out.print("[red]wrong[/red] ", end="")
        out.print(error, markup=False)
    out.print(
        f"[green]{run_id} is whole[/green]"
        if report.ok
        else f"[red]{len(report.errors)} faults[/red]"
    )
    return report.ok


def run_sql(root: str, query: str, *, as_json: bool) -> None:
    """Run a query over all runs of a root."""
    import duckdb

    from rlcore.observe.sql import connect

    try:
        result = connect(Objects.open(root)).execute(query)
        names = [column[0] for column in result.description or []]
        rows = [dict(zip(names, row, strict=True)) for row in result.fetchall()]
    except duckdb.Error as error:
        raise ConfigError(f"the query failed: {error}") from None
    if as_json:
        print_json(rows)
    else:
        out.print(table_of(rows, names))


def show_config(config: RunConfig, *, as_json: bool) -> None:
    """The whole configuration, defaults included."""
    tree = config.model_dump(mode="json")
    if as_json:
        print_json(tree)
        return
    for section, keys in tree.items():
        out.print(f"\\[{section}]")
        for key, value in keys.items():
            if value is not None:
                out.print(f"{key} = {toml_value(value)}", markup=False)
        out.print()


def show_schema() -> None:
    """The JSON schema of the configuration."""
    print_json(RunConfig.model_json_schema())


# --- shared -------------------------------------------------------------------------------------


def committed_record(store: RunStore, iteration: int) -> dict[str, Any]:
    """The record of a committed iteration.

    Raises:
        NotFound: the run or the iteration is not there; says what is.
    """
    store.load_run()
    record = store.committed(iteration) if iteration >= 0 else None
    if record is None:
        last = store.last_committed()
        there = "none is" if last is None else f"0 to {last} are"
        raise NotFound(
            f"run {store.run_id} has no committed iteration {iteration}; {there} committed"
        )
    return record


def last_checkpoint(root: str, run_id: str) -> Path | str | None:
    """The newest Hugging Face folder of a run."""
    objects = Objects.open(root)
    store = RunStore(objects, run_id)
    last = store.last_committed()
    for i in range(-1 if last is None else last, -1, -1):
        record = store.committed(i)
        if record is not None and "checkpoint" in record["stages"]:
            manifest = store.manifest(StageRef.model_validate(record["stages"]["checkpoint"]))
            prefix = manifest.extra["checkpoint"]["key_prefix"]
            if is_pruned(objects, prefix):
                return None
            return objects.local_path(prefix) or objects.url(prefix)
    return None


def table_of(rows: list[dict[str, Any]], names: list[str] | None = None) -> Table:
    """Rows as a table, numbers to the right."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    names = names or (list(rows[0]) if rows else [])
    for name in names:
        numeric = all(isinstance(r[name], int | float | None) for r in rows)
        table.add_column(
            name, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold"
        )
    for r in rows:
        table.add_row(*(cell(r[name]) for name in names))
    return table


def cell(value: Any) -> Text:
    """One value as people read it."""
    if value is None:
        return Text("-")
    if isinstance(value, float):
        return Text(f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}")
    return Text(str(value))


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{k} = {toml_value(v)}" for k, v in value.items() if v is not None)
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def print_json(value: Any) -> None:
    """A value as JSON on standard output; NaN and infinities, which JSON lacks, as null."""
    json.dump(_finite(value), sys.stdout, indent=2, default=str)
    print()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
