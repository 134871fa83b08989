"""Which pairs of a line are kept, the shards, previews and the report."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import files_of
from PIL import Image
from shards import plain

from diffusers_flax.data.options import Columns
from diffusers_flax.data.shards import list_row_groups, pair_at, read_row_group
from diffusers_flax.data.writing import SCHEMA
from diffusers_flax.pairing import pair_shards
from diffusers_flax.pairing.caption_lists import Caption
from diffusers_flax.pairing.pair_scores import Scores, Thresholds
from diffusers_flax.pairing.pair_shards import BINS, MadeLine, MadePair, PairShards
from diffusers_flax.pairing.pairs_report import (
    summarize_counts,
    warning_of_empty,
    write_preview,
    write_report,
)
from diffusers_flax.pairing.samples import draw_sample

NAN = float("nan")
SETTINGS = {"model": "a", "num_samples": 3, "captions": "123"}
CAPTIONS = [Caption(2 * i + 1, f"before {i}", f"edit {i}", f"after {i}") for i in range(5)]


def config_of(num_samples=6, num_kept=2, least=0.1, **changes):
    """Flags of a run with equal thresholds."""
    flags = dict.fromkeys(Thresholds._fields, least) | dict(keep_all=False, early_stop=False)
    flags |= dict(num_samples=num_samples, num_kept=num_kept, clip_model="clip")
    return SimpleNamespace(**flags | changes)


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


def line_of(config, pairs):
    line = MadeLine(config)
    for pair in pairs:
        line.add(pair)
    return line


def is_good(pair, least):
    """As the paper says, with comparisons that NaN fails."""
    return all(score >= least for score in pair.scores)


def numbers(pairs):
    return [pair.sample.number for pair in pairs]


# ------------------------------------------------------------------ lines


@pytest.mark.parametrize("num_kept", [1, 4, 100])
def test_the_good_pairs_with_the_largest_direction_are_kept(num_kept):
    """Of equal ones the first."""
    pairs = random_pairs(60)
    line = line_of(config_of(60, num_kept, 0.25), pairs)
    good = [pair for pair in pairs if is_good(pair, 0.25)]
    expected = sorted(good, key=lambda x: (-x.scores.clip_direction, x.sample.number))
    assert len(good) > 4 and numbers(line.kept) == numbers(expected[:num_kept])
    assert line.num_good == len(good) and line.is_finished


def test_all_pairs_are_kept_on_request():
    pairs = random_pairs(20)
    line = line_of(config_of(20, least=0.9, keep_all=True), reversed(pairs))
    assert line.kept == pairs and line.num_good == 0


@pytest.mark.parametrize("early_stop", [False, True])
def test_the_order_of_arrival_does_not_matter(early_stop):
    """Nor do samples that come twice, as padding repeats them."""
    config, pairs = config_of(12, 2, 0, early_stop=early_stop), random_pairs(12, 4)
    first = line_of(config, pairs)
    for seed in range(9):
        order = pairs + random.Random(seed).choices(pairs, k=3)
        random.Random(seed).shuffle(order)
        line = line_of(config, order)
        assert line.kept == first.kept
        assert line.counts(CAPTIONS[0]) == first.counts(CAPTIONS[0])


@pytest.mark.parametrize("num_kept", [1, 3])
def test_an_early_stop_keeps_the_first_good_pairs(num_kept):
    """However many are made: the line ends at the sample that completes them."""
    pairs = random_pairs(40, 5)
    good = [pair for pair in pairs if is_good(pair, 0.1)]
    line = line_of(config_of(40, num_kept, 0.1, early_stop=True), pairs)
    assert sorted(numbers(line.kept)) == numbers(good[:num_kept])
    assert line.num_samples == good[num_kept - 1].sample.number + 1 < 40
    none = line_of(config_of(10, 3, 1.0, early_stop=True), random_pairs(10))
    assert none.num_samples == 10 and none.is_finished and not none.kept


def test_what_is_counted():
    thresholds = dict(zip(Thresholds._fields, (0.5, 0.25, 0.5)))
    pairs = random_pairs(50, 3)
    counts = line_of(config_of(50, **thresholds), pairs).counts(CAPTIONS[3])
    scores = np.array([pair.scores for pair in pairs])
    good = scores >= [0.5, 0.5, 0.25, 0.5]
    compared = np.column_stack([scores[:, :2].min(axis=1), scores[:, 2:]])
    missed = [50 - (good[:, 0] & good[:, 1]).sum(), *(50 - good[:, 2:].sum(axis=0))]
    histograms = np.array(counts.pop("histograms"))
    assert counts == {
        "line": 7,
        "samples": 50,
        "good": good.all(axis=1).sum(),
        "nan": 0,
        "kept": 2,
        "missed": dict(zip(Thresholds._fields, missed)),
        "largest": dict(zip(Thresholds._fields, np.nanmax(compared, axis=0))),
    }
    # Scores beyond the ends count at the ends, NaN at the lowest.
    assert histograms.sum(axis=1).tolist() == [50] * 4
    assert histograms[:, -1].tolist() == (scores == 1).sum(0).tolist()
    assert histograms[:, 0].tolist() == (np.isnan(scores) | (scores < -0.5)).sum(0).tolist()
    assert np.allclose(BINS[[0, -1]], [-0.5, 1])


def test_the_best_pair_of_a_line_without_good_ones():
    """The preview shows it; a pair without a direction is the best only among its like."""
    none, sample = Scores(0.1, 0.1, 0.1, NAN), random_pairs(2)
    for order in (
        (none, none._replace(clip_direction=0.1)),
        (none._replace(clip_direction=0.1), none),
    ):
        pairs = [pair._replace(scores=scores) for pair, scores in zip(sample, order)]
        assert line_of(config_of(2, least=0.9), pairs).best.scores.clip_direction == 0.1
    assert line_of(config_of(1), [sample[0]._replace(scores=none)]).best.sample.number == 0


# ------------------------------------------------------------------ files


def made(place, **flags):
    """The finished MadeLine of a place."""
    config = config_of(**flags)
    return line_of(config, random_pairs(config.num_samples, place, place))


def write_all(folder, worker=0, num_workers=1):
    """The shards of a worker; returns its PairShards."""
    shards = PairShards(folder, CAPTIONS, 2, worker, num_workers)
    shards.check(SETTINGS)
    shards.start(SETTINGS)
    for shard in shards.unfinished():
        shards.write(shard, {place: made(place) for place in shards.places(shard)})
    shards.end()
    return shards


def test_shards_have_the_kept_pairs_of_their_lines(tmp_path):
    shards = write_all(tmp_path)
    names = [f"train-0000{i}-of-00003.parquet" for i in range(3)]
    assert sorted(files_of(tmp_path)) == [Path("make_pairs.json"), *map(Path, names)]
    for number, name in enumerate(names):
        places = range(2 * number, min(2 * number + 2, 5))
        expected = [(CAPTIONS[place], pair) for place in places for pair in made(place).kept]
        rows = pq.read_table(tmp_path / name).to_pylist()
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
    assert list(shards.counts()) == [made(place).counts(CAPTIONS[place]) for place in range(5)]


def test_shards_are_read_as_public_ones(tmp_path):
    """The schema begins with the columns of published shards; nothing is compressed."""
    write_all(tmp_path)
    groups = list_row_groups(str(tmp_path), Columns())
    schema = groups[0].metadata.schema.to_arrow_schema()
    assert pa.schema(list(schema)[: len(SCHEMA)]).equals(SCHEMA)
    assert groups[0].metadata.row_group(0).column(0).compression == "UNCOMPRESSED"
    pair = pair_at(read_row_group(groups[0]), 0)
    kept = made(0).kept[0]
    assert (pair.original, pair.edited, pair.instruction) == (*kept.images, "edit 0")


@pytest.mark.parametrize(("limit", "sizes"), [("ROWS", [7, 7, 7, 7, 2]), ("BYTES", [1] * 30)])
def test_row_groups_are_limited_by_rows_and_bytes(tmp_path, monkeypatch, limit, sizes):
    monkeypatch.setattr(pair_shards, f"ROW_GROUP_{limit}", 7)
    shards = PairShards(tmp_path, CAPTIONS[:1], 1, 0, 1)
    shards.write(0, {0: made(0, num_samples=30, keep_all=True)})
    metadata = pq.read_metadata(shards.file(0))
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == sizes


def test_workers_write_the_shards_of_one(tmp_path):
    """Into one directory, which is incomplete until all have ended; the last has no shard."""
    write_all(tmp_path / "alone")
    first, *others = (PairShards(tmp_path / "all", CAPTIONS, 2, worker, 4) for worker in range(4))
    first.start(SETTINGS)
    for worker in range(1, 4):
        write_all(tmp_path / "all", worker, 4)
    with pytest.raises(ValueError, match=r"is not complete.*make_pairs.py"):
        list_row_groups(str(tmp_path / "all"))
    write_all(tmp_path / "all", 0, 4)
    assert files_of(tmp_path / "all") == files_of(tmp_path / "alone")
    lines = [line["line"] for shards in (first, *others) for line in shards.counts()]
    assert sorted(lines) == [1, 3, 5, 7, 9] and not list(others[-1].counts())


def test_finished_shards_are_kept_and_others_made(tmp_path):
    shards = write_all(tmp_path)
    before = files_of(tmp_path)
    shards.file(1).unlink()
    shards.start(SETTINGS)  # a killed run
    assert shards.unfinished() == [1]
    times = [shards.file(i).stat().st_mtime_ns for i in (0, 2)]
    write_all(tmp_path)
    assert files_of(tmp_path) == before
    assert [shards.file(i).stat().st_mtime_ns for i in (0, 2)] == times


def test_directories_that_are_refused(tmp_path):
    shards = write_all(tmp_path / "data")
    with pytest.raises(ValueError, match="with other flags: num_samples was 3 and is 4; name"):
        shards.check(SETTINGS | {"num_samples": 4})
    shards.file(1).write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"train-00001-of-00003\.parquet is damaged, or not of"):
        shards.check(SETTINGS)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").touch()
    with pytest.raises(ValueError, match=r"full is not empty \(a\.txt\); name another directory"):
        PairShards(tmp_path / "full", CAPTIONS, 2, 0, 1).check(SETTINGS)
    assert json.loads((tmp_path / "data" / "make_pairs.json").read_text()) == SETTINGS


# ------------------------------------------------------------------ previews and report

GOOD, BAD = Scores(0.3, 0.25, 0.8, 0.3), Scores(0.3, 0.25, 0.8, 0.19)
MISSING = Scores(*[float("nan")] * 4)
THRESHOLDS = Thresholds()


def scored(*scores, **flags):
    """A line whose samples have these scores."""
    config = config_of(len(scores), 4, **THRESHOLDS._asdict(), **flags)
    pairs = [x._replace(scores=s) for x, s in zip(random_pairs(len(scores)), scores)]
    return line_of(config, [x._replace(images=None) if x.scores is MISSING else x for x in pairs])


@pytest.mark.parametrize(
    ("line", "columns"),
    [(scored(GOOD, GOOD, BAD), 2), (scored(BAD, BAD), 1), (scored(*[GOOD] * 20, keep_all=True), 2)],
)
def test_a_preview_shows_the_kept_pairs_or_the_best_one(tmp_path, line, columns):
    write_preview(tmp_path, CAPTIONS[1], line)
    with Image.open(tmp_path / "previews" / "000000003.jpg") as image:
        assert image.width == columns * (2 * 20 + 8) + 8


def test_a_line_of_nan_has_no_preview(tmp_path):
    write_preview(tmp_path, CAPTIONS[1], scored(MISSING, MISSING))
    assert not (tmp_path / "previews").exists()


def test_the_report_of_lines(tmp_path):
    lines = [scored(GOOD, BAD), scored(BAD), scored(MISSING)]
    counts = [line.counts(caption) for line, caption in zip(lines, CAPTIONS)]
    summary = summarize_counts(counts, THRESHOLDS) | {"seconds_per_kept_pair": 1.234}
    said = write_report(tmp_path, "report-2", summary)
    assert said == (
        "1 pairs of 3 lines are kept; 1 of 4 samples reach the thresholds, 1.23 s per kept pair of "
        "this start"
    )
    report = json.loads((tmp_path / "report-2.json").read_text())
    assert [report[x] for x in ("lines", "samples", "good", "kept", "nan")] == [3, 4, 1, 1, 1]
    assert report["missed"] == {"min_clip_text": 1, "min_clip_image": 1, "min_clip_direction": 3}
    entry = {"line": 3, "samples": 1, "nan": 0, "threshold": "min_clip_direction"}
    assert report["lines_without_good"][0] == entry | {"missed": 1, "largest": 0.19}
    assert report["lines_by_kept_pairs"] == {"0": 2, "1": 1}
    assert report["thresholds"] == THRESHOLDS._asdict()
    assert np.allclose(report["bins"], BINS)
    for name, *values in zip(Scores._fields, GOOD, BAD, BAD, [-1] * 4):
        found = np.histogram(np.clip(values, -0.5, 1), BINS)[0]
        assert report["histograms"][name] == found.tolist()
    with Image.open(tmp_path / "report-2.png") as image:
        assert image.format == "PNG" and np.ptp(np.asarray(image.convert("L"))) > 100
    assert warning_of_empty(summary) == (
        "lines without a good sample: 3, 5; failed most: --min_clip_direction of 1, NaN of 1"
    )


def test_a_report_of_nothing(tmp_path):
    """Of a worker without shards."""
    summary = summarize_counts([], THRESHOLDS) | {"seconds_per_kept_pair": None}
    said = write_report(tmp_path, "report", summary)
    assert said == "0 pairs of 0 lines are kept; 0 of 0 samples reach the thresholds"
    assert not warning_of_empty(summary)
