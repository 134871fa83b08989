"""The report of evaluate_edits.py: results.md, curve.png and grid.png, drawn from results.json."""

from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from command_line import save_whole, write_text
from edit_metrics import CLIP_METRICS, PIXEL_METRICS
from images import captioned, load_image, save_image, tile_grid

GRID_IMAGE_SIZE = 192  # pixels, longer side
GRID_MARGIN = 8  # pixels
SAMPLING_FLAGS = ("scheduler", "timesteps", "eta", "timestep_spacing", "lora", "accelerate")
HEADINGS = {
    "l1": "L1",
    "mse": "MSE",
    "error_ratio": "error ratio",
    "l1_to_input": "L1 to input",
    "image_similarity": "image sim.",
    "direction_similarity": "direction sim.",
    "text_similarity": "text sim.",
    "truth_similarity": "truth sim.",
}
# x and y of the curve, the first pair that all rows have; the names of the axes
CURVES = (
    ("direction_similarity", "image_similarity"),
    ("l1", "l1_to_input"),
)
AXES = {
    "direction_similarity": "CLIP direction similarity (change of image and captions)",
    "image_similarity": "CLIP image similarity (to the input)",
    "l1": "L1 to the truth",
    "l1_to_input": "L1 to the input",
}


def over_seeds(rows):
    """Rows of the same model and scales, in their order.

    Returns:
        {(model, guidance_scale, image_guidance_scale): list of rows, one per seed}.
    """
    groups = defaultdict(list)
    for row in rows:
        groups[row["model"], row["guidance_scale"], row["image_guidance_scale"]].append(row)
    return dict(groups)


def mean_and_spread(rows, name):
    """Mean of a metric over rows and its sample standard deviation; None if there is none."""
    values = [row[name] for row in rows if row.get(name) is not None]
    mean = float(np.mean(values)) if values else None
    return mean, float(np.std(values, ddof=1)) if len(values) > 1 else None


def cell(rows, name, digits=4):
    """A metric of rows for a table: "mean ± spread", the mean, or nothing."""
    mean, spread = mean_and_spread(rows, name)
    if mean is None:
        return ""
    return f"{mean:.{digits}f}" + (f" ± {spread:.{digits}f}" if spread is not None else "")


