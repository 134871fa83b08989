"""Masks of images: reading, fitting and checking them; images outside of a mask stay."""

import logging

import numpy as np
from PIL import Image, ImageFilter

from diffusers_flax.data.images import decode_mask
from diffusers_flax.generating.sizes import fit_image, stretch
from diffusers_flax.images import ramp

BORDER = 4  # pixels, more than Lanczos reads beside a pixel

logger = logging.getLogger(__name__)


def white_mask(values):
    """A PIL mask of mode 1, white where values, uint8 (H, W), are 128 or more."""
    return Image.fromarray(values >= 128)


def read_mask_of(data, name):
    """The mask of an encoded image, upright: PIL of mode 1.

    Args:
        data: bytes.
        name: of the file, for errors.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        return white_mask(decode_mask(data))
    except ValueError as error:
        raise ValueError(f"{name} cannot be read as a mask: {error}") from error


def read_mask(path):
    """The mask in a file, see read_mask_of."""
    if not path.is_file():
        problem = "is a directory; name an image" if path.is_dir() else "does not exist; check it"
        raise ValueError(f"{path} {problem}")
    return read_mask_of(path.read_bytes(), path)


def fit_mask(mask, size):
    """A mask scaled to cover size (width, height) and cropped to it, as its image is.

    A pixel is white if at least half of what it covers is white.
    """
    return white_mask(np.asarray(fit_image(mask.convert("L"), size)))


def load_mask(path, size):
    """The mask in a file, fitted to size (width, height)."""
    return fit_mask(read_mask(path), size)


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


def check_mask(request, image_size, size):
    """Check a request's mask at the size of its result.

    Args:
        request: Request with a mask.
        image_size: (width, height) of its image, or of the first image of its chain of edits.
        size: (width, height) of its result.

    Returns:
        The mask, fitted to the result.

    Raises:
        ValueError: it cannot be read, has another size than the image, or no white.
    """
    mask = read_mask(request.mask)
    if not mask.getbbox():
        raise ValueError(
            f"{request.mask} has no white, so nothing of {request.image} may change; paint the "
            "part white that may change"
        )
    # An edit of another's output may have a mask of the output's size.
    allowed = (image_size,) if request.after is None else (image_size, size)
    if mask.size not in allowed:
        found, *needed = ("{}x{}".format(*x) for x in dict.fromkeys((mask.size, *allowed)))
        raise ValueError(
            f"{request.mask} is {found} pixels (width x height) and {request.image} "
            f"{' or '.join(needed)}; a mask has the size of its image"
        )
    mask, feather = fit_mask(mask, size), request.mask_feather
    if not mask.getbbox():
        raise ValueError(
            f"{request.mask} has no white left at the size of the result, {size[0]}x{size[1]} "
            "(width x height); paint a larger part white, or raise --resolution"
        )
    if feather and (strongest := ramp(np.asarray(mask), feather).max()) < 1:
        logger.warning(
            "--mask_feather %d is wider than the white part of %s, in which the image reaches a "
            "weight of %.2f at most; lower it",
            *(feather, request.mask, strongest),
        )
    return mask
