"""Image files: decoding, orientation, scaling and cropping."""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, ImageOps

from diffusers_flax.data.options import RESAMPLING
from diffusers_flax.images import MAX_PIXELS, mask_values, open_image, to_rgb
from diffusers_flax.messages import one_line

JPEG_START, START_OF_SCAN = b"\xff\xd8", b"\xff\xda"
ORIENTATION = ExifTags.Base.Orientation
EXIF_OR_XMP = (b"Exif\0\0", b"http://ns.adobe.com/xap/")  # of JPEG; Pillow reads both
MAX_ASPECT_ERROR = 0.02  # log ratio; image models round sides to multiples of 8
MAX_ASPECT = 20  # of an image; scaling up the shorter side of a longer one takes too much memory
# Warnings of libjpeg after which it fills in pixels. simplejpeg raises the first of a file.
LOST_PIXELS = (
    "remature end",
    "bad Huffman code",
    "bad arithmetic",
    "instead of RST",
    "progression",
)


def load_image(path):
    """Read an image file and apply its EXIF orientation, see decode_image.

    Args:
        path: image file.

    Returns:
        PIL image, RGB, on white where it is transparent.

    Raises:
        ValueError: the file is missing, damaged or not an image; the message starts with path.
    """
    try:
        return Image.fromarray(decode_image(Path(path).read_bytes()))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; check the path") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error


@contextmanager
def one_error() -> Iterator[None]:
    """A context or decorator that turns errors of decoders into ValueErrors of one line."""
    try:
        yield
    except MemoryError:  # no fault of the image
        raise
    except Exception as error:  # damaged data make decoders raise anything
        raise ValueError(one_line(error, 200)) from error


@one_error()
def decode_image(
    data: bytes, min_shape: tuple[int, int] = (0, 0), out: np.ndarray | None = None
) -> np.ndarray:
    """Decode one image to upright RGB.

    Args:
        data: an encoded image, see open_image. Upright JPEGs are decoded by simplejpeg, which
            releases the GIL.
        min_shape: (height, width): a JPEG at least twice as large may be decoded at half its
            size or less, but not below this; (0, 0): full size.
        out: uint8 (h, w, 3), contiguous; holds the result if the shape fits.

    Returns:
        uint8 (H, W, 3).

    Raises:
        ValueError: the data are not an image, damaged, of more than MAX_PIXELS, or of a mode that
            `to_rgb` does not support.
    """
    if data.startswith(JPEG_START):
        pixels = decode_jpeg(data, min_shape, out)
        if pixels is not None:
            return pixels
    return np.asarray(to_rgb(open_upright(data)))


@one_error()
def decode_mask(data: bytes, unpainted: int | None = None) -> np.ndarray:
    """Decode a mask: white may change, black may not.

    diffusers_flax.images.mask_values says what transparent pixels mean.

    Args:
        data: an encoded image, see open_image.
        unpainted: see mask_values; 255 for the masks of a data set.

    Returns:
        uint8 (H, W), upright; 255 where the image may change.

    Raises:
        ValueError: as for decode_image.
    """
    if data.startswith(JPEG_START):  # which may lack pixels
        return mask_values(Image.fromarray(decode_image(data)))
    return mask_values(open_upright(data), unpainted)


def open_upright(data):
    """Open an image with PIL and turn it by its EXIF orientation."""
    return ImageOps.exif_transpose(open_image(io.BytesIO(data)))


def decode_jpeg(data, min_shape, out):
    """Decode an upright RGB or grey JPEG by simplejpeg, which raises libjpeg's warnings.

    Args:
        data, min_shape, out: see decode_image.

    Returns:
        uint8 (H, W, 3), or None to leave the JPEG to Pillow, which ignores warnings.

    Raises:
        ValueError: pixels are missing.
    """
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        if height * width > MAX_PIXELS:  # open_image refuses it
            return None
        is_usual = colorspace in ("YCbCr", "RGB", "Gray")
        if not is_usual or exif_orientation(data) != 1:  # decoded only for its warning
            simplejpeg.decode_jpeg(data, "Gray" if is_usual else "CMYK", min_height=1, min_width=1)
            return None
        is_large = height >= 2 * min_shape[0] and width >= 2 * min_shape[1]
        h, w = min_shape if is_large else (0, 0)
        shape = simplejpeg.decode_jpeg_header(data, h, w)[:2]
        fits = out is not None and out.shape[:2] == shape
        return simplejpeg.decode_jpeg(
            data, "RGB", min_height=h, min_width=w, buffer=out if fits else None
        )
    except ValueError as error:
        if any(loss in str(error) for loss in LOST_PIXELS):
            raise
        return None


