"""Sizes of results and of their programs, and photographs fitted to them.

size = result_size(photograph.size, resolution=512, factor=8)
image = stretch(fit_image(photograph, size), shared_size(size, 8))
"""

import math
import os

from PIL import Image, ImageOps

from diffusers_flax.data.images import load_image

NUM_LOADERS = min(8, os.cpu_count() or 1)  # threads that decode images


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
