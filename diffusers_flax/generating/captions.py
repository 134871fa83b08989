"""Captioned images and grids of them."""

import functools
import itertools
import math
import unicodedata
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

CAPTION_SIZE = 14  # font size, pixels
LINE_HEIGHT = 20  # of a caption, pixels
NO_LETTER = "\U0010ffff"  # fonts draw missing letters like this one
GRID_IMAGES = 64  # in a grid, at most
GRID_IMAGE_SIZE = 256  # pixels, longer side
MAX_COLUMNS = 8  # images of one caption in a row
GRID_MARGIN = 8  # pixels


def image_grid(images, captions):
    """One image of the first GRID_IMAGES images, in as many rows as columns if possible.

    Several images of each of several captions have a row for each caption.

    Args:
        images: list of PIL images; small ones are enlarged.
        captions: a text for each.
    """
    tiles = []
    for image, caption in zip(images[:GRID_IMAGES], captions):
        scale = max(1, GRID_IMAGE_SIZE / max(image.size))
        size = [round(side * scale) for side in image.size]
        tiles.append(captioned([image.resize(size, Image.Resampling.LANCZOS)], caption))
    runs = [len([*run]) for _, run in itertools.groupby(captions[: len(tiles)])]
    columns = math.ceil(math.sqrt(len(tiles)))
    if len(runs) > 1 and len(set(runs[:-1])) == 1 and 1 < runs[0] <= MAX_COLUMNS:
        columns = runs[0]
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
    font = caption_font(frozenset(text), size)
    lines = wrap(text, font, width, max_lines)
    tile = Image.new("RGB", (width, height + line_height * len(lines)), "white")
    left = 0
    for image in images:
        tile.paste(image, (left, 0))
        left += image.width
    draw = ImageDraw.Draw(tile)
    for i, line in enumerate(lines):
        draw.text((0, height + i * line_height), line, fill="black", font=font)
    return tile


def wrap(text, font, width, max_lines=None):
    """Split a text into lines of at most width pixels, wide words too; at least one line.

    font: Pillow's; max_lines: see captioned.
    """
    lines = [""]
    for word in text.split():
        if font.getlength(f"{lines[-1]} {word}".strip()) <= width:
            lines[-1] = f"{lines[-1]} {word}".strip()
            continue
        if lines[-1]:
            lines.append("")
        while len(word) > 1 and font.getlength(word) > width:
            n = max(1, sum(font.getlength(word[: n + 1]) <= width for n in range(len(word))))
            lines[-1:] = [word[:n], ""]
            word = word[n:]
        lines[-1] = word
    if max_lines and len(lines) > max_lines:
        lines, last = lines[: max_lines - 1], lines[max_lines - 1]
        while last and font.getlength(f"{last}…") > width:
            last = last[:-1]
        lines.append(f"{last.rstrip()}…")
    return lines


@functools.cache
def caption_font(letters, size):
    """The first font with all letters, else with the most: Pillow's own, then the system's.

    letters: frozenset of characters; size: pixels.
    """
    # Spaces, controls and combining marks have no shape of their own.
    letters = {x for x in letters if unicodedata.category(x)[0] not in "ZCM"}

    def num_missing(file):
        return sum(not has_letter(file, x) for x in letters)

    best, fewest = None, num_missing(None)
    for file in font_files() if fewest else ():
        if (missing := num_missing(file)) < fewest:
            best, fewest = file, missing
        if not missing:
            break
    return open_font(best, size)


@functools.cache
def open_font(file, size):
    """A font for Pillow from a file, for None its own; None if FreeType cannot read the file."""
    try:
        return ImageFont.truetype(file, size) if file else ImageFont.load_default(size)
    except OSError:
        return None


@functools.cache
def has_letter(file, letter):
    """Whether the font in a file draws a letter, see open_font."""
    font = open_font(file, CAPTION_SIZE)
    try:
        return font is not None and bytes(font.getmask(letter)) != bytes(font.getmask(NO_LETTER))
    except OSError:
        return False


@functools.cache
def font_files():
    """Font files besides Pillow's own; most fonts lack Chinese, Japanese and Korean."""
    from matplotlib import font_manager, get_data_path  # only captions need it

    system = sorted(font_manager.findSystemFonts(), key=lambda file: ("CJK" not in file, file))
    own = Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    return [str(own), *(file for file in system if "LastResort" not in file)]


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
