"""Which pairs of a line are kept, what is counted, and the files of finished lines."""

import errno
import fcntl
import itertools
import json
import os
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import files_of
from shards import plain

from diffusers_flax.data.options import Columns
from diffusers_flax.data.shards import list_row_groups, pair_at, read_row_group, shard_ids
from diffusers_flax.data.writing import SCHEMA
from diffusers_flax.loading.files import unfinished_path
from diffusers_flax.pairing import results
from diffusers_flax.pairing.captions import Caption
from diffusers_flax.pairing.results import BINS, Choice, Line, MadePair, Output, read_counts
from diffusers_flax.pairing.samples import draw_sample
from diffusers_flax.pairing.scores import Scores, Thresholds

NAN = float("nan")
SETTINGS = {"model": "a", "num_samples": 3, "lines": "123"}
CAPTIONS = [Caption(2 * i + 1, f"before {i}", f"edit {i}", f"after {i}") for i in range(5)]
ANY = Thresholds(-1, -1, -1)
CHOICE = Choice(6, 2, Thresholds(0.1, 0.1, 0.1))


def random_pairs(count, seed=0, place=0):
    """Pairs with random scores, of which some are equal and some NaN."""
    rng = random.Random(seed)
    grid = [NAN, -0.6, 1.0, *(x / 8 for x in range(9))]
    return [
        MadePair(
            draw_sample(0, place, number, (7.5, 15), (0.1, 0.9)),
            Scores(*(rng.choice(grid) for _ in Scores._fields)),
            (plain(number % 256), plain(255 - number % 256)),
        )
        for number in range(count)
    ]


def line_of(choice, pairs):
    line = Line(choice)
    for pair in pairs:
        line.add(pair)
    return line


def is_good(pair, thresholds):
    """As the paper says, with comparisons that NaN fails."""
    text, edited, image, direction = pair.scores
    least = thresholds.min_clip_text
    return (
        text >= least
        and edited >= least
        and image >= thresholds.min_clip_image
        and direction >= thresholds.min_clip_direction
    )


def numbers(pairs):
    return [pair.sample.number for pair in pairs]


# ------------------------------------------------------------------ lines


@pytest.mark.parametrize("num_kept", [1, 2, 4, 100])
@pytest.mark.parametrize("seed", range(3))
def test_the_good_pairs_with_the_largest_direction_are_kept(seed, num_kept):
    """Of equal ones the first; by sorting all at once, where Line keeps num_kept while it runs."""
    thresholds, pairs = Thresholds(0.25, 0.25, 0.25), random_pairs(60, seed)
    line = line_of(Choice(60, num_kept, thresholds), pairs)
    good = [pair for pair in pairs if is_good(pair, thresholds)]
    expected = sorted(good, key=lambda x: (-x.scores.clip_direction, x.sample.number))
    assert len(good) > 4 and numbers(line.kept) == numbers(expected[:num_kept])
    assert line.num_good == len(good) and line.is_finished


def test_all_pairs_are_kept_on_request():
    pairs = random_pairs(20)
    line = line_of(Choice(20, None, Thresholds(0.9, 0.9, 0.9)), reversed(pairs))
    assert line.kept == pairs and line.num_good == 0


@pytest.mark.parametrize("stops_early", [False, True])
def test_the_order_of_arrival_does_not_matter(stops_early):
    """Nor do samples that come twice, as padding repeats them."""
    choice, pairs = Choice(12, 2, Thresholds(0, 0, 0), stops_early), random_pairs(12, 4)
    first = line_of(choice, pairs)
    for seed in range(30):
        order = pairs + random.Random(seed).choices(pairs, k=3)
        random.Random(seed).shuffle(order)
        line = line_of(choice, order)
        assert line.kept == first.kept and line.num_seen == first.num_seen
        assert line.counts(CAPTIONS[0]) == first.counts(CAPTIONS[0])
        assert np.array_equal(line.histograms, first.histograms)
        assert stops_early or not line.arrived


