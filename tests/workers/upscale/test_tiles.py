"""Tiles cover an image without seams."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from workers.engines.upscale.tiles import Canvas, plan
from workers.media.pixels import Pixels


def _noise(height: int, width: int) -> Pixels:
    return np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("height", "width"), [(1, 1), (32, 32), (33, 32), (200, 40), (40, 200), (131, 77), (500, 3)]
)
@pytest.mark.parametrize("scale", [1, 2, 4])
def test_split_image_is_joined_without_loss(height: int, width: int, scale: int) -> None:
    source = _noise(height, width)
    grid = plan(height, width, tile=32, overlap=8)
    canvas = Canvas(source, grid, scale)

    for place in range(grid.tiles):
        assert not canvas.done
        cut = canvas.cut(place)
        assert cut.shape == (grid.height, grid.width, 3)
        canvas.put(place, (cut / np.float32(255)).repeat(scale, 0).repeat(scale, 1))

    assert canvas.done
    np.testing.assert_array_equal(canvas.image(), source.repeat(scale, 0).repeat(scale, 1))


@pytest.mark.parametrize("length", [33, 56, 57, 100, 1000])
def test_neighbouring_tiles_share_the_overlap(length: int) -> None:
    grid = plan(32, length, tile=32, overlap=8)

    starts = grid.columns
    assert (starts[0], starts[-1] + 32) == (0, length)
    assert all(b - a <= 24 for a, b in pairwise(starts))


def test_small_image_is_one_tile() -> None:
    assert plan(8, 100, tile=32, overlap=8).tiles == 1
    assert plan(32, 32, tile=32, overlap=8).tiles == 1
    assert plan(32, 33, tile=32, overlap=8).tiles == 2
