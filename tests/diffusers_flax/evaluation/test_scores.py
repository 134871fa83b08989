"""The best and the worst results, and their tables, of given values."""

import io
import re

import numpy as np
import pytest
from PIL import Image

from diffusers_flax.evaluation.held_out import HeldOutPair
from diffusers_flax.evaluation.intervals import save_values
from diffusers_flax.evaluation.measuring import keep_extremes
from diffusers_flax.evaluation.report import CELL_SIZE
from diffusers_flax.evaluation.scores import NUM_EXTREMES, draw_extremes, score_tables
from diffusers_flax.generating.captions import GRID_MARGIN

LEVELS = [80, 160, 40, 240, 120, 20, 200, 60, 100, 140]  # gray of each result, its overall too


def png(level):
    data = io.BytesIO()
    Image.new("RGB", (32, 32), (level,) * 3).save(data, "PNG")
    return data.getvalue()


@pytest.fixture
def judged(tmp_path):
    """Two rows of a model on ten edits of two kinds; the second row is better."""
    pairs = [
        HeldOutPair(i, f"{i}", "red", png(0), key=f"k{i}", group="b" if i < 2 else "a")
        for i in range(len(LEVELS))
    ]
    rows = []
    for name, add in (("worse", -10), ("better", 0)):
        overall = [x + add for x in LEVELS]
        save_values(tmp_path, name, {"overall": overall})
        mean = (np.mean(overall[:2]) + np.mean(overall[2:])) / 2
        rows.append({"model": "m", "guidance_scale": 7.0, "image_guidance_scale": 1.0})
        rows[-1] |= {"seed": len(rows), "overall": mean, "ranked_by": "overall", "images": name}
        for i, level in enumerate(overall):
            (tmp_path / "images" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "images" / name / f"k{i}.png").write_bytes(png(level))
    results = {"settings": {"protocol": "imgedit"}, "models": {"m": {}}, "baselines": []}
    return results | {"rows": rows}, pairs, tmp_path


def test_the_best_and_the_worst_of_the_best_row(judged):
    """A line of the four best, and one of the four worst; the input is left of each result."""
    results, pairs, folder = judged
    image = np.asarray(draw_extremes(results, pairs, folder, folder / "images"))
    width = (image.shape[1] - GRID_MARGIN) // 4
    for line, levels in enumerate(([240, 200, 160, 140], [20, 40, 60, 80])):
        y = GRID_MARGIN + line * ((len(image) - GRID_MARGIN) // 2) + CELL_SIZE // 2
        for tile, level in enumerate(levels):
            x = GRID_MARGIN + tile * width + CELL_SIZE // 2
            assert image[y, [x, x + CELL_SIZE], 0].tolist() == [0, level]
    (folder / "images" / "better" / "k3.png").unlink()
    assert draw_extremes(results, pairs, folder, folder / "images") is None


def test_tables_of_a_judge(judged):
    """The mean of the kinds' means, its interval around it, and a column for each kind."""
    results, pairs, folder = judged
    table = "\n".join(score_tables(results, pairs, folder))
    over_seeds = np.array(LEVELS) - 5
    means = over_seeds[2:].mean(), over_seeds[:2].mean()
    assert f"| m | 7.0 | 1.0 | {means[0]:.2f} | {means[1]:.2f} |" in table
    mean, low, high = map(float, re.search(r"\| 2 \| (\S+) \[(\S+), (\S+)\] \|", table).groups())
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
