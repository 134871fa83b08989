"""The order of batches, processes, resuming, replacement of bad pairs, bad input."""

import gc
import json
import weakref
from collections import Counter
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import (
    EDITED,
    ORIGINAL,
    divide_shards,
    encode,
    on_processes,
    open_pairs,
    plain,
    prompts_of,
    same,
    smooth,
    write_numbered,
    write_shard,
)

from diffusers_flax.data import reading
from diffusers_flax.data import shards as dataloading_shards
from diffusers_flax.data.dataset import epoch_order


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """53 rows in three shards of different length, with at most 8 rows per row group."""
    return write_numbered(tmp_path_factory.mktemp("numbered"), [30, 4, 19])


@settings(max_examples=80, deadline=None)
@given(
    group_rows=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    num_parts=st.integers(1, 5),
    left_out=st.integers(0, 9),
    window=st.integers(0, 60),
    epoch=st.integers(0, 5),
)
def test_epoch_order(group_rows, num_parts, left_out, window, epoch):
    rows_per_part = max(0, sum(group_rows) - left_out) // num_parts
    if rows_per_part == 0:
        return
    order = epoch_order(
        group_rows, seed=[1, epoch], num_parts=num_parts, rows_per_part=rows_per_part, window=window
    )
    assert order.shape == (num_parts, rows_per_part)
    rows = order.ravel().tolist()
    assert len(set(rows)) == len(rows) and set(rows) <= set(range(sum(group_rows)))
    group_of = np.repeat(np.arange(len(group_rows)), group_rows)
    num_uses = 0
    for part in order:
        # In memory: the rows of a window and one row group at either end.
        groups = group_of[part]
        used, first, count = np.unique(groups, return_index=True, return_counts=True)
        last = rows_per_part - 1 - np.unique(groups[::-1], return_index=True)[1]
        for moment in range(rows_per_part):
            held = count[(first <= moment) & (moment <= last)].sum()
            assert held <= window + 2 * max(group_rows)
        num_uses += len(used)
    assert num_uses <= len(group_rows) + num_parts  # each cut between parts splits one


