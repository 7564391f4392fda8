"""From TOML files and `--set` options to a `RunConfig`, with errors that name the key.

A file may say `extends = "other.toml"`: that file is read first and this one laid over it, table by
table. `extends = "preset:NAME"` takes one of `rlcore.config.presets`, and of a list each goes over
those before it. A relative path in a file is taken from that file's folder; one given by `--set`,
from the working folder.
"""

import copy
import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rlcore.config.eval_file import named_paths, read_eval_file
from rlcore.config.fields import path_kind, section_of
from rlcore.config.presets import PRESETS
from rlcore.config.tree import EvalDataset, RunConfig, StorageConfig
from rlcore.errors import ConfigError

Tree = dict[str, Any]


def load_config(path: str | Path, sets: Sequence[str] = ()) -> RunConfig:
    """Read a run's configuration.

    Args:
        path: a TOML file.
        sets: options as `a.b=value`; the value is read as TOML, else taken as text.

    Raises:
        ConfigError: naming the file or key, what it holds, what is allowed and the nearest name.
    """
    tree = read_toml(Path(path))
    for text in sets:
        key, value = parse_set(text)
        put(tree, key, resolve_paths({key[-1]: value}, _section_at(key[:-1]), Path.cwd())[key[-1]])
    return build_config(tree)


def build_config(tree: Mapping[str, Any]) -> RunConfig:
    """A `RunConfig` of plain values, with Sluice's own error texts.

    A default path is taken from the working folder, so that it means the same in every process.
    """
    tree = dict(tree)
    if isinstance(storage := tree.get("storage", {}), Mapping) and "root" not in storage:
        root = str(StorageConfig.model_fields["root"].default)
        tree["storage"] = {"root": absolute(root, "file", Path.cwd()), **storage}
    tree = _with_eval_file(tree)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("; ".join(explain(error))) from None


def _with_eval_file(tree: Tree) -> Tree:
    """`eval.eval_config` replaced by the data sets that it lists."""
    section = tree.get("eval")
    if not isinstance(section, Mapping) or not isinstance(section.get("eval_config"), str):
        return tree
    own = dict(section)
    path = own.pop("eval_config")
    if path:
        if own.get("datasets"):
            raise ConfigError("eval.eval_config and eval.datasets are both given; use one of them")
        rollout = tree.get("rollout", {})
        entries = read_eval_file(path, rollout if isinstance(rollout, Mapping) else {})
        folder = Path(path).parent
        own["datasets"] = [resolve_paths(entry, EvalDataset, folder) for entry in entries]
    return tree | {"eval": own}


def with_sets(config: RunConfig, sets: Sequence[str]) -> RunConfig:
    """A copy of `config` with options of the form `a.b=value` applied."""
    return _with(config, (parse_set(text) for text in sets))


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """A copy of `config` with some settings replaced, given by their dotted names or as a tree.

    Raises:
        ConfigError: as `load_config`.
    """
    return _with(config, ((key.split("."), value) for key, value in dotted(values).items()))


def dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name, whether they came so or as tables of sections."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and _section_at(key.split(".")) is not None:
            out |= dotted({f"{key}.{name}": one for name, one in value.items()})
        else:
            out[key] = value
    return out


def with_eval_sets(config: RunConfig, words: Sequence[str]) -> RunConfig:
    """A copy of `config` that is evaluated on `name path name path ...` and on nothing else.

    Raises:
        ConfigError: as `load_config`, or a name has no path.
    """
    datasets = named_paths(words, config.rollout.model_dump())
    return with_values(config, {"eval.datasets": datasets})


def _with(config: RunConfig, settings: Iterable[tuple[list[str], Any]]) -> RunConfig:
    tree = config.model_dump(mode="python")
    for key, value in settings:
        put(tree, key, resolve_paths({key[-1]: value}, _section_at(key[:-1]), Path.cwd())[key[-1]])
    return build_config(tree)


def read_toml(path: Path, seen: tuple[Path, ...] = ()) -> Tree:
    """The tree of a TOML file and of those it extends, paths resolved."""
    path = path.expanduser().resolve()
    if path in seen:
        raise ConfigError(f"{path} extends itself through {' -> '.join(str(p) for p in seen)}")
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from None
    bases = tree.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) and base for base in bases):
        raise ConfigError(
            f"extends in {path} must be the path of a TOML file, preset:NAME, or a list of these, "
            f"not {bases!r}"
        )
    below: Tree = {}
    for base in bases:
        below = merge(below, _base(base, path, seen))
    return merge(below, resolve_paths(tree, RunConfig, path.parent))


def _base(base: str, path: Path, seen: tuple[Path, ...]) -> Tree:
    """The tree of what the file at `path` extends."""
    prefix, _, name = base.partition(":")
    if prefix != "preset":
        return read_toml(path.parent / base, (*seen, path))
    if name not in PRESETS:
        raise ConfigError(
            f"extends in {path}: there is no preset {name!r}; there are {', '.join(PRESETS)}"
        )
    return copy.deepcopy(PRESETS[name])


def merge(base: Tree, over: Tree) -> Tree:
    """`over` laid on `base`, table by table; lists and values replace."""
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merge(out[key], value) if both else value
    return out


