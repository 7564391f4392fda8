"""Where weights come from: Hugging Face's tensors by name, each read when it is asked for.

transformers keeps the experts of a layer in one tensor, and published folders have each on its own;
a source answers for the latter whichever it holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlcore.errors import DataError
from rlcore.models.architecture import Architecture
from rlcore.models.tensors import tensors

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
_FUSED = re.compile(r"(?P<layer>.*\.mlp\.experts)\.(?P<what>gate_up_proj|down_proj)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_NO_WEIGHTS = re.compile(r"\.rotary_emb\.inv_freq$|^mtp\.|^model\.mtp\.")
"""Tensors that some folders have and no decoder needs: rotary tables, layers that predict more."""


class Tensors(Protocol):
    """Stored tensors."""

    @property
    def where(self) -> str:
        """For errors."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of all tensors, by the names they are stored under."""

    def dtype(self, name: str) -> str:
        """The type of its numbers, as safetensors writes it."""

    def read(self, name: str, at: tuple[int | slice, ...] = ()) -> Tensor:
        """One of them, or a part of it."""


class HfFolder:
    """The safetensors files of a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self.where = str(folder)
        self._files: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in _weight_files(folder):
            try:
                file = safe_open(path, framework="pt").__enter__()
            except Exception as error:
                # safetensors raises a class of its own, and what Rust's I/O meets.
                raise DataError(f"{path} is no whole safetensors file: {error}") from None
            for name in file.keys():  # noqa: SIM118
                self._files[name] = file
                self.shapes[name] = tuple(file.get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As it is written."""
        dtype: str = self._files[name].get_slice(name).get_dtype()
        return dtype

    def read(self, name: str, at: tuple[int | slice, ...] = ()) -> Tensor:
        """One tensor, or a part of it."""
        if not at:
            tensor: Tensor = self._files[name].get_tensor(name)
            return tensor
        part: Tensor = self._files[name].get_slice(name)[at]
        return part


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, those of its index if it has one."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{index} is no index of weights: {error!r}") from None
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise DataError(f"{folder} lacks {', '.join(missing)}, which its {INDEX} names")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"{folder} has no *.safetensors file")
    return files


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in what is stored."""

    name: str
    at: tuple[int | slice, ...] = ()


class Weights:
    """The weights of a model, complete: every tensor that it has, and none besides.

    Raises:
        DataError: naming each tensor that is missing, has another shape, or belongs nowhere.
    """

    def __init__(self, arch: Architecture, stored: Tensors) -> None:
        self._stored = stored
        self._places = {}
        self.left_out: list[str] = []
        """Stored tensors that are no part of the decoder."""
        at_hand = dict(_unfused(stored.shapes))
        wrong = []
        for spec in tensors(arch):
            place, shape = at_hand.pop(spec.name, (None, None))
            if place is None:
                wrong.append(f"{spec.name} is missing")
            elif shape != spec.shape:
                wrong.append(f"{spec.name} has shape {list(shape or ())}, not {list(spec.shape)}")
            else:
                self._places[spec.name] = place
        for name in at_hand:
            if _is_beside(arch, name):
                self.left_out.append(name)
            else:
                wrong.append(f"{name} is of no {arch.model_type!r} model like this")
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise DataError(f"{stored.where}: {'; '.join(wrong[:5])}{more}")

    def dtype(self, name: str) -> str:
        """The type of a tensor's numbers."""
        return self._stored.dtype(self._places[name].name)

    def read(self, name: str) -> Tensor:
        """One tensor by the name that published folders give it."""
        place = self._places[name]
        return self._stored.read(place.name, place.at)


def _unfused(
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[str, tuple[Place, tuple[int, ...]]]]:
    """Each tensor's place and shape; those of fused experts, one by one."""
    for name, shape in shapes.items():
        found = _FUSED.fullmatch(name)
        if found is None or len(shape) != 3:
            yield name, (Place(name), shape)
            continue
        count, rows, columns = shape
        parts = ("down_proj",) if found["what"] == "down_proj" else ("gate_proj", "up_proj")
        height = rows // len(parts)
        for expert in range(count):
            for k, part in enumerate(parts):
                place = Place(name, (expert, slice(k * height, (k + 1) * height)))
                yield f"{found['layer']}.{expert}.{part}.weight", (place, (height, columns))


@cache
def _is_beside(arch: Architecture, name: str) -> bool:
    layer = _LAYER.match(name)
    beyond = layer is not None and int(layer[1]) >= arch.num_hidden_layers
    tied = arch.tie_word_embeddings and name == "lm_head.weight"
    return beyond or tied or _NO_WEIGHTS.search(name) is not None
