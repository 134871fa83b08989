"""The order of batches, processes, resuming, replacement of bad pairs, bad input."""

import gc
import json
import socket
import subprocess
import sys
import weakref
from collections import Counter
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import (
    EDITED,
    IMAGE,
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

import parquet_processing
from diffusers_flax.data import decoding, reading
from diffusers_flax.data import shards as dataloading_shards
from diffusers_flax.data.dataset import epoch_order
from diffusers_flax.data.options import Columns
from diffusers_flax.evaluation.held_out import pairs_of_one_shape, pairs_of_shards
from diffusers_flax.training.latents import decode_into


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """53 rows in three shards of different length, with at most 8 rows per row group."""
    return write_numbered(tmp_path_factory.mktemp("numbered"), [30, 4, 19])


def test_same_seed_and_epoch_same_batches_on_any_number_of_threads(tmp_path):
    rows = [(encode(smooth(n, 12, 20)), str(n), encode(smooth(-n % 99, 12, 20))) for n in range(53)]
    rows[20] = (b"bad", "20", b"bad")
    write_shard(tmp_path / "a.parquet", rows[:40], row_group_size=9)
    write_shard(tmp_path / "b.parquet", rows[40:])

    def batches(epoch, **options):
        dataset = open_pairs(tmp_path, batch_size=6, resolution=8, **options)
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
    dataset = open_pairs(tmp_path, batch_size=32, resolution=8)
    seen = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        (batch,) = dataset
        flips = dict(zip(batch["edit_prompt"], batch[ORIGINAL][:, 0, 0, 0].tolist()))
        seen.append([flips[str(n)] for n in range(32)])
    assert seen[0] != seen[1]


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


def test_order_is_well_mixed():
    group_rows = [1000] * 40

    def order_of(epoch, num_parts=1, window=4096):
        return epoch_order(
            group_rows, seed=[0, epoch], num_parts=num_parts, rows_per_part=40000 // num_parts,
            window=window,
        )  # fmt: skip

    order = order_of(0)[0]
    groups_per_batch = [len(set(batch // 1000)) for batch in order.reshape(-1, 50)]
    assert np.mean(groups_per_batch) > 3.5 and min(groups_per_batch) >= 2
    # Neighbours in a shard are hundreds of rows apart in training, not in the same batch.
    when = np.argsort(order)
    apart = np.abs(np.diff(when.reshape(40, 1000), axis=1))
    assert np.median(apart) > 1000
    assert abs(np.corrcoef(when, np.argsort(order_of(1)[0]))[0, 1]) < 0.4
    # The eight parts of a batch come from eight row groups even without shuffling in a part.
    batches = order_of(0, num_parts=8, window=0).reshape(8, -1, 4).swapaxes(0, 1).reshape(-1, 32)
    assert np.mean([len(set(batch // 1000)) for batch in batches]) > 7


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
    num_parts = data.draw(st.sampled_from([0, *divisors]), "parts")  # 0: the default
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
    make_all = partial(make, num_parts=num_parts, num_threads=data.draw(threads, "threads"))
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
    make_all = partial(make, num_parts=num_parts, num_threads=data.draw(threads, "other threads"))
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
            dataset = make(k, None, process_count=process_count, num_parts=num_parts)
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
        assert "processes 0 and 1 both have shard-0.parquet" in str(error)
    missing = tmp_path / "missing"
    first, second = on_processes(partial(make, folders=[numbered, missing]), 2)
    assert "process 1 cannot use its --train_data_dir" in str(first)
    assert "missing is not a directory" in str(second)


GATHER = """
import sys, jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("localhost:" + sys.argv[1], 2, int(sys.argv[2]))
from jax.experimental.multihost_utils import process_allgather
from diffusers_flax.data.options import Processes, Transform
from parquet_processing import ParquetImagePairs
for folder in sys.argv[3:]:
    dataset = ParquetImagePairs(
        folder.replace("K", sys.argv[2]), batch_size=2, transform=Transform(4),
        processes=Processes(jax.process_index(), 2, process_allgather),
    )
    prompts = [prompt for batch in dataset for prompt in batch["edit_prompt"]]
    print("rows", sum(dataset.directory_rows), *prompts, sep=",")
"""


@pytest.mark.slow
def test_real_processes_find_out_what_they_have(tmp_path):
    everything = write_numbered(tmp_path, [6, 4, 5])
    for k, shards in enumerate(([0, 2], [1])):
        own = tmp_path / f"own{k}"
        own.mkdir()
        for shard in shards:
            (own / f"shard-{shard}.parquet").symlink_to(everything / f"shard-{shard}.parquet")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", GATHER, port, str(k), str(everything), str(tmp_path / "ownK")],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )
        for k in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=100)[0].splitlines() for process in processes]
    (same0, own0), (same1, own1) = (
        [line.split(",")[1:] for line in output if line.startswith("rows,")] for output in outputs
    )
    assert same0[0] == same1[0] == own0[0] == own1[0] == "15"
    assert len(same0) == len(same1) == 7 and len({*same0[1:], *same1[1:]}) == 12
    assert len(set(own0[1:])) == 4 and not {"6", "7", "8", "9"} & set(own0[1:])
    assert sorted(own1[1:]) == ["6", "7", "8", "9"]


def test_torch_data_loader(numbered, monkeypatch):
    dataset = open_pairs(numbered, batch_size=10, resolution=8)
    assert isinstance(dataset, torch.utils.data.IterableDataset)
    batches = list(torch.utils.data.DataLoader(dataset, batch_size=None))
    assert len(batches) == 5 and batches[0][ORIGINAL].dtype == torch.uint8
    dataset.set_epoch(0)
    for batch, other in zip(batches, dataset):
        np.testing.assert_array_equal(batch[ORIGINAL].numpy(), other[ORIGINAL])
        assert batch["edit_prompt"] == other["edit_prompt"]
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: "a worker process")
    with pytest.raises(ValueError, match="num_workers must be 0"):
        next(iter(dataset))


def test_torch_is_not_needed(numbered):
    code = f"""
import sys
sys.modules["torch"] = None  # importing it raises an ImportError
from parquet_processing import ParquetImagePairs
assert len(list(ParquetImagePairs({str(numbered)!r}, batch_size=10))) == 5
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize("max_rows", [1, 8, 33, 53, 60])
def test_max_rows_are_the_first(numbered, max_rows):
    dataset = open_pairs(numbered, batch_size=1, resolution=4, max_rows=max_rows)
    rows = sorted(int(prompt) for prompt in prompts_of(dataset))
    assert rows == list(range(min(max_rows, 53)))


def test_max_rows_are_too_few(numbered):
    with pytest.raises(ValueError, match="has 3 pairs, fewer than a batch of 4"):
        open_pairs(numbered, batch_size=4, resolution=4, max_rows=3)
    with pytest.raises(ValueError, match="max_rows=0 must be at least 1"):
        open_pairs(numbered, batch_size=4, max_rows=0)


@pytest.mark.slow
@pytest.mark.parametrize("num_parts, window", [(1, 0), (1, 20), (2, 10), (3, 40)])
def test_memory_is_a_few_row_groups(numbered, monkeypatch, num_parts, window):
    """Row groups in memory: at most a window per part, its ends, and one read ahead."""
    read, alive, most = dataloading_shards.read_row_group, set(), []

    def watched(*args):
        cells = read(*args)
        alive.add(id(cells.originals))
        weakref.finalize(cells.originals, alive.remove, id(cells.originals))
        most.append(len(alive))
        return cells

    monkeypatch.setattr(reading, "read_row_group", watched)
    for epoch in range(4):
        dataset = open_pairs(
            numbered, batch_size=num_parts, resolution=4, shuffle_buffer=window * num_parts,
            num_parts=num_parts, prefetch_batches=1,
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
        options["num_parts"] = 1
        dataset = open_pairs(tmp_path, num_threads=1, **options)
        batches = list(dataset)
        (order,) = epoch_order(
            [5, 5, 5, 5, 4], seed=[seed, 0, 0], num_parts=1, rows_per_part=24, window=4096
        )
        expected = [stands_in.get(row, row) for row in order.tolist()]
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

    # Counted in every epoch, logged once.
    caplog.clear()
    list(dataset)
    assert dataset.num_bad == 12 and len(dataset.bad_rows) == 6
    assert not caplog.records


def test_a_pair_of_two_shapes_is_bad_everywhere(tmp_path, capsys, caplog):
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
    options = {"batch_size": 1, "resolution": 8, "max_bad_fraction": 0.5}
    for sizes in (None, ((8, 12), (8, 8))):
        dataset = open_pairs(tmp_path, sizes=sizes, **options)
        assert {"0", "2", "3"} == {*prompts_of(dataset)}
        assert dataset.num_bad == 1 and dataset.bad_rows == {("a.parquet", 1): reason}
    with pytest.raises(ValueError, match=r"cannot be used.*a\.parquet row 1 \(original_image has"):
        list(open_pairs(tmp_path, **options | {"max_bad_fraction": 0}))

    parquet_processing.main(["--train_data_dir", str(tmp_path), "--preview="])
    out = capsys.readouterr().out
    assert f"unreadable  1 of 4 rows\n            a.parquet row 1: {reason}\n" in out

    (group,) = dataloading_shards.list_row_groups(str(tmp_path))
    cells, images = dataloading_shards.read_row_group(group), np.empty((2, 8, 8, 3), np.uint8)
    cached = [decode_into(images, group, cells, n, "dct", 8) for n in range(4)]
    assert [row[-1] for row in cached] == [None, f"a.parquet row 1: {reason}", None, None]

    held_out = pairs_of_shards(tmp_path, Columns())
    assert pairs_of_one_shape(held_out) == [held_out[n] for n in (0, 2, 3)]
    assert "and its truth 64x64; crop one of them" in caplog.text
    assert "pairs that are left out: 1" in caplog.text
    with pytest.raises(ValueError, match=r"row 1 has 96x64 .*; no pair is left to measure"):
        pairs_of_one_shape(held_out[1:2])


def test_row_group_without_a_good_pair(tmp_path):
    rows = [(plain(n), str(n), plain(n)) for n in range(4)] + [(b"bad", "x", b"bad")] * 4
    write_shard(tmp_path / "a.parquet", [*rows, (plain(8), "8", plain(8))], row_group_size=4)
    dataset = open_pairs(tmp_path, batch_size=3, resolution=8, max_bad_fraction=0.5)
    assert sorted(map(int, prompts_of(dataset))) == [0, 1, 2, 3, 8, 8, 8, 8, 8]
    assert dataset.num_bad == 4


def test_a_long_stretch_of_broken_pairs_is_looked_through_once(tmp_path, monkeypatch):
    rows = [(plain(n % 200), str(n), plain(1)) for n in range(900)]
    rows += [(b"bad", "x", b"bad")] * 100
    write_shard(tmp_path / "a.parquet", rows, row_group_size=50)
    num_decoded = []
    decode = decoding.decode_pair
    monkeypatch.setattr(
        decoding, "decode_pair", lambda *a, **k: num_decoded.append(1) or decode(*a, **k)
    )
    dataset = open_pairs(tmp_path, batch_size=20, resolution=4, shuffle_buffer=100)
    seen = Counter(prompts_of(dataset))
    assert seen == Counter(str(n) for n in range(900)) + Counter({"0": 100})
    assert dataset.num_bad == 100 and len(num_decoded) < 1350


def test_text_that_is_none(tmp_path, capsys):
    """A prompt that is not UTF-8 counts as an undecodable pair in loader and description."""
    rows = [(plain(n), "abcd", plain(n)) for n in range(4)]
    plainly = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    write_shard(tmp_path / "a.parquet", rows, **plainly)
    data = (tmp_path / "a.parquet").read_bytes()
    at = data.index(b"abcd")
    (tmp_path / "a.parquet").write_bytes(data[:at] + b"ab\xff\xfe" + data[at + 4 :])
    dataset = open_pairs(tmp_path, batch_size=4, resolution=4, max_bad_fraction=0.5)
    assert prompts_of(dataset) == ["abcd"] * 4
    ((_, reason),) = dataset.bad_rows.items()
    assert reason.startswith("the instruction is not UTF-8")
    parquet_processing.main(["--train_data_dir", str(tmp_path), "--preview", ""])
    assert "unreadable  1 of 4 rows" in capsys.readouterr().out


def test_too_many_broken_pairs(tmp_path, monkeypatch):
    rows = [(plain(0) if n % 5 else b"bad", str(n), plain(1)) for n in range(100)]
    write_shard(tmp_path / "a.parquet", rows)

    def run(**options):
        dataset = open_pairs(tmp_path, batch_size=10, resolution=4, **options)
        try:
            list(dataset)
        except ValueError as error:
            assert "\n" not in str(error)
            return dataset.num_seen, str(error)
        return dataset.num_seen, ""

    assert run(max_bad_fraction=0.2) == (100, "")
    seen, error = run(max_bad_fraction=0.1)  # more than ten of the 100 pairs of an epoch
    assert error.startswith(("11 pairs of", "12 pairs of"))
    assert "--max_bad_fraction 0.1" in error and "a.parquet row" in error
    monkeypatch.setattr(reading, "MIN_ROWS_FOR_BAD_FRACTION", 1)
    assert run(max_bad_fraction=0)[0] <= seen


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


@pytest.mark.parametrize("copy_first", [False, True])
def test_a_struct_beside_its_flattened_copy(tmp_path, copy_first):
    """Both columns have a leaf with the dotted name original_image.bytes."""
    struct, flat, edits = ([f"{name}{n}".encode() for n in range(40)] for name in "abc")
    columns = {
        "original_image": pa.array([{"bytes": x, "path": "x"} for x in struct], IMAGE),
        "original_image.bytes": pa.array(flat, pa.binary()),
        "edit_prompt": pa.array(list(map(str, range(40)))),
        "edited_image": pa.array([{"bytes": x, "path": "x"} for x in edits], IMAGE),
    }
    names = sorted(columns, key="original_image.bytes".__ne__) if copy_first else columns
    pq.write_table(pa.table({name: columns[name] for name in names}), tmp_path / "a.parquet")
    for chosen, originals in {"": struct, "original_image.bytes": flat}.items():
        (group,) = dataloading_shards.list_row_groups(tmp_path, Columns(chosen))
        cells = dataloading_shards.read_row_group(group)
        rows = [dataloading_shards.pair_at(cells, row)[:3] for row in range(40)]
        assert rows == list(zip(originals, edits, map(str, range(40))))
        pairs = pairs_of_shards(tmp_path, Columns(chosen))
        assert [(pair.original, pair.edited) for pair in pairs] == list(zip(originals, edits))


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


def test_columns_of_one_name(tmp_path):
    """Refused only if the ambiguous column is needed."""
    names = ["original_image", "edited_image", "edit_prompt", "x", "x"]
    columns = [pa.array([plain(0)])] * 2 + [pa.array(["red"])] * 3
    pq.write_table(pa.Table.from_arrays(columns, names=names), tmp_path / "a.parquet")
    assert prompts_of(open_pairs(tmp_path, batch_size=1, resolution=4)) == ["red"]
    with pytest.raises(ValueError, match=r"a\.parquet has 2 columns named x; .*edit_prompt_column"):
        open_pairs(tmp_path, batch_size=1, edit_prompt="x")


@pytest.mark.variants
@pytest.mark.parametrize(
    "options, words",
    [
        ({"batch_size": 54}, "has 53 pairs, fewer than a batch of 54; use a smaller batch"),
        ({"batch_size": 20, "process_count": 3}, "53 pairs, fewer than a batch of 60"),
        ({"num_parts": 3, "process_count": 2}, "num_parts=3 does not divide the global batch of 4"),
        ({"max_bad_fraction": 1.5}, "max_bad_fraction=1.5 must be from 0 to 1"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"process_index": 2, "process_count": 2}, "process_index=2 must be from 0"),
        ({"resample": "nearest"}, "resample=nearest is unknown; use one of dct, lanczos, bicubic"),
    ],
)
def test_bad_arguments(numbered, options, words):
    with pytest.raises(ValueError, match=words):
        open_pairs(numbered, **{"batch_size": 2, **options})


def test_every_image_broken(tmp_path):
    write_shard(tmp_path / "a.parquet", [(b"bad", "x", plain(1))] * 3)
    dataset = open_pairs(tmp_path, batch_size=2, resolution=8)
    with pytest.raises(ValueError, match=r"none of the 3 pairs .*known image format") as error:
        list(dataset)
    assert "\n" not in str(error.value)


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
