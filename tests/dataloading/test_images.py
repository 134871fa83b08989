"""Image files: EXIF orientation, files that cannot be read."""

import numpy as np
import pytest
from PIL import ExifTags, Image

from dataloading.images import load_image

TURNED = [  # by EXIF orientation, from 1: how the pixels of a file are to be seen
    lambda x: x,
    lambda x: x[:, ::-1],
    lambda x: x[::-1, ::-1],
    lambda x: x[::-1],
    lambda x: x.swapaxes(0, 1),
    lambda x: np.rot90(x, -1),
    lambda x: x[::-1, ::-1].swapaxes(0, 1),
    lambda x: np.rot90(x),
]


def test_images_are_turned_as_exif_says(tmp_path):
    pixels = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)
    for orientation, turned in enumerate(TURNED, start=1):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
        np.testing.assert_array_equal(np.asarray(load_image(tmp_path / "a.png")), turned(pixels))


def test_files_that_are_no_image_are_named(tmp_path, monkeypatch):
    """Also files of which Pillow can read only the header."""
    whole = tmp_path / "a.jpg"
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    Image.fromarray(pixels).save(whole)
    half = whole.read_bytes()[: whole.stat().st_size // 2]
    damaged = {
        "text.png": (b"no image", "cannot be read as an image: no known image format"),
        "empty.png": (b"", "cannot be read as an image: no known image format"),
        "cut.jpg": (half, "cannot be read as an image: Premature end"),
        "bad.ppm": (b"P6 1x 1 255 123", "cannot be read as an image: "),
    }
    for name, (content, _) in damaged.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    cases = {name: message for name, (_, message) in damaged.items()}
    cases |= {"folder": "cannot be read as an image", "none.png": "does not exist; check the path"}
    for name, message in cases.items():
        with pytest.raises(ValueError, match=f"^{tmp_path / name} {message}"):
            load_image(tmp_path / name)
    (tmp_path / "large.pgm").write_bytes(b"P5 15000 10001 255\n")
    with pytest.raises(ValueError, match=r"large\.pgm cannot be read as an image: 15000x10001 pix"):
        load_image(tmp_path / "large.pgm")
