"""Masks of images: reading them, and checking them against their images.

    mask = read_mask(Path("mask.png"))
    image_sizes = check_inputs(edits)
    edits = check_masks(edits, image_sizes, sizes)

Edits are frozen dataclasses with input (a path), mask (a path or None) and after, the place of the
edit whose output is the input, or None.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from PIL import Image, ImageFilter

from diffusers_flax.data.images import decode_mask, load_image
from diffusers_flax.generating.batches import rounds_of
from diffusers_flax.generating.sizes import fit_image, num_loaders, stretch
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


def check_inputs(edits, bar=iter):
    """Decode all images and masks, in a few threads, to check them.

    Args:
        edits: list of edits.
        bar: function of an iterable, for progress.

    Returns:
        (width, height) of the first original image of each edit's chain.

    Raises:
        ValueError: an image or a mask cannot be read, or a mask has no white or another size than
            its image.
    """
    rounds, sizes = rounds_of(edits), [None] * len(edits)
    order = sorted(range(len(edits)), key=rounds.__getitem__)
    with ThreadPoolExecutor(num_loaders()) as loaders:
        found = loaders.map(check_input, (edits[place] for place in order))
        for place, (size, mask) in zip(bar(order), found):
            edit = edits[place]
            sizes[place] = size if edit.after is None else sizes[edit.after]
            if mask is not None and edit.after is None:
                require_size(edit, mask, size)
    return sizes


def check_input(edit):
    """(size of an edit's original image, None if another edit writes it; its mask or None)."""
    size = load_image(edit.input).size if edit.after is None else None
    if edit.mask is None:
        return size, None
    mask = read_mask(edit.mask)
    if not mask.getbbox():
        raise ValueError(
            f"{edit.mask} has no white, so nothing of {edit.input} may change; paint the part "
            "white that may change"
        )
    return size, mask


def require_size(edit, mask, *sizes):
    """Raise a ValueError unless a mask has one of these sizes (width, height)."""
    if mask.size not in sizes:
        found, *needed = ("{}x{}".format(*size) for size in dict.fromkeys((mask.size, *sizes)))
        raise ValueError(
            f"{edit.mask} is {found} pixels (width x height) and {edit.input} "
            f"{' or '.join(needed)}; a mask has the size of its image"
        )


def check_masks(edits, image_sizes, sizes, feather=0):
    """Check masks at the sizes of the edits.

    Args:
        edits: list of edits.
        image_sizes: of check_inputs; a mask has this size, or the result's if the edit is of
            another's output.
        sizes: (width, height) of each result.
        feather: --mask_feather; too wide a value is a warning.

    Returns:
        The edits; all-white masks are None, as they restrict nothing.

    Raises:
        ValueError: a mask has another size, or no white is left at the size of the result.
    """
    checked = []
    for edit, image_size, size in zip(edits, image_sizes, sizes):
        if edit.mask is not None:
            mask = read_mask(edit.mask)
            require_size(edit, mask, image_size, size)
            mask = fit_mask(mask, size)
            if not mask.getbbox():
                raise ValueError(
                    f"{edit.mask} has no white left at the size of the result, "
                    f"{size[0]}x{size[1]} (width x height); paint a larger part white, or raise "
                    "--resolution"
                )
            if feather and (strongest := ramp(np.asarray(mask), feather).max()) < 1:
                logger.warning(
                    "--mask_feather %d is wider than the white part of %s, in which the edit "
                    "reaches a weight of %.2f at most; lower it",
                    feather, edit.mask, strongest,
                )  # fmt: skip
            if mask.getextrema()[0]:
                edit = replace(edit, mask=None)
        checked.append(edit)
    return checked
