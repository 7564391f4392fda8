"""Evaluation sets as slime has them: a YAML file, or names and paths in a row.

A YAML file has `eval: {defaults: {...}, datasets: [...]}`, or the same without `eval`; `datasets`
is a list of tables with a name, or a table of name to table or path. The keys are those of
`[[eval.datasets]]`. What neither a data set nor the defaults say of temperature and top_p is as in
the rollout, which is slime's rule; `[[eval.datasets]]` in TOML evaluates greedily instead.

Invariant: what is stored of a run holds the data sets themselves, so the file may go.
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.config.data import EvalDataset
from rlcore.errors import ConfigError

Tree = dict[str, Any]
AS_ROLLOUT = {"temperature": 1.0, "top_p": 1.0}
"""Settings that are the rollout's where nothing is said, with the rollout's defaults."""


def read_eval_file(path: str, rollout: Mapping[str, Any]) -> list[Tree]:
    """The data sets of a YAML (or JSON) file.

    Args:
        path: of the file.
        rollout: the rollout section, as it is written.

    Returns:
        Tables of `eval.datasets`, paths as they are written.

    Raises:
        ConfigError: the file cannot be read, or has another shape or an unknown key; names it.
    """
    import yaml

    where = f"eval.eval_config = {path!r}"
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{where}: there is no such file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{where} is no YAML that can be read: {error}") from None
    root = tree.get("eval", tree) if isinstance(tree, dict) else None
    if not isinstance(root, dict) or set(root) - {"defaults", "datasets"}:
        raise ConfigError(f"{where} must hold a table `eval` of `defaults` and `datasets`")
    defaults = _table(root.get("defaults") or {}, f"{where}: defaults")
    _check_keys(defaults, f"{where}: defaults", without=("name", "path"))
    made = []
    for entry in _entries(root.get("datasets"), where):
        what = f"{where}: data set {entry.get('name')!r}"
        _check_keys(entry, what)
        merged = {k: v for k, v in (defaults | entry).items() if v is not None}
        made.append(merged)
    return [_as_rollout(rollout) | entry for entry in made]


def named_paths(words: Sequence[str], rollout: Mapping[str, Any]) -> list[Tree]:
    """Data sets of `name path name path ...`, as tables of `eval.datasets`.

    Raises:
        ConfigError: a name has no path.
    """
    if not words or len(words) % 2:
        raise ConfigError(
            f"--eval-prompt-data takes pairs of a name and a path, but it was given {len(words)} "
            "words"
        )
    pairs = zip(words[::2], words[1::2], strict=True)
    return [_as_rollout(rollout) | {"name": name, "path": path} for name, path in pairs]


def _as_rollout(rollout: Mapping[str, Any]) -> Tree:
    return {name: rollout.get(name, value) for name, value in AS_ROLLOUT.items()}


def _entries(found: Any, where: str) -> list[Tree]:
    if isinstance(found, dict):
        pairs = [
            (v if isinstance(v, dict) else {"path": v}) | {"name": k} for k, v in found.items()
        ]
        found = pairs
    if not isinstance(found, list) or not found:
        raise ConfigError(f"{where} has no datasets: it must be a list of tables, and not empty")
    return [_table(entry, f"{where}: an entry of datasets") for entry in found]


def _table(found: Any, what: str) -> Tree:
    if not isinstance(found, dict):
        raise ConfigError(f"{what} must be a table; it is {found!r:.80}")
    return dict(found)


def _check_keys(entry: Tree, what: str, without: Sequence[str] = ()) -> None:
    known = [name for name in EvalDataset.model_fields if name not in without]
    for key in entry:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"{what} has the unknown key {key!r}; {hint}")
