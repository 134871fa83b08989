"""Image files: decoding, conversion to RGB, cropping, names of output files, saving, grids.

Also what goes with images on the command line: prompts, latents, batches for several devices.
"""

import functools
import io
import logging
import math
import os
import unicodedata
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, ImageDraw, ImageFont, ImageOps, UnidentifiedImageError

from command_line import check_writable, one_line, save_whole

RESAMPLING = {
    "dct": Image.Resampling.LANCZOS,  # after libjpeg has decoded at a reduced scale
    "lanczos": Image.Resampling.LANCZOS,
    "bicubic": Image.Resampling.BICUBIC,
}
ORIENTATION = ExifTags.Base.Orientation
EXIF_OR_XMP = (b"Exif\0\0", b"http://ns.adobe.com/xap/")  # of JPEG; Pillow reads both
MAX_ASPECT = 20  # of an image; scaling up the shorter side of a longer one takes too much memory
# Formats that Pillow may decode; others run external programs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
# Warnings of libjpeg after which it fills in pixels. simplejpeg raises the first of a file.
LOST_PIXELS = (
    *("Premature end", "premature end", "bad Huffman code", "bad arithmetic code"),
    *("instead of RST", "Inconsistent progression"),
)
IMAGE_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}
JPEG_QUALITY = 95
CAPTION_SIZE = 14  # of the font, pixels
LINE_HEIGHT = 20  # of a caption, pixels
NO_LETTER = "\U0010ffff"  # drawn as letters that a font lacks
GRID_IMAGES = 64  # of a grid, at most; more cannot be looked at in one image
GRID_IMAGE_SIZE = 256  # pixels, longer side
GRID_MARGIN = 8  # pixels

logger = logging.getLogger(__name__)


