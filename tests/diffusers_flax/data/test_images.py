"""Image files: formats, EXIF orientation, scaling and cropping, files that cannot be read."""

import io
import struct
import zlib
from collections import Counter

import numpy as np
import pytest
import skimage.data
from helpers import slow
from PIL import Image, ImageOps
from shards import (
    EDITED,
    ORIGINAL,
    encode,
    open_pairs,
    smooth,
    write_shard,
)

from diffusers_flax.data.images import crop_image, decode_image, encoded_size


@pytest.mark.parametrize("resample", ["lanczos", *slow("bicubic")])
@pytest.mark.parametrize("image_format", ["PNG", "JPEG"])
@pytest.mark.parametrize("height, width", [(50, 70), (16, 20), *slow((32, 32), (61, 33))])
def test_pixels_are_pillows(tmp_path, resample, image_format, height, width):
    first, second = (encode(smooth(s, height, width), image_format) for s in (0, 1))
    write_shard(tmp_path / "a.parquet", [(first, "x", second)])
    dataset = open_pairs(
        tmp_path, batch_size=1, resolution=32, resample=resample, random_crop=False,
        random_flip=False,
    )  # fmt: skip
    (batch,) = dataset
    for data, pixels in ((first, batch[ORIGINAL]), (second, batch[EDITED])):
        image = Image.open(io.BytesIO(data))
        if height < width:
            size = (round(32 * width / height), 32)
        else:
            size = (32, round(32 * height / width))
        image = image.resize(size, getattr(Image.Resampling, resample.upper()))
        left, top = (size[0] - 31) // 2, (size[1] - 31) // 2
        assert pixels.shape == (1, 32, 32, 3) and pixels.dtype == np.uint8
        np.testing.assert_array_equal(
            pixels[0], np.asarray(image.crop((left, top, left + 32, top + 32)))
        )


def photograph(side, quality=100):
    """A square crop of a photograph as JPEG."""
    image = Image.fromarray(skimage.data.astronaut()).resize((side, side), Image.Resampling.LANCZOS)
    return encode(image, "JPEG", quality=quality)


@pytest.mark.parametrize("side", [600, *slow(512)])
def test_scaling_while_decoding_is_close_to_the_filter(tmp_path, side):
    data = photograph(side)
    write_shard(tmp_path / "a.parquet", [(data, "x", data)])
    options = {"batch_size": 1, "resolution": 256, "random_crop": False, "random_flip": False}
    (fast,) = open_pairs(tmp_path, **options)
    (exact,) = open_pairs(tmp_path, resample="lanczos", **options)
    difference = fast[ORIGINAL].astype(float) - exact[ORIGINAL]
    psnr = 10 * np.log10(255**2 / np.mean(difference**2))
    assert 35 < psnr < 60  # close, but not the same algorithm
    flipped = open_pairs(tmp_path, batch_size=1, random_crop=False)
    for epoch in range(20):  # both flips, decoded into the batch
        flipped.set_epoch(epoch)
        (batch,) = flipped
        for name in (ORIGINAL, EDITED):
            either = (fast[name], fast[name][:, :, ::-1])
            assert any(np.array_equal(batch[name], pixels) for pixels in either)


def sixteen_bit_png(values):
    """A PNG of 16 bits a value, which Pillow does not write; values: (H, W, C)."""
    height, width, channels = values.shape

    def chunk(name, data):
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    colour_type = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def test_every_kind_of_image():
    pixels = smooth(3, 20, 28)
    image = Image.fromarray(pixels)
    grey = np.asarray(image.convert("L"))
    turned = image.getexif()
    turned[0x0112] = 6  # rotated by 90 degrees
    alpha = image.copy()
    alpha.putalpha(128)
    palette = image.quantize(64)
    sixteen = grey.astype(np.uint16) * 257
    see_through = encode(palette, transparency=bytes(range(64)))
    cmyk = encode(image.convert("CMYK"), "JPEG", quality=95)
    adobe = cmyk.index(b"\xff\xee")
    unmarked = cmyk[:adobe] + cmyk[adobe + 2 + int.from_bytes(cmyk[adobe + 2 : adobe + 4]) :]
    flat = Image.new("RGB", (8, 8), (200, 40, 90))
    wide = pixels.astype(np.uint16) * 257
    opaque = np.full((*grey.shape, 1), 65535, np.uint16)
    bits = np.asarray(image.convert("1").convert("RGB"))
    more = {"save_all": True, "append_images": [Image.fromarray(255 - pixels)]}
    first = Image.open(io.BytesIO(encode(image, "GIF"))).convert("RGB")

    def on_white(input_image):
        rgba = np.asarray(input_image.convert("RGBA"), np.float64)
        share = rgba[..., 3:] / 255
        return np.rint(share * rgba[..., :3] + (1 - share) * 255).astype(np.uint8)

    exact = [
        (encode(pixels), pixels),
        (encode(pixels, "WEBP", lossless=True), pixels),
        (encode(grey), np.stack([grey] * 3, -1)),
        (encode(sixteen), np.stack([grey] * 3, -1)),
        (encode(alpha), on_white(alpha)),
        (encode(palette), np.asarray(palette.convert("RGB"))),
        (see_through, on_white(Image.open(io.BytesIO(see_through)))),
        (encode(pixels, exif=turned), np.rot90(pixels, -1)),
        (encode(pixels, "TIFF"), pixels),
        (cmyk, np.asarray(Image.open(io.BytesIO(cmyk)).convert("RGB"))),
        (unmarked, np.asarray(Image.open(io.BytesIO(cmyk)).convert("RGB"))),
        (encode(flat.convert("CMYK"), "JPEG", quality=100), np.asarray(flat)),
        (encode(image.convert("CMYK"), "TIFF"), pixels),
        (encode(sixteen, "TIFF"), np.stack([grey] * 3, -1)),
        (sixteen_bit_png(wide), pixels),
        (sixteen_bit_png(np.concatenate([wide, opaque], -1)), pixels),
        (sixteen_bit_png(np.concatenate([wide[..., :1], opaque], -1)), pixels[..., [0] * 3]),
        (encode(image.convert("1")), bits),
        (encode(image.convert("1"), "TIFF"), bits),
        (encode(image, "GIF", **more), np.asarray(first)),
        (encode(image, "PNG", **more), pixels),  # APNG
        (encode(image, "WEBP", lossless=True, **more), pixels),
        (encode(image, "TIFF", **more), pixels),
    ]
    blended = (encode(alpha), see_through)  # Pillow may round differently
    for data, expected in exact:
        decoded = decode_image(data)
        assert decoded.dtype == np.uint8
        np.testing.assert_allclose(decoded.astype(int), expected, atol=data in blended)
    xmp = b"""<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF
        xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description
        xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>"""
    assert decode_image(encode(image, "JPEG", xmp=xmp)).shape == (28, 20, 3)
    for source, options in [
        (image, {"exif": turned}), (image, {"xmp": xmp}), (image, {"progressive": True}),
        (grey, {}),
    ]:  # fmt: skip
        data = encode(source, "JPEG", **options)
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
        np.testing.assert_array_equal(decode_image(data), np.asarray(expected))


