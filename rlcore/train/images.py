"""The images of a committed batch, as the trainer's model takes them.

A batch holds the files of its images, not their pixels: the image processor makes the same of them
again. Where a function of one's own has put `multimodal_train_inputs` on a sample, those are used.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa

from rlcore.errors import DataError
from rlcore.images.files import images_of
from rlcore.images.layout import Ids, Pixels, SequenceImages
from rlcore.images.processor import ImageProcessor
from rlcore.store.packed import unpack

IMAGE_COLUMNS = ("multimodal_inputs", "multimodal_train_inputs")


class BatchImages:
    """Images by row; what several samples share is processed once.

    Args:
        table: with `IMAGE_COLUMNS`.
        processor: of the trainer's model.
    """

    def __init__(self, table: pa.Table, processor: ImageProcessor) -> None:
        self._given, self._made = (table[name] for name in IMAGE_COLUMNS)
        self._processor = processor
        self._known: dict[tuple[str, str], Pixels | None] = {}

    def of(self, row: int, tokens: Ids, prompt: int) -> SequenceImages | None:
        """The images of a row; None where it has none.

        Args:
            row: of the table.
            tokens: of the sample.
            prompt: how many of them are its prompt's.

        Raises:
            DataError: an image is broken, or tokens and images do not belong together.
        """
        texts = (self._given[row].as_py() or "", self._made[row].as_py() or "")
        try:
            if texts not in self._known:
                self._known[texts] = self._pixels(*texts)
            pixels = self._known[texts]
            return None if pixels is None else self._processor.lay_out(tokens, pixels, prompt)
        except DataError as error:
            raise DataError(f"row {row} of the rollout: {error}") from None

    def _pixels(self, given: str, made: str) -> Pixels | None:
        inputs = json.loads(made, object_hook=unpack) if made else None
        if inputs and "pixel_values" in inputs:
            return _as_pixels(inputs)
        images = images_of(json.loads(given, object_hook=unpack) if given else None)
        return self._processor.pixels(images) if images else None


def _as_pixels(inputs: dict[str, Any]) -> Pixels:
    try:
        return Pixels(
            np.asarray(inputs["pixel_values"], np.float32),
            np.asarray(inputs["image_grid_thw"], np.int64).reshape(-1, 3),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            "multimodal_train_inputs must hold pixel_values [patches, width] and image_grid_thw "
            f"[images, 3]: {type(error).__name__} {error}"
        ) from None