def test_small_dataset_is_shuffled_uniformly_and_leaves_out_other_rows_each_epoch():
    firsts, left_out = Counter(), Counter()
    for epoch in range(2000):
        order = epoch_order([5, 2], seed=[0, epoch], num_parts=1, rows_per_part=6, window=7)[0]
        firsts[int(order[0])] += 1
        left_out.update({*range(7)} - {*order.tolist()})
    # 2000 draws with probability 1/7: mean 286, standard deviation 15.7.
    assert len(firsts) == 7 and all(abs(n - 2000 / 7) < 80 for n in firsts.values())
    # The last row group loses one random row, of five or of two.
    assert all(abs(left_out[row] - (200 if row < 5 else 500)) < 80 for row in range(7))

    # In a random order of seven rows, one row on average is followed by its neighbour.
    orders = [
        epoch_order([7], seed=[0, epoch], num_parts=1, rows_per_part=7, window=7)[0]
        for epoch in range(2000)
    ]
    assert abs(np.mean([np.sum(np.diff(order) % 7 == 1) for order in orders]) - 1) < 0.1


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_row_once_and_the_rest_after_a_stop(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("shards")
    shard_rows = data.draw(st.lists(st.integers(1, 14), min_size=1, max_size=6), "shard rows")
    write_numbered(folder, shard_rows, data.draw(st.integers(1, 9), "row group size"))
    num_rows = sum(shard_rows)
    process_count = data.draw(st.integers(1, 4), "processes")
    batch_size = data.draw(st.integers(1, 6), "batch size")
    global_batch = batch_size * process_count
    divisors = [n for n in range(1, global_batch + 1) if global_batch % n == 0]
    own = process_count <= len(shard_rows) and data.draw(st.booleans(), "own shards")
    epoch = data.draw(st.integers(0, 3), "epoch")
    buffer = data.draw(st.integers(0, 60), "shuffle buffer")

    folders, rows_of = [folder] * global_batch, [num_rows] * process_count
    if own:
        folders, rows_of = divide_shards(folder, shard_rows, process_count)

    def make(process_index, all_gather, process_count=process_count, **options):
        dataset = open_pairs(
            folders[process_index], batch_size=batch_size, resolution=4,
            process_index=process_index, process_count=process_count, all_gather=all_gather,
            shuffle_buffer=buffer, **options,
        )  # fmt: skip
        dataset.set_epoch(epoch)
        return dataset

    threads = st.integers(1, 5)
    make_all = partial(make, num_threads=data.draw(threads, "threads"))
    datasets = on_processes(make_all, process_count)
    num_batches = min(rows_of) // batch_size if own else num_rows // (batch_size * process_count)
    if num_batches == 0:
        assert all(isinstance(dataset, ValueError) for dataset in datasets)
        return
    streams, states = [], []
    for dataset in datasets:
        assert len(dataset) == num_batches and dataset.num_rows == num_rows
        states.append([dataset.state_dict()])
        streams.append([])
        for batch in dataset:
            streams[-1].append(batch)
            states[-1].append(dataset.state_dict())
            rows = np.array([int(prompt) for prompt in batch["edit_prompt"]])
            np.testing.assert_array_equal(batch[ORIGINAL][:, 3, 3, 1], rows)
        assert len(streams[-1]) == num_batches
    assert all(
        own_states == states[0] for own_states in states
    )  # the state is the same on all processes
    seen = Counter(prompt for stream in streams for prompt in prompts_of(stream))
    assert max(seen.values()) == 1
    assert seen.total() == num_batches * batch_size * process_count

    # Resume at every step, with another number of threads.
    make_all = partial(make, num_threads=data.draw(threads, "other threads"))
    again = on_processes(make_all, process_count)
    for dataset, stream in zip(again, streams):
        for step, state in enumerate(states[0]):
            dataset.load_state_dict(json.loads(json.dumps(state)))
            if step < num_batches:
                rest = list(dataset)
                assert len(rest) == num_batches - step
                assert all(map(same, rest, stream[step:]))
        assert dataset.state_dict() == states[0][-1]
    assert states[0][-1]["epoch"] == epoch + 1 and states[0][-1]["batch"] == 0

    if not own:  # another number of processes resumes with the same global batches
        counts = [n for n in divisors if n != process_count]
        process_count = data.draw(st.sampled_from(counts), "other processes") if counts else 1
        batch_size = global_batch // process_count
        start = data.draw(st.integers(0, num_batches - 1), "first of the other's batches")
        others = []
        for k in range(process_count):
            dataset = make(k, None, process_count=process_count)
            dataset.load_state_dict(states[0][start])
            others.append(list(dataset))
        for step in range(start, num_batches):
            expected = prompts_of(stream[step] for stream in streams)
            assert prompts_of(other[step - start] for other in others) == expected


def test_epochs_follow_each_other_and_loading_goes_on_in_the_middle(numbered):
    dataset = open_pairs(numbered, batch_size=10, resolution=8)
    epochs = [list(dataset) for _ in range(3)]
    assert len({tuple(prompts_of(epoch)) for epoch in epochs}) == 3
    dataset.set_epoch(1)
    assert prompts_of(dataset) == prompts_of(epochs[1])
    dataset.set_epoch(1)
    iterator = iter(dataset)
    next(iterator), next(iterator)
    state = dataset.state_dict()
    iterator.close()
    assert same(next(iter(dataset)), epochs[1][0])  # a new iteration restarts the epoch
    dataset.load_state_dict(state)
    assert prompts_of(dataset) == prompts_of(epochs[1][2:])
    assert prompts_of(dataset) == prompts_of(epochs[2])


def test_state_of_another_stream_is_refused(numbered, tmp_path):
    state = open_pairs(numbered, batch_size=4).state_dict()
    other = open_pairs(numbered, batch_size=5, seed=1)
    with pytest.raises(
        ValueError, match=r"seed was 0 and is 1; global_batch_size was 4 and is 5; num_"
    ):
        other.load_state_dict(state)
    write_numbered(tmp_path, [30, 4, 20])
    with pytest.raises(ValueError, match=r"data was \w+ and is \w+"):
        open_pairs(tmp_path, batch_size=4).load_state_dict(state)


def test_folders_that_do_not_fit_together(numbered, tmp_path):
    write_numbered(tmp_path, [30])  # the first of three shards

    def make(process_index, all_gather, folders):
        return open_pairs(
            folders[process_index], batch_size=1, process_index=process_index, process_count=2,
            all_gather=all_gather,
        )  # fmt: skip

    for error in on_processes(partial(make, folders=[numbered, tmp_path]), 2):
        assert "several processes have shard-0.parquet" in str(error)
    missing = tmp_path / "missing"
    first, second = on_processes(partial(make, folders=[numbered, missing]), 2)
    assert "process 1 cannot use its --train_data_dir" in str(first)
    assert "missing is not a directory" in str(second)


def test_torch_data_loader(numbered):
    dataset = open_pairs(numbered, batch_size=10, resolution=8)
    assert isinstance(dataset, torch.utils.data.IterableDataset)
    batches = list(torch.utils.data.DataLoader(dataset, batch_size=None))
    assert len(batches) == 5 and batches[0][ORIGINAL].dtype == torch.uint8
    dataset.set_epoch(0)
    for batch, other in zip(batches, dataset):
        np.testing.assert_array_equal(batch[ORIGINAL].numpy(), other[ORIGINAL])
        assert batch["edit_prompt"] == other["edit_prompt"]


@pytest.mark.parametrize("max_rows", [8, 33])
def test_max_rows_are_the_first(numbered, max_rows):
    dataset = open_pairs(numbered, batch_size=1, resolution=4, max_rows=max_rows)
    rows = sorted(int(prompt) for prompt in prompts_of(dataset))
    assert rows == list(range(min(max_rows, 53)))


@pytest.mark.slow
@pytest.mark.parametrize("num_parts, window", [(1, 0), (1, 20), (2, 10), (4, 40)])
def test_memory_is_a_few_row_groups(numbered, monkeypatch, num_parts, window):
    """Row groups in memory: at most a window per part, its ends, and one read ahead."""
    read, alive, most = dataloading_shards.read_row_group, set(), []

    def watched(*args):
        cells = read(*args)
        alive.add(id(cells.table))
        weakref.finalize(cells.table, alive.remove, id(cells.table))
        most.append(len(alive))
        return cells

    monkeypatch.setattr(reading, "read_row_group", watched)
    for epoch in range(4):
        dataset = open_pairs(
            numbered, batch_size=num_parts, resolution=4, shuffle_buffer=window * num_parts,
            prefetch_batches=1,
        )  # fmt: skip
        dataset.set_epoch(epoch)
        assert len(list(dataset)) == 53 // num_parts
        gc.collect()
        assert not alive
    # 53 rows, in row groups of at least 3 rows on average.
    assert 1 < max(most) <= min(num_parts * (window / 3 + 2) + 2, 9)


def test_broken_pairs_are_replaced_counted_and_named(tmp_path, caplog):
    rows = [(plain(n), str(n), plain(255 - n)) for n in range(24)]
    jpeg = encode(smooth(0, 64, 64), "JPEG")
    rows[3] = (jpeg[:-30], "3", rows[3][2])
    rows[4] = (rows[4][0], "4", b"")
    rows[17] = (None, "17", rows[17][2])
    rows[18] = (rows[18][0], None, rows[18][2])
    rows[20] = rows[21] = (b"bad", "x", b"bad")
    write_shard(tmp_path / "a.parquet", rows[:15], row_group_size=5)
    write_shard(tmp_path / "b.parquet", rows[15:], row_group_size=5)
    # The next decodable row of the row group, cyclically.
    stands_in = {3: 0, 4: 0, 17: 19, 18: 19, 20: 22, 21: 22}

    for seed in range(3):
        caplog.clear()
        options = {"batch_size": 4, "resolution": 8, "seed": seed, "max_bad_fraction": 0.3}
        dataset = open_pairs(tmp_path, num_threads=1, **options)
        batches = list(dataset)
        parts = epoch_order(
            [5, 5, 5, 5, 4], seed=[seed, 0, 0], num_parts=4, rows_per_part=6, window=1024
        )
        expected = [stands_in.get(row, row) for row in parts.T.ravel().tolist()]
        assert [int(p) for p in prompts_of(batches)] == expected
        for batch, wanted in zip(batches, np.reshape(expected, (6, 4))):
            np.testing.assert_array_equal(batch[ORIGINAL][:, 0, 0, 0], wanted)
            np.testing.assert_array_equal(batch[EDITED][:, 0, 0, 0], 255 - wanted)

        assert dataset.num_bad == 6 and dataset.num_seen == 24
        unknown = "original_image: no known image format (3 bytes); save it as PNG or JPEG"
        assert dataset.bad_rows == {
            ("a.parquet", 3): "original_image: Premature end of JPEG file",
            ("a.parquet", 4): unknown.replace("original", "edited").replace("3", "0"),
            ("b.parquet", 2): "original_image: no image bytes in the shard",
            ("b.parquet", 3): "edit_prompt: null",
            ("b.parquet", 5): unknown,
            ("b.parquet", 6): unknown,
        }
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == 6
        wanted = "a.parquet row 3: original_image: Premature end of JPEG file"
        assert any(message.startswith(wanted) for message in messages)
        assert all(map(same, open_pairs(tmp_path, num_threads=5, **options), batches))


def test_a_pair_of_two_shapes_is_bad(tmp_path):
    """Both sizes are in the reason. Pairs of one shape and two sizes train."""
    sizes = [
        ((64, 64), (64, 64)),
        ((96, 64), (64, 64)),
        ((64, 64), (32, 32)),
        ((64, 43), (128, 85)),
    ]
    pairs = [[encode(smooth(0, *size[::-1]), "JPEG") for size in pair] for pair in sizes]
    rows = [(first, str(n), second) for n, (first, second) in enumerate(pairs)]
    write_shard(tmp_path / "a.parquet", rows)
    reason = "original_image has 96x64 pixels (width x height) and edited_image 64x64; crop one of "
    reason += "them to the aspect ratio of the other"
    for sizes in (None, ((8, 12), (8, 8))):
        dataset = open_pairs(
            tmp_path, batch_size=1, resolution=8, max_bad_fraction=0.5, sizes=sizes
        )
        assert {"0", "2", "3"} == {*prompts_of(dataset)}
        assert dataset.num_bad == 1 and dataset.bad_rows == {("a.parquet", 1): reason}


def test_row_group_without_a_good_pair(tmp_path):
    rows = [(plain(n), str(n), plain(n)) for n in range(4)] + [(b"bad", "x", b"bad")] * 4
    write_shard(tmp_path / "a.parquet", [*rows, (plain(8), "8", plain(8))], row_group_size=4)
    dataset = open_pairs(tmp_path, batch_size=3, resolution=8, max_bad_fraction=0.5)
    assert sorted(map(int, prompts_of(dataset))) == [0, 1, 2, 3, 8, 8, 8, 8, 8]
    assert dataset.num_bad == 4


def test_text_that_is_none(tmp_path):
    """A prompt that is not UTF-8 counts as an undecodable pair."""
    rows = [(plain(n), "abcd", plain(n)) for n in range(4)]
    plainly = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    write_shard(tmp_path / "a.parquet", rows, **plainly)
    data = (tmp_path / "a.parquet").read_bytes()
    at = data.index(b"abcd")
    (tmp_path / "a.parquet").write_bytes(data[:at] + b"ab\xff\xfe" + data[at + 4 :])
    dataset = open_pairs(tmp_path, batch_size=4, resolution=4, max_bad_fraction=0.5)
    assert prompts_of(dataset) == ["abcd"] * 4
    ((_, reason),) = dataset.bad_rows.items()
    assert "utf-8" in reason


def test_too_many_broken_pairs(tmp_path):
    rows = [(plain(0) if n % 5 else b"bad", str(n), plain(1)) for n in range(100)]
    write_shard(tmp_path / "a.parquet", rows)
    options = dict(batch_size=10, resolution=4)
    assert len(list(open_pairs(tmp_path, max_bad_fraction=0.2, **options))) == 10
    with pytest.raises(ValueError, match=r"^1[12] pairs .*a\.parquet row"):
        list(open_pairs(tmp_path, max_bad_fraction=0.1, **options))


TEXTS = (
    pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()),
    pa.dictionary(pa.int32(), pa.large_string()),
)  # fmt: skip

