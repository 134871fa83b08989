"""diffusers_flax/images.py: images and masks of every mode of Pillow, formats, the limit."""

import io
import struct
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from diffusers_flax.data.images import decode_image, encoded_size
from diffusers_flax.images import (
    MAX_PIXELS,
    READ_FORMATS,
    image_mark,
    mask_values,
    open_image,
    prepare_images,
    prepare_masks,
    save_image,
    to_rgb,
)
from diffusers_flax.pipelines.controlnet import ControlNetTextToImage

WITHOUT_ALPHA = (
    *("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"),
    *("I", "I;16", "I;16L", "I;16B"),
)
WITH_ALPHA = (
    "LA",
    "La",
    "PA",
    "RGBA",
    "RGBa",
    "P, one colour",
    "P, RGBA",
    "L, one grey",
)
TOLERANCE = {"YCbCr": 2, "LAB": 2}  # of 255


def image_of(mode, grey, opaque):
    """A PIL image of grey values, uint8 (H, W), transparent where not opaque.

    The values of transparent pixels are those of no other pixel.
    """
    size, alpha = grey.shape[::-1], np.where(opaque, 255, 0).astype(np.uint8)
    image = Image.fromarray(grey)
    kind, _, rest = mode.partition(", ")
    if kind.startswith("I"):
        wide = grey.astype({"I": "<i4", "I;16B": ">u2"}.get(kind, "<u2")) * 257
        image = Image.frombytes(kind, size, wide.tobytes())
    elif kind == "P":
        image = Image.fromarray(grey)
        image.putpalette([x for i in range(256) for x in (i, i, i)])
        if rest == "RGBA":
            clear = set(grey[~opaque].tolist())
            entries = [x for i in range(256) for x in (i, i, i, 0 if i in clear else 255)]
            image.putpalette(entries, "RGBA")
    elif mode in ("LA", "La"):
        image = Image.merge("LA", (image, Image.fromarray(alpha))).convert(mode)
    elif mode == "PA":
        image = image.convert("PA")
        image.putalpha(Image.fromarray(alpha))
    elif mode in ("RGBA", "RGBa"):
        image = Image.merge("RGBA", (image,) * 3 + (Image.fromarray(alpha),)).convert(mode)
    else:
        image = image.convert("RGB").convert(kind)
    if rest.startswith("one"):
        (clear,) = set(grey[~opaque].tolist())
        image.info["transparency"] = clear
    assert image.mode == kind
    return image


@pytest.mark.parametrize("mode", [*WITHOUT_ALPHA, *WITH_ALPHA])
def test_images_of_any_mode(mode):
    """As arrays, and as conditions of a ControlNet, also where these are scaled."""
    grey, opaque = np.full((18, 27), 90, np.uint8), np.ones((18, 27), bool)
    grey[:9, :13], grey[9:, 13:], opaque[9:, 13:] = 180, 30, False
    expected = np.where(opaque | (mode in WITHOUT_ALPHA), grey, 255)
    if mode == "1":
        grey = np.where(grey > 128, 255, 0).astype(np.uint8)
        expected = grey
    image, atol = image_of(mode, grey, opaque), TOLERANCE.get(mode, 0)
    found = np.asarray(to_rgb(image), np.int16)
    np.testing.assert_allclose(found, np.stack([expected] * 3, -1), atol=atol)
    np.testing.assert_allclose(
        prepare_images(image), 2 * found.transpose(2, 0, 1)[None] / 255 - 1, atol=1e-6
    )
    conditions = ControlNetTextToImage._prepare_control_images(
        SimpleNamespace(vae_scale_factor=8), image
    )
    scaled = Image.fromarray(expected.astype(np.uint8)).resize((24, 16), Image.Resampling.LANCZOS)
    expected = np.stack([scaled] * 3)[None] / 255
    np.testing.assert_allclose(conditions, expected, atol=(atol + 0.01) / 255)


@pytest.mark.parametrize("mode", [*WITHOUT_ALPHA, *WITH_ALPHA])
def test_masks_of_any_mode(mode):
    """Drawn in white and black, and as white paint on a layer that is empty elsewhere."""
    white = np.arange(12) >= np.full((8, 1), 7)
    mask = image_of(mode, np.where(white, 255, 0).astype(np.uint8), white)
    np.testing.assert_array_equal(mask_values(mask) >= 128, white)
    np.testing.assert_array_equal(prepare_masks(mask), white[None, None])


def layer(color, where, alpha=255, under=(9, 80, 200)):
    """An RGBA image: a color, or an image, uint8 (H, W, 3), where painted; elsewhere alpha 0."""
    pixels = np.where(where[..., None], np.uint8(color), np.uint8(under))
    return Image.fromarray(np.dstack([pixels, np.where(where, np.uint8(alpha), np.uint8(0))]))


