"""Writes the tables in these pages that say what the code says: all settings, all columns.

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`; the rest of a page is left
alone. `tests/unit/docs` fails where a page is not what this would write.

Run: python docs/generate.py
"""

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from flows.cli import app
from rlcore.config import EvalDataset, RunConfig
from rlcore.config.data import MixedSet
from rlcore.config.digest import NOT_COMPUTED
from rlcore.config.reward import JudgeConfig
from rlcore.config.section import Section
from rlcore.slime.megatron import OPTIONS
from rlcore.slime.table import GROUPS
from rlcore.store.schema import SAMPLES, SCORES, SELECTION

DOCS = Path(__file__).parent
BLOCK = re.compile(r"(<!-- generated: (?P<name>[a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
Schema = dict[str, Any]
FULL = "--sequence-parallel --recompute full"
PLANS = {
    "8-gpus": ("", f"--tensor-parallel 2 {FULL}"),
    "64-gpus": (
        "",
        f"--tensor-parallel 4 {FULL}",
        f"--tensor-parallel 2 --pipeline-parallel 4 {FULL}",
    ),
    "512-gpus": (
        "",
        "--tensor-parallel 2 --pipeline-parallel 4 --context-parallel 2 --expert-parallel 8 "
        f"--expert-tensor-parallel 1 {FULL}",
        "--tensor-parallel 4 --pipeline-parallel 4 --context-parallel 2 --expert-parallel 32 "
        f"--expert-tensor-parallel 1 {FULL}",
    ),
}
"""Files of `scale`, and the options that each is planned with."""


def settings() -> str:
    """A table of each section of the configuration."""
    parts = []
    for name, field in RunConfig.model_fields.items():
        section = field.annotation
        parts.append(f"### `[{name}]`\n\n{field.description}")
        if isinstance(section, type) and issubclass(section, Section):
            parts.append(section_table(section, all_free=name in NOT_COMPUTED))
        if name == "reward":
            parts.append("### `[reward.judge]`\n\nThe language model that scores.")
            parts.append(section_table(JudgeConfig, all_free=False))
        if name == "data":
            parts.append("### `[[data.mix]]`\n\nOne more file of prompts.")
            parts.append(section_table(MixedSet, all_free=False))
        if name == "eval":
            parts.append("### `[[eval.datasets]]`\n\nOne held-out data set.")
            parts.append(section_table(EvalDataset, all_free=False))
    return "\n\n".join(parts)


def section_table(section: type[Section], *, all_free: bool) -> str:
    """The settings of a section: name, type and range, default, help."""
    schema = section.model_json_schema()
    rows = []
    for name, one in schema["properties"].items():
        free = all_free or name in section.OPERATIONAL
        default = "*required*" if name in schema.get("required", ()) else code(one.get("default"))
        rows.append(
            (f"`{name}`{' °' if free else ''}", kind_of(one), default, one.get("description", ""))
        )
    return table(("setting", "what it takes", "default", ""), rows)


def kind_of(schema: Schema) -> str:
    """What a setting takes, in words."""
    if "enum" in schema or "const" in schema:
        return " or ".join(code(v) for v in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        kinds = [kind_of(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in schema:
        return "table"
    match schema.get("type"):
        case "array":
            return f"list of {kind_of(schema['items'])}s"
        case "object":
            return "table"
        case "boolean":
            return "`true` or `false`"
        case "string":
            return {"file": "path", "function": "function"}.get(
                schema.get("sluice_path", ""), "text"
            )
    name = {"integer": "integer", "number": "number"}[schema["type"]]
    return f"{name} {bounds}" if (bounds := ", ".join(range_of(schema))) else name


def range_of(schema: Schema) -> Iterator[str]:
    """The bounds of a number."""
    signs = {
        "minimum": "≥",
        "exclusiveMinimum": ">",
        "maximum": "≤",
        "exclusiveMaximum": "<",
    }
    for key, sign in signs.items():
        if key in schema:
            yield f"{sign} {schema[key]}"


def code(value: Any) -> str:
    """A value as TOML writes it; nothing for none."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def columns(schema: pa.Schema) -> str:
    """A table of a Parquet schema: column, type, what it holds."""
    rows = [
        (
            f"`{field.name}`",
            arrow_kind(field),
            (field.metadata or {}).get(b"unit", b"").decode().replace("|", ", "),
        )
        for field in schema
    ]
    return table(("column", "type", "what, and its unit"), rows)


def arrow_kind(field: pa.Field) -> str:
    """A column's type as people say it."""
    kind = field.type
    name = f"list of {kind.value_type}" if pa.types.is_list(kind) else str(kind)
    if (field.metadata or {}).get(b"encoding") == b"json":
        name = "JSON text"
    return name if not field.nullable else f"{name}, may be null"


def slime_arguments() -> str:
    """A table of each group of slime's arguments: what becomes of them."""
    parts = []
    for group, arguments in GROUPS.items():
        rows = [(f"`--{argument.name}`", str(argument.rule)) for argument in arguments]
        parts.append(f"### {group}\n\n{table(('argument', 'here'), rows)}")
    return "\n\n".join(parts)


def megatron_options() -> str:
    """A table of Megatron's options by what becomes of them."""
    by_rule: dict[str, list[str]] = {}
    for argument in OPTIONS.values():
        by_rule.setdefault(str(argument.rule), []).append(f"`--{argument.name}`")
    return table(("options", "here"), [(", ".join(names), rule) for rule, names in by_rule.items()])


def plans() -> str:
    """What `sluice plan` says of the files in `scale`, in the layouts of `PLANS`."""
    parts = []
    for name, commands in PLANS.items():
        columns = [figures_of(said(f"plan docs/scale/{name}.toml {more}")) for more in commands]
        rows: list[tuple[str, ...]] = []
        for group in zip(*columns, strict=True):
            names = dict.fromkeys(name for column in group for name in column)
            rows += [(name, *(column.get(name, "") for column in group)) for name in names]
        heads = (f"`{command}`" if command else "FSDP2" for command in commands)
        parts.append(
            f"### {name.replace('-gpus', ' GPUs')}\n\n`sluice plan docs/scale/{name}.toml` with"
        )
        parts.append(table(("", *heads), rows))
    return "\n\n".join(parts)


def said(command: str) -> dict[str, Any]:
    """What a command of `sluice` prints as JSON, called from the repository's root."""
    run, bound, _ = app.parse_args([*command.split(), "--json"], exit_on_error=False)
    with contextlib.chdir(DOCS.parent), contextlib.redirect_stdout(io.StringIO()) as out:
        run(*bound.args, **bound.kwargs)
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def figures_of(plan: dict[str, Any]) -> list[dict[str, str]]:
    """Memory and traffic in GB, time in seconds."""
    groups = [
        {f"{kind}, GB": size / 1e9 for kind, size in plan["memory"].items() if size},
        {
            "**memory of a rank, GB**": sum(plan["memory"].values()) / 1e9,
            "there is, GB": plan["available"] / 1e9,
        },
        {f"sent: {kind}, GB": size / 1e9 for kind, size in plan["traffic"].items() if size},
        {
            "computing, s": plan["compute_s"],
            "traffic beside it, s": plan["traffic_s"],
            "traffic that it waits for, s": plan["waiting_s"],
            "**training an iteration, s**": plan["seconds"],
        },
    ]
    return [{name: shown(value) for name, value in group.items()} for group in groups]


def shown(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines
    )


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings,
    "slime arguments": slime_arguments,
    "megatron options": megatron_options,
    "plans": plans,
    "samples": lambda: columns(SAMPLES),
    "scores": lambda: columns(SCORES),
    "selection": lambda: columns(SELECTION),
}


def filled(page: str) -> str:
    """A page with its tables as they should be."""
    return BLOCK.sub(lambda m: f"{m[1]}\n{TABLES[m['name']]()}\n\n{m[3]}", page)


def main() -> int:
    """Rewrite the tables of all pages."""
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