BYTES = (pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary()))


@pytest.mark.parametrize("text", TEXTS, ids=str)
def test_every_type_of_text_and_of_bytes(tmp_path, text):
    """A row group is read in two arrays; the second has a null."""
    originals = [plain(n % 7) for n in range(43)]
    edits = [plain(255 - n % 7) for n in range(43)]
    originals[35] = None
    prompts = [f"paint it {n % 3}" for n in range(43)]
    for n, kind in enumerate(BYTES):
        struct = pa.struct([("bytes", kind), ("path", pa.string())])
        cells = [{"bytes": data, "path": None} for data in originals]
        table = pa.table(
            {
                "original_image": pa.array(cells, struct),
                "edit_prompt": pa.array(prompts).cast(text),
                "edited_image": pa.array(edits, kind),
            }
        )
        pq.write_table(table, tmp_path / f"{n}.parquet")
    schemas = [pq.read_schema(path) for path in sorted(tmp_path.iterdir())]
    assert all(schema.field("edited_image").type == kind for schema, kind in zip(schemas, BYTES))
    assert "string" in str(schemas[0].field("edit_prompt").type)
    rows = []
    for group in dataloading_shards.list_row_groups(tmp_path):
        cells = dataloading_shards.read_row_group(group)
        rows += [dataloading_shards.pair_at(cells, row) for row in range(group.num_rows)]
    assert [row[:3] for row in rows] == list(zip(originals, edits, prompts)) * len(BYTES)


