"""What may be wrong with a pair besides damaged images: shapes, frames, repetitions, no change.

    finder = FaultFinder()
    finder.find(measure(original, edited), "make it red")  # ["border", "unchanged"]

Nothing is changed here; parquet_processing.py --report counts faults, --drop leaves pairs out.
"""

import hashlib
import math
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
    colours: bytes = b""  # uint8 (2, 16, 16, 3): mean RGB of cells of both images


def frame_sides(pixels: np.ndarray) -> tuple[float, float]:
    """The widths of bars at the top and the bottom, as shares of the height.

    A bar is of the corner's colour and ends in a straight edge.

    Args:
        pixels: uint8 (h, w, 3).
    """
    widths = []
    for turned in (pixels, pixels[::-1]):
        away = np.abs(turned.astype(np.int16) - turned[0, 0]).max(-1) > SAME_COLOUR
        shares = away.mean(1)
        inside = np.flatnonzero(shares > 1 - SHARP_EDGE)
        outside = np.flatnonzero(shares > 0.02)
        is_sharp = len(inside) and inside[0] - outside[0] <= 1 and shares[inside[0] :][:2].max()
        sharp = is_sharp and is_sharp >= SHARP_EDGE
        widths.append(outside[0] / len(shares) if sharp else 0.0)
    return tuple(widths)


def has_border(pixels: np.ndarray) -> bool:
    """Whether an image has bars of one colour on two opposite sides."""
    turned = (pixels, pixels.transpose(1, 0, 2))
    return any(min(frame_sides(view)) >= MIN_FRAME for view in turned)


def difference_hash(image: Image.Image) -> int:
    """64 bits: whether each of 8x8 cells is brighter than its left neighbour."""
    grey = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BOX), np.int16)
    return int.from_bytes(np.packbits(grey[:, 1:] > grey[:, :-1]).tobytes())


def measure(original: bytes, edited: bytes) -> Measured:
    """Measure a pair; may run in a thread.

    Args:
        original, edited: encoded images.
    """
    try:
        pixels = [decode_image(data, (CHANGE_SIDE, CHANGE_SIDE)) for data in (original, edited)]
        (w, h), (W, H) = map(encoded_size, (original, edited))
    except ValueError:
        return Measured(("unreadable",))
    faults = []
    if abs(math.log(w * H / (h * W))) > MAX_ASPECT_ERROR:
        faults.append("shape")
    images = [Image.fromarray(array) for array in pixels]
    small = [image.resize((SIDE, SIDE), Image.Resampling.BOX) for image in images]
    if any(has_border(np.asarray(image)) for image in small):
        faults.append("border")
    if is_unchanged(*images):
        faults.append("unchanged")
    bits = difference_hash(small[0]) << 64 | difference_hash(small[1])
    looks = [image.resize((LOOK_SIDE, LOOK_SIDE), Image.Resampling.BOX) for image in small]
    digest = hashlib.sha256(hashlib.sha256(original).digest() + edited).digest()[:16]
    return Measured(tuple(faults), digest, bits, b"".join(image.tobytes() for image in looks))


def is_unchanged(original: Image.Image, edited: Image.Image) -> bool:
    """Whether no cell of an image changes by more than recompression changes it."""
    size = (CHANGE_SIDE, CHANGE_SIDE)
    cells = [
        np.asarray(image.resize(size, Image.Resampling.BOX).reduce(CELL), np.int16)
        for image in (original, edited)
    ]
    change = np.abs(cells[0] - cells[1])
    return change.max() <= MOST_CHANGE and change.mean() <= MEAN_CHANGE


class FaultFinder:
    """Judges pairs one after the other, and compares them with those before."""

    def __init__(self):
        self._seen: set[bytes] = set()  # hashes of images and instruction
        self._looks: dict[bytes, list[Measured]] = {}  # by the instruction with a band of the bits

    def find(self, measured: Measured, instruction: str) -> list[str]:
        """The faults of a pair, in the order of FAULTS; see remember.

        Args:
            measured: of the images.
            instruction: or several as one text.
        """
        faults = set(measured.faults)
        if "unreadable" not in faults:
            text = self._digest(instruction)
            if measured.digest + text in self._seen:
                faults.add("duplicate")
            elif any(
                is_near(measured, other)
                for band in self._bands(measured, text)
                for other in self._looks.get(band, ())
            ):
                faults.add("near_duplicate")
        return [name for name in FAULTS if name in faults]

    def remember(self, measured: Measured, instruction: str) -> None:
        """Compare later pairs with this one; arguments as for find."""
        text = self._digest(instruction)
        if "unreadable" in measured.faults or measured.digest + text in self._seen:
            return
        self._seen.add(measured.digest + text)
        for band in self._bands(measured, text):
            alike = self._looks.setdefault(band, [])
            if len(alike) < MAX_CANDIDATES:
                alike.append(measured)

    @staticmethod
    def _digest(instruction: str) -> bytes:
        return hashlib.sha256(instruction.encode(errors="replace")).digest()[:8]

    @staticmethod
    def _bands(measured: Measured, text: bytes) -> list[bytes]:
        """The instruction with each band of the bits."""
        width = -(-128 // NUM_BANDS)
        parts = [measured.bits >> n * width & (1 << width) - 1 for n in range(NUM_BANDS)]
        return [text + bytes([n]) + part.to_bytes(3) for n, part in enumerate(parts)]


def is_near(one: Measured, other: Measured) -> bool:
    """Whether two pairs look alike."""
    colours = [np.frombuffer(x.colours, np.uint8).astype(np.int16) for x in (one, other)]
    is_alike = np.abs(colours[0] - colours[1]).max() <= MAX_COLOUR
    return bool(is_alike) and (one.bits ^ other.bits).bit_count() <= MAX_BITS
