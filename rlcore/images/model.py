"""What a model with a vision tower is made of, in transformers: where its parts are, and how images
come into the embeddings of its decoder.

Images are put where `at` says and not where the placeholder's id is: a model may say the
placeholder too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.images.processor import takes_images

PER_TOWER = "sdpa"
"""Attention of a vision tower: each image, or window of one, by itself."""


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """One image, or several, as a vision tower takes them."""

    pixel_values: Tensor
    """float [patches, width]"""
    grids: Tensor
    """int64 [images, 3]"""


def auto_class(folder: Path) -> Any:
    """The class of transformers that loads the model of a folder."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if takes_images(folder) else AutoModelForCausalLM


def attention_of(folder: Path, name: str) -> str | dict[str, str]:
    """`attn_implementation` with `name` for the decoder of the model of a folder."""
    return _split(name) if takes_images(folder) else name


def attend(lm: Any, name: str) -> None:
    """Have a model's decoder use an attention implementation."""
    lm.set_attn_implementation(_split(name) if sees(lm.base_model) else name)


def _split(name: str) -> dict[str, str]:
    return {"": PER_TOWER, "text_config": name, "vision_config": PER_TOWER}


def sees(base: Any) -> bool:
    """Whether a model without its output layer has a vision tower."""
    return hasattr(base, "visual")


def decoder(base: Any) -> Any:
    """The part of a model without its output layer that goes from embeddings to hidden states."""
    return base.language_model if sees(base) else base


def blocks(base: Any) -> list[torch.nn.Module]:
    """The layers of a model, those of its vision tower among them."""
    return [*(base.visual.blocks if sees(base) else ()), *decoder(base).layers]


def blank(base: Any) -> Picture:
    """The smallest image that a vision tower takes, all zeros."""
    config, weight = base.config.vision_config, base.visual.patch_embed.proj.weight
    side = config.spatial_merge_size
    return Picture(
        weight.new_zeros(side * side, weight[0].numel()),
        torch.tensor([[1, side, side]], device=weight.device),
    )


def features(base: Any, picture: Picture) -> list[Tensor]:
    """[features, hidden]: what takes the place of placeholders; then, where the model has such,
    what is added there behind its first layers.
    """
    found = base.get_image_features(
        picture.pixel_values, image_grid_thw=picture.grids, return_dict=True
    )
    deep = getattr(found, "deepstack_features", None) or ()
    return [_whole(found.pooler_output), *map(_whole, deep)]


def embed(
    base: Any, ids: Tensor, at: Tensor, pictures: Sequence[Picture], take: Tensor | None = None
) -> tuple[Tensor, dict[str, Any]]:
    """Embeddings of tokens and images, and what else the decoder's forward is to be given.

    Args:
        base: a model without its output layer.
        ids: int64 [rows, tokens].
        at: int64 [N], ascending: the places of features in the flattened rows.
        pictures: each goes through the vision tower by itself.
        take: int64 [N]: which of the pictures' features goes to each place; None: all in order.
    """
    words = base.get_input_embeddings()(ids)
    parts = zip(*(features(base, picture) for picture in pictures), strict=True)
    seen, *deep = [torch.cat(part).to(words.dtype) for part in parts]
    if take is not None:
        seen, *deep = [part.index_select(0, take) for part in (seen, *deep)]
    mixed = words.flatten(0, 1).index_copy(0, at, seen).view_as(words)
    if not deep:
        return mixed, {}
    mask = torch.zeros(ids.numel(), dtype=torch.bool, device=ids.device)
    mask = mask.index_fill(0, at, True).view_as(ids)
    return mixed, {"visual_pos_masks": mask, "deepstack_visual_embeds": deep}


def _whole(parts: Any) -> Tensor:
    """A tensor that may have come in pieces, one an image."""
    return parts if isinstance(parts, Tensor) else torch.cat(tuple(parts))
