"""The report of evaluate_edits.py of given rows: tables, curve, grid, best and worst results."""

import numpy as np
import pytest
from evaluations import png
from PIL import Image

from diffusers_flax.evaluation.held_out import HeldOutPair
from diffusers_flax.evaluation.results import save_values
from diffusers_flax.evaluation.results_report import (
    CELL_SIZE,
    curve,
    extremes,
    image_rows,
    report_lines,
)
from diffusers_flax.generating.captions import GRID_MARGIN

SETTINGS = {"num_pairs": 9, "protocol": "instruct_pix2pix", "metrics": []}
COSTS = {
    "seconds_per_edit": 0.5,
    "compile_seconds": 1,
    "flops_per_edit": 2.5e12,
    "peak_memory_bytes": 2**30,
}
LEVELS = [80, 160, 40, 240, 120, 20, 200, 60, 100, 140]  # gray of each result, its overall too


def gray(level):
    return png(Image.new("RGB", (32, 32), (level,) * 3))


def make_row(folder, model, image_guidance_scale, seed, **values):
    """A row of results.json whose pairs all have the values."""
    name = f"{model.replace('/', '-')}-{image_guidance_scale}-{seed}"
    save_values(folder, name, {metric: [x] * 2 for metric, x in values.items()})
    row = {"model": model, "guidance_scale": 7.5, "image_guidance_scale": image_guidance_scale}
    return row | {"seed": seed, "images": name} | values | COSTS


def test_the_curve_of_clip_similarities(tmp_path):
    rows = [
        make_row(tmp_path, "a", scale, seed, direction_similarity=scale, image_similarity=seed)
        for scale in (2.0, 1.0)
        for seed in (0, 1)
    ]
    (line,) = curve(rows, 2).axes[0].lines
    np.testing.assert_array_equal(line.get_xydata(), [[1, 0.5], [2, 0.5]])
    rows.append(make_row(tmp_path, "a", 3.0, 0, l1=1.0))
    assert curve(rows, 2) is None


def test_tables_of_given_rows(tmp_path):
    """Mean, spread over seeds and interval; differences to the first model."""
    models = ["runs/a", "runs/b", "hub/other"]
    rows = [
        make_row(tmp_path, model, 1.0, seed, l1=0.1 * place + 0.5 * seed)
        for place, model in enumerate(models)
        for seed in (0, 1)
    ]
    baselines = [{"baseline": "truth", "model": None, "l1": 0.0}]
    baselines += [{"baseline": "VAE", "model": "hub/other", "l1": 0.3}]
    pairs = [HeldOutPair(i, f"{i}", "red", gray(0), gray(9)) for i in range(2)]
    results = {"settings": SETTINGS, "baselines": baselines, "rows": rows}
    lines = report_lines(tmp_path, results, pairs, ["a sentence"])
    assert "- a sentence" in lines
    for line in (
        "| model | guidance | image guidance | L1 |",
        "| truth |  |  | 0.0000 |",
        "| VAE of hub/other |  |  | 0.3000 |",
        "| runs/a | 7.5 | 1.0 | 0.2500 ± 0.3536 [0.2500, 0.2500] |",
        "| hub/other | 7.5 | 1.0 | 0.4500 ± 0.3536 [0.4500, 0.4500] |",
        "| difference to runs/a | guidance | image guidance | L1 |",
        "| hub/other | 7.5 | 1.0 | 0.2000 [0.2000, 0.2000] |",
        "| hub/other | 7.5 | 1.0 | 0.5/0.5 | 1/1 | 1/1 | 2.5e+03/2.5e+03 |",
    ):
        assert lines.count(line) == 1, line


@pytest.fixture
def judged(tmp_path):
    """Two rows of a model on ten edits of two types, of which the second is better; the pairs."""
    pairs = [
        HeldOutPair(i, f"{i}", "red", gray(0), key=f"k{i}", group="b" if i < 2 else "a")
        for i in range(len(LEVELS))
    ]
    rows = []
    for name, add in (("worse", -10), ("better", 0)):
        overall = [x + add for x in LEVELS]
        save_values(tmp_path, name, {"overall": overall})
        mean = (np.mean(overall[:2]) + np.mean(overall[2:])) / 2
        rows.append({"model": "m", "guidance_scale": 7.0, "image_guidance_scale": 1.0, **COSTS})
        rows[-1] |= {"seed": len(rows), "overall": mean, "images": name}
        for i, level in enumerate(overall):
            (tmp_path / "images" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "images" / name / f"k{i}.png").write_bytes(gray(level))
    settings = SETTINGS | {"protocol": "imgedit"}
    return {"settings": settings, "baselines": [], "rows": rows}, pairs


def test_the_best_and_the_worst_of_the_best_row(judged, tmp_path):
    """The four best, then the four worst, a line each; the input is left of each result."""
    results, pairs = judged
    shown = extremes(tmp_path, results["rows"], "overall")
    image = np.asarray(image_rows(tmp_path, pairs, [(32, 32)] * len(pairs), shown))
    width, height = (image.shape[1] - GRID_MARGIN) // 2, (len(image) - GRID_MARGIN) // 8
    for line, level in enumerate((240, 200, 160, 140, 20, 40, 60, 80)):
        y, x = GRID_MARGIN + line * height + CELL_SIZE // 2, GRID_MARGIN + CELL_SIZE // 2
        assert image[y, [x, x + width], 0].tolist() == [0, level]


def test_tables_of_a_judge(judged, tmp_path):
    """The mean of the types' means, and a column for each type."""
    table = "\n".join(report_lines(tmp_path, *judged, []))
    over_seeds = np.array(LEVELS) - 5
    means = over_seeds[2:].mean(), over_seeds[:2].mean()
    assert f"| m | 7.0 | 1.0 | {means[0]:.2f} | {means[1]:.2f} |" in table
    assert f"| m | 7.0 | 1.0 | {np.mean(means):.4f} ± " in table