PHOTOGRAPH = np.random.default_rng(0).integers(128, 256, (32, 40, 3), np.uint8)
PAINTED = np.hypot(*np.mgrid[-16:16, -20:20]) < 10  # bool (32, 40)


@pytest.mark.parametrize("alpha", [255, 128, 100, 20])
@pytest.mark.parametrize("color", [(255, 255, 255), (255, 0, 0), (0, 0, 0), (90, 90, 90)])
def test_paint_of_any_color_and_opacity_may_change(color, alpha):
    np.testing.assert_array_equal(mask_values(layer(color, PAINTED, alpha)), 255 * PAINTED)
    soft = np.where(PAINTED, np.linspace(alpha / 2, alpha, 40).round(), 0).astype(np.uint8)
    assert (mask_values(layer(color, PAINTED, soft)) == 255 * PAINTED).mean() > 0.99


@pytest.mark.parametrize("is_grey", [False, True])
@pytest.mark.parametrize("dark", [0, 128])
def test_holes_of_photographs_may_change(dark, is_grey):
    photograph = PHOTOGRAPH - np.uint8(dark)
    photograph = photograph[..., :1] if is_grey else photograph
    hole = layer(np.broadcast_to(photograph, (32, 40, 3)), ~PAINTED)
    np.testing.assert_array_equal(mask_values(hole), 255 * PAINTED)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (layer((0, 0, 0), PAINTED & False), "nothing is painted"),
        (layer((200, 200, 205), ~PAINTED), "may be paint or an image with a hole"),
        (Image.fromarray(PHOTOGRAPH * np.uint8([1, 0, 0])), "colors and no transparent pixels"),
    ],
)
def test_masks_that_cannot_be_told_apart_are_refused(mask, message):
    with pytest.raises(ValueError, match=f"{message}.*white where .* may change and black"):
        mask_values(mask)


@pytest.mark.parametrize("function", [prepare_images, prepare_masks])
def test_values_without_a_known_range_are_refused(function):
    ramp = np.linspace(0, 1, 16).reshape(4, 4)
    for values in (ramp.astype(np.float32), np.int32(ramp * 1e6)):
        with pytest.raises(ValueError, match="convert it to mode L"):
            function(Image.fromarray(values))


@pytest.mark.parametrize("name", READ_FORMATS)
def test_every_format_is_read(name):
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:, 16:] = 255
    file = io.BytesIO()
    image = Image.fromarray(pixels).resize((32, 32), Image.Resampling.NEAREST)
    image.save(file, name, lossless=True, quality=100)
    assert open_image(file).format == name
    assert encoded_size(file.getvalue()) == (32, 32)
    np.testing.assert_allclose(decode_image(file.getvalue()), np.asarray(image), atol=8)


@pytest.mark.parametrize("data", [b"", b"<html>not found</html>", b"%!PS-Adobe-3.0 EPSF-3.0\n"])
def test_other_formats_are_refused(data):
    message = rf"^no known image format \({len(data)} bytes\); save it as PNG or JPEG$"
    with pytest.raises(ValueError, match=message):
        open_image(io.BytesIO(data))


def header(name, width, height):
    """The beginning of a file of this size; the pixels are missing."""
    file = io.BytesIO()
    Image.new("L", (8, 8)).save(file, name)
    data, at = bytearray(file.getvalue()), {"BMP": 18, "PNG": 16}[name]
    data[at : at + 8] = struct.pack({"BMP": "<ii", "PNG": ">II"}[name], width, height)
    if name == "PNG":
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


@pytest.mark.parametrize("name", ["BMP", "PNG"])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_one_limit_on_pixels(name, tmp_path):
    large, too_large = header(name, 10_000, 8_000), header(name, 15_000, 10_001)
    assert open_image(io.BytesIO(large)).size == (10_000, 8_000)
    assert 10_000 * 8_000 < MAX_PIXELS < 15_000 * 10_001
    assert encoded_size(large) == (10_000, 8_000)
    with pytest.raises(
        ValueError, match=r"^15000x10001 pixels are more than 150 megapixels; scale"
    ):
        decode_image(too_large)
    (tmp_path / "a.png").write_bytes(large)
    assert image_mark(tmp_path / "a.png") == (None, None)


def test_the_mark_of_a_saved_image(tmp_path):
    for name in ("a.png", "a.jpg"):
        save_image(np.zeros((8, 8, 3)), tmp_path / name, "a program", "0" * 32)
        assert image_mark(tmp_path / name) == ("a program", "0" * 32)
