"""parquet_processing.py: pictures, order, replacement, bad input, command line."""

import io
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

import parquet_processing
from parquet_processing import ParquetImagePairs, crop_square, decode_picture, epoch_order

SCRIPT = Path(parquet_processing.__file__)
PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
ORIGINAL, EDITED = "original_pixel_values", "edited_pixel_values"


def encode(pixels, picture_format="PNG", **options):
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    file = io.BytesIO()
    image.save(file, picture_format, **options)
    return file.getvalue()


def smooth(seed, height=24, width=24):
    """A picture with slow gradients, (height, width, 3) uint8."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


def plain(value):
    """A PNG of one colour, which says which row a pixel came from."""
    return encode(np.full((20, 20, 3), value, np.uint8))


def write_shard(path, rows, names=("original_image", "edit_prompt", "edited_image"), **options):
    """Rows are (original bytes, prompt, edited bytes); pictures are stored as the public ones."""
    originals, prompts, edits = zip(*rows) if rows else ((), (), ())
    cells = [
        pa.array([{"bytes": data, "path": None} for data in originals], PICTURE),
        pa.array(prompts, pa.string()),
        pa.array([{"bytes": data, "path": None} for data in edits], PICTURE),
    ]
    pq.write_table(pa.table(dict(zip(names, cells))), path, **options)


def write_numbered(folder, shard_rows, row_group_size=8):
    """Shards whose row n (over all shards) has prompt str(n) and pictures of colour n, 255 - n."""
    first = 0
    for k, count in enumerate(shard_rows):
        rows = [(plain(n % 256), str(n), plain(255 - n % 256)) for n in range(first, first + count)]
        write_shard(folder / f"shard-{k}.parquet", rows, row_group_size=row_group_size)
        first += count
    return folder


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """53 rows in three unequal shards, row groups of 8 and less."""
    return write_numbered(tmp_path_factory.mktemp("numbered"), [30, 4, 19])


# Pictures


@pytest.mark.parametrize("resample", ["lanczos", "bicubic"])
@pytest.mark.parametrize("picture_format", ["PNG", "JPEG"])
@pytest.mark.parametrize("height, width", [(32, 32), (50, 70), (61, 33), (16, 20)])
def test_pixels_are_pillows(tmp_path, resample, picture_format, height, width):
    first, second = (encode(smooth(s, height, width), picture_format) for s in (0, 1))
    write_shard(tmp_path / "a.parquet", [(first, "x", second)])
    dataset = ParquetImagePairs(
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


def test_large_jpeg_is_scaled_while_decoding():
    data = encode(smooth(0, 256, 320), "JPEG", quality=100)
    small = decode_picture(data, min_side=64)
    assert 64 <= min(small.size) <= 128
    assert decode_picture(data, min_side=129).size == (320, 256)
    direct = Image.open(io.BytesIO(data)).resize((40, 32), Image.Resampling.LANCZOS)
    error = np.asarray(direct)[:, 4:36].astype(int) - crop_square(small, 32)
    assert np.abs(error).mean() < 1.0


def test_every_kind_of_picture():
    pixels = smooth(3, 20, 28)
    image = Image.fromarray(pixels)
    grey = np.asarray(image.convert("L"))
    turned = image.getexif()
    turned[0x0112] = 6  # stored lying on its side
    alpha = image.copy()
    alpha.putalpha(128)
    palette = image.quantize(64)
    sixteen = grey.astype(np.uint16) * 257
    see_through = encode(palette, transparency=bytes(range(64)))
    cmyk = encode(image.convert("CMYK"), "JPEG", quality=95)

    def on_white(picture):
        rgba = np.asarray(picture.convert("RGBA"), np.float64)
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
        (cmyk, np.asarray(Image.open(io.BytesIO(cmyk)).convert("RGB"))),
    ]
    blended = (encode(alpha), see_through)  # Pillow may round the other way
    for data, expected in exact:
        decoded = decode_picture(data)
        assert decoded.mode == "RGB"
        np.testing.assert_allclose(np.asarray(decoded, int), expected, atol=data in blended)
    for source, options in [(image, {"exif": turned}), (image, {"progressive": True}), (grey, {})]:
        data = encode(source, "JPEG", **options)
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
        np.testing.assert_array_equal(np.asarray(decode_picture(data)), np.asarray(expected))


@pytest.mark.parametrize("kind", ["JPEG", "progressive", "CMYK", "turned", "PNG", "WEBP", "GIF"])
def test_truncated_picture_is_refused(kind):
    image = Image.fromarray(smooth(0, 60, 60))
    turned = image.getexif()
    turned[0x0112] = 3
    data = {
        "JPEG": lambda: encode(image, "JPEG"),
        "progressive": lambda: encode(image, "JPEG", progressive=True),
        "CMYK": lambda: encode(image.convert("CMYK"), "JPEG"),
        "turned": lambda: encode(image, "JPEG", exif=turned),
        "PNG": lambda: encode(image),
        "WEBP": lambda: encode(image, "WEBP"),
        "GIF": lambda: encode(image, "GIF"),
    }[kind]()
    decode_picture(data)
    # The last bytes of a PNG (20) and of a GIF hold no pixels: only what comes before is missed.
    for end in (len(data) // 3, len(data) - (24 if kind in ("PNG", "GIF") else 2)):
        with pytest.raises(ValueError, match=r"\w"):
            decode_picture(data[:end])
        with pytest.raises(ValueError, match=r"\w"):
            decode_picture(data[:end], min_side=8)


@pytest.mark.parametrize("data", [b"", b"no picture", b"\xff\xd8\xff\xe0" + bytes(50)])
def test_what_is_no_picture_is_refused_in_one_line(data):
    with pytest.raises(ValueError) as error:
        decode_picture(data)
    assert str(error.value) and "\n" not in str(error.value) and "0x" not in str(error.value)


def test_pair_is_cropped_and_flipped_alike(tmp_path):
    rows = []
    for n in range(40):
        pixels = smooth(n, 24 + n % 3 * 8, 32)
        rows.append((encode(pixels), str(n), encode(255 - pixels)))
    write_shard(tmp_path / "a.parquet", rows)
    dataset = ParquetImagePairs(tmp_path, batch_size=8, resolution=24)
    flips, places = Counter(), set()
    for batch in dataset:
        # Resampling rounds to whole numbers, each picture on its own.
        total = batch[ORIGINAL].astype(int) + batch[EDITED]
        assert np.abs(total - 255).max() <= 1
        for pixels, prompt in zip(batch[ORIGINAL], batch["edit_prompt"]):
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
    assert flips.total() == 40 and 10 <= flips[True] <= 30
    assert len({left for height, width, _, left in places if width > height}) >= 5


def test_crop_reaches_both_ends():
    strip = Image.fromarray(np.repeat(np.arange(10, dtype=np.uint8)[None, :, None], 3, 2))
    strip = strip.resize((40, 4), Image.Resampling.NEAREST)
    first_columns = {
        int(crop_square(strip, 4, crop=x)[0, 0, 0]) for x in np.linspace(0, 0.9999, 100)
    }
    assert first_columns == set(range(10))
    assert crop_square(strip, 4, crop=0.9999)[0, -1, 0] == 9


# Order


def test_same_seed_and_epoch_same_batches_on_any_number_of_threads(tmp_path):
    rows = [(encode(smooth(n, 12, 20)), str(n), encode(smooth(-n % 99, 20, 12))) for n in range(53)]
    rows[20] = (b"bad", "20", b"bad")
    write_shard(tmp_path / "a.parquet", rows[:40], row_group_size=9)
    write_shard(tmp_path / "b.parquet", rows[40:])

    def batches(epoch, **options):
        dataset = ParquetImagePairs(tmp_path, batch_size=6, resolution=8, **options)
        dataset.set_epoch(epoch)
        return list(dataset)

    reference = batches(3, seed=5, num_threads=1, prefetch_batches=1)
    for options in ({"num_threads": 1}, {"num_threads": 7, "prefetch_batches": 9}):
        again = batches(3, seed=5, **options)
        assert len(again) == len(reference) == 8
        for a, b in zip(again, reference):
            assert a["edit_prompt"] == b["edit_prompt"]
            np.testing.assert_array_equal(a[ORIGINAL], b[ORIGINAL])
            np.testing.assert_array_equal(a[EDITED], b[EDITED])
    prompts = [p for batch in reference for p in batch["edit_prompt"]]
    for other in (batches(4, seed=5), batches(3, seed=6)):
        assert [p for batch in other for p in batch["edit_prompt"]] != prompts


def test_flips_differ_between_epochs(tmp_path):
    half = np.zeros((8, 8, 3), np.uint8)
    half[:, :4] = 255
    rows = [(encode(half), str(n), encode(half)) for n in range(32)]
    write_shard(tmp_path / "a.parquet", rows)
    dataset = ParquetImagePairs(tmp_path, batch_size=32, resolution=8)
    seen = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        (batch,) = dataset
        flips = dict(zip(batch["edit_prompt"], batch[ORIGINAL][:, 0, 0, 0].tolist()))
        seen.append([flips[str(n)] for n in range(32)])
    assert seen[0] != seen[1]


@pytest.mark.parametrize("process_count", [1, 2, 3])
def test_rows_are_shared_out(numbered, process_count):
    for epoch in range(2):
        parts = []
        for process_index in range(process_count):
            dataset = ParquetImagePairs(
                numbered, batch_size=4, resolution=8, process_count=process_count,
                process_index=process_index, num_streams=2, shuffle_buffer=6,
            )  # fmt: skip
            assert dataset.num_rows == 53
            dataset.set_epoch(epoch)
            batches = list(dataset)
            assert len(batches) == len(dataset) == 53 // (4 * process_count)
            for batch in batches:
                assert batch[ORIGINAL].shape == batch[EDITED].shape == (4, 8, 8, 3)
                # The pictures stayed with their instruction.
                rows = np.array([int(prompt) for prompt in batch["edit_prompt"]])
                np.testing.assert_array_equal(batch[ORIGINAL][:, 3, 3, 1], rows)
                np.testing.assert_array_equal(batch[EDITED][:, 3, 3, 1], 255 - rows)
            parts.append({p for batch in batches for p in batch["edit_prompt"]})
        union = set().union(*parts)
        assert len(union) == sum(map(len, parts)) == 53 // (4 * process_count) * 4 * process_count


@settings(max_examples=60, deadline=None)
@given(
    group_rows=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    process_count=st.integers(1, 4),
    batch_size=st.integers(1, 7),
    num_streams=st.integers(1, 5),
    shuffle_buffer=st.integers(0, 60),
    epoch=st.integers(0, 5),
)
def test_epoch_order(group_rows, process_count, batch_size, num_streams, shuffle_buffer, epoch):
    share = sum(group_rows) // (batch_size * process_count) * batch_size
    if share == 0:
        return
    seen, num_runs = [], 0
    for process_index in range(process_count):
        order, stream_of, streams = epoch_order(
            group_rows, seed=1, epoch=epoch, batch_size=batch_size, process_index=process_index,
            process_count=process_count, num_streams=num_streams, shuffle_buffer=shuffle_buffer,
        )  # fmt: skip
        assert len(order) == len(stream_of) == share
        assert len(streams) <= num_streams
        first_rows = np.cumsum([0, *group_rows])
        positions = {}
        for s, stream in enumerate(streams):
            rows = [int(first_rows[g]) + r for g, start, stop in stream for r in range(start, stop)]
            assert all(0 <= start < stop <= group_rows[g] for g, start, stop in stream)
            positions |= {row: (s, p) for p, row in enumerate(rows)}
        assert sorted(positions) == sorted(order.tolist())
        # Read each stream only as far as the next row needs, and count what has to wait.
        read = [0] * len(streams)
        for used, (row, s) in enumerate(zip(order.tolist(), stream_of.tolist())):
            assert positions[row][0] == s
            read[s] = max(read[s], positions[row][1] + 1)
            assert sum(read) - used <= shuffle_buffer + 2 * len(streams)
        seen += order.tolist()
        num_runs += sum(map(len, streams))
    assert len(set(seen)) == len(seen) == share * process_count
    # A row group is cut only where the line begins and where a process's stretch ends.
    assert num_runs <= len(group_rows) + process_count + 1


def test_order_is_well_mixed():
    group_rows = [1000] * 40
    order, _, _ = epoch_order(group_rows, seed=0, epoch=0, batch_size=50)
    groups_per_batch = [len(set(batch // 1000)) for batch in order.reshape(-1, 50)]
    assert np.mean(groups_per_batch) > 5
    # Neighbours in a shard are hundreds of rows apart in training, not batch mates.
    when = np.argsort(order)
    apart = np.abs(np.diff(when.reshape(40, 1000), axis=1))
    assert np.median(apart) > 300
    again, _, _ = epoch_order(group_rows, seed=0, epoch=1, batch_size=50)
    assert abs(np.corrcoef(when, np.argsort(again))[0, 1]) < 0.4


def test_small_dataset_is_shuffled_uniformly_and_drops_other_rows_each_epoch():
    firsts, dropped = Counter(), Counter()
    for epoch in range(2000):
        order, _, _ = epoch_order([5, 2], seed=0, epoch=epoch, batch_size=3)
        firsts[int(order[0])] += 1
        dropped.update({*range(7)} - {*order.tolist()})
    # 2000 draws of one in seven: 286 with a standard deviation of 15.7.
    for counter in (firsts, dropped):
        assert len(counter) == 7 and all(abs(n - 2000 / 7) < 80 for n in counter.values())

    # A row is followed by its neighbour once in a random order of seven, on average.
    orders = [
        epoch_order([7], seed=0, epoch=epoch, batch_size=1, shuffle_buffer=7)[0]
        for epoch in range(2000)
    ]
    followed = [np.sum(np.diff(order) % 7 == 1) for order in orders]
    assert abs(np.mean(followed) - 1) < 0.1


def test_tokenizer(numbered):
    def tokenizer(prompts):
        return np.array([[int(p)] * 77 for p in prompts], np.int64)

    dataset = ParquetImagePairs(numbered, batch_size=5, resolution=8, tokenizer=tokenizer)
    batch = next(iter(dataset))
    assert batch["input_ids"].dtype == np.int32 and batch["input_ids"].shape == (5, 77)
    assert batch["input_ids"][:, 76].tolist() == [int(p) for p in batch["edit_prompt"]]


def test_stopping_early_leaves_no_thread_and_starts_again(numbered):
    dataset = ParquetImagePairs(numbered, batch_size=2, resolution=8)
    before = threading.active_count()
    iterator = iter(dataset)
    first = next(iterator)["edit_prompt"]
    assert threading.active_count() > before
    iterator.close()
    assert threading.active_count() == before
    assert next(iter(dataset))["edit_prompt"] == first


@pytest.mark.parametrize("stored", ["struct", "binary"])
def test_columns_of_the_other_dataset_and_of_ones_own(tmp_path, stored):
    rows = [(plain(n), str(n), plain(n + 100)) for n in range(4)]
    write_shard(
        tmp_path / "a.parquet", rows, ("input_image", "edit_prompt", "edited_image")
    ) if stored == "struct" else pq.write_table(
        pa.table(dict(zip(("before", "words", "after"), map(list, zip(*rows))))),
        tmp_path / "a.parquet",
    )
    names = {} if stored == "struct" else {
        "original_image_column": "before",
        "edit_prompt_column": "words",
        "edited_image_column": "after",
    }  # fmt: skip
    (batch,) = ParquetImagePairs(tmp_path, batch_size=4, resolution=8, **names)
    rows = [int(p) for p in batch["edit_prompt"]]
    assert sorted(rows) == [0, 1, 2, 3]
    assert batch[ORIGINAL][:, 0, 0, 0].tolist() == rows
    assert batch[EDITED][:, 0, 0, 0].tolist() == [n + 100 for n in rows]


# Broken pictures


def test_broken_pairs_are_replaced_counted_and_named(tmp_path, caplog):
    rows = [(plain(n), str(n), plain(255 - n)) for n in range(24)]
    jpeg = encode(smooth(0, 64, 64), "JPEG")
    rows[3] = (jpeg[:-30], "3", rows[3][2])
    rows[10] = (rows[10][0], "10", b"")
    rows[17] = (None, "17", rows[17][2])
    rows[18] = (rows[18][0], None, rows[18][2])
    write_shard(tmp_path / "a.parquet", rows[:15], row_group_size=5)
    write_shard(tmp_path / "b.parquet", rows[15:])

    def run(**options):
        dataset = ParquetImagePairs(tmp_path, batch_size=4, resolution=8, **options)
        return dataset, list(dataset)

    bad = {3, 10, 17, 18}
    for seed in range(4):
        caplog.clear()
        dataset, batches = run(seed=seed, num_threads=1)
        order, _, _ = epoch_order([5, 5, 5, 9], seed=seed, epoch=0, batch_size=4)
        for batch, wanted in zip(batches, order.reshape(-1, 4).tolist()):
            good = [row for row in wanted if row not in bad]
            expected = []
            for place, row in enumerate(wanted):
                later = [r for r in wanted[place:] if r not in bad]
                expected.append(row if row not in bad else (later + good)[0])
            assert [int(p) for p in batch["edit_prompt"]] == expected
            assert batch[ORIGINAL][:, 0, 0, 0].tolist() == expected
            assert batch[EDITED][:, 0, 0, 0].tolist() == [255 - row for row in expected]

    assert dataset.num_bad == 4
    assert dataset.bad_rows == {
        ("a.parquet", 3): "original_image: Premature end of JPEG file",
        ("a.parquet", 10): "edited_image: no known picture format (0 bytes)",
        ("b.parquet", 2): "original_image: no picture bytes in the shard",
        ("b.parquet", 3): "edit_prompt: null",
    }
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 4
    wanted = "a.parquet row 3: original_image: Premature end of JPEG file"
    assert any(message.startswith(wanted) for message in messages)

    _, again = run(seed=seed, num_threads=5)
    for a, b in zip(again, batches):
        assert a["edit_prompt"] == b["edit_prompt"]
        np.testing.assert_array_equal(a[ORIGINAL], b[ORIGINAL])

    # Counted every epoch, named once.
    caplog.clear()
    list(dataset)
    assert dataset.num_bad == 8 and len(dataset.bad_rows) == 4
    assert not caplog.records


def test_batch_without_a_good_pair(tmp_path):
    rows = [(b"bad", str(n), plain(1)) for n in range(9)] + [(plain(9), "9", plain(9))]
    write_shard(tmp_path / "a.parquet", rows)
    dataset = ParquetImagePairs(tmp_path, batch_size=2, resolution=8)
    batches = list(dataset)
    assert [batch["edit_prompt"] for batch in batches] == [["9", "9"]] * 5
    assert all((batch[ORIGINAL] == 9).all() and (batch[EDITED] == 9).all() for batch in batches)
    assert dataset.num_bad == 9


# Bad input


def truncated(folder):
    write_numbered(folder, [6, 6])
    data = (folder / "shard-1.parquet").read_bytes()
    (folder / "shard-1.parquet").write_bytes(data[: len(data) // 2])


def wrong_columns(folder):
    write_shard(folder / "a.parquet", [(plain(0), "x", plain(1))], ("picture", "edit_prompt", "z"))


def all_broken(folder):
    write_shard(folder / "a.parquet", [(b"bad", "x", plain(1))] * 3)


BAD_FOLDERS = {
    "missing": (Path.rmdir, ["is not a folder"]),
    "no shards": (lambda folder: (folder / "a.txt").touch(), ["no *.parquet"]),
    "truncated": (truncated, ["1 of 2 shards", "shard-1.parquet"]),
    "zero bytes": (lambda folder: (folder / "a.parquet").touch(), ["a.parquet", "0 bytes"]),
    "not parquet": (
        lambda folder: [(folder / f"{n}.parquet").write_text("text" * 9) for n in "ab"],
        ["2 of 2 shards", "a.parquet", "b.parquet"],
    ),
    "wrong columns": (
        wrong_columns,
        ["original_image or input_image", "picture, edit_prompt, z", "--original_image_column"],
    ),
    "empty": (lambda folder: write_shard(folder / "a.parquet", []), ["0 rows"]),
}


@pytest.mark.parametrize("kind", BAD_FOLDERS)
def test_bad_folder(tmp_path, capsys, kind):
    spoil, words = BAD_FOLDERS[kind]
    folder = tmp_path / "data"
    folder.mkdir()
    spoil(folder)
    with pytest.raises(ValueError) as error:
        ParquetImagePairs(folder, batch_size=1, resolution=8)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)

    with pytest.raises(SystemExit) as stop:
        parquet_processing.main(["--train_data_dir", str(folder)])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {error.value}\n"


def test_wrong_column_types(tmp_path):
    table = pa.table({"original_image": ["text"], "edit_prompt": [1], "edited_image": [b"x"]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"original_image is string.*--original_image_column"):
        ParquetImagePairs(tmp_path, batch_size=1)
    with pytest.raises(ValueError, match=r"edit_prompt is int64.*--edit_prompt_column"):
        ParquetImagePairs(tmp_path, batch_size=1, original_image_column="edited_image")
    with pytest.raises(ValueError, match="no column nothing; it has original_image, edit_prompt"):
        ParquetImagePairs(tmp_path, batch_size=1, original_image_column="nothing")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"batch_size": 54}, "batch_size can be 53 at most"),
        ({"batch_size": 20, "process_count": 3}, "needs 60 rows.* 53; batch_size can be 17"),
        ({"batch_size": 1, "process_count": 99}, "use 53 processes at most"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"resolution": 0}, "resolution=0 must be at least 1"),
        ({"resolution": -8}, "resolution=-8"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"num_threads": -1}, "num_threads=-1"),
        ({"process_index": 2, "process_count": 2}, "process_index=2 must be from 0"),
        ({"resample": "nearest"}, "resample=nearest is unknown; use lanczos or bicubic"),
    ],
)
def test_bad_arguments(numbered, options, words):
    with pytest.raises(ValueError, match=words):
        ParquetImagePairs(numbered, **{"batch_size": 2, **options})


def test_every_picture_broken(tmp_path):
    all_broken(tmp_path)
    dataset = ParquetImagePairs(tmp_path, batch_size=2, resolution=8)
    with pytest.raises(ValueError, match=r"none of the 2 pairs .* known picture format") as error:
        list(dataset)
    assert "\n" not in str(error.value)


def test_damaged_row_group_is_named(tmp_path):
    write_numbered(tmp_path, [8, 8])
    path = tmp_path / "shard-1.parquet"
    data = bytearray(path.read_bytes())
    offset = pq.read_metadata(path).row_group(0).column(0).dictionary_page_offset
    data[offset : offset + 40] = b"\xff" * 40  # the footer is whole, the data are not
    path.write_bytes(data)
    dataset = ParquetImagePairs(tmp_path, batch_size=4, resolution=8)
    with pytest.raises(ValueError, match=r"shard-1\.parquet: row group 0 cannot be read") as error:
        list(dataset)
    assert "\n" not in str(error.value)


# Command line


def run_script(*args, cwd):
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


def test_script_describes_a_folder(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    colours = [(plain(40 * n), f"paint it {n}", plain(250 - 40 * n)) for n in range(6)]
    colours[2] = (b"bad", "paint it 2", plain(0))
    jpeg = encode(smooth(0, 30, 40), "JPEG")
    write_shard(folder / "a.parquet", colours, row_group_size=4)
    write_shard(folder / "b.parquet", [(jpeg, "日本 " * 60, plain(7))] * 2)
    done = run_script(
        "--train_data_dir", folder, "--resolution", 32, "--preview", "out/grid.png",
        "--num_preview", 4, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    for words in (
        "shards      2,",
        "rows        8\n",
        "original_image: struct<bytes: binary, path: string>  <- original picture",
        "edit_prompt: string  <- prompt",
        "row groups  3; rows min 2, median 2, max 4; bytes min",
        "checked     all 8 rows",
        "original_image: 5 x PNG 20x20 RGB, 2 x JPEG 40x30 RGB\n",
        "edited_image: 7 x PNG 20x20 RGB\n",
        "unreadable  1 of 8 rows\n",
        "a.parquet row 2: original_image: no known picture format (3 bytes)\n",
        "\nprompts     'paint it 0'\n            'paint it 3'\n            'paint it 4'\n",
        "\n            '日本 日本 ",
    ):
        assert words in done.stdout, (words, done.stdout)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["grid.png"]
    with Image.open(tmp_path / "out" / "grid.png") as sheet:
        assert sheet.mode == "RGB"
        pixels = np.asarray(sheet)
    assert (pixels[4:36, 4:36] == 0).all() and (pixels[4:36, 36:68] == 250).all()
    assert (pixels[36:60, 4:68] < 100).any()  # the prompt under the pair


@pytest.mark.parametrize(
    "spoil, args, words",
    [
        (truncated, [], "1 of 2 shards in data cannot be read as parquet: shard-1.parquet ("),
        (wrong_columns, [], "it has picture, edit_prompt, z: choose with --original_image_column"),
        (all_broken, [], "none of the 3 rows checked in data can be decoded; the first is a.par"),
    ],
)
def test_script_ends_with_one_line(tmp_path, spoil, args, words):
    (tmp_path / "data").mkdir()
    spoil(tmp_path / "data")
    done = run_script("--train_data_dir", "data", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert not (tmp_path / "preview.png").exists()


@pytest.mark.parametrize(
    "args, words",
    [
        (["--resolution", "0"], "resolution=0 must be at least 1"),
        (["--num_preview", "-1"], "num_preview=-1 must be at least 1"),
        (["--num_checked", "-1"], "num_checked=-1"),
        (["--preview", "preview.txt"], "preview=preview.txt must end as pictures do"),
    ],
)
def test_bad_flags(numbered, capsys, args, words):
    with pytest.raises(SystemExit) as stop:
        parquet_processing.main(["--train_data_dir", str(numbered), *args])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_sample_is_spread_over_the_folder(tmp_path, capsys):
    write_numbered(tmp_path, [30, 30], row_group_size=3)
    parquet_processing.main(
        ["--train_data_dir", str(tmp_path), "--num_checked", "16", "--preview", ""]
    )
    out = capsys.readouterr().out
    assert "checked     16 rows (a sample)" in out
    shown = [int(line.split("'")[1]) for line in out.split("prompts")[1].splitlines()]
    # The first two rows of 8 of the 20 row groups, every other one of them shown.
    assert shown == [3 * group for group in (0, 2, 5, 8, 10, 13, 16, 19)]
