"""Weights by broadcast: the groups that this engine is a member of, and what comes through them.

Invariant: all tensors of a request have come before the first of them changes the model.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlcore.errors import EngineError
from rlcore.weights.group import Meeting, WeightGroup, join_group

DTYPES = ("float32", "bfloat16", "float16")


class Groups:
    """Weight-update groups by name. Used by one thread at a time."""

    def __init__(self) -> None:
        self._groups: dict[str, WeightGroup] = {}

    def join(self, body: Mapping[str, Any]) -> None:
        """Become a member of the group of an /init_weights_update_group request.

        Raises:
            EngineError: the request makes no sense, or the group did not come together.
        """
        address, name = (_of(str, body, key) for key in ("master_address", "group_name"))
        port, rank, world = (
            _of(int, body, key) for key in ("master_port", "rank_offset", "world_size")
        )
        if (backend := body.get("backend")) != "gloo":
            raise EngineError(
                f"Failed to initialize custom process group: backend must be 'gloo', not "
                f"{backend!r}: this engine computes on CPU."
            )
        if not 0 < rank < world:
            raise EngineError(f"rank_offset must be in [1, {world - 1}], got {rank}.")
        if name in self._groups:
            raise EngineError(
                f"Failed to initialize custom process group: {name!r} exists; call "
                "/destroy_weights_update_group first."
            )
        meeting = Meeting(address, port, world, name, "gloo")
        try:
            self._groups[name] = join_group(meeting, rank)
        except (RuntimeError, OSError) as error:
            raise EngineError(f"Failed to initialize custom process group: {error}.") from error

    def leave(self, body: Mapping[str, Any]) -> None:
        """Leave the group of a /destroy_weights_update_group request.

        Raises:
            EngineError: there is none of that name.
        """
        name = _of(str, body, "group_name")
        if name not in self._groups:
            raise EngineError("The group to be destroyed does not exist.")
        self._groups.pop(name).close()

    def receive(self, body: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of an /update_weights_from_distributed request.

        Raises:
            EngineError: the request makes no sense, or the sender is gone.
        """
        name = _of(str, body, "group_name")
        names, dtypes, shapes = (body.get(key) for key in ("names", "dtypes", "shapes"))
        lists = [part for part in (names, dtypes, shapes) if isinstance(part, list)]
        if len(lists) != 3 or len({len(part) for part in lists}) != 1:
            raise EngineError("names, dtypes and shapes must be lists of the same length.")
        if body.get("load_format") is not None:
            raise EngineError("load_format is not offered by this engine for a broadcast.")
        if name not in self._groups:
            raise EngineError(
                f"Group {name} not in {list(self._groups)}. Please call "
                "`init_weights_update_group` first."
            )
        tensors = {
            str(key): _empty(str(key), dtype, shape)
            for key, dtype, shape in zip(*lists, strict=True)
        }
        try:
            self._groups[name].broadcast(list(tensors.values()))
        except RuntimeError as error:
            self._groups.pop(name).close()
            raise EngineError(f"Failed to update parameter online: {error}.") from error
        return tensors


def _empty(name: str, dtype: object, shape: object) -> Tensor:
    if dtype not in DTYPES:
        raise EngineError(f"dtype of {name} must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise EngineError(f"shape of {name} must be a list of sizes, got {shape!r}.")
    return torch.empty(shape, dtype=getattr(torch, str(dtype)))


def _of(kind: type[Any], body: Mapping[str, Any], key: str) -> Any:
    value = body.get(key)
    if type(value) is not kind:
        raise EngineError(f"{key} must be of type {kind.__name__}, got {value!r}.")
    return value
