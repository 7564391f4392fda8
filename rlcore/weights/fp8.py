"""Weights in 8 bits for engines whose model folder is in 8 bits: float8 (e4m3), one scale a block.

The folder says which weights are so, and in blocks of which size: beside `X.weight` it has
`X.weight_scale_inv`, float32 [blocks of rows, blocks of columns], by which a block is multiplied to
get its numbers back. Everything else is sent as it is.

Invariants:
- What is sent has the names of the folder, no more and no fewer that are in 8 bits.
- A number comes back within 1/16 of itself, or within 2^-10 of its block's scale, if it is small.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.errors import ConfigError, SyncError
from rlcore.weights.names import stored_names

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 448.0
"""The largest number of e4m3."""
SCALE = "_scale_inv"
"""Behind a weight's name: the name of its scales."""


@dataclass(frozen=True, slots=True)
class BlockFp8:
    """How a folder's weights are quantised."""

    block: tuple[int, int]
    """Rows and columns that share a scale."""
    names: frozenset[str]
    """Of the weights that are."""
    powers_of_two: bool = False
    """Scales are such (`scale_fmt = "ue8m0"`)."""

    @classmethod
    def of_folder(cls, folder: Path) -> BlockFp8:
        """Read what a Hugging Face folder says.

        Raises:
            ConfigError: it is not in this format.
        """
        setting = f"rollout.hf_checkpoint = {str(folder)!r}"
        try:
            config = json.loads((folder / "config.json").read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{setting} must be a Hugging Face folder that this machine sees; its config.json "
                f"cannot be read: {error}"
            ) from None
        how = config.get("quantization_config") or {}
        block = how.get("weight_block_size")
        if how.get("quant_method") != "fp8" or not block:
            raise ConfigError(
                f"{setting}: its config.json has no quantization_config of quant_method 'fp8' with "
                "a weight_block_size; weights are sent in fp8 blocks or as they are. For the "
                "latter remove the setting"
            )
        stored = stored_names(folder)
        names = frozenset(n.removesuffix(SCALE) for n in stored if n.endswith(f".weight{SCALE}"))
        if not names:
            raise ConfigError(f"{setting}: its config.json says fp8, but no weight has {SCALE}")
        return cls((int(block[0]), int(block[1])), names, how.get("scale_fmt") == "ue8m0")

    def apply(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Weights under their names, those of `names` in 8 bits and followed by their scales.

        Raises:
            SyncError: the model lacks a weight that the folder has, so it is of another model.
        """
        left = set(self.names)
        for name, tensor in tensors:
            if name not in left:
                yield name, tensor
                continue
            left.remove(name)
            quantised, scales = quantise(tensor, self.block, powers_of_two=self.powers_of_two)
            yield name, quantised
            yield name + SCALE, scales
        if left:
            raise SyncError(
                f"rollout.hf_checkpoint holds {min(left)} in fp8 ({len(left)} such weights), which "
                "the trained model does not have: it must be the same model as model.path"
            )


def quantise(
    weight: Tensor, block: tuple[int, int], *, powers_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """A matrix as float8_e4m3fn, and its scales.

    Args:
        weight: [rows, columns], floating.
        block: rows and columns that share a scale; the last block of either may be smaller.
        powers_of_two: round scales up to one.

    Returns:
        float8 [rows, columns], float32 [blocks of rows, blocks of columns].
    """
    import torch

    rows, columns = weight.shape
    down, across = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    padding = (0, across * block[1] - columns, 0, down * block[0] - rows)
    whole = torch.nn.functional.pad(weight.float(), padding)
    blocks = whole.view(down, block[0], across, block[1])
    scales = blocks.abs().amax(dim=(1, 3)) / LARGEST
    # A block of zeros is zero under any scale.
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    if powers_of_two:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    scaled = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST)
    narrow = scaled.to(torch.float8_e4m3fn).view(down * block[0], across * block[1])
    return narrow[:rows, :columns].contiguous(), scales


def dequantise(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """The float32 numbers that `quantise` stands for."""
    spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return weight.float() * spread[: weight.shape[0], : weight.shape[1]]
