"""A short sequence with two images of noise, to see that a model is computed rightly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlcore.images.layout import Pixels, SequenceImages, expand, lay_out
from rlcore.images.model import blank


@dataclass(frozen=True)
class Trial:
    """Tokens with their images."""

    tokens: list[int]
    images: SequenceImages
    forward: dict[str, Tensor]
    """What the model's own forward is given beside the tokens."""


def trial(lm: Any) -> Trial:
    """For a model of transformers with a vision tower; the same for models of one shape."""
    config = lm.config
    side, image = config.vision_config.spatial_merge_size, config.image_token_id
    own = {image, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id}
    words = [t for t in range(2, config.get_text_config().vocab_size) if t not in own][:6]
    seen = [config.vision_start_token_id, image, config.vision_end_token_id]
    tokens = expand([*words[:2], *seen, words[2], *seen, *words[3:]], [6, 2], image)
    empty = blank(lm.base_model).pixel_values
    grids = torch.tensor([[1, 2 * side, 3 * side], [1, side, 2 * side]])
    chance = torch.Generator().manual_seed(0)
    values = torch.randn(int(grids.prod(1).sum()), empty.shape[1], generator=chance)
    kinds = torch.tensor([[int(token == image) for token in tokens]], dtype=torch.int32)
    return Trial(
        tokens,
        lay_out(tokens, Pixels(values.numpy(), grids.numpy()), image, side),
        {
            "pixel_values": values.to(empty.device, empty.dtype),
            "image_grid_thw": grids.to(empty.device),
            "mm_token_type_ids": kinds.to(empty.device),
        },
    )
