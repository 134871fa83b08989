"""Captions of images: wrapped to the width, in a font that has their letters; grids."""

import logging

import numpy as np
import pytest
from matplotlib import font_manager
from PIL import Image, ImageFont

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

CYRILLIC, CHINESE = "сделай ярче", "把天空变成紫色"


@pytest.fixture
def fresh_fonts():
    """Clear the caches of fonts and of the warning."""
    caches = (
        captions.font_files,
        captions.open_font,
        captions.has_letter,
        captions.warn_of_missing_letters,
    )
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("text", ["W" * 50, "WWW MMM " * 9, "a/path/without/spaces" * 5, "x", ""])
@pytest.mark.parametrize("width", [64, 200])
def test_no_line_is_wider_than_the_image_and_no_letter_is_lost(text, width):
    font, _ = caption_font(set(text), CAPTION_SIZE)
    lines = wrap(text, font, width)
    assert max(map(font.getlength, lines)) <= width
    assert "".join("".join(lines).split()) == "".join(text.split())
    tile = np.asarray(captioned([Image.new("RGB", (width, 8), "red")], text))
    assert tile.shape == (8 + LINE_HEIGHT * len(lines), width, 3)
    short = wrap(text, font, width, max_lines=2)
    assert short == lines if len(lines) <= 2 else (len(short) == 2 and short[1].endswith("…"))
    assert max(map(font.getlength, short)) <= width


def test_letters_that_the_first_font_lacks_are_drawn_with_another(caplog):
    """Without a warning; each letter has its own shape."""
    font, missing = caption_font(set(CYRILLIC), CAPTION_SIZE)
    assert not missing
    shapes = {bytes(font.getmask(letter)) for letter in set(CYRILLIC) - {" "}}
    assert len(shapes) == len(set(CYRILLIC) - {" "})
    captioned([Image.new("RGB", (200, 8))], CYRILLIC)
    assert not caplog.records


def test_letters_that_no_font_has_are_escaped_with_one_warning(monkeypatch, caplog, fresh_fonts):
    monkeypatch.setattr(font_manager, "findSystemFonts", list)
    image = Image.new("RGB", (400, 8), "red")
    with caplog.at_level(logging.WARNING):
        found = [np.asarray(captioned([image], f"{CHINESE} red")) for _ in range(2)]
    expected = captioned([image], r"\u628a\u5929\u7a7a\u53d8\u6210\u7d2b\u8272 red")
    np.testing.assert_array_equal(found[0], np.asarray(expected))
    (record,) = caplog.records
    assert "install a font that has them" in record.getMessage()


def test_captions_with_one_odd_letter_search_the_fonts_once(monkeypatch, fresh_fonts):
    """No font has the letter, and captions also have different letters."""
    opened, truetype = [], ImageFont.truetype

    def count(file, *args, **options):
        opened.append(file)
        return truetype(file, *args, **options)

    monkeypatch.setattr(ImageFont, "truetype", count)
    odd = "\u0378"  # unassigned
    for letter in "abcdefgh":
        assert caption_font({letter, CYRILLIC[0], odd}, CAPTION_SIZE)[1] in (set(), {odd})
    files = [file for file in opened if isinstance(file, str)]
    assert files and len(files) == len(set(files))


def test_fonts_of_last_resort_are_skipped(monkeypatch, fresh_fonts):
    """They draw one shape for many letters."""
    files = ["/b/LastResort.otf", "/b/z.ttf", "/b/NotoSansCJK.ttc", "/b/a.ttf"]
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: files)
    assert captions.font_files()[1:] == ["/b/NotoSansCJK.ttc", "/b/a.ttf", "/b/z.ttf"]


def test_a_grid_enlarges_small_images_and_keeps_large_ones():
    small, large = Image.new("RGB", (32, 16), "red"), Image.new("RGB", (600, 300), "blue")
    grid = np.asarray(image_grid([small, large], ["a", "b"]))
    assert grid.shape[1] == 2 * (600 + GRID_MARGIN) + GRID_MARGIN
    red, blue = ((grid == color).all(-1) for color in ([255, 0, 0], [0, 0, 255]))
    assert red.sum() == GRID_IMAGE_SIZE * GRID_IMAGE_SIZE // 2 and blue.sum() == 600 * 300
    many = image_grid([small] * 100, ["a"] * 100)
    assert many.width == GRID_IMAGES**0.5 * (GRID_IMAGE_SIZE + GRID_MARGIN) + GRID_MARGIN
