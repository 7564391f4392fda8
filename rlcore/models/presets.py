"""Architectures of published models, by name: one TOML each beside this module.

A file holds the fields of `Architecture`, and under `[published]` the size that its makers give.
"""

import difflib
import tomllib
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from rlcore.errors import ConfigError
from rlcore.models.architecture import Architecture, differences
from rlcore.models.hf_config import read_hf_config

FOLDER = Path(__file__).with_name("presets")


class Published(BaseModel):
    """What the makers of a model say of its size."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    of: str
    """The published model, by its name on the Hugging Face hub."""
    parameters: int = 0
    """Exact, or rounded as they write it; 0: there is no figure of this variant."""
    active_parameters: int = 0
    """0: all of them. Some count the embedding and the output layer and some do not."""
    beside_decoder: int = 0
    """What the figure counts that is no part of the decoder: layers that predict further tokens."""


class Preset(BaseModel):
    """A named architecture."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    architecture: Architecture
    published: Published


@cache
def preset_names() -> tuple[str, ...]:
    """All presets, in order."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


@cache
def read_preset(name: str) -> Preset:
    """A preset.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in preset_names():
        near = difflib.get_close_matches(name, preset_names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(preset_names())}"
        raise ConfigError(f"model.preset = {name!r} is no preset: {hint}")
    path = FOLDER / f"{name}.toml"
    try:
        return Preset.model_validate(tomllib.loads(path.read_text("utf-8")))
    except ValidationError as error:
        raise ConfigError(f"preset {path} is no architecture: {error}") from None


def check_preset(name: str, folder: Path) -> None:
    """The model in a folder is the one that a preset describes.

    Raises:
        ConfigError: naming each field in which they differ.
    """
    wanted, found = read_preset(name).architecture, read_hf_config(folder)
    wrong = [
        f"{field} is {theirs!r} in the preset and {ours!r} in config.json"
        for field, theirs, ours in differences(wanted, found)
    ]
    if wrong:
        raise ConfigError(
            f"model.preset = {name!r} is not the model of {folder}: {'; '.join(wrong)}; name "
            "another preset, or leave it out, since config.json says it all"
        )
