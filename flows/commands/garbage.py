"""What `sluice gc` does and prints."""

from dataclasses import asdict
from typing import Any

from flows.commands.inspect import out, print_json, table_of
from flows.exit_codes import DONE
from rlcore.errors import ConfigError
from rlcore.store.gc import GcReport, Removal, collect, remove_run
from rlcore.store.objects import Objects


def gc(
    root: str,
    *,
    keep: int | None,
    older_than_days: float,
    run_id: str | None,
    whole: bool,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Remove what nobody needs; with `whole` a run as a whole."""
    objects = Objects.open(root)
    if whole:
        if run_id is None:
            raise ConfigError("--all removes a whole run: name it by --run")
        if not yes and not dry_run:
            raise ConfigError(f"--all removes run {run_id} for good: say --yes, or --dry-run")
        report = remove_run(objects, run_id, dry_run=dry_run)
    else:
        if keep is not None and keep < 1:
            raise ConfigError("--keep must be 1 or more")
        report = collect(
            objects, keep=keep, older_than_days=older_than_days, run_id=run_id, dry_run=dry_run
        )
    if as_json:
        print_json(as_dict(report))
    else:
        _print(report)
    return DONE


def as_dict(report: GcReport) -> dict[str, Any]:
    """The report as JSON."""
    return asdict(report) | {"bytes": report.bytes}


def totals(report: GcReport) -> list[dict[str, Any]]:
    """What was removed, by run and kind."""
    found: dict[tuple[str, str], list[Removal]] = {}
    for one in report.removed:
        found.setdefault((one.run_id, one.kind), []).append(one)
    return [
        {
            "run": run_id,
            "kind": kind,
            "things": len(things),
            "files": sum(one.files for one in things),
            "bytes": sum(one.bytes for one in things),
        }
        for (run_id, kind), things in found.items()
    ]


def _print(report: GcReport) -> None:
    if report.removed:
        out.print(table_of(totals(report)))
    verb = "would be removed" if report.dry_run else "removed"
    out.print(f"{report.bytes} bytes {verb}")
    for run_id, why in report.skipped.items():
        out.print(f"{run_id} was left alone: {why}", markup=False)
