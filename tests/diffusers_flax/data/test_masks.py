"""Masks of edits: conventions, crops with their pairs, masks that cannot be used."""

import io
import itertools
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from known_sets import SCHEMAS, half_mask, known_rows, png, write_known
from PIL import Image
from shards import open_mixture, open_pairs

import parquet_processing
from diffusers_flax.data.images import decode_mask

ULTRA, MAGIC = "BleachNick/UltraEdit", "osunlp/MagicBrush"


def masks_of(kind):
    left = np.zeros((6, 8), np.uint8)
    left[:, :4] = 255
    white, hole = (
        Image.fromarray(left),
        Image.fromarray(np.arange(144, dtype=np.uint8).reshape(6, 8, 3)),
    )
    hole.putalpha(Image.fromarray(255 - left))
    drawing = Image.new("RGBA", (8, 6))
    drawing.paste("white", (0, 0, 4, 6))
    turned = white.rotate(90, expand=True)
    exif = turned.getexif()
    exif[0x0112] = 6
    file = io.BytesIO()
    turned.save(file, "PNG", exif=exif)
    jpeg = io.BytesIO()
    white.resize((64, 48), Image.Resampling.NEAREST).save(jpeg, "JPEG", quality=100)
    return {
        "white": png(white),
        "RGB": png(white.convert("RGB")),
        "1 bit": png(white.convert("1")),
        "16 bits": png(Image.fromarray(left.astype(np.uint16) * 257)),
        "palette": png(white.convert("P")),
        "transparent, as in MagicBrush": png(hole),
        "opaque alpha": png(Image.merge("RGBA", [white] * 3 + [Image.new("L", (8, 6), 255)])),
        "white on nothing": png(drawing),
        "turned": file.getvalue(),
        "JPEG": jpeg.getvalue(),
    }[kind]


KINDS = (
    *("white", "RGB", "1 bit", "16 bits", "palette", "transparent, as in MagicBrush"),
    *("opaque alpha", "white on nothing", "turned", "JPEG"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_convention_of_masks(kind):
    mask = decode_mask(masks_of(kind))
    assert mask.dtype == np.uint8
    H, W = mask.shape
    assert (mask[:, : W // 2] >= 250).all() and (mask[:, W // 2 :] <= 5).all()
    if kind != "JPEG":
        assert (H, W) == (6, 8)


def write_pairs_with_masks(folder, count=24, size=(24, 40)):
    """Pairs whose edited image is white exactly where the mask is."""
    rng, rows = np.random.default_rng(0), []
    for n in range(count):
        small = np.kron(rng.integers(0, 2, (3, 5)), np.ones((8, 8))) * 255
        mask = small.astype(np.uint8)[: size[0], : size[1]]
        rgb = np.repeat(mask[..., None], 3, -1)
        rows.append({"original_image": png(rgb), "edited_image": png(rgb), "edit_prompt": str(n)})
        rows[-1]["mask_image"] = None if n % 6 == 0 else png(mask)
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
    return folder


def test_masks_are_cropped_and_flipped_with_their_pairs(tmp_path):
    folder = write_pairs_with_masks(tmp_path / "data")
    dataset = open_pairs(folder, batch_size=8, resolution=16, mask="")
    for _ in range(2):
        for batch in dataset:
            assert batch["mask"].shape == (8, 16, 16) and batch["mask"].dtype == np.uint8
            for mask, edited, prompt in zip(
                batch["mask"], batch["edited_pixel_values"], batch["edit_prompt"]
            ):
                np.testing.assert_array_equal(mask, 0 if int(prompt) % 6 == 0 else edited[..., 0])
    wide = open_pairs(folder, batch_size=8, resolution=16, mask="", sizes=((24, 16), (16, 16)))
    for batch in wide:
        assert batch["mask"].shape == (8, 16, 24)
        with_mask = [int(prompt) % 6 != 0 for prompt in batch["edit_prompt"]]
        edited = batch["edited_pixel_values"][with_mask, ..., 0]
        np.testing.assert_array_equal(batch["mask"][with_mask], edited)
    identity = dataset.state_dict()
    assert identity["columns"] == ["original_image, edited_image, edit_prompt, mask_image"]
    plain = open_pairs(folder, batch_size=8, resolution=16)
    assert "mask" not in next(iter(plain))
    with pytest.raises(ValueError, match=r"columns was .*, mask_image"):
        plain.load_state_dict(identity)


def test_sets_with_and_without_masks(tmp_path):
    """In a mixture the pairs of a set without masks weigh the same everywhere."""
    names = (ULTRA, "fusing/instructpix2pix-1000-samples", MAGIC)
    folders = [write_known(tmp_path / str(n), name) for n, name in enumerate(names)]
    options = dict(batch_size=8, resolution=8, random_crop=False, random_flip=False)
    mixture = open_mixture(folders, (1, 1, 1), mask="", **options)
    shares = Counter()
    for batch in itertools.islice(mixture, 20):
        assert batch["mask"].shape == (8, 8, 8)
        for mask in batch["mask"]:
            assert (mask[:, 4:] < 40).all()  # scaled down, so that the edge is soft
            shares[bool((mask[:, :3] > 200).all())] += 1
    # Half of UltraEdit's rows and all of MagicBrush's have a mask: the half of 160, give or take
    # three standard deviations.
    assert shares.total() == 160 and abs(shares[True] - 80) < 19
    with pytest.raises(ValueError, match="no column mask_img or mask_image or mask or MASK_IMG;"):
        open_pairs(folders[1], mask="", **options)


def test_bad_masks_are_bad_rows(tmp_path, capsys):
    rows = known_rows(ULTRA, 8)
    for n, data in enumerate((b"bad", half_mask("white", (16, 32)), half_mask("white", (64, 64)))):
        rows[n]["mask_image"] = {"bytes": data, "path": None}
    table = pa.Table.from_pylist(rows, pa.schema(SCHEMAS[ULTRA][0]))
    pq.write_table(table, tmp_path / "a.parquet")
    options = dict(batch_size=8, resolution=8, max_bad_fraction=1)
    dataset = open_pairs(tmp_path, mask="mask_image", **options)
    list(dataset)
    assert dataset.bad_rows == {
        ("a.parquet", 0): "mask: no known image format (3 bytes); save it as PNG or JPEG",
        ("a.parquet", 1): "the mask has 32x16 pixels (width x height) and the edited image 16x16; "
        "crop one of them to the aspect ratio of the other",
    }
    parquet_processing.main(["--train_data_dir", str(tmp_path), "--preview="])
    out = capsys.readouterr().out
    assert "unreadable  2 of 8 rows" in out and "row 0: mask: no known image format" in out
    dataset = open_pairs(tmp_path, **options)
    list(dataset)
    assert not dataset.bad_rows  # masks are not even read