def markdown(results, sentences):
    """The content of results.md.

    Args:
        results: content of results.json.
        sentences: what is left out.
    """
    settings, rows, baselines = (results[name] for name in ("settings", "rows", "baselines"))
    metrics = [
        name
        for name in (*PIXEL_METRICS, *CLIP_METRICS)
        if any(row.get(name) is not None for row in rows + baselines)
    ]
    seeds = sorted({row["seed"] for row in rows})
    clip = f"CLIP model: {settings['clip_model']}"
    conditions = [
        f"{settings['num_pairs']} pairs",
        f"{settings['num_inference_steps']} steps",
        f"longer side {settings['resolution']} pixels",
        settings["dtype"],
        settings["devices"],
    ]
    conditions += [
        f"--{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name in SAMPLING_FLAGS
        if (value := settings.get(name)) is not None
    ]
    lines = [
        "# Edits",
        "",
        f"{', '.join(conditions)}. Means over the pairs, then mean ± standard deviation over seeds "
        f"({', '.join(map(str, seeds))}). {clip}.",
        "",
        *(f"- {sentence}" for sentence in sentences),
        *[""] * bool(sentences),
    ]
    memory = " and ".join(sorted({f"of the {row['peak_memory_of']}" for row in rows}))
    costs = ("s per edit", "s to compile", f"GiB, peak {memory}", "TFLOP per edit")
    heads = ("model", "guidance", "image guidance", "seeds", *map(HEADINGS.get, metrics), *costs)
    lines += [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in baselines:
        name = row["baseline"] + (f" ({row['model']})" if row["model"] else "")
        cells = [name, "", "", "", *(cell([row], x) for x in metrics), *[""] * len(costs)]
        lines.append(f"| {' | '.join(cells)} |")
    for (model, *scales), group in over_seeds(rows).items():
        cells = [
            *(model, *map(str, scales), str(len(group))),
            *(cell(group, name) for name in metrics),
            cell(group, "seconds_per_edit", 3),
            f"{max(row['compile_seconds'] for row in group):.1f}",
            f"{max(row['peak_memory_bytes'] for row in group) / 2**30:.2f}",
            f"{group[0]['flops_per_edit'] / 1e12:.4g}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    names = "" if settings["clip_model"] == "none" else "; its metrics are named sim."
    lines += ["", clip + names]
    for name, model in results["models"].items():
        if "parameters" in model:
            parts = ", ".join(f"{part} {n:,}" for part, n in model["parameters"].items())
            lines.append(f"\n{name}: {model['pipeline']}; parameters: {parts}.")
    return "\n".join(lines) + "\n"


def draw_curve(results, file):
    """Draw one metric against another over image_guidance_scale, a line per model.

    The paper's curve, CLIP direction similarity (x) and image similarity (y); without captions or
    CLIP, L1 to the truth and to the input.

    Returns:
        What was drawn, a sentence; None if neither can be drawn.

    Source: InstructPix2Pix (arXiv 2211.09800), section 4.1.
    """
    import matplotlib.figure  # seconds to import; without pyplot no display is used

    rows = results["rows"]
    axes = next(
        (
            pair
            for pair in CURVES
            if rows and all(row.get(x) is not None for row in rows for x in pair)
        ),
        None,
    )
    if axes is None:
        return None
    figure = matplotlib.figure.Figure(figsize=(8, 6), layout="constrained")
    plot = figure.add_subplot()
    lines = defaultdict(list)
    for (model, guidance_scale, image_guidance_scale), group in over_seeds(rows).items():
        points = [mean_and_spread(group, name) for name in axes]
        lines[model, guidance_scale].append((image_guidance_scale, *points))
    for (model, guidance_scale), points in lines.items():
        points.sort()
        (x, x_spread), (y, y_spread) = (
            zip(*((mean, spread or 0) for mean, spread in column))
            for column in list(zip(*points))[1:]
        )
        label = f"{model}, guidance {guidance_scale:g}"
        plot.errorbar(x, y, y_spread, x_spread, marker="o", capsize=2, label=label)
        for scale, *point in zip((scale for scale, *_ in points), x, y):
            plot.annotate(f"{scale:g}", point, xytext=(4, 4), textcoords="offset points")
    for row in results["baselines"]:
        if all(row.get(name) is not None for name in axes):
            label = row["baseline"] + (f" ({row['model']})" if row["model"] else "")
            plot.plot(*(row[name] for name in axes), "x", label=label)
    plot.set_xlabel(AXES[axes[0]])
    plot.set_ylabel(AXES[axes[1]])
    settings = results["settings"]
    clip = f", {settings['clip_model']}" if axes == CURVES[0] else ""
    plot.set_title(f"{settings['num_pairs']} pairs{clip}; numbers: image guidance", fontsize=10)
    plot.legend(fontsize=7)
    save_whole(file, partial(figure.savefig, format="png", dpi=120))
    return f"{file.name}: {AXES[axes[0]]} and {AXES[axes[1]]}"


def best_rows(rows, folder):
    """Per model the row with images in folder whose L1 to the truth is least.

    Without truth, the row that was measured first.
    """
    best = {}
    for row in rows:
        if Path(folder, row["images"]).is_dir():
            other = best.setdefault(row["model"], row)
            if row["l1"] is not None and row["l1"] < other["l1"]:
                best[row["model"]] = row
    return list(best.values())


def draw_grid(results, pairs, folder):
    """The grid: a row per pair; input, truth if known, and the best row of each model.

    Args:
        results: content of results.json.
        pairs: list of (row, HeldOutPair, size (width, height)).
        folder: of the rows' images.

    Returns:
        PIL image.
    """
    box = (GRID_IMAGE_SIZE, GRID_IMAGE_SIZE)
    rows = best_rows(results["rows"], folder)
    has_truth = any(pair.truth is not None for _, pair, _ in pairs)
    tiles = []
    for i, pair, size in pairs:
        cells = [(pair.fitted_original(size), pair.instruction)]
        if has_truth:
            truth = pair.fitted_truth(size)
            cells.append((truth, "truth") if truth else (Image.new("RGB", size, "white"), ""))
        for row in rows:
            scales = f"{row['guidance_scale']:g} and {row['image_guidance_scale']:g}"
            image = load_image(Path(folder, row["images"], f"{i}.png"))
            cells.append((image, f"{row['model']}, {scales}"))
        tiles += [captioned([ImageOps.contain(image, box)], text) for image, text in cells]
    return tile_grid(tiles, 1 + has_truth + len(rows), GRID_MARGIN)


def write_report(output_dir, results, pairs, sentences):
    """Write results.md, curve.png and grid.png.

    Args:
        output_dir: directory of results.json.
        results: its content.
        pairs: those of the grid, list of (row, HeldOutPair, size).
        sentences: what is left out.
    """
    curve = draw_curve(results, output_dir / "curve.png")
    if curve is None:  # of earlier results
        (output_dir / "curve.png").unlink(missing_ok=True)
    sentences = [*sentences, curve or "no curve: it needs captions and CLIP, or truths"]
    save_image(draw_grid(results, pairs, output_dir / "images"), output_dir / "grid.png")
    text = markdown(results, sentences)
    write_text(output_dir / "results.md", text)
