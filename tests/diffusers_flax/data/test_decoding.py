"""Damaged and odd JPEGs are judged alike by the loader, --pairs, edit_cli.py, evaluate_edits.py."""

import io

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps

from diffusers_flax.data.images import decode_image, encoded_size, load_image
from diffusers_flax.data.pairs import check_pair
from diffusers_flax.data.shards import Pair
from diffusers_flax.evaluation.held_out import HeldOutPair

END = b"\xff\xd9"  # marker at the end of a JPEG


def jpeg(mode="RGB", orientation=1, size=(56, 40)):
    """A smooth image as JPEG."""
    small = np.random.default_rng(0).integers(0, 256, (4, 4, 3), np.uint8)
    image = Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).convert(mode)
    exif = image.getexif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90, **({"exif": exif} if orientation != 1 else {}))
    return file.getvalue()


def change(data, marker, offset, new):
    """Replace bytes at an offset from the first marker of a kind."""
    start = data.index(bytes([0xFF, marker])) + offset
    return data[:start] + new + data[start + len(new) :]


HARMLESS = {  # each with all of its pixels
    "JFIF 2.1": lambda data: change(data, 0xE0, 9, b"\2\1"),
    "JFIF 0.2": lambda data: change(data, 0xE0, 9, b"\0\2"),
    # Start of scan: length, number n of components, two bytes for each, then Ss and Se.
    "SOS Se 0": lambda data: change(data, 0xDA, 6 + 2 * data[data.index(b"\xff\xda") + 4], b"\0"),
    "stray bytes": lambda data: data.removesuffix(END) + bytes(range(1, 9)) + END,
}
LOSSES = {  # and what libjpeg says
    "no end": (lambda data: data.removesuffix(END), "Premature end of JPEG file"),
    "cut": (lambda data: data[:-60], "Premature end of JPEG file"),
    "cut, with an end": (lambda data: data[:-60] + END, "premature end of data segment"),
    "bad codes": (lambda data: data[:-80] + b"\xff\0" * 20 + data[-40:], "bad Huffman code"),
}


def by_pillow(data):
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


@pytest.mark.parametrize("kind", [{}, {"mode": "L"}, {"mode": "CMYK"}, {"orientation": 6}], ids=str)
@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_warnings_give_pillows_pixels(tmp_path, name, kind):
    whole = jpeg(**kind)
    if "JFIF" in name and b"JFIF" not in whole:
        return  # Pillow writes CMYK without the header that this test changes
    data = HARMLESS[name](whole)
    if not kind:
        with pytest.raises(ValueError, match=r"unknown JFIF|Invalid SOS|extraneous bytes before"):
            simplejpeg.decode_jpeg(data)
    pixels = by_pillow(data)
    np.testing.assert_array_equal(pixels, by_pillow(whole))
    np.testing.assert_array_equal(decode_image(data), pixels)
    np.testing.assert_array_equal(decode_image(data, min_shape=(8, 8)), pixels)
    assert encoded_size(data) == pixels.shape[1::-1]
    path = tmp_path / "a.jpg"
    path.write_bytes(data)
    np.testing.assert_array_equal(np.asarray(load_image(path)), pixels)


@pytest.mark.parametrize("kind", [{}, {"mode": "CMYK"}, {"orientation": 6}], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_missing_pixels_are_refused_everywhere(tmp_path, name, kind):
    spoil, message = LOSSES[name]
    data = spoil(jpeg(**kind))
    for side in (0, 8):
        with pytest.raises(ValueError, match=message):
            decode_image(data, (side, side))
    path = tmp_path / "a.jpg"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"a\.jpg cannot be read as an image: .*{message}"):
        load_image(path)
    with pytest.raises(ValueError, match=message):
        check_pair(Pair(data, data, "x"))
    with pytest.raises(ValueError, match=message):
        HeldOutPair(0, "a.jpg", "x", data).decoded("original")
