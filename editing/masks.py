"""Masks of edits: reading, and checking against the images to edit.

    mask = read_mask(Path("mask.png"))
    image_sizes = check_inputs(edits)
    edits = check_masks(edits, image_sizes, sizes)

Edits are frozen dataclasses with input, mask (a path or None) and after, see edits.read_edits.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from PIL import Image, ImageFilter

from dataloading.images import decode_mask
from diffusers_flax.images import ramp
from editing.edits import fit_image, num_loaders, rounds_of, size_of_image, stretch

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

    White is what is white in at least half of the pixels that it covers.
    """
    return white_mask(np.asarray(fit_image(mask.convert("L"), size)))


def load_mask(edit, size):
    """The mask of an edit, fitted to size (width, height)."""
    return fit_mask(read_mask(edit.mask), size)


def stretch_mask(mask, size):
    """A mask for a program of another size (width, height) than its edit's result.

    Its white part is wider by BORDER pixels: the result, scaled back, has no pixels of the image to
    edit inside of the mask.
    """
    if mask.size == size:
        return mask
    wider = mask.convert("L").filter(ImageFilter.MaxFilter(2 * BORDER + 1))
    return wider.resize(size, Image.Resampling.NEAREST).convert("1")


def finish_edit(edited, size, image=None, mask=None, feather=0):
    """The result of an edit, of size (width, height), from what a program of any size has made.

    Args:
        edited: PIL image; with a mask, of an edit with a hard edge.
        image: to edit, PIL, of this size; for a mask.
        mask: of fit_mask, of this size, or None. Outside of it the pixels are the image's.
        feather: pixels inside of the white part to fade the edit in.
    """
    edited = stretch(edited, size)
    if mask is None:
        return edited
    weights = np.rint(ramp(np.asarray(mask), feather) * 255).astype(np.uint8)
    return Image.composite(edited, image, Image.fromarray(weights))


def check_inputs(edits, bar=iter):
    """Decode all images and masks, in a few threads, to check them.

    Args:
        edits: list of edits.
        bar: function of an iterable, for progress.

    Returns:
        (width, height) of the image that each edit, or the first of the edits before it, begins
        with.

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
    """The size of an edit's image, unless another edit makes it, and its mask or None."""
    size = size_of_image(edit.input) if edit.after is None else None
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
        image_sizes: of check_inputs. The mask of an edit after another may have this size, or the
            size of the edit.
        sizes: (width, height) of each edit.
        feather: --mask_feather; a warning says so if it is wider than the white part.

    Returns:
        The edits; a mask that is all white is None, as it restricts nothing.

    Raises:
        ValueError: a mask has another size, or no white is left at the size of the edit.
    """
    checked = []
    for edit, image_size, size in zip(edits, image_sizes, sizes):
        if edit.mask is not None:
            mask = read_mask(edit.mask)
            require_size(edit, mask, image_size, size)
            mask = fit_mask(mask, size)
            if not mask.getbbox():
                raise ValueError(
                    f"{edit.mask} has no white left at the size of the edit, "
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