def test_a_gap_is_waited_for():
    pairs, line = random_pairs(4), Line(Choice(4, 2, ANY))
    assert [line.add(pairs[i]) for i in (2, 0, 3)] == [0, 1, 0]
    assert not line.is_finished and line.num_seen == 1
    assert line.add(pairs[1]) == 3 and line.is_finished


@pytest.mark.parametrize("num_kept", [1, 2, 3])
def test_an_early_stop_keeps_the_first_good_pairs(num_kept):
    """However many are made: the line ends at the sample that completes them."""
    thresholds, pairs = Thresholds(0.1, 0.1, 0.1), random_pairs(40, 5)
    good = [pair for pair in pairs if is_good(pair, thresholds)]
    line = line_of(Choice(40, num_kept, thresholds, True), pairs)
    assert sorted(numbers(line.kept)) == numbers(good[:num_kept])
    assert line.num_seen == good[num_kept - 1].sample.number + 1 < 40
    assert line.histograms.sum() == 4 * line.num_seen


def test_an_early_stop_without_enough_good_pairs_makes_all():
    line = line_of(Choice(10, 3, Thresholds(1.0, 1.0, 1.0), True), random_pairs(10))
    assert line.num_seen == 10 and line.is_finished and not line.kept


def test_histograms_are_those_of_numpy():
    """Scores beyond the ends count at the ends, NaN at the lowest."""
    pairs = random_pairs(300, 2)
    line = line_of(Choice(300, 4, Thresholds()), pairs)
    for histogram, values in zip(line.histograms, zip(*(pair.scores for pair in pairs))):
        values = np.nan_to_num(values, nan=-1).clip(BINS[0], BINS[-1])
        assert np.array_equal(histogram, np.histogram(values, BINS)[0])
    assert line.histograms.sum(axis=1).tolist() == [300] * 4


def test_what_is_counted():
    thresholds, pairs = Thresholds(0.5, 0.25, 0.5), random_pairs(50, 3)
    counts = line_of(Choice(50, 2, thresholds), pairs).counts(CAPTIONS[3])
    scores = np.array([pair.scores for pair in pairs])
    good = scores >= [0.5, 0.5, 0.25, 0.5]
    compared = np.column_stack([scores[:, :2].min(axis=1), scores[:, 2:]])
    missed = [50 - (good[:, 0] & good[:, 1]).sum(), *(50 - good[:, 2:].sum(axis=0))]
    assert counts == {
        "line": 7,
        "samples": 50,
        "good": good.all(axis=1).sum(),
        "nan": 0,
        "kept": 2,
        "missed": dict(zip(Thresholds._fields, missed)),
        "largest": dict(zip(Thresholds._fields, np.nanmax(compared, axis=0))),
    }
    assert json.loads(json.dumps(counts, default=int)) == counts


def test_the_best_pair_of_a_line_without_good_ones():
    """The preview shows it; a pair without a direction is the best only among its like."""
    none = Scores(0.1, 0.1, 0.1, NAN)
    sample = random_pairs(4)
    for order in itertools.permutations((none, none._replace(clip_direction=0.1), none)):
        pairs = [pair._replace(scores=scores) for pair, scores in zip(sample, order)]
        line = line_of(Choice(3, 2, Thresholds()), pairs)
        assert line.best.scores.clip_direction == 0.1
    line = line_of(Choice(1, 2, Thresholds()), [sample[0]._replace(scores=none)])
    assert line.best.sample.number == 0


# ------------------------------------------------------------------ files


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


def outputs(folder, lines_per_shard=2, num_workers=1):
    return [
        Output(folder, CAPTIONS, lines_per_shard, worker, num_workers)
        for worker in range(num_workers)
    ]


def made(place, choice=CHOICE):
    """The finished Line of a place."""
    return line_of(choice, random_pairs(choice.num_samples, place, place))


def write_all(folder, **options):
    """All shards of a run; returns the Output."""
    (output,) = outputs(folder, **options)
    complete(output)
    return output