def to_rgb(image):
    """Convert a PIL image to RGB, on white where it is transparent.

    Args:
        image: PIL image; values of 16 bits (mode I;16, or I above 255) become 0 to 255.

    Returns:
        PIL image of mode RGB.

    Raises:
        ValueError: the range of the values is not known: mode F, or mode I that is not 16 bits.
    """
    if image.mode == "F":
        raise ValueError(
            "image mode F (float) has no known range; scale its values to 0 to 255 and convert it "
            "to mode L"
        )
    if image.mode.startswith("I"):  # Pillow clips 16-bit grey instead of scaling it
        values = np.asarray(image)
        low, high = values.min(), values.max()
        if low < 0 or high > 65535 or (image.mode == "I" and high < 256):
            raise ValueError(
                f"image mode {image.mode} (integer) has values from {low} to {high}, which are "
                "not 16 bits; scale them to 0 to 255 and convert the image to mode L"
            )
        image = Image.fromarray((values // 257).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


def prepare_images(image):
    """Convert images to float32 (B, 3, H, W) in [-1, 1].

    Args:
        image: image or list of images of one size: PIL of any mode, or array (H, W, 3), or
            arrays (B, H, W, 3); uint8, or float in [0, 1].

    Raises:
        ValueError: sizes differ, or it is not an image.
    """
    is_batch = isinstance(image, list | tuple) or np.ndim(image) == 4
    arrays = [to_array(one) for one in (image if is_batch else [image])]
    if len(sizes := sorted({array.shape[:2] for array in arrays})) != 1:
        found = ", ".join(f"{height}x{width}" for height, width in sizes) or "none"
        raise ValueError(
            f"the images of a batch must have one size (height x width), found {found}; "
            "resize or crop them, or call once per size"
        )
    return np.stack(arrays).transpose(0, 3, 1, 2)


def to_array(image):
    """Convert one image, PIL or array, to float32 (H, W, 3) in [-1, 1]."""
    array = np.asarray(to_rgb(image) if isinstance(image, Image.Image) else image)
    if array.ndim != 3 or array.shape[-1] != 3:
        raise ValueError(f"an image has shape {array.shape}; as an array it is (H, W, 3)")
    if array.dtype == np.uint8:
        array = array.astype(np.float32) / 255
    if not (array.dtype.kind == "f" and array.min() >= 0 and array.max() <= 1):
        raise ValueError(
            f"an image has {array.dtype} values from {array.min()} to {array.max()}; "
            "give uint8, or float in [0, 1]"
        )
    return array.astype(np.float32) * 2 - 1


def prepare_masks(mask):
    """Masks as float32 (B, 1, H, W) of 0 (keep) and 1 (repaint).

    Args:
        mask: mask or list of masks of one size: PIL of any mode, or array (H, W), or arrays
            (B, H, W); uint8, bool, or float in [0, 1]. Pixels from 0.5 on are
            repainted.

    Raises:
        ValueError: sizes differ, or it is not a mask.
    """
    is_batch = isinstance(mask, list | tuple) or getattr(mask, "ndim", 0) == 3
    masks = []
    for one in mask if is_batch else [mask]:
        array = np.asarray(one.convert("L") if isinstance(one, Image.Image) else one)
        if array.ndim != 2:
            raise ValueError(f"a mask has shape {array.shape}; as an array it is (H, W)")
        if array.dtype == np.uint8:
            array = array.astype(np.float32) / 255
        if array.min() < 0 or array.max() > 1:
            raise ValueError(
                f"a mask has {array.dtype} values from {array.min()} to {array.max()}; give uint8, "
                "bool, or float in [0, 1]"
            )
        masks.append(array >= 0.5)
    if len({mask.shape for mask in masks}) != 1:
        raise ValueError("the masks of a batch must have one size; resize them, or call per size")
    return np.stack(masks)[:, None].astype(np.float32)


def load_image(path):
    """Read an image file of any format of Pillow and apply its EXIF orientation.

    Args:
        path: of the file.

    Returns:
        PIL image, RGB, on white where it is transparent.

    Raises:
        ValueError: the file is missing, damaged or not an image; the message starts with path.
    """
    try:
        with open(path, "rb") as file:
            return Image.fromarray(decode_upright(file.read(), formats=None))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; check the path") from None
    except UnidentifiedImageError:
        raise ValueError(
            f"{path} is not an image that Pillow can read; convert it to PNG or JPEG"
        ) from None
    except Exception as error:  # decoders raise errors of many types
        raise ValueError(f"{path} cannot be read as an image: {error}") from error


def decode_image(data: bytes, min_side: int = 0, out: np.ndarray | None = None) -> np.ndarray:
    """Decode one image to upright RGB.

    Args:
        data: an encoded image, one of FORMATS. Upright JPEGs are decoded by simplejpeg, which
            releases the GIL.
        min_side: a JPEG at least twice as large may be decoded at a half of its size or less, but
            with no side below this; 0: full size.
        out: uint8 (h, w, 3), contiguous: used for the result if it has this size.

    Returns:
        uint8 (H, W, 3).

    Raises:
        ValueError: the data are not an image, damaged, or of a mode that `to_rgb` does not support.
    """
    try:
        return decode_upright(data, min_side, out)
    except UnidentifiedImageError:
        raise ValueError(f"no known image format ({len(data)} bytes)") from None
    except MemoryError:  # says nothing about the image
        raise
    except Exception as error:  # damaged data make decoders raise anything
        raise ValueError(one_line(error, 200)) from error


def decode_upright(data, min_side=0, out=None, formats=FORMATS):
    """decode_image without its one type of error; formats: that Pillow may decode, None: all."""
    if data.startswith(b"\xff\xd8"):
        pixels = decode_jpeg(data, min_side, out)
        if pixels is not None:
            return pixels
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data), formats=formats))
    return np.asarray(to_rgb(image))


def decode_jpeg(data, min_side, out):
    """Decode an upright RGB or grey JPEG by simplejpeg, which raises a warning of libjpeg.

    Args:
        data, min_side, out: see decode_image.

    Returns:
        uint8 (H, W, 3), or None: the JPEG is left to Pillow, which ignores warnings.

    Raises:
        ValueError: pixels are missing.
    """
    orientation = exif_orientation(data)
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        if height * width > Image.MAX_IMAGE_PIXELS:  # Pillow warns of them or refuses them
            return None
        if colorspace not in ("YCbCr", "RGB", "Gray"):
            simplejpeg.decode_jpeg(data, "CMYK", min_height=1, min_width=1)  # only for its warning
            return None
        if orientation != 1:
            simplejpeg.decode_jpeg(data, "Gray", min_height=1, min_width=1)
            return None
        side = min_side if min(height, width) >= 2 * min_side else 0
        size = simplejpeg.decode_jpeg_header(data, side, side)[:2]
        fits = out is not None and out.shape[:2] == size
        return simplejpeg.decode_jpeg(
            data, "RGB", min_height=side, min_width=side, buffer=out if fits else None
        )
    except ValueError as error:
        if any(loss in str(error) for loss in LOST_PIXELS):
            raise
        # A warning of the header hides warnings of the pixels; stray bytes at the end hide none.
        if (usual := with_usual_header(data)) != data:
            decode_jpeg(usual, min_side, None)
        return None


