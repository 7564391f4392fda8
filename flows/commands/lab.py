"""What `sluice lab` prints: every algorithm on one stored batch, side by side."""

import dataclasses
import shutil
from typing import Any

from flows.commands.inspect import out, print_json, table_of
from rlcore.opening import existing_config, open_store
from rlcore.scratch import make_scratch


def lab(root: str, run_id: str, iteration: int, policy: int | None, *, as_json: bool) -> None:
    """Measure and print.

    Args:
        root: of the runs.
        run_id: the run.
        iteration: whose batch.
        policy: the iteration that the policy follows, -1 for the starting model; None: chosen.
        as_json: all metrics, and the cosines between all gradients.
    """
    from rlcore.lab import OWN, START, Lab, run_lab

    config = existing_config(root, run_id)
    scratch = make_scratch(run_id)
    try:
        found: Lab = run_lab(config, open_store(config), iteration, policy, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    whose = "the starting model" if found.policy == START else f"the state after {found.policy}"
    out.print(
        f"[bold]{run_id}[/bold] iteration {iteration}: {found.samples} samples, {found.tokens} "
        f"tokens, seen from {whose}"
    )
    rows: list[dict[str, Any]] = [
        {
            "algorithm": row.name,
            "loss": row.metrics["loss"],
            "clip fraction": row.metrics["pg_clipfrac"],
            "tis clipped": row.metrics.get("tis_clipfrac"),
            "effective size": row.metrics["effective_sample_size"],
            "grad norm": row.metrics["grad_norm"],
            f"cosine to {OWN}": row.cosines[OWN],
        }
        for row in found.rows
    ]
    out.print(table_of(rows))
