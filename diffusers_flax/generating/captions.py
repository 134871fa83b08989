"""Captioned images and grids of them."""

import math
import textwrap
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

CAPTION_SIZE = 14  # font size, pixels
LINE_HEIGHT = 20  # of a caption, pixels
CHINESE = "\u2e80"  # from this letter on
GRID_IMAGES = 64  # in a grid, at most
GRID_IMAGE_SIZE = 256  # pixels, longer side
GRID_MARGIN = 8  # pixels


def image_grid(images, captions):
    """One image of the first GRID_IMAGES images, in as many rows as columns if possible.

    Args:
        images: list of PIL images; small ones are enlarged.
        captions: a text for each.
    """
    tiles = []
    for image, caption in zip(images[:GRID_IMAGES], captions):
        scale = max(1, GRID_IMAGE_SIZE / max(image.size))
        size = [round(side * scale) for side in image.size]
        tiles.append(captioned([image.resize(size, Image.Resampling.LANCZOS)], caption))
    columns = math.ceil(math.sqrt(len(tiles)))
    return tile_grid(tiles, columns, GRID_MARGIN)


def captioned(images, text, max_lines=None):
    """PIL images side by side, with a text below that is wrapped to their width.

    Args:
        images: list of PIL images.
        text: the caption.
        max_lines: longer captions end with an ellipsis; None: all lines.
    """
    width, height = sum(image.width for image in images), max(image.height for image in images)
    size = max(CAPTION_SIZE, width // 40)
    line_height = size * LINE_HEIGHT // CAPTION_SIZE
    font = caption_font(text, size)
    mean = font.getlength(text) / max(1, len(text)) or 1.0  # width of a letter
    columns = max(1, int(0.9 * width / mean))
    lines = textwrap.wrap(text, columns, max_lines=max_lines, placeholder="…") or [""]
    tile = Image.new("RGB", (width, height + line_height * len(lines)), "white")
    left = 0
    for image in images:
        tile.paste(image, (left, 0))
        left += image.width
    draw = ImageDraw.Draw(tile)
    for i, line in enumerate(lines):
        draw.text((0, height + i * line_height), line, fill="black", font=font)
    return tile


def caption_font(text, size):
    """A font for a text: Pillow's own, DejaVu Sans, or the system's for Chinese; size: pixels."""
    if text.isascii():
        return ImageFont.load_default(size)
    from matplotlib import font_manager, get_data_path  # a second

    file = str(Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"))
    if max(text) >= CHINESE:
        system = sorted(font_manager.findSystemFonts())
        file = next((x for x in system if "CJK" in x), file)
    return ImageFont.truetype(file, size)


def tile_grid(tiles, columns, margin=0):
    """One image of tiles, row by row, each at the top left of its cell.

    Args:
        tiles: list of PIL images of any sizes.
        columns: tiles per row.
        margin: white pixels between and around the tiles.
    """
    width = max(tile.width for tile in tiles) + margin
    height = max(tile.height for tile in tiles) + margin
    rows = math.ceil(len(tiles) / columns)
    grid = Image.new("RGB", (columns * width + margin, rows * height + margin), "white")
    for i, tile in enumerate(tiles):
        row, column = divmod(i, columns)
        grid.paste(tile, (margin + column * width, margin + row * height))
    return grid