def with_usual_header(data):
    """A JPEG with JFIF version 1.1 and Se 63 in a baseline scan; libjpeg warns of other values."""
    changed, position, is_baseline = bytearray(data), 2, False
    while changed[position : position + 1] == b"\xff":
        marker = changed[position + 1]
        is_baseline |= marker in (0xC0, 0xC1)
        if marker == 0xE0 and changed[position + 4 : position + 9] == b"JFIF\0":
            changed[position + 9 : position + 11] = b"\1\1"
        if marker == 0xDA:  # length, number n of components, two bytes for each, then Ss and Se
            end = position + 6 + 2 * changed[position + 4]
            if is_baseline:
                changed[end : end + 1] = b"\x3f"
            break
        position += 2 + int.from_bytes(changed[position + 2 : position + 4])
    return bytes(changed)


def encoded_size(data: bytes) -> tuple[int, int]:
    """Height and width of an encoded image that decode_image has decoded, upright, at full size."""
    if data.startswith(b"\xff\xd8"):
        with suppress(ValueError):  # a header that decode_jpeg leaves to Pillow
            height, width = simplejpeg.decode_jpeg_header(data)[:2]
            is_turned = exif_orientation(data) in (5, 6, 7, 8)
            return (width, height) if is_turned else (height, width)
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    is_turned = image.getexif().get(ORIENTATION, 1) in (5, 6, 7, 8)
    if image.format == "TIFF":  # Pillow has applied it
        is_turned = False
    return (image.width, image.height) if is_turned else (image.height, image.width)


def exif_orientation(data: bytes) -> int:
    """The EXIF orientation of a JPEG, 1 to 8; 1 (upright) if it has none."""
    position = 2
    while data[position : position + 1] == b"\xff" and data[position + 1] != 0xDA:  # up to the scan
        if data[position + 1] == 0xE1 and data.startswith(EXIF_OR_XMP, position + 4):
            return Image.open(io.BytesIO(data), formats=["JPEG"]).getexif().get(ORIENTATION, 1)
        position += 2 + int.from_bytes(data[position + 2 : position + 4])
    return 1


def scaled_size(height: int, width: int, resolution: int) -> tuple[int, int]:
    """Height and width of an image whose shorter side is scaled to the resolution."""
    scale = resolution / min(height, width)
    return max(resolution, round(height * scale)), max(resolution, round(width * scale))


def crop_corner(height: int, width: int, resolution: int, crop: float) -> tuple[int, int]:
    """Top and left of the square that crop_square cuts out of a scaled image."""
    return int(crop * (height - resolution + 1)), int(crop * (width - resolution + 1))


def crop_square(
    pixels: np.ndarray, resolution: int, resample: str = "dct", crop: float = 0.5
) -> np.ndarray:
    """Scale the shorter side of an image to the resolution and cut a square out.

    Hugging Face's trainer squeezes the full image into the square instead; on the square images of
    the public datasets both agree.

    Args:
        pixels: uint8 (H, W, 3).
        resolution: side R of the square, pixels.
        resample: "lanczos" or "dct" (Lanczos is what "dct" does here), or "bicubic".
        crop: in [0, 1), position of the square along the longer side; 0.5: the centre.

    Returns:
        uint8 (R, R, 3).

    Raises:
        ValueError: one side is more than MAX_ASPECT times the other.
    """
    if max(pixels.shape[:2]) > MAX_ASPECT * min(pixels.shape[:2]):
        raise ValueError(
            f"{pixels.shape[1]}x{pixels.shape[0]} pixels are too narrow: one side may be at most "
            f"{MAX_ASPECT} times the other; crop the image"
        )
    height, width = scaled_size(*pixels.shape[:2], resolution)
    if pixels.shape[:2] != (height, width):
        image = Image.fromarray(pixels).resize((width, height), RESAMPLING[resample])
        pixels = np.asarray(image)
    top, left = crop_corner(height, width, resolution, crop)
    return pixels[top : top + resolution, left : left + resolution]


