"""What may be wrong with a pair besides damaged images: shapes, frames, repetitions, no change.

    finder = FaultFinder()
    finder.find(measure(original, edited), "make it red")  # ["border", "unchanged"]

Nothing is changed here; parquet_processing.py --report counts faults, --drop leaves pairs out.
"""

import hashlib
import math
from collections.abc import Container
from typing import NamedTuple

import numpy as np
from PIL import Image

from diffusers_flax.data.images import MAX_ASPECT_ERROR, decode_image, encoded_size

FAULTS = {  # name: what it means
    "unreadable": "an image cannot be decoded",
    "shape": "the images have two aspect ratios; training leaves these out as damaged",
    "border": "an image has a frame or bars of one colour",
    "unchanged": "no part of the image changes by more than compression changes it",
    "duplicate": "images and instruction are those of an earlier pair",
    "near_duplicate": "images look like those of an earlier pair with the same instruction",
}
SIDE = 128  # pixels along which frames and changes are looked for
SAME_COLOUR = 12  # levels within which a frame is of one colour
MIN_FRAME = 0.02  # of the image's side, on two opposite sides
SHARP_EDGE = 0.7  # of the first line inside a frame differs from it; less is a plain background
# Levels by which recompression (JPEG 50 to 90, WebP 70; 256 to 1024 px) changes the mean color of
# the most changed and the average cell of CELL pixels at CHANGE_SIDE: up to 10 and 1.4; a ball
# of 28 pixels put in at 512 px changes one cell by 23 and more.
CHANGE_SIDE, CELL = 256, 8
MOST_CHANGE, MEAN_CHANGE = 11, 2
NUM_BANDS = 7  # of the 128 bits of two images' hashes
MAX_BITS = NUM_BANDS - 1  # that differ between near duplicates; one band is then equal
LOOK_SIDE = 16  # cells, of the mean colours of an image
MAX_COLOUR = 10  # levels between the mean colours of near duplicates
MAX_CANDIDATES = 100  # earlier pairs of one instruction and band that are compared


class Measured(NamedTuple):
    """What faults are judged by."""

    faults: tuple[str, ...]  # that a pair has by itself
    digest: bytes = b""  # of the bytes of both images
    bits: int = 0  # 128: difference hashes of both images
    colours: np.ndarray | None = None  # uint8 (2, 16, 16, 3): mean RGB of cells of both images


def measure(original: bytes, edited: bytes) -> Measured:
    """Measure a pair of encoded images; may run in a thread."""
    try:
        pixels = [decode_image(data, (CHANGE_SIDE, CHANGE_SIDE)) for data in (original, edited)]
        (w, h), (W, H) = map(encoded_size, (original, edited))
    except ValueError:
        return Measured(("unreadable",))
    images = [Image.fromarray(array) for array in pixels]
    small = [scaled(image, SIDE, SIDE) for image in images]
    size = (CHANGE_SIDE, CHANGE_SIDE)
    cells = [np.asarray(scaled(x, *size).reduce(CELL), np.int16) for x in images]
    change = np.abs(cells[0] - cells[1])
    faults = {
        "shape": abs(math.log(w * H / (h * W))) > MAX_ASPECT_ERROR,
        "border": any(has_border(np.asarray(image)) for image in small),
        "unchanged": change.max() <= MOST_CHANGE and change.mean() <= MEAN_CHANGE,
    }
    bits = difference_hash(small[0]) << 64 | difference_hash(small[1])
    colours = np.stack([np.asarray(scaled(x, LOOK_SIDE, LOOK_SIDE)) for x in small])
    digest = hashlib.sha256(hashlib.sha256(original).digest() + edited).digest()[:16]
    return Measured(tuple(name for name in faults if faults[name]), digest, bits, colours)


def scaled(image: Image.Image, width: int, height: int) -> Image.Image:
    """An image whose pixels are means of an image's pixels."""
    return image.resize((width, height), Image.Resampling.BOX)


def has_border(pixels: np.ndarray) -> bool:
    """Whether an image, uint8 (h, w, 3), has bars of one colour on two opposite sides."""
    turned = (pixels, pixels.transpose(1, 0, 2))
    return any(min(map(bar_width, (view, view[::-1]))) >= MIN_FRAME for view in turned)


def bar_width(pixels: np.ndarray) -> float:
    """The height of a bar at the top as a share of an image's, uint8 (h, w, 3); 0: none.

    A bar is of the corner's colour and ends in a straight edge.
    """
    shares = (np.abs(pixels.astype(np.int16) - pixels[0, 0]).max(-1) > SAME_COLOUR).mean(1)
    inside = np.flatnonzero(shares > 1 - SHARP_EDGE)
    outside = np.flatnonzero(shares > 0.02)
    if not len(inside) or inside[0] - outside[0] > 1:
        return 0.0
    is_sharp = shares[inside[0] :][:2].max() >= SHARP_EDGE
    return outside[0] / len(shares) if is_sharp else 0.0


def difference_hash(image: Image.Image) -> int:
    """64 bits: whether each of 8x8 cells is brighter than its left neighbour."""
    grey = np.asarray(scaled(image.convert("L"), 9, 8), np.int16)
    return int.from_bytes(np.packbits(grey[:, 1:] > grey[:, :-1]).tobytes())


class FaultFinder:
    """Judges pairs one after the other, and compares them with those before."""

    def __init__(self):
        self._seen: set[tuple] = set()  # hashes of images, instructions
        self._looks: dict[tuple, list[Measured]] = {}  # by instruction and band of the bits

    def find(self, measured: Measured, instruction: str, dropped: Container[str] = ()) -> list[str]:
        """The faults of a pair, in the order of FAULTS.

        Args:
            measured: of the images.
            instruction: or several as one text.
            dropped: later pairs are not compared with a pair that has one of these faults.
        """
        faults = set(measured.faults)
        if "unreadable" in faults:
            return ["unreadable"]
        # A hash takes less memory than the text.
        text = hashlib.sha256(instruction.encode(errors="replace")).digest()[:8]
        width = -(-128 // NUM_BANDS)
        bands = [(text, n, measured.bits >> n * width & (1 << width) - 1) for n in range(NUM_BANDS)]
        alike = (other for band in bands for other in self._looks.get(band, ()))
        if (measured.digest, text) in self._seen:
            faults.add("duplicate")
        elif any(is_near(measured, other) for other in alike):
            faults.add("near_duplicate")
        if "duplicate" not in faults and not any(fault in dropped for fault in faults):
            self._seen.add((measured.digest, text))
            for band in bands:
                if len(looks := self._looks.setdefault(band, [])) < MAX_CANDIDATES:
                    looks.append(measured)
        return [name for name in FAULTS if name in faults]


def is_near(one: Measured, other: Measured) -> bool:
    """Whether two pairs look alike."""
    if (one.bits ^ other.bits).bit_count() > MAX_BITS:
        return False
    change = one.colours.astype(np.int16) - other.colours
    return bool(np.abs(change).max() <= MAX_COLOUR)
