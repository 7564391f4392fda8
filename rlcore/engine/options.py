"""Arguments that the installed SGLang's server takes, read off its source.

The package itself is not imported: that takes longer than an iteration, and needs a GPU's
libraries. What is read is the class `ServerArgs` of `sglang/srt/server_args.py`: a field with an
annotation is an argument, and so is every option that is registered by hand, such as older names.

Where SGLang is not installed nothing is known; the machine that has it checks before it starts a
server (`EngineActor`).
"""

import ast
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlcore.engine.sglang import Argument
from rlcore.errors import ConfigError

SOURCE = "srt/server_args.py"
NUMBERS = {"int": (int,), "float": (int, float)}


@dataclass(frozen=True)
class Option:
    """An argument of the server."""

    kind: str = ""
    """bool, int, float, str; anything else is not looked at."""
    many: bool = False
    choices: tuple[str, ...] = ()


def check_options(given: Mapping[str, Argument], source: Path | None = None) -> None:
    """Every argument is one of the installed SGLang, with a value of its kind.

    Args:
        given: by name, as `sglang.*` has them.
        source: `server_args.py`; default: the installed one's. Nothing is checked without one.

    Raises:
        ConfigError: naming the argument, and the nearest one that there is.
    """
    source = source or installed_source()
    if source is None:
        return
    known = read_options(source)
    for name, value in given.items():
        option = known.get(name.replace("-", "_"))
        if option is None:
            near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
            hint = f"; did you mean sglang.{near[0]}?" if near else ""
            raise ConfigError(f"sglang.{name}: {_release()} has no such argument{hint}")
        if fault := _fault(option, value):
            raise ConfigError(f"sglang.{name} = {value!r}: {_release()} takes {fault}")


def installed_source() -> Path | None:
    """The file that says what the installed server takes; None where SGLang is not installed."""
    spec = find_spec("sglang")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / SOURCE).is_file():
            return path
    return None


@cache
def read_options(source: Path) -> dict[str, Option]:
    """All arguments by name, '_' between words."""
    module = ast.parse(source.read_text(encoding="utf-8"))
    lists = dict(_constants(module.body))
    out: dict[str, Option] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef) and node.name == "ServerArgs":
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    out |= _of_field(field.target.id, field.annotation, lists)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            for word in words:
                if isinstance(word, str) and word.startswith("--"):
                    out.setdefault(_plain(word), Option())
    return out


def _of_field(
    name: str, annotation: ast.expr, lists: Mapping[str, tuple[str, ...]]
) -> dict[str, Option]:
    """A field's argument, under all of its names; nothing for a field that is none."""
    if not isinstance(annotation, ast.Subscript) or not isinstance(annotation.slice, ast.Tuple):
        return {}
    kind, *more = annotation.slice.elts
    option, names = _of_type(kind), [name]
    for extra in more:
        words = {word.arg: word.value for word in getattr(extra, "keywords", [])}
        if _literal(words.get("no_cli")):
            return {}
        if cli := _literal(words.get("cli_name")):
            names = [_plain(cli)]
        names += map(_plain, _literal(words.get("aliases")) or ())
        # What is parsed by a function of its own may be written in other ways.
        if words.keys() & {"type_parser", "action", "nargs"}:
            option = Option()
        elif "choices" in words:
            chosen = words["choices"]
            named = lists.get(chosen.id, ()) if isinstance(chosen, ast.Name) else _literal(chosen)
            option = replace(option, choices=tuple(map(str, named or ())))
    return dict.fromkeys(names, option)


def _of_type(kind: ast.expr) -> Option:
    if isinstance(kind, ast.Name):
        return Option(kind.id)
    if not isinstance(kind, ast.Subscript):
        return Option()
    outer = getattr(kind.value, "id", "")
    if outer == "Optional":
        return _of_type(kind.slice)
    if outer in ("List", "list"):
        return replace(_of_type(kind.slice), many=True)
    if outer == "Literal":
        named = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
        values = [_literal(one) for one in named]
        return Option("str", choices=tuple(str(v) for v in values if v is not None))
    return Option()


def _constants(body: list[ast.stmt]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Lists of words that the module names."""
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = _literal(node.value)
            if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
                yield node.targets[0].id, tuple(value)


def _literal(node: ast.expr | None) -> Any:
    """The value of an expression; None for what is no constant."""
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _fault(option: Option, value: Argument) -> str | None:
    """What an argument takes instead of a value; None where the value will do."""
    if option.kind == "bool" and not option.many:
        return None if isinstance(value, bool) else "true or false"
    if not option.kind:
        return None
    if isinstance(value, list) and not option.many:
        return "one value"
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, bool):
            return "a value"
        kinds = NUMBERS.get(option.kind)
        if kinds and not isinstance(one, kinds):
            return "whole numbers" if option.kind == "int" else "numbers"
        if option.choices and str(one) not in option.choices:
            return "one of " + ", ".join(option.choices)
    return None


def _plain(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _release() -> str:
    try:
        return f"SGLang {version('sglang')}"
    except PackageNotFoundError:
        return "SGLang"