def check_image_file(path):
    """Raise a ValueError for an image file that cannot be written; nothing is written."""
    if path.is_dir():
        raise ValueError(f"{path} is a directory; name a file")
    if path.suffix.lower() not in IMAGE_FORMATS:
        raise ValueError(
            f"{path} ends in {path.suffix or 'no extension'}; name it {' or '.join(IMAGE_FORMATS)}"
        )
    check_writable(str(path), path.absolute().parent)


def save_image(image, path, software=None):
    """Write an image in the format of its extension, to a temporary file that is renamed.

    Args:
        image: PIL image.
        path: of the file.
        software: text for the EXIF tag of this name; None: no EXIF data.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; name a file")
    image_format = IMAGE_FORMATS[path.suffix.lower()]
    options = {}
    if software:
        options["exif"] = Image.Exif()
        options["exif"][ExifTags.Base.Software] = software
    save_whole(path, partial(image.save, format=image_format, quality=JPEG_QUALITY, **options))


def made_by(path, software):
    """Whether a file is an image that save_image has written with this software text."""
    try:
        with Image.open(path) as image:
            return image.getexif().get(ExifTags.Base.Software) == software
    except OSError:  # not an image, or none that can be read
        return False


def image_files(output, num_images, grid=None):
    """The files to write images to.

    Args:
        output: directory; for one image also a file name with an extension.
        num_images: number of images.
        grid: another file that will be written, or None.

    Returns:
        Paths; in a directory 000.png, 001.png, ..., numbered on from those that exist.

    Raises:
        ValueError: output is one file for several images, cannot be written, or is the grid too.
    """
    is_folder = output.is_dir() or not (output.suffix or output.is_file())
    if is_one_file := num_images == 1 and not is_folder:
        files = [output]
    elif output.suffix.lower() in IMAGE_FORMATS or output.is_file():
        raise ValueError(
            f"--output {output} is one file for {num_images} images; give a directory, or one "
            "prompt and --num_images 1 to make one image"
        )
    else:
        numbers = [int(file.stem) for file in output.glob("*.png") if file.stem.isdecimal()]
        first = max(numbers, default=-1) + 1
        files = [output / f"{first + i:03}.png" for i in range(num_images)]
    if grid and grid.resolve() in [file.resolve() for file in files]:
        raise ValueError(f"--grid {grid} is an image of --output too; give it another name")
    for file in files if is_one_file else files[:1]:  # the others are new in the same directory
        check_image_file(file)
    return files


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
    return tile_grid(tiles, math.ceil(math.sqrt(len(tiles))), GRID_MARGIN)


def captioned(images, text, max_lines=None):
    """PIL images side by side, with a text below that is wrapped to their width.

    Args:
        images: list of PIL images.
        text: the caption; letters that no installed font has become \\uXXXX, with a warning.
        max_lines: of the caption, which then ends with an ellipsis if it is longer; None: all.
    """
    width, height = sum(image.width for image in images), max(image.height for image in images)
    size = max(CAPTION_SIZE, width // 40)
    line_height = size * LINE_HEIGHT // CAPTION_SIZE
    font, missing = caption_font(set(text), size)
    if missing:
        warn_of_missing_letters()
        text = "".join(x.encode("unicode_escape").decode() if x in missing else x for x in text)
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
    """The lines of a text in a font, none wider than width; at least one, which may be empty.

    Args:
        text: words that are wider are broken, as are texts without spaces.
        font: of Pillow.
        width: pixels.
        max_lines: see captioned.
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


def caption_font(letters, size):
    """The first font that has all letters, or the one that lacks the fewest.

    Args:
        letters: set of characters.
        size: pixels.

    Returns:
        (font, set of the letters that it lacks).
    """
    # Spaces, controls and combining marks have no shape of their own.
    letters = {x for x in letters if unicodedata.category(x)[0] not in "ZCM"}
    best, lacking = None, {x for x in letters if not has_letter(None, x)}
    for file in font_files() if lacking else ():
        missing = {x for x in letters if not has_letter(file, x)}
        if len(missing) < len(lacking):
            best, lacking = file, missing
        if not missing:
            break
    return open_font(best, size), lacking


@functools.cache
def open_font(file, size):
    """Pillow's font from a file, or its own for None; None if FreeType cannot read the file."""
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
    """Files of fonts besides Pillow's own: matplotlib's, then the system's."""
    from matplotlib import font_manager, get_data_path  # only captions need it

    # Chinese, Japanese and Korean are what most fonts lack.
    system = sorted(font_manager.findSystemFonts(), key=lambda file: ("CJK" not in file, file))
    own = Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    return [str(own), *(file for file in system if "LastResort" not in file)]