def complete(output):
    output.check(SETTINGS)
    output.start(SETTINGS)
    for place in output.unfinished_lines():
        output.finish(place, made(place))
    output.end()


def counted_by(output):
    """(counts of all lines, histograms) of an Output."""
    found = list(output.counted())
    counts = [line for lines, _ in found for line in lines]
    return counts, sum((histograms for _, histograms in found), np.zeros((4, len(BINS) - 1)))


def test_shards_have_the_kept_pairs_of_their_lines(folder):
    output = write_all(folder)
    names = [f"train-0000{i}-of-00003.parquet" for i in range(3)]
    assert sorted(files_of(folder)) == [Path("make_pairs.json"), *map(Path, names)]
    for number, name in enumerate(names):
        places = range(2 * number, min(2 * number + 2, 5))
        expected = [(CAPTIONS[place], pair) for place in places for pair in made(place).kept]
        rows = pq.read_table(folder / name).to_pylist()
        assert len(rows) == len(expected)
        for row, (caption, pair) in zip(rows, expected):
            original, edited = ({"bytes": data, "path": None} for data in pair.images)
            texts = row["original_prompt"], row["edit_prompt"], row["edited_prompt"]
            assert texts == caption[1:] and row["line"] == caption.line
            assert (row["original_image"], row["edited_image"]) == (original, edited)
            assert row["sample"] == pair.sample.number
            assert row["guidance_scale"] == pytest.approx(pair.sample.guidance_scale)
            assert row["attention_sharing"] == pytest.approx(pair.sample.attention_sharing)
            assert np.array_equal([row[x] for x in Scores._fields], np.float32(pair.scores))
    counts, histograms = counted_by(output)
    assert counts == [made(place).counts(CAPTIONS[place]) for place in range(5)]
    assert np.array_equal(histograms, sum(made(place).histograms for place in range(5)))


def test_shards_are_read_as_public_ones(folder):
    """The schema begins with the columns of published shards; nothing is compressed."""
    write_all(folder)
    groups = list_row_groups(str(folder), Columns())
    schema = groups[0].metadata.schema.to_arrow_schema()
    assert pa.schema(list(schema)[: len(SCHEMA)]).equals(SCHEMA)
    assert groups[0].metadata.row_group(0).column(0).compression == "UNCOMPRESSED"
    pair = pair_at(read_row_group(groups[0]), 0)
    kept = made(0).kept[0]
    assert (pair.original, pair.edited, pair.instruction) == (*kept.images, "edit 0")


def test_row_groups_are_limited_by_rows_and_bytes(folder, monkeypatch):
    choice = Choice(30, None, ANY)
    monkeypatch.setattr(results, "ROW_GROUP_ROWS", 7)
    output = Output(folder, CAPTIONS[:1], 1, 0, 1)
    output.start(SETTINGS)
    output.finish(0, made(0, choice))
    metadata = pq.read_metadata(output.shards[0])
    assert [metadata.row_group(i).num_rows for i in range(5)] == [7, 7, 7, 7, 2]
    size = sum(map(len, made(0, choice).kept[0].images))
    monkeypatch.setattr(results, "ROW_GROUP_BYTES", int(3.5 * size))
    output = Output(folder / "bytes", CAPTIONS[:1], 1, 0, 1)
    output.start(SETTINGS)
    output.finish(0, made(0, choice))
    metadata = pq.read_metadata(output.shards[0])
    assert {metadata.row_group(i).num_rows for i in range(9)} <= {2, 3, 4}
    assert metadata.num_rows == 30


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 0, 3, 1), (3, 1, 0, 4, 2)])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_bytes_depend_neither_on_workers_nor_on_the_order_of_lines(tmp_path, order, num_workers):
    """Workers write into one directory; the last one may have no shards."""
    write_all(tmp_path / "alone")
    shared = outputs(tmp_path / "data", num_workers=num_workers)
    for output in shared:
        output.check(SETTINGS)
        output.start(SETTINGS)
    for place in order:
        (owner,) = (x for x in shared if place in x.unfinished_lines())
        owner.finish(place, made(place))
        with pytest.raises(ValueError, match=r"is not complete.*make_pairs.py"):
            list_row_groups(str(tmp_path / "data"))
    for output in shared:
        assert not output.unfinished_lines()
        output.end()
    assert files_of(tmp_path / "data") == files_of(tmp_path / "alone")
    counts = [line for output in shared for line in counted_by(output)[0]]
    assert sorted(line["line"] for line in counts) == [1, 3, 5, 7, 9]
    assert sum(counted_by(output)[1] for output in shared).sum() == 4 * 6 * 5


