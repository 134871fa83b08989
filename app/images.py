"""Images and masks from the page."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from dataloading.images import decode_image, one_error
from diffusers_flax.images import open_image
from editing.edits import read_edits
from generating.masks import white_mask
from generating.sizes import fit_image

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


def painted_mask(layers):
    """The mask of the mask editor's layers: PIL of mode 1, white where a layer has paint.

    Args:
        layers: PIL images of mode RGBA, of one size.

    Raises:
        ValueError: there is no paint.
    """
    painted = [np.asarray(layer.convert("RGBA"))[..., 3] for layer in layers]
    mask = white_mask(np.max(painted, axis=0)) if painted else None
    if mask is None or not mask.getbbox():
        raise ValueError("no part is painted; paint the part that may change, or switch this off")
    return mask


def read_examples(file, edits):
    """The original images and instructions of a list, each once: (paths, texts).

    Args:
        file: list of --examples, or None.
        edits: whether the model edits images; else there are no paths.
    """
    rows = read_edits(file, "examples") if file else []
    paths = [str(path) for path, *_ in rows] if edits else []
    return [*dict.fromkeys(paths)], [*dict.fromkeys(text for _, text, *_ in rows)]
