"""What a run says about its pairs: previews, warnings, report.json and report.png."""

import json

import numpy as np
import pytest
from helpers import slow
from PIL import Image
from shards import encode

from diffusers_flax.pairing.captions import Caption
from diffusers_flax.pairing.report import (
    NUM_NAMED,
    summarize_counts,
    warn_of_empty,
    write_preview,
    write_report,
)
from diffusers_flax.pairing.results import BINS, Choice, Line, MadePair
from diffusers_flax.pairing.samples import draw_sample
from diffusers_flax.pairing.scores import Scores, Thresholds

CAPTION = Caption(7, "a cat", "make it a lion", "a lion")
GOOD, BAD = Scores(0.3, 0.31, 0.8, 0.25), Scores(0.3, 0.19, 0.65, 0.1)
PAPER = Thresholds()
COLOURS = [(250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 0), (0, 250, 250), (250, 0, 250)]


def pair(number, scores):
    """A pair of images of one colour each, 40x30."""
    colours = COLOURS[2 * number : 2 * number + 2]
    images = [encode(np.full((30, 40, 3), x, np.uint8), "JPEG", subsampling=0) for x in colours]
    return MadePair(draw_sample(0, 6, number, (7.5, 15), (0.1, 0.9)), scores, tuple(images))


def line_of(*scores, num_kept=4, thresholds=PAPER):
    line = Line(Choice(len(scores), num_kept, thresholds))
    for number, each in enumerate(scores):
        line.add(pair(number, each))
    assert line.is_finished
    return line


def colours_in(file):
    """The numbers of the COLOURS in an image, each as often as it is a rectangle of 40x30."""
    pixels = np.asarray(Image.open(file).convert("RGB")).astype(int)
    counts = [(np.abs(pixels - x).max(axis=-1) < 30).sum() / (40 * 30) for x in COLOURS]
    return [number for number, count in enumerate(counts) if count > 0.8]


def test_the_preview_has_the_kept_pairs(tmp_path):
    write_preview(tmp_path, CAPTION, line_of(GOOD, BAD, GOOD))
    assert colours_in(tmp_path / "previews" / "000000007.jpg") == [0, 1, 4, 5]


def test_the_preview_of_a_line_without_pairs_has_its_best_one(tmp_path):
    write_preview(tmp_path, CAPTION, line_of(BAD, BAD._replace(clip_direction=0.11), BAD))
    assert colours_in(tmp_path / "previews" / "000000007.jpg") == [2, 3]


def test_the_preview_of_many_pairs_has_the_best_ones(tmp_path, monkeypatch):
    """With --keep_all: good ones first, then by direction; a JPEG has at most 65,500 rows."""
    monkeypatch.setattr("diffusers_flax.pairing.report.NUM_DRAWN", 2)
    scores = [BAD._replace(clip_direction=0.9), GOOD, GOOD._replace(clip_direction=0.3)]
    write_preview(tmp_path, CAPTION, line_of(*scores, num_kept=None))
    assert colours_in(tmp_path / "previews" / "000000007.jpg") == [2, 3, 4, 5]


def test_texts_of_the_preview(tmp_path, monkeypatch):
    texts = []
    real = __import__("diffusers_flax.pairing.report", fromlist=["captioned"]).captioned
    monkeypatch.setattr(
        "diffusers_flax.pairing.report.captioned",
        lambda images, text: texts.append(text) or real(images, text),
    )
    write_preview(tmp_path, CAPTION, line_of(BAD))
    sample = draw_sample(0, 6, 0, (7.5, 15), (0.1, 0.9))
    assert texts == [
        "0: text 0.30 0.19, image 0.65, direction 0.10; "
        f"scale {sample.guidance_scale:.1f}, p {sample.attention_sharing:.2f}; "
        "below min_clip_text, min_clip_image, min_clip_direction",
        "7: a cat | make it a lion | a lion",
    ]


# ------------------------------------------------------------------ warnings


def summary_of(lines, thresholds=PAPER):
    """The report of lines 7, 8, ... of which each has a shard."""
    return summarize_counts(
        (
            ([line.counts(CAPTION._replace(line=n))], line.histograms)
            for n, line in enumerate(lines, start=CAPTION.line)
        ),
        thresholds,
    )


def warnings_of(lines, thresholds=PAPER):
    return warn_of_empty(summary_of(lines, thresholds))


def test_a_warning_names_the_threshold_that_failed_most():
    """And the best value: of texts the lower one of both images."""
    scores = [BAD, BAD._replace(clip_text_edited=0.195), BAD._replace(clip_image=0.9)]
    assert warnings_of([line_of(*scores), line_of(GOOD)]) == [
        "line 7: none of 3 samples is good; 3 are below --min_clip_text 0.2, the largest value "
        "is 0.195"
    ]
    lower = Thresholds(0.1, 0.7, 0.15)
    assert warnings_of([line_of(*scores, thresholds=lower)], lower) == [
        "line 7: none of 3 samples is good; 3 are below --min_clip_direction 0.15, the largest "
        "value is 0.100"
    ]