@functools.cache
def warn_of_missing_letters():
    """Log, once, that captions have letters that no font has."""
    logger.warning(
        "no installed font has all letters of the captions: the others are written as \\uXXXX; "
        "install a font that has them, such as the packages fonts-noto and fonts-noto-cjk"
    )


def tile_grid(tiles, columns, margin=0):
    """One image of tiles of any size, row by row, each at the top left of its cell.

    Args:
        tiles: list of PIL images.
        columns: tiles per row.
        margin: between the tiles and around them, pixels, white.
    """
    width = max(tile.width for tile in tiles) + margin
    height = max(tile.height for tile in tiles) + margin
    rows = math.ceil(len(tiles) / columns)
    grid = Image.new("RGB", (columns * width + margin, rows * height + margin), "white")
    for i, tile in enumerate(tiles):
        row, column = divmod(i, columns)
        grid.paste(tile, (margin + column * width, margin + row * height))
    return grid


def read_prompts(file):
    """The lines of a text file that are not empty; raise a ValueError if there are none."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts_file {file} is not UTF-8 text; save it as UTF-8") from error
    except OSError as error:
        raise ValueError(f"--prompts_file {file} cannot be read: {error}") from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"--prompts_file {file} has no prompt; write one per line")
    return prompts


def read_latents(file, shape):
    """Read the initial noise of images from a .npy file.

    Args:
        file: path.
        shape: (images, C, h, w); the file may have more images.

    Returns:
        float32 of that shape.

    Raises:
        ValueError: the file has no such array, or fewer images.
    """
    try:
        with open(file, "rb") as opened:
            latents = np.load(opened, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not one, or is cut short"
        raise ValueError(f"--latents {file} cannot be read as a .npy file: {reason}") from error
    if not isinstance(latents, np.ndarray) or latents.dtype.kind not in "fiu":
        raise ValueError(f"--latents {file} has no array of real numbers; numpy.save writes one")
    if latents.shape[1:] != shape[1:]:
        raise ValueError(f"--latents {file} has shape {latents.shape}, these images need {shape}")
    if len(latents) < shape[0]:
        raise ValueError(
            f"{shape[0]} images are more than the {len(latents)} latents of {file}; give fewer "
            "prompts or more latents"
        )
    latents = latents[: shape[0]].astype(np.float32)
    if not np.isfinite(latents).all():
        raise ValueError(
            f"--latents {file} has numbers that are not finite; make it again without them"
        )
    return latents


def to_batches(arrays, num_devices, batch_size):
    """Split arrays of one row per image into batches for all devices; the last is padded.

    Args:
        arrays: {name: (images, ...) or None}.
        num_devices: number of devices.
        batch_size: rows per device.

    Yields:
        (range of the batch's images, {name: (devices, batch_size, ...) or None}).
    """
    num_images = next(len(x) for x in arrays.values() if x is not None)
    per_batch = num_devices * batch_size
    for start in range(0, num_images, per_batch):
        rows = np.minimum(np.arange(start, start + per_batch), num_images - 1)
        yield (
            range(start, min(start + per_batch, num_images)),
            {
                name: None if x is None else x[rows].reshape(num_devices, batch_size, *x.shape[1:])
                for name, x in arrays.items()
            },
        )


def num_usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def to_pil(images):
    """Convert arrays (..., H, W, 3 or 1) in [0, 1] to a flat list of PIL images."""
    pixels = np.rint(np.asarray(images, np.float32) * 255).astype(np.uint8)
    if pixels.shape[-1] == 1:  # grey
        pixels = pixels[..., 0]
        return [Image.fromarray(image) for image in pixels.reshape(-1, *pixels.shape[-2:])]
    return [Image.fromarray(image) for image in pixels.reshape(-1, *pixels.shape[-3:])]


def pair_up(first, second, first_name="prompts", second_name="images"):
    """Repeat one row of either array for all rows of the other; else their numbers must agree."""
    sizes = len(first), len(second)
    if sizes[0] != sizes[1] and 1 not in sizes:
        raise ValueError(
            f"{sizes[0]} {first_name} do not fit {sizes[1]} {second_name}; give as many, or one"
        )
    B = max(sizes)
    return np.repeat(first, B // sizes[0], axis=0), np.repeat(second, B // sizes[1], axis=0)