@pytest.mark.parametrize("killed_at", range(24))
def test_a_run_that_is_killed_anywhere_goes_on(tmp_path, monkeypatch, killed_at):
    """It ends at one of the renames, the moments at which a file becomes visible, or a removal."""

    calls = itertools.count()

    class Killed(BaseException):
        pass

    def ending(function):
        def call(*args, **options):
            if next(calls) == killed_at:
                raise Killed
            return function(*args, **options)

        return call

    write_all(tmp_path / "alone")
    with monkeypatch.context() as patch:
        for name in ("replace", "unlink"):
            patch.setattr(Path, name, ending(getattr(Path, name)))
        with pytest.raises(Killed):
            write_all(tmp_path / "data")
    write_all(tmp_path / "data")
    assert files_of(tmp_path / "data") == files_of(tmp_path / "alone")


def test_files_of_killed_writers_are_removed(folder):
    """Of a line that is made again, and of a line and a shard that no start writes again."""
    (output,) = outputs(folder)
    output.start(SETTINGS)
    output.finish(0, made(0))
    part = unfinished_path(output.line_file(1))
    part.write_bytes(b"PAR1")
    output.lock.release()  # as the system does after a kill
    write_all(folder)
    assert not (folder / ".unfinished").exists()
    output.line_file(1).parent.mkdir()
    output.line_file(1).write_bytes(b"")  # killed while it removed the lines of a shard
    write_all(folder)
    assert not (folder / ".unfinished").exists()


def test_all_lines_there_and_no_shard(folder, monkeypatch):
    """Killed before a shard is written: the next start writes it without a model."""
    (output,) = outputs(folder)
    output.start(SETTINGS)
    with monkeypatch.context() as patch:
        patch.setattr(Output, "_merge", lambda *args: None)
        for place in range(5):
            output.finish(place, made(place))
    (output,) = outputs(folder)
    output.check(SETTINGS)
    output.start(SETTINGS)
    assert not output.unfinished_lines() and counted_by(output)[0]


def test_a_directory_without_a_complete_shard_is_incomplete(folder):
    """Also between two shards, when no line waits for its shard."""
    (output,) = outputs(folder)
    output.start(SETTINGS)
    for place in (0, 1):
        output.finish(place, made(place))
    assert output.shards[0].exists()
    with pytest.raises(ValueError, match="is not complete"):
        list_row_groups(str(folder))


def test_marks_of_other_numbers_of_workers_do_not_stay(folder):
    """A run with 3 workers is killed and goes on with 1."""
    for output in outputs(folder, num_workers=3):
        output.start(SETTINGS)
        output.lock.release()  # as the system does after a kill
    write_all(folder)
    assert not (folder / ".unfinished").exists()


def test_workers_in_one_directory_do_not_end_each_other(folder):
    """The first worker is done before the second one begins, or while it runs."""
    first, second = outputs(folder, num_workers=2)
    second.start(SETTINGS)
    first.start(SETTINGS)
    for place in first.unfinished_lines():
        first.finish(place, made(place))
    first.end()
    with pytest.raises(ValueError, match="is not complete"):
        list_row_groups(str(folder))
    for place in second.unfinished_lines():
        second.finish(place, made(place))
    second.end()
    assert len(list_row_groups(str(folder))) == 3


