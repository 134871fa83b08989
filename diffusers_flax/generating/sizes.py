"""Sizes of results and of their programs; photographs and masks fitted to them.

size = result_size(photograph.size, resolution=512, factor=8)
image = stretch(fit_image(photograph, size), shared_size(size, 8))
"""

import math
import os

import numpy as np
from PIL import Image, ImageFilter, ImageOps

from diffusers_flax.data.images import decode_mask, load_image
from diffusers_flax.images import ramp

NUM_LOADERS = min(8, os.cpu_count() or 1)  # threads that decode images
BORDER = 4  # pixels, more than Lanczos reads beside a pixel


def result_size(size, resolution, factor):
    """The size of a result: the longer side is resolution, both sides multiples of factor.

    size, result: (width, height).
    """
    longer = max(size)
    sides = (side * resolution / longer for side in size)
    return tuple(max(1, math.floor(side / factor + 0.5)) * factor for side in sides)


def shared_size(size, factor):
    """The size of the program for a result; images of similar shapes share it.

    The shorter side becomes the nearest of 8/16, 9/16, ..., 16/16 of the longer side. 1:1, 4:3,
    16:10, 16:9 and 2:1 do not change, 3:2 changes by about 3%, others by at most 7% from 256 pixels
    on. Images longer than 2:1 keep their size.

    Args:
        size: (width, height) of result_size.
        factor: both sides are multiples of it.
    """
    shorter, longer = sorted(size)
    sides = [math.floor(longer * k / 16 / factor + 0.5) * factor for k in range(8, 17)]
    if shorter < sides[0]:
        return size
    shared = min(sides, key=lambda side: (abs(side - shorter), -side))
    return (longer, shared) if size[0] == longer else (shared, longer)


def fit_image(image, size):
    """A PIL image scaled to cover size (width, height) and cropped to it evenly."""
    return ImageOps.fit(image, size, Image.Resampling.LANCZOS)


def load_fitted(path, size):
    """fit_image for the image in a file."""
    return fit_image(load_image(path), size)


def stretch(image, size):
    """A PIL image resized to (width, height) without keeping its aspect ratio."""
    return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)


def read_mask_of(data, name):
    """The mask in bytes of a file, upright: PIL of mode 1, white from 128 on; name: for errors."""
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
