"""Captions of images: wrapped to the width, in a font that has their letters; grids."""

import numpy as np
import pytest
from PIL import Image

from diffusers_flax.generating.captions import (
    CAPTION_SIZE,
    GRID_IMAGE_SIZE,
    GRID_IMAGES,
    GRID_MARGIN,
    LINE_HEIGHT,
    caption_font,
    captioned,
    image_grid,
)

CYRILLIC = "сделайярче"


@pytest.mark.parametrize("text", ["W" * 50, "WWW MMM " * 9, "a/path/without/spaces" * 5, ""])
def test_captions_are_wrapped(text):
    tile = captioned([Image.new("RGB", (200, 8), "red")], text)
    assert tile.width == 200 and (tile.height - 8) % LINE_HEIGHT == 0
    assert np.asarray(tile)[8:, 199:].min() == 255  # no letter reaches the border
    short = captioned([Image.new("RGB", (200, 8), "red")], text, max_lines=2)
    assert short.height == min(tile.height, 8 + 2 * LINE_HEIGHT)


def test_letters_that_the_first_font_lacks_are_drawn_with_another():
    """Each letter has its own shape."""
    font = caption_font(CYRILLIC, CAPTION_SIZE)
    assert len({bytes(font.getmask(letter)) for letter in CYRILLIC}) == len({*CYRILLIC})


def test_a_grid_enlarges_small_images_and_keeps_large_ones():
    small, large = Image.new("RGB", (32, 16), "red"), Image.new("RGB", (600, 300), "blue")
    grid = np.asarray(image_grid([small, large], ["a", "b"]))
    assert grid.shape[1] == 2 * (600 + GRID_MARGIN) + GRID_MARGIN
    red, blue = ((grid == color).all(-1) for color in ([255, 0, 0], [0, 0, 255]))
    assert red.sum() == GRID_IMAGE_SIZE * GRID_IMAGE_SIZE // 2 and blue.sum() == 600 * 300
    many = image_grid([small] * 100, ["a"] * 100)
    assert many.width == GRID_IMAGES**0.5 * (GRID_IMAGE_SIZE + GRID_MARGIN) + GRID_MARGIN
