"""What `sluice slime` prints: the configuration that a launch line of slime comes to."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flows.commands.inspect import print_json, toml_value
from flows.exit_codes import DONE
from rlcore.config import RunConfig, build_config
from rlcore.config.load import resolve_paths
from rlcore.slime.translate import Translation, translate


def from_slime(
    tokens: Sequence[str], *, run: bool, root: str | None, name: str | None, as_json: bool
) -> int:
    """Print the equivalent configuration; train with it if asked.

    Args:
        tokens: a launch line's arguments.
        run: train with it, after it is printed.
        root: of all runs, in place of --save.
        name: of the run.
        as_json: print the configuration as JSON, and the run's end too.

    Raises:
        ConfigError: naming each argument that has no place here.
    """
    done = translate(tokens)
    if name is not None:
        done.tree.setdefault("run", {})["id"] = name
    done.tree = resolve_paths(done.tree, RunConfig, Path.cwd())
    config = build_config(done.tree)
    if not (run and as_json):
        show(done, as_json=as_json)
    if not run:
        return DONE
    from flows.commands.launch import run_training

    return run_training(config, root=root, as_json=as_json)


def show(done: Translation, *, as_json: bool) -> None:
    """The configuration, and what is so anyway."""
    if as_json:
        print_json({"config": done.tree, "notes": dict(done.notes)})
    else:
        sys.stdout.write("\n".join(lines(done)) + "\n")


def lines(done: Translation) -> Iterator[str]:
    """The lines of a TOML file."""
    for text, why in done.notes:
        yield f"# {text}: {why}"
    for section in RunConfig.model_fields:
        settings: dict[str, Any] = done.tree.get(section, {})
        tables = {key: value for key, value in settings.items() if is_tables(value)}
        if settings:
            yield f"\n[{section}]"
        yield from (
            f"{key} = {toml_value(value)}" for key, value in settings.items() if key not in tables
        )
        for key, rows in tables.items():
            for row in rows:
                yield f"\n[[{section}.{key}]]"
                yield from (f"{name} = {toml_value(value)}" for name, value in row.items())


def is_tables(value: Any) -> bool:
    """Whether a value is a list of tables."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)
