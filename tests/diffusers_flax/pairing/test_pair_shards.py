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
from diffusers_flax.pairing.caption_lists import Caption
from diffusers_flax.pairing.pair_scores import NO_SCORES, Scores
from diffusers_flax.pairing.pair_shards import (
    MadePair,
    PairShards,
    choose_pairs,
    counted_pairs,
    counts_of,
    write_preview,
    write_report,
)
from diffusers_flax.pairing.samples import draw_sample

FLAGS = ("min_clip_text", "min_clip_image", "min_clip_direction")
NAN = float("nan")
SETTINGS = {"model": "a", "num_samples": 3, "captions": "123"}
CAPTIONS = [Caption(2 * i + 1, f"before {i}", f"edit {i}", f"after {i}") for i in range(5)]


def config_of(num_samples=6, num_kept=2, least=0.1, **changes):
    """Flags of a run with equal thresholds."""
    flags = dict.fromkeys(FLAGS, least) | dict(keep_all=False, early_stop=False)
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


def by_number(pairs):
    return {pair.sample.number: pair for pair in pairs}


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
    good = [pair for pair in pairs if is_good(pair, 0.25)]
    expected = sorted(good, key=lambda x: (-x.scores.clip_direction, x.sample.number))
    kept = choose_pairs(pairs, config_of(60, num_kept, 0.25))
    assert len(good) > 4 and numbers(kept) == numbers(expected[:num_kept])
    assert choose_pairs(pairs, config_of(60, least=0.9, keep_all=True)) == pairs


@pytest.mark.parametrize("num_kept", [1, 3])
def test_an_early_stop_keeps_the_first_good_pairs(num_kept):
    """However many are made: the line ends at the sample that completes them."""
    pairs = random_pairs(40, 5)
    good = [pair for pair in pairs if is_good(pair, 0.1)]
    config = config_of(40, num_kept, 0.1, early_stop=True)
    last = good[num_kept - 1].sample.number
    assert counted_pairs(by_number(pairs), config) == (pairs[: last + 1], True)
    assert sorted(numbers(choose_pairs(pairs[: last + 1], config))) == numbers(good[:num_kept])
    assert counted_pairs(by_number(pairs[1:]), config) == ([], False)  # the first one is missing
    never = config_of(10, 3, 1.0, early_stop=True)
    pairs = random_pairs(10)
    assert counted_pairs(by_number(pairs), never) == (pairs, True)


def test_what_is_counted():
    thresholds = dict(zip(FLAGS, (0.5, 0.25, 0.5)))
    pairs = random_pairs(50, 3)
    counts = counts_of(CAPTIONS[3], pairs, config_of(50, **thresholds))
    scores = np.array([pair.scores for pair in pairs])
    good = scores >= [0.5, 0.5, 0.25, 0.5]
    missed = [50 - (good[:, 0] & good[:, 1]).sum(), *(50 - good[:, 2:].sum(axis=0))]
    assert counts == {
        "line": 7,
        "samples": 50,
        "good": good.all(axis=1).sum(),
        "kept": 2,
        "missed": dict(zip(FLAGS, missed)),
    }


# ------------------------------------------------------------------ files


def made(place):
    """The pairs of a place."""
    return random_pairs(6, place, place)


def shards_in(folder, worker=0, num_workers=1):
    return PairShards(config_of(output_dir=folder), CAPTIONS, 2, worker, num_workers)


def write_all(folder, worker=0, num_workers=1):
    """The shards of a worker; returns its PairShards."""
    shards = shards_in(folder, worker, num_workers)
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
        expected = [
            (CAPTIONS[i], pair) for i in places for pair in choose_pairs(made(i), config_of())
        ]
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
    assert shards.counts() == [
        counts_of(CAPTIONS[place], made(place), config_of()) for place in range(5)
    ]


def test_shards_are_read_as_public_ones(tmp_path):
    """The schema begins with the columns of published shards; nothing is compressed."""
    write_all(tmp_path)
    groups = list_row_groups(str(tmp_path), Columns())
    schema = groups[0].metadata.schema.to_arrow_schema()
    assert pa.schema(list(schema)[: len(SCHEMA)]).equals(SCHEMA)
    assert groups[0].metadata.row_group(0).column(0).compression == "UNCOMPRESSED"
    pair = pair_at(read_row_group(groups[0]), 0)
    kept = choose_pairs(made(0), config_of())[0]
    assert (pair.original, pair.edited, pair.instruction) == (*kept.images, "edit 0")