def test_hidden_files_are_no_shards(numbered, tmp_path):
    """Neither an unreadable one nor one that would add rows; .unfinished still stops the loader."""
    for path in numbered.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "._shard-0.parquet").write_bytes(b"\0\5\x16\7 of macOS")
    (tmp_path / ".x.parquet").write_bytes((numbered / "shard-1.parquet").read_bytes())
    assert open_pairs(tmp_path, batch_size=53, resolution=8).num_rows == 53
    (tmp_path / ".unfinished").mkdir()
    with pytest.raises(ValueError, match="is not complete"):
        open_pairs(tmp_path, batch_size=53, resolution=8)


def test_wrong_column_types(tmp_path):
    table = pa.table({"original_image": [2], "edit_prompt": [1], "edited_image": [b"x"]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"original_image is int64.*--original_image_column"):
        open_pairs(tmp_path, batch_size=1)
    with pytest.raises(ValueError, match=r"edit_prompt is int64.*--edit_prompt_column"):
        open_pairs(tmp_path, batch_size=1, original_image="edited_image")
    with pytest.raises(ValueError, match="no column nothing; it has original_image, edit_prompt"):
        open_pairs(tmp_path, batch_size=1, original_image="nothing")


def test_less_than_a_batch(numbered):
    with pytest.raises(ValueError, match="has 53 pairs, fewer than a batch of 54; use a smaller"):
        open_pairs(numbered, batch_size=54)


def test_damaged_row_group_is_named(tmp_path):
    write_numbered(tmp_path, [8, 8])
    path = tmp_path / "shard-1.parquet"
    data = bytearray(path.read_bytes())
    offset = pq.read_metadata(path).row_group(0).column(0).dictionary_page_offset
    data[offset : offset + 40] = b"\xff" * 40  # damages the data but not the footer
    path.write_bytes(data)
    dataset = open_pairs(tmp_path, batch_size=4, resolution=8)
    with pytest.raises(ValueError, match=r"shard-1\.parquet: row group 0 cannot be read") as error:
        list(dataset)
    assert "\n" not in str(error.value)
