"""What `sluice evaluate` prints: a checkpoint on held-out data, beside the run."""

import asyncio
import dataclasses
from collections.abc import Sequence

from flows.commands.inspect import out, print_json, table_of
from rlcore.config.load import with_eval_sets
from rlcore.evaluation import evaluate_checkpoint, find_checkpoint
from rlcore.opening import existing_config, open_store


def evaluate(
    root: str, run_id: str, iteration: int | None, datasets: Sequence[str], *, as_json: bool
) -> None:
    """Generate, score, commit and print.

    Args:
        root: of the runs.
        run_id: the run.
        iteration: whose checkpoint; None: the newest that is kept.
        datasets: name and path, and more pairs; empty: the run's own.
        as_json: all of it as JSON.
    """
    config = existing_config(root, run_id)
    if datasets:
        config = with_eval_sets(config, datasets)
    store = open_store(config)
    checkpoint = find_checkpoint(store, iteration)
    done = asyncio.run(evaluate_checkpoint(config, store, checkpoint, config.eval.datasets))
    if as_json:
        print_json(dataclasses.asdict(done))
        return
    out.print(f"[bold]{run_id}[/bold] after iteration {done.iteration}")
    rows = [{"metric": name, "value": value} for name, value in sorted(done.metrics.items())]
    out.print(table_of(rows))
    out.print(f"[dim]{store.objects.url(done.manifest)}[/dim]")
