"""The image processor of a model's folder: how many tokens an image takes, and its patches.

Rollout, embedded engine and trainer each process images by this, with the same files, so that all
have the same patches. transformers 5.24 needs no torchvision for it; 5.12 does.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.errors import ConfigError, DataError
from rlcore.images.files import open_image
from rlcore.images.layout import Ids, Pixels, SequenceImages, expand, lay_out

Images = Sequence[Mapping[str, Any]]
"""As `rlcore.images.files.read_image` gives them."""


def takes_images(folder: str | Path) -> bool:
    """Whether the model of a Hugging Face folder has a vision tower, as its config.json says."""
    return "vision_config" in _read(Path(folder) / "config.json")


def own_template(folder: str | Path) -> str | None:
    """The chat template that a folder keeps for its processor alone, in chat_template.json."""
    text = _read(Path(folder) / "chat_template.json").get("chat_template")
    return None if text is None else str(text)


def mark_of_images(folder: str | Path, tokenizer: str | Path) -> str | None:
    """The text that stands for an image in prompts; None: it is not known from the files.

    Args:
        folder: of the model.
        tokenizer: folder of its tokenizer.
    """
    token = _read(Path(folder) / "config.json").get("image_token_id")
    if token is None:
        return None
    config = _read(Path(tokenizer) / "tokenizer_config.json").get("added_tokens_decoder") or {}
    added = _read(Path(tokenizer) / "tokenizer.json").get("added_tokens") or []
    named = {str(one["id"]): one for one in added} | config
    found = named.get(str(token), {}).get("content")
    return str(found) if found else None


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class ImageProcessor:
    """Makes tokens and patches of images, for one model.

    Args:
        folder: of the model.
        trust_remote_code: run code that the folder brings.

    Raises:
        ConfigError: the model takes no images, or takes them in a way that is not known here.
    """

    def __init__(self, folder: str | Path, *, trust_remote_code: bool = False) -> None:
        if not takes_images(folder):
            raise ConfigError(
                f"the data has images, but the model in {folder} takes none (its config.json has "
                "no vision_config); use a model that does, or leave data.multimodal_keys out"
            )
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        self._folder = str(folder)
        self._trust_remote_code = trust_remote_code
        self.merge = config["vision_config"].get("spatial_merge_size")
        self.token = config.get("image_token_id")
        if not isinstance(self.merge, int) or not isinstance(self.token, int):
            raise ConfigError(
                f"the model in {folder}, of type {config.get('model_type')!r}, takes images in a "
                "way that is not known here: its config.json has no image_token_id, or its "
                "vision_config no spatial_merge_size; models are those of Qwen's VL kind"
            )

    @cached_property
    def _processor(self) -> Any:
        # Loading it takes seconds, and a prompt of text needs none.
        from transformers import AutoImageProcessor

        try:
            return AutoImageProcessor.from_pretrained(
                self._folder, trust_remote_code=self._trust_remote_code, local_files_only=True
            )
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"model folder {self._folder} holds no image processor that loads: {error}"
            ) from None

    def expand(self, ids: Sequence[int], images: Images) -> list[int]:
        """A prompt's ids with as many placeholders as its images have features.

        Raises:
            DataError: an image is broken, or there are fewer placeholders than images.
        """
        counts = []
        for image in images:
            width, height = open_image(image).size
            try:
                patches = self._processor.get_number_of_image_patches(height, width, {})
            except ValueError as error:
                raise self._refused(image, f"{width} x {height}", error) from None
            counts.append(patches // self.merge**2)
        return expand(ids, counts, self.token)

    def pixels(self, images: Images) -> Pixels:
        """The patches of images.

        Raises:
            DataError: an image is broken.
        """
        opened = [open_image(image) for image in images]
        try:
            made = self._processor(opened, return_tensors="pt")
        except ValueError as error:
            sizes = ", ".join("{} x {}".format(*image.size) for image in opened)
            raise self._refused(images[0], sizes, error) from None
        return Pixels(
            made["pixel_values"].numpy().astype(np.float32, copy=False),
            made["image_grid_thw"].numpy().astype(np.int64, copy=False),
        )

    def _refused(self, image: Mapping[str, Any], size: str, error: ValueError) -> DataError:
        name = image.get("path") or f"of {len(image['bytes'])} bytes"
        return DataError(f"the model's image processor refuses image {name} ({size}): {error}")

    def lay_out(self, ids: Ids, pixels: Pixels, prompt: int | None = None) -> SequenceImages:
        """Patches at their places in a sequence; see `rlcore.images.layout.lay_out`."""
        return lay_out(ids, pixels, self.token, self.merge, prompt)
