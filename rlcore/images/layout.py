"""Where the images of a sequence are among its tokens, and the positions that its tokens have.

In a prompt each image is one placeholder id, repeated as often as the image has features. Positions
are those of Qwen2-VL's M-RoPE (arXiv 2409.12191, section 2.1): a token of text has the same number
on all three axes; a feature of an image has its place in time, height and width, counted from where
the text before it ends; the text behind goes on after the largest of them.

Invariant: only the first runs of the placeholder, as many as there are images, are images. A model
may sample the placeholder too; then it is a token like any other.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlcore.errors import DataError

Ints = npt.NDArray[np.int64]
Ids = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    """What a processor makes of images: their patches, end to end."""

    values: npt.NDArray[np.float32]
    """[patches, channels x time x height x width of a patch]"""
    grids: Ints
    """[images, 3]: patches of each along time, height and width."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceImages:
    """The images of one sequence."""

    pixels: Pixels
    at: Ints
    """[features]: the tokens that they take the place of, ascending."""
    positions: Ints
    """[3, tokens]"""

    @property
    def shift(self) -> int:
        """What a token behind these is at on all axes, less how many tokens there are."""
        return int(self.positions.max()) + 1 - self.positions.shape[1]

    @property
    def digest(self) -> bytes:
        """SHA-256 of the pixels."""
        whole = hashlib.sha256(self.pixels.values.tobytes())
        whole.update(self.pixels.grids.tobytes())
        return whole.digest()


def expand(ids: Sequence[int], counts: Sequence[int], token: int) -> list[int]:
    """Ids in which the placeholder of each image is repeated as often as it has features.

    Args:
        ids: a prompt, whose placeholders may have been repeated before.
        counts: features of each image.
        token: the placeholder's id.

    Raises:
        DataError: there are fewer placeholders than images.
    """
    out: list[int] = []
    end = 0
    runs = _runs(ids, token)
    if len(runs) < len(counts):
        raise DataError(f"the prompt has {len(runs)} places for {len(counts)} images")
    for (start, stop), count in zip(runs, counts, strict=False):
        out += [*ids[end:start], *[token] * count]
        end = stop
    return [*out, *ids[end:]]


def places(ids: Ids, token: int) -> int:
    """How many runs of the placeholder there are."""
    return len(_runs(ids, token))


def collapse(ids: Sequence[int], images: int, token: int) -> list[int]:
    """The inverse of `expand`: one placeholder for each of the images."""
    out: list[int] = []
    end = 0
    for start, stop in _runs(ids, token)[:images]:
        out += [*ids[end:start], token]
        end = stop
    return [*out, *ids[end:]]


def lay_out(
    ids: Ids, pixels: Pixels, token: int, merge: int, prompt: int | None = None
) -> SequenceImages:
    """Images at their places in a sequence.

    Args:
        ids: of the whole sequence, placeholders repeated.
        pixels: of its images.
        token: the placeholder's id.
        merge: patches along each side that become one feature.
        prompt: how many of the ids may hold images; None: all.

    Raises:
        DataError: placeholders and features do not agree.
    """
    grids = pixels.grids // np.array([1, merge, merge])
    counts = grids.prod(axis=1).tolist()
    runs = _runs(ids[:prompt], token)[: len(counts)]
    if [stop - start for start, stop in runs] != counts:
        raise DataError(
            f"a prompt has places for {[stop - start for start, stop in runs]} features of images, "
            f"but its images have {counts}; its tokens were made with another image processor"
        )
    positions = np.empty((3, len(ids)), np.int64)
    at, end, following = [], 0, 0
    for (start, stop), grid in zip(runs, grids.tolist(), strict=True):
        positions[:, end:start] = np.arange(start - end) + following
        following += start - end
        positions[:, start:stop] = np.indices(grid).reshape(3, -1) + following
        following += max(grid)
        at.append(np.arange(start, stop))
        end = stop
    positions[:, end:] = np.arange(len(ids) - end) + following
    return SequenceImages(pixels, np.concatenate(at), positions)


def _runs(ids: Ids, token: int) -> list[tuple[int, int]]:
    """Begin and end of each run of the placeholder."""
    there = np.concatenate([[0], np.asarray(ids, np.int64) == token, [0]])
    edges = np.flatnonzero(np.diff(there.astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
