"""Masks of images: reading, fitting and checking them; images outside of a mask stay."""

import numpy as np
from PIL import Image, ImageFilter

from diffusers_flax.data.images import decode_mask
from diffusers_flax.generating.sizes import fit_image, stretch
from diffusers_flax.images import ramp

BORDER = 4  # pixels, more than Lanczos reads beside a pixel


def read_mask_of(data, name):
    """The mask of an encoded image, upright: PIL of mode 1, white from 128 on.

    Args:
        data: bytes.
        name: of the file, for errors.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        return Image.fromarray(decode_mask(data) >= 128)
    except ValueError as error:
        raise ValueError(f"{name} cannot be read as a mask: {error}") from error


def fit_mask(mask, size):
    """A mask scaled to cover size (width, height) and cropped to it, as its image is.

    A pixel is white if at least half of what it covers is white.
    """
    return Image.fromarray(np.asarray(fit_image(mask.convert("L"), size)) >= 128)


def load_mask(path, size):
    """The mask in a file, fitted to size (width, height)."""
    return fit_mask(read_mask_of(path.read_bytes(), path), size)


def stretch_mask(mask, size):
    """A mask resized for a program of another size (width, height) than the result.

    White is wider by BORDER pixels, so that no pixel of the original is left inside of the mask
    when the result is scaled back.
    """
    if mask.size == size:
        return mask
    wider = mask.convert("L").filter(ImageFilter.MaxFilter(2 * BORDER + 1))
    return wider.resize(size, Image.Resampling.NEAREST).convert("1")


def finish_image(result, size, original=None, mask=None, feather=0):
    """Resize a program's result to size (width, height); outside of a mask it is the original.

    Args:
        result: PIL image; with a mask, of an edit with a hard edge.
        size: of original and mask.
        original: PIL image, for a mask.
        mask: of fit_mask, or None.
        feather: pixels inside of the white part over which the edit fades in.
    """
    result = stretch(result, size)
    if mask is None:
        return result
    weights = np.rint(ramp(np.asarray(mask), feather) * 255).astype(np.uint8)
    return Image.composite(result, original, Image.fromarray(weights))


def check_mask(path, image_sizes, size):
    """Raise a ValueError for a mask that cannot be read, has another size, or no white.

    Args:
        path: of its file.
        image_sizes: (width, height) that it may have: of its image.
        size: (width, height) of the result.
    """
    mask = read_mask_of(path.read_bytes(), path)
    if mask.size not in image_sizes:
        found, needed = ("{}x{}".format(*x) for x in (mask.size, image_sizes[0]))
        raise ValueError(
            f"{path} is {found} pixels (width x height) and its image {needed}; a mask has the "
            "size of its image"
        )
    if not fit_mask(mask, size).getbbox():
        raise ValueError(
            f"{path} has no white at the size of the result, {size[0]}x{size[1]} (width x height), "
            "so nothing may change; paint the part white that may change"
        )