def test_thresholds_that_fail_together_are_said():
    """Each threshold is reached by some sample, and by none all of them."""
    scores = Scores(0.3, 0.3, 0.5, 0.3), Scores(0.3, 0.3, 0.9, 0.1)
    (sentence,) = warnings_of([line_of(*scores)])
    assert sentence == (
        "line 7: none of 2 samples is good; 1 is below --min_clip_image 0.7, the largest value "
        "is 0.900"
    )


def test_lines_that_keep_bad_pairs_are_warned_of_too():
    """With --keep_all."""
    line = line_of(BAD, num_kept=None)
    assert len(line.kept) == 1 and len(warnings_of([line])) == 1


def test_lines_of_nan_are_named():
    """Their thresholds and captions are not to blame."""
    nan = Scores(*[float("nan")] * 4)
    assert warnings_of([line_of(nan, nan)]) == ["line 7: all images are NaN; try --dtype float32"]
    (sentence,) = warnings_of([line_of(nan, BAD)])
    assert sentence.endswith("2 are below --min_clip_text 0.2, the largest value is 0.190")


def test_many_empty_lines_are_counted():
    sentences = warnings_of([line_of(BAD)] * 30)
    assert len(sentences) == NUM_NAMED + 1
    assert sentences[-1] == "20 more lines have no good sample; the report names them"
    assert warnings_of([]) == []


# ------------------------------------------------------------------ reports


def test_the_report(tmp_path):
    summary = summary_of([line_of(GOOD, BAD, GOOD, num_kept=1), line_of(BAD)])
    said = write_report(tmp_path, "report-2", summary, 1.234)
    assert said == (
        "1 pairs of 2 lines are kept; 2 of 4 samples reach the thresholds, 1.23 s per kept pair "
        "of this start"
    )
    report = json.loads((tmp_path / "report-2.json").read_text())
    assert {name: report[name] for name in ("lines", "samples", "good", "kept")} == {
        "lines": 2,
        "samples": 4,
        "good": 2,
        "kept": 1,
    }
    assert report["missed"] == dict.fromkeys(Thresholds._fields, 2)
    empty = {"line": 8, "samples": 1, "nan": 0, "threshold": "min_clip_text"}
    assert report["lines_without_good"] == [empty | {"missed": 1, "largest": 0.19}]
    assert report["lines_by_kept_pairs"] == {"0": 1, "1": 1}
    assert list(report)[:4] == ["lines", "samples", "good", "kept"]
    assert report["thresholds"] == Thresholds()._asdict()
    assert report["seconds_per_kept_pair"] == 1.234
    bins = np.array(report["bins"])
    assert np.allclose(bins, BINS) and len(bins) == 151
    for name, values in zip(Scores._fields, zip(GOOD, BAD, GOOD, BAD)):
        assert report["histograms"][name] == np.histogram(values, BINS)[0].tolist()
    with Image.open(tmp_path / "report-2.png") as image:
        assert image.format == "PNG" and np.ptp(np.asarray(image.convert("L"))) > 100


@pytest.mark.parametrize("least", [0.251, *slow(-1, 0.2, 1)])
def test_numbers_in_the_figure(tmp_path, monkeypatch, least):
    """Of samples at least at the threshold, also within a bin; of texts the lower score counts."""
    from matplotlib.axes import Axes

    titles = []
    monkeypatch.setattr(Axes, "set_title", lambda self, text, **_: titles.append(text))
    thresholds = Thresholds(least, least, least)
    line = line_of(GOOD, BAD, GOOD, thresholds=thresholds)
    summary = summary_of([line], thresholds)
    write_report(tmp_path, "report", summary, None)
    rows = [(min(x[:2]), min(x[:2]), *x[2:]) for x in (GOOD, BAD, GOOD)]
    reached = np.sum(np.array(rows) >= least, axis=0)
    text = f"min_clip_text {least:g} with both images"
    flags = [text, text, f"min_clip_image {least:g}", f"min_clip_direction {least:g}"]
    assert titles == [
        f"{name}\n{number} of 3 reach {flag}"
        for name, number, flag in zip(Scores._fields, reached, flags)
    ]


def test_a_report_of_nothing(tmp_path):
    """A worker without shards; a damaged report is replaced."""
    (tmp_path / "report.json").write_text("{bad")
    said = write_report(tmp_path, "report", summary_of([]), None)
    assert said == "0 pairs of 0 lines are kept; 0 of 0 samples reach the thresholds"
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["lines"] == report["samples"] == report["kept"] == report["good"] == 0
    assert report["missed"] == dict.fromkeys(Thresholds._fields, 0)
    assert report["seconds_per_kept_pair"] is None