def test_a_worker_that_begins_while_another_is_checked(folder, monkeypatch):
    """Its files appear between the two looks at the directory."""
    first, second = outputs(folder, num_workers=2)
    glob = Path.glob

    def begin(path, pattern):
        found = list(glob(path, pattern))
        if path == folder:
            first.start(SETTINGS)
        return iter(found)

    monkeypatch.setattr(Path, "glob", begin)
    second.check(SETTINGS)


def test_runs_that_begin_at_once_do_not_mix(folder):
    """Both find an empty directory, then open their models; the first to start stays."""
    (first,), (second,) = outputs(folder), outputs(folder)
    first.check(SETTINGS)
    second.check(SETTINGS | {"seed": 5})
    first.start(SETTINGS)
    with pytest.raises(ValueError, match="other --seed"):
        second.start(SETTINGS | {"seed": 5})
    with pytest.raises(ValueError, match=r"another run writes into .*; wait until it ends"):
        second.start(SETTINGS)
    with pytest.raises(ValueError, match=r"another run writes into .*; wait until it ends"):
        outputs(folder, num_workers=2)[0].start(SETTINGS)
    assert len(list((folder / ".unfinished").iterdir())) == 1
    first.finish(0, made(0))
    first.end()
    second.start(SETTINGS)
    assert second.finished == {0}


def test_a_disk_without_locks(folder, monkeypatch):
    """The same worker, started twice: both end, and lines are made twice."""

    def no_lock(*args):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", no_lock)
    (first,), (second,) = outputs(folder), outputs(folder)
    first.start(SETTINGS)
    second.start(SETTINGS)
    for place in range(4):
        first.finish(place, made(place))
    for place in second.unfinished_lines():
        second.finish(place, made(place))
    first.finish(4, made(4))
    for output in (first, second):
        output.end()
    assert not (folder / ".unfinished").exists()
    assert [len(lines) for lines, _ in first.counted()] == [2, 2, 1]


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model": "b"}, "other --model;"),
        ({"lines": "456"}, "other lines;"),
        ({"commit": "1a"}, "other commit of --model on the hub; name another directory$"),
        ({"num_samples": 4, "lora": ["x"]}, "other --num_samples, --lora;"),
    ],
)
def test_other_settings_are_refused(folder, changes, named):
    output = write_all(folder)
    before = files_of(folder)
    with pytest.raises(ValueError, match=named):
        output.check(SETTINGS | changes)
    assert files_of(folder) == before


def test_settings_are_compared_as_json(folder):
    """Tuples and paths are lists and texts in the file."""
    settings = SETTINGS | {"timesteps": (1, 2), "captions": Path("a"), "eta": 0.1 + 0.2}
    (output,) = outputs(folder)
    output.start(settings)
    output.check(settings)


@pytest.mark.parametrize("name", ["train-00000-of-00003.parquet", "captions.jsonl", "previews"])
def test_foreign_files_are_refused(folder, name):
    folder.mkdir()
    (folder / name).write_text("mine")
    (folder / ".hidden").write_text("mine")
    (output,) = outputs(folder)
    with pytest.raises(ValueError, match=f"is not empty \\({name}\\); name another"):
        output.check(SETTINGS)
    assert len(files_of(folder)) == 2


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "data").write_text("")
    for folder in (tmp_path / "data", tmp_path / "data" / "below"):
        with pytest.raises(ValueError, match="cannot be written"):
            outputs(folder)[0].check(SETTINGS)


def test_a_shard_under_the_name_of_another_is_named(folder):
    output = write_all(folder)
    output.shards[1].write_bytes(output.shards[0].read_bytes())
    with pytest.raises(ValueError, match=f"{output.shards[1]} has the lines of another shard; rem"):
        outputs(folder)[0].start(SETTINGS)
    assert not (folder / ".unfinished").exists()


