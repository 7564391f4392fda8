"""The flow `rl-evaluate`: a run's checkpoint on held-out data, at any time, beside the run."""

import dataclasses
import os
import re
from typing import Any

from prefect import flow
from prefect.artifacts import acreate_table_artifact

from flows.operation.credentials import fetch_credentials
from flows.reporting.logs import logs_to_prefect
from rlcore.config import EvalDataset
from rlcore.evaluation import evaluate_checkpoint, find_checkpoint
from rlcore.opening import existing_config, open_store


@flow(name="rl-evaluate", flow_run_name="evaluate-{run_id}", retries=0, persist_result=False)
async def rl_evaluate(
    run_id: str,
    root: str = "",
    iteration: int | None = None,
    datasets: list[EvalDataset] | None = None,
) -> dict[str, Any]:
    """Evaluate a checkpoint of a run. The run may be going on meanwhile.

    Args:
        run_id: name of the run.
        root: folder or URL of all runs; empty: the worker's.
        iteration: whose checkpoint; empty: the newest that is kept.
        datasets: what to evaluate on; empty: the run's own `eval.datasets`.

    Returns:
        The run's id, the iteration, the key of the evaluation's manifest and its metrics.
    """
    logs_to_prefect()
    config = existing_config(root or os.environ.get("SLUICE_ROOT") or "sluice-data", run_id)
    await fetch_credentials(config.storage)
    store = open_store(config)
    checkpoint = find_checkpoint(store, iteration)
    chosen = config.eval.datasets if datasets is None else datasets
    done = await evaluate_checkpoint(config, store, checkpoint, chosen)
    await acreate_table_artifact(
        table=[{"metric": name, "value": value} for name, value in sorted(done.metrics.items())],
        key=re.sub(r"[^a-z0-9-]+", "-", f"{run_id}-evaluation"),
        description=f"Iteration {done.iteration} of {run_id}; {store.objects.url(done.manifest)}",
    )
    return dataclasses.asdict(done)
