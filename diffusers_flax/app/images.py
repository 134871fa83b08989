"""Images and masks from the page."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from diffusers_flax.data.images import decode_image, one_error
from diffusers_flax.evaluation.edits import read_edits
from diffusers_flax.generating.masks import read_mask_of
from diffusers_flax.generating.sizes import fit_image
from diffusers_flax.images import opaque_part, open_image

PAINTING_SIZE = 512  # pixels, smallest longer side of an image in the mask editor


def read_bytes(path):
    """The bytes of an image file, after a check of its header.

    Raises:
        ValueError: it is not an image, or too large; the message has no path.
    """
    data = Path(path).read_bytes()
    try:
        with one_error():
            open_image(io.BytesIO(data))
    except ValueError as error:
        raise ValueError(f"this image cannot be read: {error}") from error
    return data


def read_upload(path):
    """An uploaded image, upright, PIL of mode RGB; raises ValueErrors as read_bytes."""
    data = read_bytes(path)
    try:
        return Image.fromarray(decode_image(data))
    except ValueError as error:
        raise ValueError(f"this image cannot be read: {error}") from error


def image_to_paint_on(image, size):
    """The image for the mask editor: what the model sees, enlarged if it is small.

    size: (width, height) of the result.
    """
    scale = -(-PAINTING_SIZE // max(size)) if max(size) < PAINTING_SIZE else 1
    fitted = fit_image(image, size)
    return fitted.resize([side * scale for side in size], Image.Resampling.LANCZOS)


def middle_of_change(before, after):
    """The column with half of the squared differences of two images on each side.

    Args:
        before, after: PIL images of one size and mode.

    Returns:
        Percent of the width, from the left; 50 for equal images.
    """
    change = np.square(np.float32(before) - np.float32(after)).sum((0, 2)).cumsum()  # (width,)
    if not change[-1]:
        return 50.0
    return 100 * (np.searchsorted(change, change[-1] / 2) + 0.5) / len(change)


def read_mask_file(path, size):
    """The mask in an uploaded file: PIL of mode 1; size: (width, height) of its image."""
    mask = read_mask_of(read_bytes(path), "the mask")
    if mask.size != size:
        raise ValueError(
            "the mask has {}x{} pixels, the image {}x{}; make it of the same size".format(
                *mask.size, *size
            )
        )
    return mask


def painted_mask(layers):
    """The mask of the mask editor's layers: PIL of mode 1, white where a layer has paint.

    Args:
        layers: PIL images of mode RGBA, of one size.

    Raises:
        ValueError: there is no paint.
    """
    if not has_paint(layers):
        raise ValueError("no part is painted; paint the part that may change, or switch this off")
    return Image.fromarray(opaque_part(alpha_of(layers)))


def has_paint(layers):
    """Whether a layer of the mask editor has paint; layers: see painted_mask."""
    return bool(layers) and opaque_part(alpha_of(layers)).any()


def alpha_of(layers):
    """The largest alpha of all layers, uint8 (H, W)."""
    return np.max([np.asarray(layer.convert("RGBA"))[..., 3] for layer in layers], axis=0)


def read_examples(file):
    """The original images and instructions of a list, each once: (paths, texts).

    Args:
        file: list of --examples, or None.
    """
    rows = read_edits(file, "examples") if file else []
    paths, texts = [str(path) for path, *_ in rows], [text for _, text, *_ in rows]
    return [*dict.fromkeys(paths)], [*dict.fromkeys(texts)]
