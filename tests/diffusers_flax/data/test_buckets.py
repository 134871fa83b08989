"""Batches of several sizes: which sizes, which pair at which, on several processes, after kills."""

import json
import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from shards import (
    EDITED,
    ORIGINAL,
    divide_shards,
    encode,
    on_processes,
    open_pairs,
    plain,
    write_shard,
)

from diffusers_flax.data import buckets
from diffusers_flax.data.buckets import bucket_sizes, nearest_sizes, stored_sizes
from diffusers_flax.data.shards import list_row_groups

SIZES = bucket_sizes(8, ("6x12", "8x8", "12x6"))  # tallest first
SHAPES = {"tall": (24, 11), "square": (16, 18), "wide": (9, 20)}  # of stored images


def write_kinds(folder, shards, row_group_size=4):
    """Shards of lists of kinds; row n over all has prompt str(n) and the colours n and 255 - n."""
    n = 0
    for k, kinds in enumerate(shards):
        rows = []
        for kind in kinds:
            height, width = SHAPES[kind]  # the edited image has another size of this shape
            edited = plain(255 - n, (2 * height, 2 * width))
            rows.append((plain(n, SHAPES[kind]), str(n), edited))
            n += 1
        write_shard(folder / f"shard-{k}.parquet", rows, row_group_size=row_group_size)


def test_default_sizes():
    assert bucket_sizes(512, ()) == ((384, 640), (448, 576), (512, 512), (576, 448), (640, 384))
    assert bucket_sizes(256, ()) == ((192, 320), (256, 256), (320, 192))
    assert bucket_sizes(64, ()) == ((48, 80), (64, 64), (80, 48))
    for resolution in (128, 512, 768, 1024):
        sizes = bucket_sizes(resolution, ())
        aspects = [w / h for w, h in sizes]
        assert aspects == sorted(set(aspects)) and {s[::-1] for s in sizes} == {*sizes}
        assert aspects[0] >= 0.5 and (resolution, resolution) in sizes
        assert all(0.85 * resolution**2 < h * w <= resolution**2 for h, w in sizes)
    # Five of SDXL's sizes (arXiv 2307.01952, appendix I), each also lying.
    sdxl = {(1344, 768), (1216, 832), (1152, 896), (1088, 960), (1024, 1024)}
    assert {*bucket_sizes(1024, ())} == sdxl | {size[::-1] for size in sdxl}


