"""Masks that an index has as run lengths."""

import io

import numpy as np
from PIL import Image


def decode_counts(text: str) -> list[int]:
    """Run lengths from the text of the COCO API: 6 bits a character from "0" on, as differences.

    Five bits of a character are of the number, from the lowest; the sixth says that more follow.
    From the fourth number on, a number is the difference to the number two before.

    Source: cocodataset/cocoapi, common/maskApi.c, rleFrString.
    """
    counts, value, shift = [], 0, 0
    for character in text.encode():
        bits = character - 48
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            if bits & 16:
                value -= 1 << shift
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value, shift = 0, 0
    return counts


def run_lengths_to_png(mask: dict) -> bytes:
    """A mask as PNG, white inside.

    Args:
        mask: {"size": [height, width], "counts": run lengths of outside and inside in turn, by
            columns; a list, or the text of the COCO API}.

    Raises:
        ValueError: the run lengths do not fill the size.
    """
    try:
        height, width = map(int, mask["size"])
        counts = mask["counts"]
        counts = counts.decode("latin-1") if isinstance(counts, bytes) else counts
        counts = decode_counts(counts) if isinstance(counts, str) else [int(n) for n in counts]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the mask has no run lengths ({error})") from error
    is_small = min(height, width) > 0 and height * width <= 150_000_000
    if not is_small or min(counts, default=0) < 0 or sum(counts) != height * width:
        raise ValueError(f"the mask's run lengths do not fill {width}x{height} pixels")
    values = np.repeat(np.arange(len(counts)) % 2 * 255, counts).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(values.reshape(width, height).T)).save(file, "PNG")
    return file.getvalue()
