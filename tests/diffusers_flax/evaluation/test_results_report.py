"""The report of evaluate_edits.py of given rows: tables, curve, grid, best and worst results."""

import io
import re

import numpy as np
import pytest
from PIL import Image

from diffusers_flax.evaluation.held_out import HeldOutPair
from diffusers_flax.evaluation.intervals import save_values
from diffusers_flax.evaluation.measuring import keep_extremes
from diffusers_flax.evaluation.results_report import (
    CELL_SIZE,
    NUM_EXTREMES,
    EditReport,
    grid_places,
)
from diffusers_flax.generating.captions import GRID_MARGIN

SETTINGS = {
    "num_pairs": 9,
    "num_inference_steps": 20,
    "resolution": 64,
    "devices": "1 x cpu",
    "dtype": "float32",
    "clip_model": "some-clip",
    "protocol": None,
    "metrics": None,
    "num_masks": 0,
}
COSTS = {
    "seconds_per_edit": 0.5,
    "compile_seconds": 1,
    "flops_per_edit": 2.5e12,
    "peak_memory_bytes": 2**30,
    "peak_memory_of": "device",
    "ranked_by": None,
}
LEVELS = [80, 160, 40, 240, 120, 20, 200, 60, 100, 140]  # gray of each result, its overall too


def png(level):
    data = io.BytesIO()
    Image.new("RGB", (32, 32), (level,) * 3).save(data, "PNG")
    return data.getvalue()


def make_row(folder, model, image_guidance_scale, seed, **values):
    """A row of results.json whose pairs all have the values."""
    name = f"{model.replace('/', '-')}-{image_guidance_scale}-{seed}"
    save_values(folder, name, {metric: [x] * 2 for metric, x in values.items() if x is not None})
    row = {"model": model, "guidance_scale": 7.5, "image_guidance_scale": image_guidance_scale}
    return row | {"seed": seed, "images": name} | values | COSTS


def make_report(folder, rows, **changes):
    results = {"settings": SETTINGS, "baselines": [], "rows": rows} | changes
    models = {row["model"]: {} for row in rows}
    pairs = [HeldOutPair(i, f"{i}", "red", png(0), png(9)) for i in range(2)]
    return EditReport(folder, results | {"models": models}, pairs, [(32, 32)] * 2)


def test_the_curve_takes_clip_similarities_if_every_row_has_them(tmp_path):
    rows = [
        make_row(
            *(tmp_path, "a", scale, seed),
            l1=scale + 0.25 * seed,
            l1_to_input=1.0,
            direction_similarity=0.1,
            image_similarity=0.5 if scale < 2 else None,
        )
        for scale in (1.0, 2.0)
        for seed in (0, 1)
    ]
    plot = make_report(tmp_path, rows).curve().axes[0]
    assert (plot.get_xlabel(), plot.get_ylabel()) == ("L1 to the truth", "L1 to the input")
    assert make_report(tmp_path, rows[:2]).curve() is None  # one point
    two = [*rows[:2], rows[0] | {"image_guidance_scale": 1.5}]
    baselines = [{"baseline": "far", "model": None}]
    baselines[0] |= {"direction_similarity": 9, "image_similarity": 9}
    figure = make_report(tmp_path, two, baselines=baselines).curve()
    assert "direction similarity" in figure.axes[0].get_xlabel()
    assert figure.axes[0].get_xlim()[1] < 1  # a distant baseline does not squeeze the curve
    assert "far at (9, 9)" in [x.get_text() for x in figure.legends[0].get_texts()]


def test_tables_of_given_rows(tmp_path):
    """Mean, spread over seeds and interval; differences to the first model; short names."""
    models = ["runs/a/model", "runs/b/model", "hub/other"]
    rows = [
        make_row(tmp_path, model, 1.0, seed, l1=0.1 * place + 0.5 * seed)
        for place, model in enumerate(models)
        for seed in (0, 1)
    ]
    baselines = [{"baseline": "truth", "model": None, "l1": 0.0}]
    baselines += [{"baseline": "VAE", "model": "hub/other", "l1": 0.3}]
    lines = make_report(tmp_path, rows, baselines=baselines).lines(["a sentence"])
    assert "- a sentence" in lines
    for line in (
        "| model | guidance | image guidance | L1 |",
        "| truth |  |  | 0.0000 |",
        "| VAE (other) |  |  | 0.3000 |",
        "| runs/a/model | 7.5 | 1.0 | 0.2500 ± 0.3536 [0.2500, 0.2500] |",
        "| other | 7.5 | 1.0 | 0.4500 ± 0.3536 [0.4500, 0.4500] |",
        "| difference to runs/a/model | guidance | image guidance | L1 |",
        "| other | 7.5 | 1.0 | 0.2000 [0.2000, 0.2000] |",
        "| other | 7.5 | 1.0 | 0.5/0.5 | 1/1 | 1/1 | 2.5e+03/2.5e+03 |",
    ):
        assert lines.count(line) == 1, line


