"""The flow `rl-gc`: collection of garbage on a schedule, with a report on its page in Prefect."""

import asyncio
import re

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact

from flows.commands.garbage import as_dict, totals
from rlcore.errors import ConfigError
from rlcore.store.gc import OLDER_THAN_DAYS, GcReport, collect
from rlcore.store.objects import Objects


@flow(name="rl-gc", retries=0, persist_result=False)
async def rl_gc(
    root: str,
    keep: int | None = None,
    older_than_days: float = OLDER_THAN_DAYS,
    dry_run: bool = False,
) -> dict[str, object]:
    """Remove what no run needs any more: files that nothing names, old states and checkpoints.

    Args:
        root: folder or URL of all runs.
        keep: trainer states, and checkpoints, that each run keeps; empty: as its settings say.
        older_than_days: age of quarantined manifests that are removed.
        dry_run: only report what would be removed.
    """
    if keep is not None and keep < 1:
        raise ConfigError("keep must be 1 or more")
    objects = Objects.open(root)
    report = await asyncio.to_thread(
        collect, objects, keep=keep, older_than_days=older_than_days, dry_run=dry_run
    )
    key = re.sub(r"[^a-z0-9]+", "-", f"gc-{root.lower()}").strip("-")
    await acreate_markdown_artifact(markdown=markdown(report), key=key[:200])
    return as_dict(report)


def markdown(report: GcReport) -> str:
    """The report as a page."""
    verb = "would be removed" if report.dry_run else "removed"
    lines = [f"# {report.root}", "", f"{report.bytes:,} bytes {verb}.", ""]
    if report.removed:
        lines += [
            "| run | kind | things | files | bytes |",
            "| --- | --- | ---: | ---: | ---: |",
            *(
                f"| {row['run']} | {row['kind']} | {row['things']} | {row['files']} "
                f"| {row['bytes']:,} |"
                for row in totals(report)
            ),
            "",
        ]
    lines += [f"- {run_id} was left alone: {why}" for run_id, why in report.skipped.items()]
    return "\n".join(lines) + "\n"
