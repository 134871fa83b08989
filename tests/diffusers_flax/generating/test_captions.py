"""Captions of images: wrapped to the width, in a font that has their letters; grids."""

import numpy as np
import pytest
from matplotlib import font_manager
from PIL import Image

from diffusers_flax.generating import captions
from diffusers_flax.generating.captions import (
    CAPTION_SIZE,
    GRID_IMAGE_SIZE,
    GRID_IMAGES,
    GRID_MARGIN,
    LINE_HEIGHT,
    caption_font,
    captioned,
    image_grid,
    wrap,
)

CYRILLIC = "сделай ярче"


@pytest.mark.parametrize("text", ["W" * 50, "WWW MMM " * 9, "a/path/without/spaces" * 5, "x", ""])
@pytest.mark.parametrize("width", [64, 200])
def test_no_line_is_wider_than_the_image_and_no_letter_is_lost(text, width):
    font = caption_font(frozenset(text), CAPTION_SIZE)
    lines = wrap(text, font, width)
    assert max(map(font.getlength, lines)) <= width
    assert "".join("".join(lines).split()) == "".join(text.split())
    tile = np.asarray(captioned([Image.new("RGB", (width, 8), "red")], text))
    assert tile.shape == (8 + LINE_HEIGHT * len(lines), width, 3)
    short = wrap(text, font, width, max_lines=2)
    assert short == lines if len(lines) <= 2 else (len(short) == 2 and short[1].endswith("…"))
    assert max(map(font.getlength, short)) <= width


def test_letters_that_the_first_font_lacks_are_drawn_with_another():
    """Each letter has its own shape."""
    font = caption_font(frozenset(CYRILLIC), CAPTION_SIZE)
    shapes = {bytes(font.getmask(letter)) for letter in set(CYRILLIC) - {" "}}
    assert len(shapes) == len(set(CYRILLIC) - {" "})


def test_fonts_of_last_resort_are_skipped(monkeypatch):
    """They draw one shape for many letters."""
    files = ["/b/LastResort.otf", "/b/z.ttf", "/b/NotoSansCJK.ttc", "/b/a.ttf"]
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: files)
    found = captions.font_files.__wrapped__()
    assert found[1:] == ["/b/NotoSansCJK.ttc", "/b/a.ttf", "/b/z.ttf"]


def test_a_grid_enlarges_small_images_and_keeps_large_ones():
    small, large = Image.new("RGB", (32, 16), "red"), Image.new("RGB", (600, 300), "blue")
    grid = np.asarray(image_grid([small, large], ["a", "b"]))
    assert grid.shape[1] == 2 * (600 + GRID_MARGIN) + GRID_MARGIN
    red, blue = ((grid == color).all(-1) for color in ([255, 0, 0], [0, 0, 255]))
    assert red.sum() == GRID_IMAGE_SIZE * GRID_IMAGE_SIZE // 2 and blue.sum() == 600 * 300
    many = image_grid([small] * 100, ["a"] * 100)
    assert many.width == GRID_IMAGES**0.5 * (GRID_IMAGE_SIZE + GRID_MARGIN) + GRID_MARGIN
