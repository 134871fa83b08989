"""The report of evaluate_edits.py: table, curve and grid of given rows."""

import itertools

import matplotlib.figure
import pytest
from PIL import Image

from diffusers_flax.evaluation.report import draw_curve, grid_rows, markdown, write_labels


def test_curve_and_table_of_given_rows(tmp_path):
    """The curve takes CLIP similarities if every row has them."""
    settings = {"num_pairs": 9, "num_inference_steps": 20, "resolution": 64, "devices": "1 x cpu"}
    settings |= {"dtype": "float32", "clip_model": "some-clip"}
    costs = {"seconds_per_edit": 0.5, "compile_seconds": 1, "flops_per_edit": 2.5e12}
    costs |= {"peak_memory_bytes": 2**30, "peak_memory_of": "device"}
    rows = [
        {"model": "a", "guidance_scale": 7.5, "image_guidance_scale": s, "seed": seed}
        | {"l1": s + 0.25 * seed, "l1_to_input": 1.0, "direction_similarity": 0.1, **costs}
        | {"image_similarity": 0.5 if s < 2 else None}
        for s in (1.0, 2.0)
        for seed in (0, 1)
    ]
    results = {"settings": settings, "models": {"a": {}}, "baselines": [], "rows": rows}
    file = tmp_path / "curve.png"
    assert "L1 to the truth" in draw_curve(results, file)
    assert draw_curve(results | {"rows": rows[:2]}, tmp_path / "none.png") is None  # one point
    results["rows"] = rows[:2]
    two = [*rows[:2], rows[0] | {"image_guidance_scale": 1.5}]
    assert "direction similarity" in draw_curve(results | {"rows": two}, file)
    with Image.open(file) as image:
        assert image.size == (960, 840)
    table = markdown(results, ["a sentence"])
    assert "| a | 7.5 | 1.0 | 2 | 1.1250 ± 0.1768 |" in table
    assert "| a at 7.5 and 1 | 2 | 0.5 (0.5 to 0.5) | 1.0 | 1.00 | 2.5 |" in table
    assert "TFLOP per edit" in table
    assert draw_curve(results | {"rows": []}, tmp_path / "none.png") is None


def test_a_table_has_short_names_units_and_no_row_twice():
    """Two models with one VAE and one with another; seconds that differ by noise are one cell."""
    models = ["runs/a/model", "runs/b/model", "hub/other"]
    costs = {"compile_seconds": 1, "peak_memory_bytes": 2**30, "peak_memory_of": "device"}
    rows = [
        {"model": model, "guidance_scale": 2.0, "image_guidance_scale": s, "seed": 0, "l1": 0.1}
        | {"seconds_per_edit": s / 10, "flops_per_edit": 7e9 if s == 1 else 19.6e9, **costs}
        for model in models
        for s in (1.0, 1.2, 1.3, 1.7)
    ]
    baselines = [{"baseline": "truth", "model": None, "l1": 0.0}]
    baselines += [{"baseline": "VAE", "model": m, "l1": x} for m, x in zip(models, (0.3, 0.3, 0.4))]
    settings = {"num_pairs": 9, "num_inference_steps": 20, "resolution": 64, "devices": "1 x cpu"}
    settings |= {"dtype": "float32", "clip_model": "none"}
    results = {"settings": settings, "rows": rows, "baselines": baselines}
    table = markdown(results | {"models": {model: {} for model in models}}, [])
    assert table.count("CLIP model: none.") == 1 and "GFLOP per edit" in table
    for line in (
        "| truth |  |  |  | 0.0000 |",
        "| VAE (runs/a/model, runs/b/model) |  |  |  | 0.3000 |",
        "| VAE (other) |  |  |  | 0.4000 |",
        "| other | 2.0 | 1.7 | 1 | 0.1000 |",
        "| other at 2 and 1 | 1 | 0.1 (0.1 to 0.1) | 1.0 | 1.00 | 7 |",
        "| other at 2 and 1.2 (and 2 more) | 3 | 0.13 (0.12 to 0.17) | 1.0 | 1.00 | 19.6 |",
    ):
        assert table.splitlines().count(line) == 1, line


@pytest.mark.parametrize(
    ("instructions", "per_image", "num_shown", "num_images"),
    [
        (list("abcdefgh") * 9, 8, 8, 8),  # as in the demo: the instructions of one image in a row
        (["a"] * 72, 1, 1, 8),
        (list("abc") * 9, 3, 3, 8),
        ([f"edit {i}" for i in range(500)], 1, 8, 8),
        (list("ab"), 2, 2, 1),
        (["a", "b", *"c" * 10], 1, 3, 8),
        (["a", *"b" * 3, *"c" * 9], 1, 3, 8),
    ],
)
def test_the_grid_shows_all_instructions_on_different_images(
    instructions, per_image, num_shown, num_images
):
    rows = grid_rows(instructions)
    assert len(rows) == min(8, len(instructions)) and rows == sorted(set(rows))
    assert len({instructions[row] for row in rows}) == num_shown
    assert len({row // per_image for row in rows}) == num_images


@pytest.mark.parametrize("num_labels", [3, 9])
def test_labels_of_near_points_do_not_overlap(num_labels):
    figure = matplotlib.figure.Figure(figsize=(4, 4))
    plot = figure.add_subplot()
    plot.set_xlim(0, 1)
    plot.set_ylim(0, 1)
    texts = [f"{1 + i / 10:g}" for i in range(num_labels)]
    write_labels(plot, [(text, (0.5 + i / 500, 0.5), "k") for i, text in enumerate(texts)])
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in plot.texts]
    assert [label.get_text() for label in plot.texts] == texts
    assert all(not a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
