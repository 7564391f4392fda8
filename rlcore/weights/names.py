"""Names of weights: those that a model has in memory, and those that its checkpoint has.

transformers 5 renames the weights of some models as it loads them. Folders that are exported, and
weights that are sent to engines, have the names of the folder that the model came from: that is
what engines and other tools read.

Invariant: no two weights get the same name.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from rlcore.errors import ConfigError

_PREFIXES = {
    "model.language_model.": ("model.", "language_model.model.", "language_model."),
    "model.visual.": ("visual.",),
    "lm_head.": ("language_model.lm_head.",),
}
"""Beginning of a name in memory -> what may stand in its place in a checkpoint."""


def checkpoint_names(names: Iterable[str], folder: Path) -> dict[str, str]:
    """Name in memory -> name in the folder's files; a name that is not there stays what it is, such
    as that of a weight that is tied to another.

    Raises:
        ConfigError: two weights would have one name.
    """
    stored = stored_names(folder)
    found = {name: _among(name, stored) for name in names}
    if len(set(found.values())) < len(found):
        twice = next(n for n in found.values() if list(found.values()).count(n) > 1)
        raise ConfigError(f"model folder {folder}: two weights of the model are named {twice!r}")
    return found


def stored_names(folder: Path) -> set[str]:
    """Names of the weights in a Hugging Face folder's safetensors files."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return set(json.loads(index.read_text("utf-8"))["weight_map"])
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as handle:
            names.update(handle.keys())
    return names


def _among(name: str, stored: set[str]) -> str:
    if name in stored:
        return name
    for prefix, others in _PREFIXES.items():
        if name.startswith(prefix):
            for other in others:
                if (candidate := other + name.removeprefix(prefix)) in stored:
                    return candidate
    return name