def encoded_size(data: bytes) -> tuple[int, int]:
    """Width and height of an encoded image, upright, at full size, from its header.

    Raises any exception for damaged data.
    """
    if data.startswith(JPEG_START):
        with suppress(ValueError):  # a header that decode_jpeg leaves to Pillow
            height, width = simplejpeg.decode_jpeg_header(data)[:2]
            is_turned = exif_orientation(data) in (5, 6, 7, 8)
            return (height, width) if is_turned else (width, height)
    image = open_image(io.BytesIO(data))
    # getexif decodes a whole PNG. Pillow opens a TIFF upright, with the size of the turned image.
    has_exif = "exif" in image.info if image.format == "PNG" else image.format != "TIFF"
    is_turned = has_exif and image.getexif().get(ORIENTATION, 1) in (5, 6, 7, 8)
    return image.size[::-1] if is_turned else image.size


def exif_orientation(data: bytes) -> int:
    """The EXIF orientation of a JPEG, 1 to 8; 1 (upright) if it has none."""
    head = data[: data.find(START_OF_SCAN)]
    if any(mark in head for mark in EXIF_OR_XMP):
        return open_image(io.BytesIO(data)).getexif().get(ORIENTATION, 1)
    return 1


def check_one_shape(
    first: str, first_size: tuple[float, float], second: str, second_size: tuple[float, float]
) -> None:
    """Raise a ValueError unless two images have the same aspect ratio, as both are cropped alike.

    Args:
        first, second: names for the error.
        first_size, second_size: (width, height).
    """
    (w, h), (W, H) = first_size, second_size
    if abs(math.log(w * H / (h * W))) > MAX_ASPECT_ERROR:
        raise ValueError(
            f"{first} has {w:.0f}x{h:.0f} pixels (width x height) and {second} {W:.0f}x{H:.0f}; "
            "crop one of them to the aspect ratio of the other"
        )


def scaled_shape(height: int, width: int, shape: tuple[int, int]) -> tuple[int, int]:
    """Height and width of an image that is scaled until it just covers a shape."""
    scale = max(shape[0] / height, shape[1] / width)
    return max(shape[0], round(height * scale)), max(shape[1], round(width * scale))


def crop_corner(height: int, width: int, shape: tuple[int, int], crop: float) -> tuple[int, int]:
    """Top and left of crop_image's cut in the scaled image."""
    return int(crop * (height - shape[0] + 1)), int(crop * (width - shape[1] + 1))


def crop_image(
    pixels: np.ndarray, shape: tuple[int, int], resample: str = "dct", crop: float = 0.5
) -> np.ndarray:
    """Scale an image until it just covers a shape, and cut this shape out.

    Hugging Face's trainer squeezes the full image into a square instead; on the square images of
    the public datasets both agree.

    Args:
        pixels: uint8 (H, W, 3).
        shape: height h and width w of the result, pixels.
        resample: "lanczos" or "dct" (Lanczos is what "dct" does here), or "bicubic".
        crop: in [0, 1), position of the cut along the longer side; 0.5: the centre.

    Returns:
        uint8 (h, w, 3).

    Raises:
        ValueError: one side is more than MAX_ASPECT times the other.
    """
    if max(pixels.shape[:2]) > MAX_ASPECT * min(pixels.shape[:2]):
        raise ValueError(
            f"{pixels.shape[1]}x{pixels.shape[0]} pixels are too narrow: one side may be at most "
            f"{MAX_ASPECT} times the other; crop the image"
        )
    height, width = scaled_shape(*pixels.shape[:2], shape)
    if pixels.shape[:2] != (height, width):
        image = Image.fromarray(pixels).resize((width, height), RESAMPLING[resample])
        pixels = np.asarray(image)
    top, left = crop_corner(height, width, shape, crop)
    return pixels[top : top + shape[0], left : left + shape[1]]