@pytest.mark.parametrize(
    "resolution, texts, words",
    [
        (512, ("500x512",), "500x512: 500 is not a multiple of 64; try 448 or 512"),
        (512, ("512,448",), "512,448 is no size"),
    ],
)
def test_bad_sizes(resolution, texts, words):
    with pytest.raises(ValueError) as error:
        bucket_sizes(resolution, texts)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_the_nearest_size_has_the_most_similar_aspect_ratio():
    rng = np.random.default_rng(0)
    images, sizes = rng.integers(1, 2000, (500, 2)), bucket_sizes(1024, ())
    for (width, height), found in zip(images, nearest_sizes(images, sizes)):
        ratios = [max(width * h / (height * w), height * w / (width * h)) for w, h in sizes]
        assert ratios[found] == pytest.approx(min(ratios))
    assert [sizes[i] for i in nearest_sizes(np.zeros((1, 2)), sizes)] == [(1024, 1024)]


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_pair_once_at_its_size_and_the_rest_after_a_kill(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("shards")
    kind = st.sampled_from(["tall", "square", "square", "wide"])
    shards = data.draw(st.lists(st.lists(kind, min_size=1, max_size=20), min_size=1, max_size=5))
    write_kinds(folder, shards, data.draw(st.integers(1, 9), "row group size"))
    num_rows = sum(map(len, shards))
    process_count = data.draw(st.sampled_from([1, 2, 4]), "processes")
    batch_size = data.draw(st.integers(1, 3), "batch size")
    global_batch = batch_size * process_count
    divisors = [n for n in range(1, global_batch + 1) if global_batch % n == 0]
    own = process_count <= len(shards) and data.draw(st.booleans(), "own shards")
    epoch = data.draw(st.integers(0, 3), "epoch")
    buffer = data.draw(st.integers(0, 60), "shuffle buffer")
    folders, rows_of = [folder] * global_batch, [num_rows] * process_count
    if own:
        folders, rows_of = divide_shards(folder, map(len, shards), process_count)

    def make(process_index, all_gather, process_count=process_count):
        return open_pairs(
            folders[process_index], batch_size=global_batch // process_count, resolution=8,
            sizes=SIZES, process_index=process_index, process_count=process_count,
            all_gather=all_gather, shuffle_buffer=buffer,
            num_threads=data.draw(st.integers(1, 3), "threads") if all_gather is None else 2,
        )  # fmt: skip

    datasets = on_processes(make, process_count)
    if min(rows_of) < (batch_size if own else global_batch):
        assert all(isinstance(dataset, ValueError) for dataset in datasets)
        return
    sizes, counts = datasets[0].decoding.sizes, datasets[0].size_rows
    needed = batch_size if own else global_batch
    assert len(sizes) == 1 or counts.min() >= needed
    num_batches = int((counts.min(axis=0) // needed).sum())
    kinds = [kind for of_shard in shards for kind in of_shard]
    aspect = {row: np.log(SHAPES[kind][1] / SHAPES[kind][0]) for row, kind in enumerate(kinds)}
    epochs = []
    for number in (epoch, epoch + 1):
        streams, states = [], []
        for dataset in datasets:
            dataset.set_epoch(number)
            assert len(dataset) == num_batches
            states.append([dataset.state_dict()])
            streams.append([])
            for batch in dataset:
                streams[-1].append(batch)
                states[-1].append(dataset.state_dict())
                rows = np.array([int(prompt) for prompt in batch["edit_prompt"]])
                assert batch[ORIGINAL].shape == batch[EDITED].shape
                np.testing.assert_array_equal(batch[ORIGINAL][:, 2, 3, 1], rows)
                np.testing.assert_array_equal(batch[EDITED][:, 2, 3, 1], 255 - rows)
                size = batch[ORIGINAL].shape[2:0:-1]
                distances = np.array([[np.log(w / h)] for w, h in sizes]) - [
                    aspect[r] for r in rows
                ]
                assert {sizes[i] for i in np.abs(distances).argmin(axis=0)} == {size}
        assert all(of_process == states[0] for of_process in states)
        for batches in zip(*streams, strict=True):  # one size on all processes
            assert len({batch[ORIGINAL].shape for batch in batches}) == 1
        seen = Counter(p for stream in streams for batch in stream for p in batch["edit_prompt"])
        assert max(seen.values()) == 1 and seen.total() == num_batches * global_batch
        epochs.append((streams, states, {*map(int, seen)}))
    if not own:  # what waits is drawn in the next epoch
        assert epochs[0][2] | epochs[1][2] == set(range(num_rows))

    # Killed at any batch: the rest is the same, on any number of processes with all shards.
    streams, states, _ = epochs[0]
    start = data.draw(st.integers(0, num_batches - 1), "first batch after the kill")
    state = json.loads(json.dumps(states[0][start]))
    if own:
        again = on_processes(make, process_count)
    else:
        process_count = data.draw(st.sampled_from(divisors), "other processes")
        again = [make(k, None, process_count) for k in range(process_count)]
    for dataset in again:
        dataset.load_state_dict(state)
    others = [list(dataset) for dataset in again]
    for step in range(start, num_batches):
        before, after = ([s[i] for s in of] for of, i in ((streams, step), (others, step - start)))
        for name in (ORIGINAL, EDITED):
            before_pixels, after_pixels = (
                np.concatenate([batch[name] for batch in batches]) for batches in (before, after)
            )
            np.testing.assert_array_equal(before_pixels, after_pixels)


def test_sizes_come_mixed_and_each_pair_waits_as_often(tmp_path):
    kinds = (["tall"] + ["square"] * 6 + ["wide"] * 2) * 23
    write_kinds(tmp_path, [kinds], row_group_size=9)
    dataset = open_pairs(tmp_path, batch_size=4, resolution=8, sizes=SIZES, shuffle_buffer=36)
    counts = "pairs by size: 6x12 23, 8x8 138, 12x6 46"
    assert dataset.describe_epoch() == f"200 of 207 pairs per epoch ({counts})"
    drawn = Counter()
    for epoch in range(23):
        order, *_ = dataset._partition.shuffle(dataset, 0, epoch, 36)
        drawn.update(order.ravel().tolist())
        for size, number in enumerate((5, 34, 11)):
            places = np.flatnonzero(dataset.size_of[order[:, 0]] == size)
            assert len(places) == number
            # Every fifth of the epoch has about a fifth of the batches of a size.
            counts = np.histogram(places, 5, (0, 50))[0]
            assert np.abs(counts - number / 5).max() <= 3
    for kind, times in (("tall", 20), ("square", 22 + 2 / 3), ("wide", 22)):
        counts = [drawn[row] for row, k in enumerate(kinds) if k == kind]
        assert max(counts) - min(counts) <= 1 and np.mean(counts) == pytest.approx(times)


def test_a_size_without_a_batch_is_left_out(tmp_path):
    write_kinds(tmp_path, [["tall"] * 3 + ["square"] * 8 + ["wide"] * 5])
    dataset = open_pairs(tmp_path, batch_size=4, resolution=8, sizes=SIZES)
    assert dataset.decoding.sizes == ((8, 8), (12, 6)) and len(dataset) == 3
    # A smaller batch would have other sizes, so that none is suggested.
    assert dataset.describe_epoch() == "12 of 16 pairs per epoch (pairs by size: 8x8 11, 12x6 5)"
    assert len(open_pairs(tmp_path, batch_size=16, resolution=8, sizes=SIZES)) == 1
    state = dataset.state_dict()
    other = open_pairs(tmp_path, batch_size=4, resolution=8, sizes=SIZES[:2])
    with pytest.raises(ValueError, match="sizes was 8x8 12x6 and is 8x8"):
        other.load_state_dict(state)


def test_sizes_are_read_once(tmp_path, monkeypatch):
    exif = Image.new("RGB", (1, 1)).getexif()
    exif[0x0112] = 6  # rotated by 90 degrees
    pixels = np.zeros((10, 30, 3), np.uint8)
    originals = [encode(pixels), encode(pixels, "JPEG", exif=exif), b"no image", None]
    write_shard(tmp_path / "a.parquet", [(data, "x", b"") for data in originals])
    write_shard(tmp_path / "b.parquet", [(encode(pixels[:, :9]), "x", b"")] * 5, row_group_size=2)
    groups = list_row_groups(tmp_path)
    expected = [[30, 10], [10, 30], [0, 0], [0, 0]] + [[9, 10]] * 5
    assert stored_sizes(groups, 2).tolist() == expected
    monkeypatch.setattr(buckets, "encoded_size", None)
    assert stored_sizes(groups, 2).tolist() == expected
    some = [groups[0]._replace(num_rows=3)]  # max_rows
    assert stored_sizes(some, 2).tolist() == expected[:3]
    monkeypatch.undo()

    # another shard of the same name, in a directory that cannot be written
    write_shard(tmp_path / "b.parquet", [(encode(pixels[:, :5]), "x", b"")] * 5)
    monkeypatch.setattr(buckets, "save_whole", lambda *args, **options: os.mkdir("/proc/x"))
    assert stored_sizes(list_row_groups(tmp_path), 2)[4:].tolist() == [[5, 10]] * 5


def test_broken_pairs_are_replaced_by_pairs_of_their_size(tmp_path):
    kinds = ["tall"] * 6 + ["square"] * 6
    rows = [
        (plain(n, SHAPES[kind]), str(n), plain(0, SHAPES[kind])) for n, kind in enumerate(kinds)
    ]
    rows[2] = (rows[2][0][:-24], "2", rows[2][2])  # the header is whole
    rows[4] = (b"no image", "4", rows[4][2])  # counts as a square
    write_shard(tmp_path / "a.parquet", rows, row_group_size=3)
    dataset = open_pairs(tmp_path, batch_size=1, resolution=8, sizes=SIZES, max_bad_fraction=1)
    assert dataset.size_rows.tolist() == [[5, 7]]
    prompts = Counter()
    for batch in dataset:
        (prompt,) = batch["edit_prompt"]
        prompts[int(prompt)] += 1
        assert batch[ORIGINAL].shape[1] == (12 if kinds[int(prompt)] == "tall" else 8)
        assert (batch[ORIGINAL][0, 2, 2] == int(prompt)).all()
    assert dataset.num_bad == 2 and prompts == Counter(
        {n: 1 + (n in (0, 6)) for n in range(12) if n not in (2, 4)}
    )
