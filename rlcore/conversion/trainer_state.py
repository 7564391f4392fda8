"""The model in a trainer's state: whole tensors of the shards that ranks wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.conversion.sources import Tensors
from rlcore.conversion.torch_dist import Region, inside, overlap
from rlcore.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

MODEL = "model."
"""Beginning of the names of the policy's parameters."""
BUFFERS = ".e_score_correction_bias"
"""End of the names of what is no parameter: training leaves it as it is."""


class TrainerState:
    """Implements `Tensors` of a state's folder.

    Args:
        folder: of the state.
        prefix: of the names that are wanted; the policy's weights, if none is given.
    """

    def __init__(self, folder: Path, prefix: str = MODEL) -> None:
        from safetensors import safe_open

        from rlcore.train.fsdp.shards import ShardReader

        self.where, self._prefix = str(folder), prefix
        try:
            metadata = ShardReader(folder).read_metadata()
        except Exception as error:
            # A pickle that is damaged raises anything.
            raise DataError(f"{folder} holds no trainer state: {error}") from None
        self._metadata: dict[str, Any] = {
            name.removeprefix(prefix): value
            for name, value in metadata.state_dict_metadata.items()
            if name.startswith(prefix)
        }
        self.shapes = {name: tuple(value.size) for name, value in self._metadata.items()}
        self._files = metadata.storage_data
        self._open = {
            name: safe_open(folder / name, framework="pt").__enter__()
            for name in sorted(set(self._files.values()))
        }

    def dtype(self, name: str) -> str:
        """As safetensors writes it: masters are float32."""
        return "F32"

    def read(self, name: str, at: tuple[int | slice, ...] = ()) -> Tensor:
        """One tensor, or a part of it.

        Raises:
            DataError: a part of it is not stored.
        """
        import torch
        from torch.distributed.checkpoint.metadata import MetadataIndex

        wanted = _region(at, self.shapes[name])
        out = torch.empty([b - a for a, b in wanted], dtype=torch.float32)
        filled = 0
        for chunk in self._metadata[name].chunks:
            stored = tuple((o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            if both := overlap(wanted, stored):
                file = self._open[self._files[MetadataIndex(self._prefix + name, chunk.offsets)]]
                key = f"{self._prefix}{name}@{','.join(map(str, chunk.offsets))}"
                part = file.get_slice(key)[inside(both, stored)]
                out[inside(both, wanted)] = part
                filled += part.numel()
        if filled != out.numel():
            raise DataError(f"{self.where} lacks a part of {name}: it is no whole state")
        taken = [k for k, index in enumerate(at) if isinstance(index, int)]
        return out.squeeze(taken) if taken else out


def _region(at: tuple[int | slice, ...], shape: tuple[int, ...]) -> Region:
    whole = [(0, n) for n in shape]
    for k, index in enumerate(at):
        span = (index, index + 1) if isinstance(index, int) else index.indices(shape[k])[:2]
        whole[k] = span
    return tuple(whole)


class WithAdapters:
    """The model that training began with, and in it the updates of low rank that a state holds:
    W + (alpha / rank) B A, in float32 as a trainer's own checkpoints.
    """

    def __init__(self, state: Tensors, model: Tensors, alpha: float) -> None:
        self.where = state.where
        self._state, self._model, self._alpha = state, model, alpha
        self.shapes = model.shapes

    def dtype(self, name: str) -> str:
        """As safetensors writes it."""
        return self._model.dtype(name) if name.endswith(BUFFERS) else "F32"

    def read(self, name: str, at: tuple[int | slice, ...] = ()) -> Tensor:
        """One tensor, or a part of it."""
        import torch

        whole = self._model.read(name, at)
        if name.endswith(BUFFERS):
            return whole
        head = name.removesuffix(".weight")
        if f"{head}.lora_A" not in self._state.shapes:
            return whole.float()
        a, b = (self._state.read(f"{head}.{part}") for part in ("lora_A", "lora_B"))
        return torch.addmm(whole.float(), b, a, alpha=self._alpha / len(a))


class WithBuffers:
    """A trainer's state, and of the model that it began with what training does not change."""

    def __init__(self, state: Tensors, model: Tensors) -> None:
        self.where = state.where
        self._of: dict[str, Tensors] = {n: model for n in model.shapes if n.endswith(BUFFERS)}
        self._of |= dict.fromkeys(state.shapes, state)
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: source.shapes[name] for name, source in self._of.items()
        }

    def dtype(self, name: str) -> str:
        """As safetensors writes it."""
        return self._of[name].dtype(name)

    def read(self, name: str, at: tuple[int | slice, ...] = ()) -> Tensor:
        """One tensor, or a part of it."""
        return self._of[name].read(name, at)