def test_images_without_a_known_range_are_refused():
    for mode, value in (("I", 200), ("F", 0.5)):
        data = encode(Image.new(mode, (8, 8), value), "TIFF")
        with pytest.raises(ValueError, match=f"image mode {mode} has"):
            decode_image(data)
    grey = np.arange(64, dtype=np.int32).reshape(8, 8)
    decoded = decode_image(encode(Image.fromarray(grey * 257), "TIFF"))  # of mode I
    np.testing.assert_array_equal(decoded, np.stack([grey] * 3, axis=-1))
    with pytest.raises(
        ValueError, match=r"1x400 pixels are too narrow: .* at most 20 times the other; crop"
    ):
        crop_image(np.zeros((400, 1, 3), np.uint8), (8, 8))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "AVIF", "WEBP"])
@pytest.mark.parametrize("orientation", [6, *slow(1, 3, 8)])
def test_encoded_size_is_that_of_the_upright_image(kind, orientation):
    image = Image.fromarray(smooth(0, 40, 64))
    exif = image.getexif()
    exif[0x0112] = orientation
    data = encode(image, kind, exif=exif)
    assert encoded_size(data) == decode_image(data).shape[1::-1]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
def test_truncated_image_is_refused(kind):
    data = encode(Image.fromarray(smooth(0, 60, 60)), kind)
    decode_image(data)
    # The last 20 bytes of a PNG and the last bytes of a GIF hold no pixels.
    for end in (len(data) // 3, len(data) - (24 if kind in ("PNG", "GIF") else 2)):
        with pytest.raises(ValueError, match=r"\w"):
            decode_image(data[:end])
        with pytest.raises(ValueError, match=r"\w"):
            decode_image(data[:end], min_shape=(8, 8))


def test_pair_is_cropped_and_flipped_alike(tmp_path):
    """The time ids say where: in the mirrored image if it was mirrored."""
    rows = []
    for n in range(40):
        pixels = smooth(n, 24 + n % 3 * 8, 32)
        rows.append((encode(pixels), str(n), encode(255 - pixels)))
    write_shard(tmp_path / "a.parquet", rows)
    dataset = open_pairs(tmp_path, batch_size=8, resolution=24, micro_conditioning=True)
    flips, places = Counter(), set()
    for batch in dataset:
        # Resampling rounds each image to integers separately.
        total = batch[ORIGINAL].astype(int) + batch[EDITED]
        assert np.abs(total - 255).max() <= 1
        columns = batch[ORIGINAL], batch["edit_prompt"], batch["time_ids"]
        for pixels, prompt, time_ids in zip(*columns):
            image = Image.open(io.BytesIO(rows[int(prompt)][2]))
            size = image.height, image.width
            image = Image.open(io.BytesIO(rows[int(prompt)][0]))
            height, width = (round(s * 24 / min(image.size)) for s in (image.height, image.width))
            whole = np.asarray(image.resize((width, height), Image.Resampling.LANCZOS))
            matches = [
                (top, left, flip)
                for top in range(height - 23)
                for left in range(width - 23)
                for flip in (False, True)
                if np.array_equal(
                    whole[top : top + 24, left : left + 24][:, :: -1 if flip else 1], pixels
                )
            ]
            assert len(matches) == 1
            flips[matches[0][2]] += 1
            places.add((height, width, *matches[0][:2]))
            top, left, flip = matches[0]
            left = width - 24 - left if flip else left
            assert time_ids.tolist() == [*size, top, left, 24, 24]
    assert flips.total() == 40 and 10 <= flips[True] <= 30
    assert len({left for height, width, _, left in places if width > height}) >= 5


def test_crop_reaches_both_ends():
    strip = Image.fromarray(np.repeat(np.arange(10, dtype=np.uint8)[None, :, None], 3, 2))
    strip = np.asarray(strip.resize((40, 4), Image.Resampling.NEAREST))
    first_columns = {
        int(crop_image(strip, (4, 4), crop=x)[0, 0, 0]) for x in np.linspace(0, 0.9999, 100)
    }
    assert first_columns == set(range(10))
    assert crop_image(strip, (4, 4), crop=0.9999)[0, -1, 0] == 9