def test_workers_write_the_shards_of_one(tmp_path):
    """Into one directory, which is incomplete until all have ended; the last has no shard."""
    write_all(tmp_path / "alone")
    first, *others = (shards_in(tmp_path / "all", worker, 4) for worker in range(4))
    first.start(SETTINGS)
    for worker in range(1, 4):
        write_all(tmp_path / "all", worker, 4)
    with pytest.raises(ValueError, match=r"is not complete.*make_pairs.py"):
        list_row_groups(str(tmp_path / "all"))
    write_all(tmp_path / "all", 0, 4)
    assert files_of(tmp_path / "all") == files_of(tmp_path / "alone")
    lines = [line["line"] for shards in (first, *others) for line in shards.counts()]
    assert sorted(lines) == [1, 3, 5, 7, 9] and not others[-1].counts()


def test_directories_that_are_refused(tmp_path):
    shards = write_all(tmp_path / "data")
    with pytest.raises(ValueError, match="with other flags: num_samples was 3 and is 4; name"):
        shards.check(SETTINGS | {"num_samples": 4})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").touch()
    with pytest.raises(ValueError, match=r"full is not empty \(a\.txt\); name another directory"):
        shards_in(tmp_path / "full").check(SETTINGS)
    assert json.loads((tmp_path / "data" / "make_pairs.json").read_text()) == SETTINGS


# ------------------------------------------------------------------ previews and report

GOOD, BAD = Scores(0.3, 0.25, 0.8, 0.3), Scores(0.3, 0.25, 0.8, 0.19)
THRESHOLDS = dict(zip(FLAGS, (0.2, 0.7, 0.2)))


def scored(*scores):
    """The pairs of a line whose samples have these scores."""
    pairs = [x._replace(scores=s) for x, s in zip(random_pairs(len(scores)), scores)]
    return [x._replace(images=None) if x.scores is NO_SCORES else x for x in pairs]


def test_a_preview_shows_the_kept_pairs_or_the_best_one(tmp_path):
    worse = BAD._replace(clip_direction=NAN)
    for pairs, columns, keep_all in (
        (scored(GOOD, GOOD, BAD), 2, False),
        (scored(worse, BAD), 1, False),
        (scored(*[GOOD] * 20), 2, True),
    ):
        config = config_of(keep_all=keep_all, output_dir=tmp_path, **THRESHOLDS)
        write_preview(config, CAPTIONS[1], pairs)
        with Image.open(tmp_path / "previews" / "000000003.jpg") as image:
            assert image.width == columns * (2 * 20 + 8) + 8
    write_preview(config, CAPTIONS[0], scored(NO_SCORES))
    assert len([*(tmp_path / "previews").iterdir()]) == 1


def test_the_report_of_lines(tmp_path):
    lines = [scored(GOOD, BAD), scored(BAD), scored(NO_SCORES)]
    config = config_of(output_dir=tmp_path, **THRESHOLDS)
    counts = [counts_of(*line, config) for line in zip(CAPTIONS, lines)]
    _, said = write_report(config, "report-2", counts, 1.234)
    assert said == (
        "1 pairs of 3 lines are kept; 1 of 4 samples reach the thresholds, 1.23 s per kept pair of "
        "this start\nlines without a good sample: 3, 5; samples miss --min_clip_text by 1, "
        "--min_clip_image by 1, --min_clip_direction by 3"
    )
    report = json.loads((tmp_path / "report-2.json").read_text())
    assert [report[x] for x in ("lines", "samples", "good", "kept")] == [3, 4, 1, 1]
    assert report["missed"] == dict(zip(FLAGS, (1, 1, 3)))
    assert report["lines_without_good"] == [3, 5]
    assert report["thresholds"] == THRESHOLDS
    _, said = write_report(config, "report", [], None)  # of a worker without shards
    assert said == "0 pairs of 0 lines are kept; 0 of 0 samples reach the thresholds"
