"""The bytes of an image, from what a row says of it. Imports neither torch nor transformers.

An item is a path, a `file://` or `data:` URI, base64, raw bytes, or an object that holds one of
these: of a chat message (`{"type": "image", "image": ...}`) or of a Hugging Face data set
(`{"bytes": ..., "path": ...}`). The last is the form in which samples keep images, so that what was
generated can be trained on wherever the file has gone.

Invariant: nothing is fetched from a network.
"""

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from rlcore.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

KIND = "image"
"""The kind of media that engines are given."""
_KEYS = ("bytes", "image", "image_url", "path", "url", "base64")
"""Where an object holds its image, the likeliest first."""
_JPEG_SCAN, _JPEG_END = b"\xff\xda", b"\xff\xd9"
"""Marks before the pixels of a JPEG, and behind them; neither is among them."""
_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}


def read_image(item: Any, folder: Path | None) -> dict[str, Any]:
    """An item as samples keep it: `{"bytes": of the image file, "path": as the row has it}`.

    Args:
        item: see above.
        folder: that relative paths begin at; None: paths are refused.

    Raises:
        DataError: there is no image; says what is wrong with the item.
    """
    if isinstance(item, Mapping):
        return _of_object(item, folder)
    if isinstance(item, bytes | bytearray):
        return {"bytes": bytes(item), "path": None}
    if not isinstance(item, str) or not item:
        raise DataError(f"{item!r:.80} is no image; give a path, a data URI or base64")
    if item.startswith("data:"):
        head, comma, data = item.partition(",")
        if not comma or not head.endswith(";base64"):
            raise DataError(f"{item!r:.80} is no data URI of base64")
        return {"bytes": _decoded(data, f"{item!r:.80} is not base64"), "path": None}
    if item.startswith(("http://", "https://")):
        raise DataError(f"{item!r:.80} is on a network; download it and give its path")
    if folder is not None:
        name = unquote(item.removeprefix("file://")) if item.startswith("file://") else item
        if (found := _read(folder / name)) is not None:
            return {"bytes": found, "path": item}
        where = f"{item!r:.80} is neither a file in {folder} nor base64"
        return {"bytes": _decoded(item, where), "path": None}
    return {"bytes": _decoded(item, f"{item!r:.80} is not base64"), "path": None}


def check_image(image: Mapping[str, Any]) -> None:
    """See that an image that `read_image` gave is one, and whole.

    PNG has checksums, and a JPEG that is whole ends with a mark: their pixels need not be decoded.

    Raises:
        DataError: it is of no known format, or broken.
    """
    from PIL import Image

    data = image["bytes"]
    try:
        with Image.open(io.BytesIO(data)) as opened:
            if opened.format == "PNG":
                opened.verify()
            elif opened.format != "JPEG" or data.rfind(_JPEG_END) < data.rfind(_JPEG_SCAN):
                opened.load()
    except Exception as error:
        # Readers of broken files raise what they like.
        raise _broken(image, error) from error


def open_image(image: Mapping[str, Any]) -> "Image":
    """The pixels of an image that `read_image` gave, in RGB.

    Raises:
        DataError: it is of no known format, or broken.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(image["bytes"])) as opened:
            return opened.convert("RGB")
    except Exception as error:
        # Readers of broken files raise what they like.
        raise _broken(image, error) from error


def images_of(media: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The images of a sample's `multimodal_inputs`, in their order.

    Raises:
        DataError: an item holds no bytes, such as one that a source of one's own did not read.
    """
    items = list((media or {}).get(KIND) or [])
    for item in items:
        if not isinstance(item, Mapping) or not isinstance(item.get("bytes"), bytes):
            raise DataError(
                f"multimodal_inputs[{KIND!r}] holds {item!r:.80}; an item must have the image "
                "file's bytes, as rlcore.images.files.read_image gives them"
            )
    return items


def data_uris(images: Sequence[Mapping[str, Any]]) -> list[str]:
    """Images as an engine takes them in `image_data`."""
    from PIL import Image

    out = []
    for image in images:
        try:
            with Image.open(io.BytesIO(image["bytes"])) as opened:
                kind = _TYPES.get(opened.format or "", "application/octet-stream")
        except Exception as error:
            raise _broken(image, error) from error
        out.append(f"data:{kind};base64,{base64.b64encode(image['bytes']).decode()}")
    return out


def _of_object(item: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    for key in _KEYS:
        if (value := item.get(key)) is not None:
            found = read_image(value, folder)
            named = item.get("path") if key == "bytes" else found["path"]
            return found | {"path": named}
    raise DataError(f"{dict(item)!r:.80} holds no image; it needs one of {', '.join(_KEYS)}")


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (OSError, ValueError):
        return None


def _decoded(text: str, fault: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{fault}: {error}") from None


def _broken(image: Mapping[str, Any], error: Exception) -> DataError:
    from PIL import UnidentifiedImageError

    size = len(image["bytes"])
    name = image.get("path") or f"of {size} bytes"
    if not size:
        return DataError(f"image {name} is empty")
    if isinstance(error, UnidentifiedImageError):
        # Its own words name an object of Python's.
        return DataError(f"image {name} is broken, or of no known format")
    return DataError(f"image {name} is broken: {error}")
