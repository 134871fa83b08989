"""Encoded images to upright RGB pixels, and squares cut out of them.

What the data loader (parquet_processing.py) does with one image, and what every image of a list of
pairs is checked with (parquet_pairs.py).
"""

import io
import os

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from pictures import to_rgb

RESAMPLING = {
    "dct": Image.Resampling.LANCZOS,  # for what decoding at a reduced scale has left to do
    "lanczos": Image.Resampling.LANCZOS,
    "bicubic": Image.Resampling.BICUBIC,
}
ORIENTATION = ExifTags.Base.Orientation
EXIF_OR_XMP = (b"Exif\0\0", b"http://ns.adobe.com/xap/")  # of JPEG; Pillow reads both
MAX_ASPECT = 20  # of an image; scaling the shorter side up would take any amount of memory
# What Pillow may try: not the formats for which it runs programs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


def decode_picture(data: bytes, min_side: int = 0, out: np.ndarray | None = None) -> np.ndarray:
    """Decode one image to upright RGB.

    Args:
        data: an encoded image, one of FORMATS. Upright JPEGs go through simplejpeg, which lets
            other threads run meanwhile.
        min_side: a JPEG at least twice as large may come back smaller, by a half or more, but
            with no side below this; 0 decodes at full size.
        out: uint8 (h, w, 3), contiguous: used for the result if that has just this size.

    Returns:
        uint8 (H, W, 3).

    Raises:
        ValueError: the data are no image, cut short, damaged, or of a mode that `to_rgb` refuses.
    """
    try:
        if data.startswith(b"\xff\xd8") and exif_orientation(data) == 1:
            height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
            if colorspace in ("YCbCr", "RGB", "Gray") and height * width <= Image.MAX_IMAGE_PIXELS:
                side = min_side if min(height, width) >= 2 * min_side else 0
                size = simplejpeg.decode_jpeg_header(data, side, side)[:2]
                fits = out is not None and out.shape[:2] == size
                # Strict by default: a warning of libjpeg (premature end, corrupt data) is an error.
                return simplejpeg.decode_jpeg(
                    data, "RGB", min_height=side, min_width=side, buffer=out if fits else None
                )
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data), formats=FORMATS))
        return np.asarray(to_rgb(image))
    except UnidentifiedImageError:
        raise ValueError(f"no known picture format ({len(data)} bytes)") from None
    except MemoryError:  # says nothing about the image
        raise
    except Exception as error:  # damaged data make decoders raise anything
        raise ValueError(one_line(error)) from error


def exif_orientation(data: bytes) -> int:
    """How a JPEG is turned, 1 to 8; 1 is upright, also if it does not say."""
    position = 2
    while data[position : position + 1] == b"\xff" and data[position + 1] != 0xDA:  # up to the scan
        if data[position + 1] == 0xE1 and data.startswith(EXIF_OR_XMP, position + 4):
            return Image.open(io.BytesIO(data), formats=["JPEG"]).getexif().get(ORIENTATION, 1)
        position += 2 + int.from_bytes(data[position + 2 : position + 4])
    return 1


def crop_square(
    pixels: np.ndarray, resolution: int, resample: str = "dct", crop: float = 0.5
) -> np.ndarray:
    """Scale the shorter side of an image to the resolution and cut a square out.

    Hugging Face's trainer squeezes the whole image into the square instead, after which its
    crop has nothing left to choose; on the square images of the public datasets both agree.

    Args:
        pixels: uint8 (H, W, 3).
        resolution: side R of the square, pixels.
        resample: "lanczos" or "dct" (Lanczos is what "dct" does here), or "bicubic".
        crop: in [0, 1), where along the longer side the square lies; 0.5 is the middle.

    Returns:
        uint8 (R, R, 3).

    Raises:
        ValueError: one side is more than MAX_ASPECT times the other.
    """
    if max(pixels.shape[:2]) > MAX_ASPECT * min(pixels.shape[:2]):
        raise ValueError(f"{pixels.shape[1]}x{pixels.shape[0]} pixels are too narrow to cut from")
    scale = resolution / min(pixels.shape[:2])
    height, width = (max(resolution, round(side * scale)) for side in pixels.shape[:2])
    if pixels.shape[:2] != (height, width):
        image = Image.fromarray(pixels).resize((width, height), RESAMPLING[resample])
        pixels = np.asarray(image)
    top = int(crop * (height - resolution + 1))
    left = int(crop * (width - resolution + 1))
    return pixels[top : top + resolution, left : left + resolution]


def num_usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def one_line(error: Exception) -> str:
    """What an exception says, on one short line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