def test_the_grid_shows_pairs_from_all_over_the_list():
    """Of the demo's list, with eight instructions for each image, all instructions."""
    assert grid_places(3) == [0, 1, 2]
    places = grid_places(72)
    assert len({place % 8 for place in places}) == len({place // 8 for place in places}) == 8


@pytest.fixture
def judged(tmp_path):
    """The report of two rows of a model on ten edits of two types; the second row is better."""
    pairs = [
        HeldOutPair(i, f"{i}", "red", png(0), key=f"k{i}", group="b" if i < 2 else "a")
        for i in range(len(LEVELS))
    ]
    rows = []
    for name, add in (("worse", -10), ("better", 0)):
        overall = [x + add for x in LEVELS]
        save_values(tmp_path, name, {"overall": overall})
        mean = (np.mean(overall[:2]) + np.mean(overall[2:])) / 2
        rows.append({"model": "m", "guidance_scale": 7.0, "image_guidance_scale": 1.0, **COSTS})
        rows[-1] |= {"seed": len(rows), "overall": mean, "ranked_by": "overall", "images": name}
        for i, level in enumerate(overall):
            (tmp_path / "images" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "images" / name / f"k{i}.png").write_bytes(png(level))
    settings = SETTINGS | {"protocol": "imgedit"}
    results = {"settings": settings, "models": {"m": {}}, "baselines": [], "rows": rows}
    return EditReport(tmp_path, results, pairs, [(32, 32)] * len(pairs))


def test_the_best_and_the_worst_of_the_best_row(judged):
    """A line of the four best, and one of the four worst; the input is left of each result."""
    image = np.asarray(judged.extremes())
    width = (image.shape[1] - GRID_MARGIN) // 4
    for line, levels in enumerate(([240, 200, 160, 140], [20, 40, 60, 80])):
        y = GRID_MARGIN + line * ((len(image) - GRID_MARGIN) // 2) + CELL_SIZE // 2
        for tile, level in enumerate(levels):
            x = GRID_MARGIN + tile * width + CELL_SIZE // 2
            assert image[y, [x, x + CELL_SIZE], 0].tolist() == [0, level]


def test_tables_of_a_judge(judged):
    """The mean of the types' means, its interval around it, and a column for each type."""
    table = "\n".join(judged.lines([]))
    over_seeds = np.array(LEVELS) - 5
    means = over_seeds[2:].mean(), over_seeds[:2].mean()
    assert f"| m | 7.0 | 1.0 | {means[0]:.2f} | {means[1]:.2f} |" in table
    mean, low, high = map(float, re.search(r"\| (\S+) ± \S+ \[(\S+), (\S+)\] \|", table).groups())
    assert mean == pytest.approx(np.mean(means), abs=1e-4)
    # Of the bootstrap the standard error is in closed form; percentiles of few values are rough.
    error = np.sqrt(over_seeds[2:].var() / 8 + over_seeds[:2].var() / 2) / 2
    np.testing.assert_allclose([low, high], [mean - 1.96 * error, mean + 1.96 * error], rtol=0.05)


def test_kept_results_are_the_extremes_of_all():
    """Whatever the batches; NaN is no result."""
    scores = np.random.default_rng(0).permutation([*range(20), np.nan, np.nan])
    for size in (1, 3, 22):
        kept = []
        for i in range(0, len(scores), size):
            batch = scores[i : i + size]
            kept = keep_extremes(kept, batch, range(i, i + len(batch)), batch)
        assert [x[0] for x in kept] == [*range(NUM_EXTREMES), *range(20 - NUM_EXTREMES, 20)]
        assert all(scores[place] == score == image for score, place, image in kept)