def test_damaged_settings_are_named(folder):
    write_all(folder)
    (folder / "make_pairs.json").write_text("{bad")
    with pytest.raises(ValueError, match=r"pairs.json is damaged, and nothing else says which"):
        outputs(folder)[0].check(SETTINGS)


@pytest.mark.parametrize("content", ["empty", "cut", "foreign", "not ours"])
@pytest.mark.parametrize("name", ["shard", "line"])
def test_damaged_files_are_named(folder, content, name):
    """Before anything is made; without the file the same command makes its lines again."""
    (output,) = outputs(folder)
    output.start(SETTINGS)
    for place in (0, 1, 2):
        output.finish(place, made(place))
    output.lock.release()  # as the system does after a kill
    file = output.shards[0] if name == "shard" else output.line_file(2)
    if content == "foreign":
        pq.write_table(pa.table({"a": [1]}), file)
    elif content == "not ours":
        pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({"a": "b"}), file)
    else:
        file.write_bytes(b"" if content == "empty" else file.read_bytes()[:-20])
    (again,) = outputs(folder)
    with pytest.raises(ValueError) as error:
        complete(again)
    again.lock.release()
    assert f"{file} is damaged, or not of make_pairs.py; remove it" in str(error.value)
    file.unlink()
    write_all(folder)
    write_all(folder.with_name("alone"))
    assert files_of(folder) == files_of(folder.with_name("alone"))


def test_counts_of_a_file(folder):
    output = write_all(folder)
    lines, histograms = read_counts(output.shards[2])
    assert [line["line"] for line in lines] == [9]
    assert histograms.shape == (4, len(BINS) - 1) and histograms.sum() == 24


# ------------------------------------------------------------------ shards without pairs


def without_pairs(folder, places):
    """Shards of lines of which nothing is kept in some places."""
    (output,) = outputs(folder, lines_per_shard=1)
    output.start(SETTINGS)
    for place in range(5):
        thresholds = Thresholds(1, 1, 1) if place in places else ANY
        pairs = [x._replace(scores=Scores(0, 0, 0, 0)) for x in random_pairs(3, 1, place)]
        output.finish(place, line_of(Choice(3, 2, thresholds), pairs))
    output.end()
    return output


def test_shards_without_pairs_are_read(folder):
    """The loader takes the rows of the others; shards count for the report."""
    output = without_pairs(folder, {0, 3})
    assert [pq.read_metadata(file).num_rows for file in output.shards] == [0, 2, 2, 0, 2]
    groups = list_row_groups(str(folder))
    assert [group.path for group in groups] == [output.shards[i] for i in (1, 2, 4)]
    assert len(shard_ids(groups)) == 3
    assert [line["kept"] for line in counted_by(output)[0]] == [0, 2, 2, 0, 2]


def test_a_directory_without_pairs(folder):
    output = without_pairs(folder, range(5))
    with pytest.raises(ValueError, match=r"5 shards in .* have 0 rows"):
        list_row_groups(str(folder))
    assert [line["kept"] for line in counted_by(output)[0]] == [0] * 5


def test_a_full_disk_names_the_file_and_keeps_finished_lines(folder, monkeypatch):
    """The writer of parquet reports ENOSPC as its own kind of error."""
    (output,) = outputs(folder)
    output.start(SETTINGS)
    output.finish(0, made(0))

    class Full:
        def __init__(self, path, *args, **options):
            Path(path).write_bytes(b"PAR1")

        def __enter__(self):
            raise OSError(f"Error writing bytes to file. Detail: [errno 28] {os.strerror(28)}")

        def __exit__(self, *args):
            pass

    with monkeypatch.context() as patch:
        patch.setattr(results.pq, "ParquetWriter", Full)
        with pytest.raises(OSError, match="the disk is full") as error:
            output.finish(1, made(1))
    assert error.value.filename == str(output.line_file(1))
    assert not list(folder.rglob(".unfinished-*"))
    assert output.is_finished(0) and not output.is_finished(1)
    output.finish(1, made(1))
    assert output.shards[0].exists()
