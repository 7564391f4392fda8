"""New weights for the running model: from a Hugging Face folder, bytes off the wire, or tensors.

Invariant: names and shapes of everything offered are checked before the first value changes, so a
refused update leaves the model as it was.
"""

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_bytes
from torch import Tensor

from rlcore.errors import EngineError

Names = Mapping[str, Tensor]


def tied_names(state: Names) -> dict[str, list[str]]:
    """Each name of the state -> all names that share its storage, itself included."""
    by_address: dict[int, list[str]] = {}
    for name, tensor in state.items():
        by_address.setdefault(tensor.data_ptr(), []).append(name)
    return {name: by_address[tensor.data_ptr()] for name, tensor in state.items()}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder. EngineError when there are none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [folder / name for name in names]
    else:
        files = [folder / "model.safetensors"]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise EngineError(
            f"Failed to get weights: {', '.join(missing)} not found; model_path must be a local "
            "Hugging Face folder with safetensors files."
        )
    return files


def load_folder(state: Names, folder: Path) -> list[str]:
    """Copy the weights of `folder` into `state`; every tensor of the model must be there. Returns
    the names of what was copied.
    """
    with ExitStack() as stack:
        sources = {}
        for file in weight_files(folder):
            try:
                handle = stack.enter_context(safe_open(str(file), framework="pt"))
            except SafetensorError as error:
                raise EngineError(f"{file} is not a readable safetensors file: {error}.") from error
            sources.update(dict.fromkeys(handle.keys(), handle))
        shapes = {n: tuple(h.get_slice(n).get_shape()) for n, h in sources.items()}
        _check(state, shapes, str(folder), complete=True)
        copy_into(state, ((name, handle.get_tensor(name)) for name, handle in sources.items()))
    return list(sources)


def load_blobs(state: Names, blobs: list[str]) -> list[str]:
    """Copy the tensors of base64-encoded safetensors blobs into `state`; part of the model will do,
    so that weights can come in several calls. Returns the names of what was copied.
    """
    tensors: dict[str, Tensor] = {}
    for i, blob in enumerate(blobs):
        tensors.update(_decode(blob, i))
    return load_tensors(state, tensors)


def load_tensors(state: Names, tensors: Names) -> list[str]:
    """Copy tensors into `state`; part of the model will do. Returns their names."""
    _check(state, {n: tuple(t.shape) for n, t in tensors.items()}, "the request", complete=False)
    copy_into(state, iter(tensors.items()))
    return list(tensors)


def _decode(blob: str, index: int) -> dict[str, Tensor]:
    place = f"serialized_named_tensors[{index}]"
    try:
        raw = base64.b64decode(blob, validate=True)
    except (binascii.Error, ValueError) as error:
        raise EngineError(f"{place} is not base64: {error}.") from error
    try:
        return load_bytes(raw)
    except (SafetensorError, ValueError, KeyError) as error:
        # Asked only now: a safetensors header may begin with the byte of a pickle.
        if raw[:1] == b"\x80":
            raise EngineError(
                f"{place} is a pickle, which this engine never loads; send base64 of safetensors "
                'bytes with load_format "safetensors".'
            ) from error
        raise EngineError(f"{place} is no safetensors blob: {error}.") from error


def _check(
    state: Names, offered: Mapping[str, tuple[int, ...]], place: str, complete: bool
) -> None:
    unknown = sorted(set(offered) - set(state))
    if unknown:
        raise EngineError(f"{place} holds {_some(unknown)}, which the model has not.")
    for name, shape in offered.items():
        if shape != tuple(state[name].shape):
            raise EngineError(
                f"{name} in {place} has shape {list(shape)}, the model's has "
                f"{list(state[name].shape)}."
            )
    if complete:
        tied = tied_names(state)
        missing = sorted(name for name in state if not set(tied[name]) & set(offered))
        if missing:
            raise EngineError(f"{place} lacks {_some(missing)}, which the model needs.")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


@torch.no_grad()
def copy_into(state: Names, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Copy values in place, converting to the model's dtype and device."""
    for name, tensor in tensors:
        state[name].copy_(tensor)
