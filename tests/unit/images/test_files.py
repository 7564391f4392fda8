"""Images as rows may give them, and what is no image."""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from vision_models import picture

from rlcore.errors import DataError
from rlcore.images.files import check_image, data_uris, images_of, open_image, read_image

PNG = picture("blue", 20, 12)
TEXT = base64.b64encode(PNG).decode()


def items(folder: Path) -> list[tuple[Any, str | None]]:
    """Forms of one image, and the path that is remembered of each."""
    (folder / "pics").mkdir()
    (folder / "pics" / "a b.png").write_bytes(PNG)
    whole = str(folder / "pics" / "a b.png")
    return [
        ("pics/a b.png", "pics/a b.png"),
        (whole, whole),
        (f"file://{whole.replace(' ', '%20')}", f"file://{whole.replace(' ', '%20')}"),
        (f"data:image/png;base64,{TEXT}", None),
        (TEXT, None),
        (PNG, None),
        ({"bytes": PNG, "path": "x.png"}, "x.png"),
        ({"bytes": None, "path": "pics/a b.png"}, "pics/a b.png"),
        ({"type": "image", "image": "pics/a b.png"}, "pics/a b.png"),
        ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{TEXT}"}}, None),
    ]


def test_an_image_is_read_from_what_a_row_says(tmp_path: Path) -> None:
    for item, path in items(tmp_path):
        found = read_image(item, tmp_path)
        assert found == {"bytes": PNG, "path": path}, item
        # As it is kept it can be read again, where the file is gone too.
        assert read_image(found, None) == found
    assert open_image(found).size == (20, 12)
    assert data_uris([found]) == [f"data:image/png;base64,{TEXT}"]
    assert images_of({"image": [found]}) == [found] and images_of(None) == []


@pytest.mark.parametrize(
    ("item", "fault"),
    [
        ("gone.png", r"'gone\.png' is neither a file in .* nor base64"),
        ("", "is no image; give a path"),
        (3, "is no image; give a path"),
        ({"type": "image"}, "holds no image; it needs one of"),
        ("http://x/y.png", "is on a network; download it"),
        ("data:image/png,abc", "is no data URI of base64"),
        ("data:image/png;base64,?", "is not base64"),
        ("?" * 300, "is neither a file in"),
    ],
)
def test_what_is_no_image_is_told(tmp_path: Path, item: Any, fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        read_image(item, tmp_path)


def test_a_broken_image_is_told() -> None:
    with pytest.raises(DataError, match=r"image a\.txt is broken, or of no known format"):
        check_image({"bytes": b"text", "path": "a.txt"})
    with pytest.raises(DataError, match=r"image a\.txt is empty"):
        check_image({"bytes": b"", "path": "a.txt"})
    cut = {"bytes": PNG[:-30], "path": None}
    with pytest.raises(DataError, match=r"of \d+ bytes is broken"):
        open_image(cut)
    with pytest.raises(
        DataError, match=r"holds 'a\.png'; an item must have the image file's bytes"
    ):
        images_of({"image": ["a.png"]})


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_an_image_that_was_cut_is_told_before_its_pixels_are_needed(kind: str) -> None:
    whole = io.BytesIO()
    Image.effect_noise((90, 60), 50).convert("RGB").save(whole, kind)
    data = whole.getvalue()
    check_image({"bytes": data, "path": None})
    # Some cameras put more behind the end.
    check_image({"bytes": data + b"\0" * 20, "path": None})
    for size in (len(data) // 2, len(data) - 60):
        with pytest.raises(DataError, match="is broken"):
            check_image({"bytes": data[:size], "path": None})


def test_a_file_without_bytes_is_no_missing_one(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    with pytest.raises(DataError, match=r"image a\.png is empty"):
        check_image(read_image("a.png", tmp_path))


def test_a_path_needs_a_folder() -> None:
    with pytest.raises(DataError, match="is not base64"):
        read_image("/etc/hostname", None)
