"""Placeholders of images among tokens, and the positions of both."""

import numpy as np
import pytest

from rlcore.errors import DataError
from rlcore.images.layout import Pixels, collapse, expand, lay_out

IMAGE = 9


def pixels(*grids: tuple[int, int, int]) -> Pixels:
    count = sum(t * h * w for t, h, w in grids)
    return Pixels(np.arange(count, dtype=np.float32)[:, None], np.array(grids, np.int64))


def test_placeholders_are_repeated_and_taken_together_again() -> None:
    short, long = [1, IMAGE, 2, IMAGE, 3], [1, *[IMAGE] * 4, 2, IMAGE, IMAGE, 3]
    assert expand(short, [4, 2], IMAGE) == long
    assert expand(long, [4, 2], IMAGE) == long
    assert collapse(long, 2, IMAGE) == short
    # What the model says is never an image, though it may be the placeholder.
    said = [*long, IMAGE, IMAGE]
    assert collapse(said, 2, IMAGE) == [*short, IMAGE, IMAGE]
    assert expand(collapse(said, 2, IMAGE), [4, 2], IMAGE) == said
    with pytest.raises(DataError, match="the prompt has 1 places for 2 images"):
        expand([1, IMAGE], [1, 1], IMAGE)


def test_positions_have_three_axes_within_an_image() -> None:
    ids = [1, 2, *[IMAGE] * 6, 3, IMAGE, 4, IMAGE]
    found = lay_out(ids, pixels((1, 4, 6), (1, 2, 2)), IMAGE, merge=2)
    assert found.positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8],
    ]
    assert found.at.tolist() == [2, 3, 4, 5, 6, 7, 9]
    assert found.shift == -3


def test_the_digest_is_that_of_the_pixels() -> None:
    ids = [IMAGE, IMAGE]
    one = lay_out(ids, pixels((1, 2, 4)), IMAGE, 2)
    same = lay_out([*ids, 1], pixels((1, 2, 4)), IMAGE, 2)
    other = lay_out(ids, pixels((1, 4, 2)), IMAGE, 2)
    assert one.digest == same.digest != other.digest


def test_other_numbers_of_features_are_told() -> None:
    with pytest.raises(DataError, match=r"has places for \[2\] features of images, but its images"):
        lay_out([1, IMAGE, IMAGE], pixels((1, 2, 2)), IMAGE, merge=2)
