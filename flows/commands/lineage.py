"""What `sluice log` and `sluice diff` print: how runs descend, and where they part."""

from typing import Any

from rich.markup import escape
from rich.tree import Tree

from flows.commands.inspect import SHOWN_ROWS, out, print_json, run_row, table_of
from rlcore.errors import StoreError
from rlcore.observe.compare import Comparison, compare_runs
from rlcore.observe.history import records, summarise
from rlcore.store.branch import differences
from rlcore.store.objects import Objects
from rlcore.store.run_store import RunStore, run_ids

COMPARED_METRICS = {
    "reward": "rollout/raw_reward",
    "exact": "rollout/exact",
    "length": "rollout/response_len/mean",
    "loss": "train/loss",
    "grad norm": "train/grad_norm",
}


# --- log ------------------------------------------------------------------------------------------


def log_root(root: str, *, as_json: bool) -> None:
    """All runs of a root, each fork below its parent."""
    objects = Objects.open(root)
    rows = [_lineage_row(objects, run_id) for run_id in run_ids(objects)]
    if as_json:
        print_json(rows)
        return
    if not rows:
        out.print(f"no runs under {root}")
    known = {row["run_id"] for row in rows}
    for row in rows:
        if row["parent"] is None or row["parent"]["run_id"] not in known:
            out.print(_branch(Tree(_line(row)), row, rows))


def log_run(root: str, run_id: str, *, as_json: bool) -> None:
    """A run and its forefathers, newest first, with the iterations that are of each."""
    objects = Objects.open(root)
    RunStore(objects, run_id).load_run()
    found = records(objects, run_id)
    entries = []
    for store in RunStore(objects, run_id).lineage:
        own = [r for r in found if r["run_id"] == store.run_id]
        iterations = [
            {
                "iteration": r["iteration"],
                "created": r["created"],
                "reward": r["metrics"].get("rollout/raw_reward"),
                "loss": r["metrics"].get("train/loss"),
                "train": r["stages"].get("train", {}).get("sha256"),
            }
            for r in reversed(own)
        ]
        entries.append(_lineage_row(objects, store.run_id) | {"iterations": iterations})
    if as_json:
        print_json(entries)
        return
    for entry in entries:
        out.print(_line(entry))
        step = max(1, -(-len(entry["iterations"]) // SHOWN_ROWS))
        for n, one in enumerate(entry["iterations"]):
            if n % step == 0 or n == len(entry["iterations"]) - 1:
                reward = "-" if one["reward"] is None else f"{one['reward']:.4g}"
                state = (one["train"] or "-")[:10]
                out.print(
                    f"  {one['iteration']:6d}  {state:10}  {one['created'][:19]}  reward {reward}"
                )


def _lineage_row(objects: Objects, run_id: str) -> dict[str, Any]:
    """A run: what it came from, what its settings changed, how far it is."""
    row = run_row(objects, run_id) | {"parent": None, "rerun": None, "changed": {}}
    try:
        store = RunStore(objects, run_id)
        record = store.load_run()
        if store.parent is not None:
            row |= {"parent": record["parent"], "rerun": record.get("rerun")}
            theirs = store.lineage[1].load_run()["config"]
            found = differences(theirs, record["config"])
            row["changed"] = {d.key: [d.old, d.new] for d in found}
    except StoreError as error:
        row["message"] = str(error)
    return row


def _branch(tree: Tree, row: dict[str, Any], rows: list[dict[str, Any]]) -> Tree:
    children = [r for r in rows if r["parent"] and r["parent"]["run_id"] == row["run_id"]]
    for child in sorted(children, key=lambda r: (r["parent"]["iteration"], r["run_id"])):
        _branch(tree.add(_line(child)), child, rows)
    return tree


def _line(row: dict[str, Any]) -> str:
    parts = [f"[bold]{escape(row['run_id'])}[/bold]"]
    if row["parent"]:
        parts.append(f"from {row['parent']['run_id']}@{row['parent']['iteration']}")
    if row["rerun"]:
        parts.append(f"{row['rerun']['stage']} again")
    changed = [f"{key} = {new!r} ({old!r})" for key, (old, new) in row["changed"].items()]
    parts += [escape(text) for text in changed]
    parts.append(str(row["status"]))
    if row["committed"] is not None:
        parts.append(f"{row['committed']} of {row['total']}")
    if row["reward"] is not None:
        parts.append(f"reward {row['reward']:.4g}")
    if row["message"]:
        parts.append(escape(row["message"]))
    return "  ".join(parts)


# --- diff -----------------------------------------------------------------------------------------


def diff(root: str, a: str, b: str, *, as_json: bool) -> None:
    """Two runs: settings, where they part, metrics side by side, states."""
    objects = Objects.open(root)
    found = compare_runs(RunStore(objects, a), RunStore(objects, b))
    sums = [summarise(objects, run_id) for run_id in (a, b)]
    metrics = [
        {
            "iteration": i,
            **{
                name: [s.metrics[i].get(key) for s in sums]
                for name, key in COMPARED_METRICS.items()
            },
        }
        for i in range(found.common)
    ]
    states = [s.state_sha256 for s in sums]
    if as_json:
        print_json(_as_json(a, b, found, metrics, states))
        return
    if found.settings:
        rows = [{"setting": d.key, a: d.old, b: d.new} for d in found.settings]
        out.print(table_of(rows))
    else:
        out.print("the same settings")
    _print_parting(a, b, found)
    if metrics:
        out.print(table_of(_side_by_side(a, b, found, metrics)))
    for run_id, state in zip((a, b), states, strict=True):
        out.print(f"state sha256 of {run_id}: {state or '-'}")


def _print_parting(a: str, b: str, found: Comparison) -> None:
    if found.shared:
        out.print(f"iterations 0 to {found.shared - 1} are shared")
    if found.parting:
        out.print(f"they part at iteration {found.parting.iteration}, {found.parting.stage}")
    elif found.common:
        out.print(f"equal as far as both go: {found.common} iterations")
    else:
        out.print(f"{a} and {b} have no iteration in common")


def _side_by_side(
    a: str, b: str, found: Comparison, metrics: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Rows from where the runs part on, thinned as `show` does it."""
    first = min(found.parting.iteration if found.parting else 0, len(metrics) - 1)
    shown = metrics[first:]
    step = max(1, -(-len(shown) // SHOWN_ROWS))
    return [
        {"iteration": row["iteration"]}
        | {
            f"{name} {run_id}": row[name][n]
            for name in COMPARED_METRICS
            for n, run_id in enumerate((a, b))
        }
        for k, row in enumerate(shown)
        if k % step == 0 or k == len(shown) - 1
    ]


def _as_json(
    a: str,
    b: str,
    found: Comparison,
    metrics: list[dict[str, Any]],
    states: list[str | None],
) -> dict[str, Any]:
    parting = found.parting
    return {
        "runs": [a, b],
        "settings": {d.key: [d.old, d.new] for d in found.settings},
        "shared": found.shared,
        "common": found.common,
        "parting": parting and {"iteration": parting.iteration, "stage": parting.stage},
        "metrics": metrics,
        "state_sha256": states,
    }
