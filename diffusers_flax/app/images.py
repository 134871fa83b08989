"""Images and masks from the page."""

from pathlib import Path

import numpy as np
from PIL import Image

from diffusers_flax.data.images import decode_image
from diffusers_flax.generating.requests import read_edits
from diffusers_flax.generating.sizes import fit_image, read_mask_of
from diffusers_flax.images import opaque_part

PAINTING_SIZE = 512  # pixels, smallest longer side of an image in the mask editor


def read_upload(path):
    """An uploaded image, upright, PIL of mode RGB; a ValueError without the path if unreadable."""
    if not Path(path).is_file():
        raise ValueError("the file of the image is deleted; upload it again")
    try:
        return Image.fromarray(decode_image(Path(path).read_bytes()))
    except ValueError as error:
        raise ValueError(f"this image cannot be read: {error}") from error


def read_mask_file(path, size):
    """The mask in an uploaded file: PIL of mode 1; size: (width, height) of its image."""
    mask = read_mask_of(Path(path).read_bytes(), "the mask")
    if mask.size != size:
        raise ValueError(
            f"the mask has {mask.width}x{mask.height} pixels, the image {size[0]}x{size[1]}; make "
            "it of the same size"
        )
    return mask


def image_to_paint_on(image, size):
    """The image for the mask editor: what the model sees, enlarged if it is small.

    size: (width, height) of the result.
    """
    scale = -(-PAINTING_SIZE // max(size))
    return fit_image(image, size).resize([side * scale for side in size], Image.Resampling.LANCZOS)


def painted_mask(layers):
    """The mask of the mask editor's layers: PIL of mode 1, white where a layer has paint.

    layers: PIL images of mode RGBA, of one size. Without paint the result is None.
    """
    if not layers:
        return None
    alpha = np.max([np.asarray(layer.convert("RGBA"))[..., 3] for layer in layers], axis=0)
    paint = opaque_part(alpha)
    return Image.fromarray(paint) if paint.any() else None


def read_examples(file):
    """The original images and instructions of a list, each once: (paths, texts).

    file: list of --examples, or None.
    """
    rows = read_edits(file, "examples") if file else []
    paths, texts = dict.fromkeys(str(row["image"]) for row in rows), [x["prompt"] for x in rows]
    return [*paths], [*dict.fromkeys(texts)]
