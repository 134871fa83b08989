"""Mixtures: which set a row is drawn from, passes of sets, resuming, processes, bad input."""

import gc
import itertools
import json
import re
import weakref
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers import slow
from shards import (
    EDITED,
    ORIGINAL,
    on_processes,
    open_mixture,
    open_pairs,
    plain,
    same,
    write_numbered,
    write_shard,
)

from diffusers_flax.data import reading
from diffusers_flax.data.mixture import distinct_names

NUM_ROWS = (53, 16, 9)  # of the sets; the rows of set s have prompts from 100 s on
MAGICBRUSH = ("source_img", "instruction", "target_img")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three sets of other columns, numbers of rows and row groups."""
    folder = tmp_path_factory.mktemp("sets")
    for name in "abc":
        (folder / name).mkdir()
    write_numbered(folder / "a", [30, 4, 19])
    write_numbered(folder / "b", [11, 5], 3, first=100, names=MAGICBRUSH)
    write_numbered(folder / "c", [9], 9, first=200)
    return [str(folder / name) for name in "abc"]


def take(dataset, count):
    """The next batches of an endless dataset."""
    batches = iter(dataset)
    taken = list(itertools.islice(batches, count))
    batches.close()
    return taken


def rows_of(batches):
    """The rows of batches as integers (num_batches, B)."""
    return np.array([[int(prompt) for prompt in batch["edit_prompt"]] for batch in batches])


def check_passes(rows, num_rows):
    """Each pass of a set has every row once; passes have different orders."""
    passes = [rows[i : i + num_rows].tolist() for i in range(0, len(rows), num_rows)]
    for number, of_pass in enumerate(passes):
        assert len(set(of_pass)) == len(of_pass)
        if len(of_pass) == num_rows and number and num_rows > 5:
            assert of_pass != passes[number - 1]
    return len(rows) / num_rows


@pytest.mark.parametrize("seeds", [range(2), *slow(range(20))], ids=["few", "many"])
def test_a_mixture_of_three_sets(folders, seeds):
    """Rows, passes, resuming at every step, and one, two and four processes."""
    for seed in seeds:
        rng = np.random.default_rng([seed, 7])
        weights = rng.uniform(0.5, 2, 3).tolist()
        buffer = int(rng.choice([0, 12, 4096]))
        options = dict(seed=seed, resolution=4, shuffle_buffer=buffer)
        make = partial(open_mixture, folders, weights, batch_size=8, **options)
        mixture, states, batches = make(num_threads=1), [], []
        stream = iter(mixture)
        for _ in range(14):
            states.append(json.loads(json.dumps(mixture.state_dict())))
            batches.append(next(stream))
        stream.close()

        rows = rows_of(batches)
        np.testing.assert_array_equal(rows // 100, mixture.draw_sets(0, 14))
        for batch, numbers in zip(batches, rows):
            np.testing.assert_array_equal(batch[ORIGINAL][:, 3, 3, 1], numbers)
            np.testing.assert_array_equal(batch[EDITED][:, 3, 3, 1], 255 - numbers)
        passes = [
            check_passes(rows[rows // 100 == number], num_rows)
            for number, num_rows in enumerate(NUM_ROWS)
        ]
        assert list(mixture.passes(14).values()) == passes and passes[2] > 1

        # Of the many seeds every tenth resumes at every step, the others at two.
        for step in range(14) if seed % 10 == 0 else rng.choice(14, 2).tolist():
            other = make(num_threads=3)
            other.load_state_dict(states[step])
            rest = take(other, min(3, 14 - step))
            assert all(map(same, rest, batches[step:]))
            assert other.state_dict() == {**states[step], "step": step + len(rest)}
        for process_count in (2, 4):
            parts = [
                make(batch_size=8 // process_count, process_index=k, process_count=process_count)
                for k in range(process_count)
            ]
            assert all(part.state_dict() == states[0] for part in parts)
            for step, of_processes in enumerate(zip(*(take(part, 14) for part in parts))):
                for name in (ORIGINAL, EDITED):
                    joined = np.concatenate([batch[name] for batch in of_processes])
                    np.testing.assert_array_equal(joined, batches[step][name])


def test_shares_are_binomial(folders):
    """Of two hundred seeds: every count within five deviations, their spread as it should be."""
    weights, num_steps, B, squares = (2, 1, 1), 60, 8, []
    for seed in range(200):
        mixture = open_mixture(folders, weights, batch_size=B, seed=seed, resolution=4)
        counts, n = mixture.count_draws(num_steps), num_steps * B
        np.testing.assert_array_equal(
            counts, np.bincount(mixture.draw_sets(0, num_steps).ravel(), minlength=3)
        )
        for count, p in zip(counts, (0.5, 0.25, 0.25)):
            squares.append((count - n * p) ** 2 / (n * p * (1 - p)))
    assert max(squares) < 25 and 0.85 < np.mean(squares) < 1.15
    # The sequence of a seed neither depends on where it is read from nor on how much at once.
    np.testing.assert_array_equal(
        mixture.draw_sets(17, 5), np.concatenate([mixture.draw_sets(t, 1) for t in range(17, 22)])
    )
    assert np.all(mixture.count_draws(20) <= counts)  # also of an earlier step


def test_without_weights_shares_are_the_numbers_of_pairs(folders):
    mixture = open_mixture(folders, batch_size=8, resolution=4)
    assert mixture.shares == [n / sum(NUM_ROWS) for n in NUM_ROWS]
    assert mixture.names == ["a", "b", "c"]


def test_one_directory_is_no_mixture(folders):
    dataset = open_pairs(folders[0], batch_size=8, resolution=4)
    assert dataset.passes(5) == {}
    dataset.set_step(len(dataset) * 2 + 3)
    assert (dataset.epoch, dataset.state_dict()["batch"]) == (2, 3)
    batch = next(iter(dataset))
    dataset.set_epoch(2)
    assert same(batch, list(dataset)[3])


def test_it_continues_after_the_last_batch(folders):
    expected = take(open_mixture(folders, batch_size=4, resolution=4), 6)
    mixture = open_mixture(folders, batch_size=4, resolution=4)
    assert all(map(same, take(mixture, 2) + take(mixture, 4), expected))
    mixture.set_step(1)
    assert same(*take(mixture, 1), expected[1])


def test_state_of_another_mixture_is_refused(folders):
    state = open_mixture(folders, (2, 1, 1), batch_size=4).state_dict()
    with pytest.raises(ValueError, match=r"shares was \[0.5, 0.25, 0.25\] and is \[0.25, 0.5, "):
        open_mixture(folders, (1, 2, 1), batch_size=4).load_state_dict(state)
    with pytest.raises(ValueError, match=r"columns was .*; data was "):
        open_mixture([*folders[1::-1], folders[2]], (2, 1, 1), batch_size=4).load_state_dict(state)
    open_mixture(folders, (4, 2, 2), batch_size=4).load_state_dict(state)  # the same shares


@pytest.fixture
def divided(tmp_path):
    """A set that two processes have, and one of which each has its own shards (own0, own1)."""
    shared, whole = tmp_path / "shared", tmp_path / "whole"
    for folder in (shared, whole):
        folder.mkdir()
    write_numbered(shared, [7, 6], 4, first=100)
    write_numbered(whole, [10, 8, 6], 4)
    for k, shards in enumerate(([0], [1, 2])):
        (tmp_path / f"own{k}").mkdir()
        for shard in shards:
            link = tmp_path / f"own{k}" / f"shard-{shard}.parquet"
            link.symlink_to(whole / f"shard-{shard}.parquet")
    return tmp_path


def check_divided(streams):
    """Check the rows (num_batches, B) of two processes that read `divided`."""
    rows = np.concatenate(streams, axis=1)
    check_passes(rows[rows >= 100], 13)  # over both processes, in the order of the global batch
    for own, numbers in zip(streams, (range(10), range(10, 24))):
        assert check_passes(own[own < 100], len(numbers)) > 2
        assert set(own[own < 100].tolist()) == set(numbers)


def test_processes_with_their_own_shards_of_one_set(divided):
    def make(process_index, all_gather, state=None, **options):
        mixture = open_mixture(
            [divided / "shared", divided / f"own{process_index}"], [1, 2], batch_size=4,
            resolution=4, shuffle_buffer=6, process_index=process_index, process_count=2,
            all_gather=all_gather, **options,
        )  # fmt: skip
        if state:
            mixture.load_state_dict(state)
        return mixture

    mixtures = on_processes(make, 2)
    batches = [take(mixture, 16) for mixture in mixtures]
    check_divided([rows_of(own) for own in batches])
    assert mixtures[0].state_dict() == mixtures[1].state_dict()
    state = mixtures[0].state_dict() | {"step": 9}
    for mixture, own in zip(on_processes(partial(make, state=state), 2), batches):
        assert all(map(same, take(mixture, 7), own[9:]))


def test_undecodable_rows_are_replaced_within_their_set(folders, tmp_path):
    rows = [(plain(n % 256), str(n), b"damaged" if n == 303 else plain(0)) for n in range(300, 312)]
    write_shard(tmp_path / "d.parquet", rows, row_group_size=4)
    mixture = open_mixture([folders[0], tmp_path], batch_size=8, resolution=4, max_bad_fraction=0.5)
    batches = take(mixture, 25)
    rows = rows_of(batches)
    np.testing.assert_array_equal(rows >= 300, mixture.draw_sets(0, 25) == 1)
    num_passes = (rows >= 300).sum() / 12
    assert 303 not in rows and num_passes - 1 <= mixture.num_bad <= num_passes + 1
    assert mixture.num_bad == mixture.sets[1].num_bad and not mixture.sets[0].bad_rows
    assert list(mixture.sets[1].bad_rows) == [("d.parquet", 3)]
    with pytest.raises(ValueError, match=r"--max_bad_fraction 0 .*d\.parquet row 3"):
        take(
            open_mixture([folders[0], tmp_path], batch_size=8, resolution=4, max_bad_fraction=0), 25
        )


def test_memory_and_reading(folders, monkeypatch):
    """Each pass of a set reads it once; a few row groups are in memory."""
    alive, readings, most = Counter(), Counter(), Counter()

    def watched(group):
        cells = reading_group(group)
        name = group.path.parent.name
        readings[name] += 1
        alive[name] += 1
        most[name] = max(most[name], alive[name])
        weakref.finalize(cells.table, alive.subtract, {name: 1})
        return cells

    reading_group = reading.read_row_group
    monkeypatch.setattr(reading, "read_row_group", watched)
    mixture = open_mixture(folders[:2], [1, 1], batch_size=4, resolution=4, shuffle_buffer=34)
    take(mixture, 80)
    gc.collect()
    passes = mixture.passes(80)
    assert 8 * (passes["a"] - 1) <= readings["a"] <= 8 * (passes["a"] + 1)
    # 17 rows are two row groups of 8 rows and a part of the next; two more, and one read ahead.
    assert most["a"] <= 6 and not any(alive.values())


def test_columns_belong_to_sets(folders, tmp_path):
    """A column by flag is taken where it is; sets without it have those of a known set."""
    write_numbered(tmp_path, [6], first=300, names=("first", "edit_prompt", "edited_image"))
    places = [*folders[:2], str(tmp_path)]
    options = dict(batch_size=4, resolution=4)
    mixture = open_mixture(places, original_image="first", **options)
    assert [pairs.groups[0].columns[0] for pairs in mixture.sets] == [
        "original_image", "source_img", "first",
    ]  # fmt: skip
    assert {300, 0} <= set((rows_of(take(mixture, 12)) // 300 * 300).ravel().tolist())
    with pytest.raises(ValueError, match="has no column nothing; it has"):
        open_mixture(places, edit_prompt="nothing", **options)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("a/data", "b/data", "/c"), ["a/data", "b/data", "c"]),
        (("x/../a/data", "b/data"), ["a/data", "b/data"]),
    ],
)
def test_names_of_sets(names, expected):
    assert distinct_names(names) == expected


BAD = [
    (dict(weights=(2, 1)), "--train_data_weights 2 1: give a weight for each of several"),
    (
        dict(places="aba"),
        "names a directory twice; name it once, and raise its weight with --train_dat",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_arguments(folders, options, message):
    options = dict(batch_size=16, resolution=4) | options
    places = [f"{Path(folders[0]).parent}/{name}" for name in options.pop("places", "abc")]
    with pytest.raises(ValueError, match=re.escape(message)):
        open_mixture(places, **options)
