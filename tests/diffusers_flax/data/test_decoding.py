"""Damaged and odd JPEGs are judged alike by the loader, --pairs, edit_cli.py, evaluate_edits.py."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import simplejpeg
from PIL import Image, ImageOps
from shards import open_pairs

from diffusers_flax.data.images import crop_image, decode_image, encoded_size, load_image
from diffusers_flax.data.pairs import check_pair, write_pairs
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
        check_pair(Pair(data, data, "x"), ("a", "b", "c"))
    with pytest.raises(ValueError, match=message):
        HeldOutPair(0, "a.jpg", "x", data).decoded("original")


@pytest.mark.parametrize("header", ["JFIF 2.1", "JFIF 0.2", "SOS Se 0"])
@pytest.mark.parametrize("name", LOSSES)
def test_an_odd_header_does_not_hide_missing_pixels(header, name):
    spoil, message = LOSSES[name]
    with pytest.raises(ValueError, match=message):
        decode_image(spoil(HARMLESS[header](jpeg())))


def test_warnings_do_not_count_as_damage(tmp_path, caplog):
    """--pairs takes such files; the loader yields them and names what is damaged only."""
    (tmp_path / "edited.jpg").write_bytes(jpeg())
    rows = []
    for name, change_it in HARMLESS.items():
        (tmp_path / f"{name}.jpg").write_bytes(change_it(jpeg()))
        rows.append({"input": f"{name}.jpg", "edit": name, "edited": "edited.jpg"})
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    write_pairs(file, tmp_path / "data")

    shard = tmp_path / "data" / "train-00000-of-00001.parquet"
    table = pq.read_table(shard)
    damaged = table.to_pylist()[0]
    damaged["original_image"]["bytes"] = jpeg()[:-60] + END
    damaged["edit_prompt"] = "damaged"
    pq.write_table(pa.concat_tables([table, pa.Table.from_pylist([damaged], table.schema)]), shard)
    options = {"resolution": 8, "random_crop": False, "random_flip": False, "max_bad_fraction": 1}
    dataset = open_pairs(tmp_path / "data", batch_size=5, **options)
    (batch,) = dataset
    assert set(batch["edit_prompt"]) == set(HARMLESS)
    assert dataset.num_bad == 1 and list(dataset.bad_rows) == [(shard.name, 4)]
    expected = crop_image(by_pillow(jpeg()), (8, 8))
    for pixels in batch["original_pixel_values"]:
        assert np.abs(pixels.astype(int) - expected).max() <= 12  # scaled while decoding