def parse_set(text: str) -> tuple[list[str], Any]:
    """`a.b=value` as its key path and value."""
    key, equals, raw = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(f"--set {text!r} is not of the form section.key=value")
    try:
        read = tomllib.loads(f"v = {raw}")
    except tomllib.TOMLDecodeError:
        return parts, raw.strip()
    # A value of several lines may read as further keys, which would be dropped.
    return parts, read["v"] if len(read) == 1 else raw.strip()


def put(tree: Tree, key: Sequence[str], value: Any) -> None:
    """Set one key of a nested tree, making the tables on the way."""
    for part in key[:-1]:
        node = tree.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{'.'.join(key)}: {part} is a value, not a section")
        tree = node
    tree[key[-1]] = value


# --- paths ----------------------------------------------------------------------------------------


def resolve_paths(tree: Tree, section: type[BaseModel] | None, folder: Path) -> Tree:
    """`tree` with the relative paths of its path fields made absolute against `folder`."""
    if section is None:
        return tree
    out = dict(tree)
    for name, field in section.model_fields.items():
        value = tree.get(name)
        kind = path_kind(field)
        inner = section_of(field)
        if kind and isinstance(value, str):
            out[name] = absolute(value, kind, folder)
        elif kind and isinstance(value, list):
            out[name] = [absolute(v, kind, folder) if isinstance(v, str) else v for v in value]
        elif inner and isinstance(value, dict):
            out[name] = resolve_paths(value, inner, folder)
        elif inner and isinstance(value, list):
            out[name] = [
                resolve_paths(v, inner, folder) if isinstance(v, dict) else v for v in value
            ]
    return out


def absolute(value: str, kind: str, folder: Path) -> str:
    """A path, or a function's file, from the root of the file system; URLs and modules as they are.

    Args:
        value: as it was given.
        kind: `file`, `function` or `url`.
        folder: what it is relative to.
    """
    if not value or "://" in value or kind == "url":
        return value
    if kind == "function":
        file, colon, function = value.rpartition(":")
        if not file.endswith(".py"):
            return value
        return f"{(folder / Path(file).expanduser()).resolve()}{colon}{function}"
    return str((folder / Path(value).expanduser()).resolve())


def _section_at(key: Sequence[str]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = RunConfig
    for part in key:
        field = section.model_fields.get(part) if section else None
        section = section_of(field) if field else None
    return section


# --- errors ---------------------------------------------------------------------------------------


def explain(error: ValidationError) -> Iterator[str]:
    """Pydantic's findings as sentences: key, value, what is allowed, nearest right name."""
    wrong: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for item in error.errors():
        loc = _real_keys(item["loc"])
        if item["type"] == "extra_forbidden":
            yield _unknown_key(_dotted(loc), loc)
        elif item["type"] == "missing":
            yield f"{_dotted(loc)} is missing: {_help(loc)}"
        elif item["type"] == "value_error":
            yield str(item["ctx"]["error"])
        else:
            wrong.setdefault(loc, []).append(item)
    for loc, items in wrong.items():
        allowed = " or ".join(_allowed(item) for item in items)
        # Among these may be one that nobody should see.
        value = f" = {items[0]['input']!r}" if loc[:2] != ("storage", "options") else ""
        yield f"{_dotted(loc)}{value} is not allowed: it should be {allowed}"


def _real_keys(loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Pydantic's location without the members of a union that it adds behind the key."""
    real: list[str | int] = []
    section: type[BaseModel] | None = RunConfig
    open_table = False
    for part in loc:
        if isinstance(part, int):
            real.append(part)
        elif section is not None:
            real.append(part)
            field = section.model_fields.get(part)
            section = section_of(field) if field else None
            open_table = field is not None and get_origin(field.annotation) is dict
        elif open_table:
            real.append(part)
            open_table = False
    return tuple(real)


def _dotted(loc: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in loc)


def _allowed(item: ErrorDetails) -> str:
    if item["type"] in ("model_type", "dict_type"):
        return "a table"
    if item["type"] == "string_pattern_mismatch":
        return f"text that matches {item['ctx']['pattern']}"
    if item["type"] == "string_too_short":
        return "text that is not empty"
    return item["msg"].removeprefix("Input should be ")


def _unknown_key(key: str, loc: tuple[str | int, ...]) -> str:
    section = _section_at([str(part) for part in loc[:-1] if not isinstance(part, int)])
    names = list(section.model_fields) if section else []
    prefix = ".".join(str(part) for part in loc[:-1])
    near = difflib.get_close_matches(str(loc[-1]).lower(), names, n=1, cutoff=0.6)
    if near:
        return f"unknown setting {key}: did you mean {prefix + '.' if prefix else ''}{near[0]}?"
    everywhere = [f"{s}.{n}" for s, f in RunConfig.model_fields.items() for n in _names(f)]
    near = [full for full in everywhere if full.split(".")[1] == str(loc[-1])]
    if near:
        return f"unknown setting {key}: did you mean {near[0]}?"
    return f"unknown setting {key}: {prefix or 'the top level'} has {', '.join(sorted(names))}"


def _names(field: FieldInfo) -> list[str]:
    section = section_of(field)
    return list(section.model_fields) if section else []


def _help(loc: tuple[str | int, ...]) -> str:
    section = _section_at([str(part) for part in loc[:-1] if not isinstance(part, int)])
    field = section.model_fields.get(str(loc[-1])) if section else None
    text = (field.description or "") if field else ""
    return text[:1].lower() + text[1:].rstrip(".") if text else "it has no default"
