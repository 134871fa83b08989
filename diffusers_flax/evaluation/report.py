"""The report of evaluate_edits.py: results.md, curve.png and grid.png, drawn from results.json."""

from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from diffusers_flax.data.images import load_image
from diffusers_flax.evaluation.metrics import CLIP_METRICS, MASK_METRICS, PIXEL_METRICS
from diffusers_flax.evaluation.protocols import EXTRA, PROTOCOLS
from diffusers_flax.generating.captions import GRID_MARGIN, captioned, tile_grid
from diffusers_flax.images import save_image
from diffusers_flax.loading.files import save_whole, write_text

CELL_SIZE = 192  # of the longer side of an image in grid.png, pixels
GRID_PAIRS = 8  # rows of grid.png, at most
LABEL_SIZE = 8  # of the font in the curve, points
# Places of a label beside its point, in points; negative x: to the left
LABEL_PLACES = [(x, y) for y in (4, -11, 14, -21, 24, -31) for x in (4, -4)]
FLOP_UNITS = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))
SAMPLING_FLAGS = (
    "scheduler",
    "timesteps",
    "eta",
    "timestep_spacing",
    "unet_delta",
    "lora",
    "embedding",
    "accelerate",
)
HEADINGS = {
    "l1": "L1",
    "mse": "MSE",
    "error_ratio": "error ratio",
    "l1_to_input": "L1 to input",
    "image_similarity": "image sim.",
    "direction_similarity": "direction sim.",
    "text_similarity": "text sim.",
    "truth_similarity": "truth sim.",
    **EXTRA,
}
# x and y of the curve: the first pair of metrics that all rows have
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
    """{(model, guidance_scale, image_guidance_scale): list of rows, one per seed}."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["model"], row["guidance_scale"], row["image_guidance_scale"]].append(row)
    return dict(groups)


def mean_and_spread(rows, name):
    """Mean and sample standard deviation of a metric over rows; None for too few rows."""
    values = [row[name] for row in rows if row.get(name) is not None]
    mean = float(np.mean(values)) if values else None
    return mean, float(np.std(values, ddof=1)) if len(values) > 1 else None


def cell(rows, name, digits=4):
    """A table's cell: "mean ± spread", the mean, or nothing."""
    mean, spread = mean_and_spread(rows, name)
    if mean is None:
        return ""
    return f"{mean:.{digits}f}" + (f" ± {spread:.{digits}f}" if spread is not None else "")


def markdown(results, sentences, tables=()):
    """The content of results.md.

    Args:
        results: of results.json.
        sentences: what is left out.
        tables: lines of more tables, of scores.score_tables.
    """
    settings, rows = results["settings"], results["rows"]
    is_protocol = settings.get("protocol") in PROTOCOLS
    seeds = sorted({row["seed"] for row in rows})
    names = short_names(results["models"])
    clip = f"CLIP model: {settings['clip_model']}"
    has_sim = settings["clip_model"] != "none" and not is_protocol
    clip += "; its metrics are named sim." if has_sim else ""
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
    means = "Means over the pairs, then mean ± standard deviation over seeds"
    if is_protocol:
        means = "Means over the pairs and the seeds"
    lines = [
        "# Edits",
        "",
        f"{', '.join(conditions)}. {means} ({', '.join(map(str, seeds))}). {clip.rstrip('.')}.",
        "",
        *(f"- {sentence}" for sentence in sentences),
        *[""] * bool(sentences),
    ]
    if not is_protocol:
        lines += [*metrics_table(results, (*PIXEL_METRICS, *CLIP_METRICS, *EXTRA), names), ""]
    lines += tables
    lines = lines[: -1 if lines[-1] == "" else None]
    if (masks := settings.get("num_masks")) and not is_protocol:
        lines += ["", f"Inside and outside of the masks of {masks} pairs:", ""]
        lines += metrics_table(results, MASK_METRICS, names)
    lines += ["", *costs(rows, names)] if rows else []
    for name, model in results["models"].items():
        if "parameters" in model:
            sizes = ", ".join(f"{component} {n:,}" for component, n in model["parameters"].items())
            also = "" if names[name] == name else f" ({name})"
            lines.append(f"\n{names[name]}{also}: {model['pipeline']}; parameters: {sizes}.")
    return "\n".join(lines) + "\n"


def metrics_table(results, metrics, names):
    """Lines of a Markdown table, without metrics that no row has; names: of short_names."""
    rows, baselines = results["rows"], results["baselines"]
    metrics = [x for x in metrics if any(row.get(x) is not None for row in rows + baselines)]
    lines = table_head(("model", "guidance", "image guidance", "seeds", *map(heading, metrics)))
    for label, row in merge_baselines(baselines, metrics, names):
        lines.append(f"| {' | '.join([label, '', '', '', *(cell([row], x) for x in metrics)])} |")
    for (model, *scales), group in over_seeds(rows).items():
        cells = [names[model], *map(str, scales), str(len(group))]
        lines.append(f"| {' | '.join([*cells, *(cell(group, name) for name in metrics)])} |")
    return lines


def heading(metric):
    """The heading of a metric's column: "L1 inside" for l1_inside."""
    name, _, side = metric.rpartition("_")
    return f"{HEADINGS[name]} {side}" if metric in MASK_METRICS else HEADINGS[metric]


def table_head(heads):
    """The first two lines of a Markdown table."""
    return [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]


def short_names(models):
    """{model: last name of its path or hub id, or all of it if models share that name}."""
    last = {model: Path(model).name or model for model in models}
    counts = Counter(last.values())
    return {model: name if counts[name] == 1 else model for model, name in last.items()}


def merge_baselines(baselines, metrics, names):
    """[(label, row)] of baselines; models with the same VAE have one.

    Args:
        baselines: rows of results.json.
        metrics: names of the shown metrics.
        names: of short_names.
    """
    groups = defaultdict(list)
    for row in baselines:
        groups[row["baseline"], *(row.get(name) for name in metrics)].append(row)
    counts = Counter(key[0] for key in groups)
    merged = []
    for (baseline, *_), rows in groups.items():
        models = ", ".join(names.get(row["model"], row["model"]) for row in rows if row["model"])
        merged.append((f"{baseline} ({models})" if counts[baseline] > 1 else baseline, rows[0]))
    return merged


def costs(rows, names):
    """Table of an edit's costs; runs of a model with the same FLOPs are one line.

    Their seconds differ by noise only: the table shows median and range.
    """
    groups = defaultdict(list)
    for row in rows:
        groups[row["model"], row["flops_per_edit"]].append(row)
    most = max(row["flops_per_edit"] for row in rows)
    unit, name = next((x for x in FLOP_UNITS if most >= x[0]), FLOP_UNITS[-1])
    memory = " and ".join(sorted({f"of the {row['peak_memory_of']}" for row in rows}))
    heads = ("edits", "runs", "s per edit, median (range)", "s to compile")
    lines = table_head((*heads, f"GiB, peak {memory}", f"{name} per edit"))
    for (model, flops), group in groups.items():
        scales = {(row["guidance_scale"], row["image_guidance_scale"]): None for row in group}
        first = "{:g} and {:g}".format(*next(iter(scales)))
        more = f" (and {len(scales) - 1} more)" if len(scales) > 1 else ""
        seconds = [row["seconds_per_edit"] for row in group]
        cells = [
            f"{names[model]} at {first}{more}",
            str(len(group)),
            f"{np.median(seconds):.2g} ({min(seconds):.2g} to {max(seconds):.2g})",
            f"{max(row['compile_seconds'] for row in group):.1f}",
            f"{max(row['peak_memory_bytes'] for row in group) / 2**30:.2f}",
            f"{flops / unit:.3g}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def draw_curve(results, file):
    """Draw one metric against another over image_guidance_scale, a line per model.

    As in the paper, CLIP direction similarity (x) and image similarity (y); without captions or
    CLIP, L1 to the edited image and to the original.

    Returns:
        A sentence about the axes; None if no curve can be drawn.

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
    lengths = Counter(key[:2] for key in over_seeds(rows))
    if axes is None or max(lengths.values()) < 2:  # single points are no curve
        return None
    figure = matplotlib.figure.Figure(figsize=(8, 7), layout="constrained")
    plot = figure.add_subplot()
    lines, names = defaultdict(list), short_names(results["models"])
    for (model, guidance_scale, image_guidance_scale), group in over_seeds(rows).items():
        points = [mean_and_spread(group, name) for name in axes]
        lines[model, guidance_scale].append((image_guidance_scale, *points))
    labels = []
    for (model, guidance_scale), points in lines.items():
        points.sort()
        (x, x_spread), (y, y_spread) = (
            zip(*((mean, spread or 0) for mean, spread in column))
            for column in list(zip(*points))[1:]
        )
        label = f"{names[model]}, guidance {guidance_scale:g}"
        style = {"marker": "o", "markersize": 4, "capsize": 2, "label": label}
        line, *_ = plot.errorbar(x, y, y_spread, x_spread, **style)
        for (scale, *_), point in zip(points, zip(x, y)):
            labels.append((f"{scale:g}", point, line.get_color()))
    # Distant baselines would squeeze the curves into points.
    limits = [widened(values) for values in zip(*(point for _, point, _ in labels))]
    for label, row in merge_baselines(results["baselines"], axes, names):
        if all(row.get(name) is not None for name in axes):
            point = [row[name] for name in axes]
            if not all(low <= value <= high for value, (low, high) in zip(point, limits)):
                label += " at ({:.3g}, {:.3g}), outside".format(*point)
            plot.plot(*point, "x", label=label)
    plot.set_xlim(limits[0])
    plot.set_ylim(limits[1])
    plot.set_xlabel(AXES[axes[0]])
    plot.set_ylabel(AXES[axes[1]])
    settings = results["settings"]
    clip = f", {settings['clip_model']}" if axes == CURVES[0] else ""
    plot.set_title(f"{settings['num_pairs']} pairs{clip}; numbers: image guidance", fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    figure.draw_without_rendering()  # places the axes
    write_labels(plot, labels)
    save_whole(file, partial(figure.savefig, format="png", dpi=120))
    return f"{file.name}: {AXES[axes[0]]} and {AXES[axes[1]]}"


def widened(values):
    """(low, high) around values, with a quarter of their range on both sides, at least 5%."""
    low, high = min(values), max(values)
    margin = max((high - low) / 4, 0.05 * max(abs(low), abs(high)), 1e-3)
    return low - margin, high + margin


def write_labels(plot, labels):
    """Write texts next to points, at the first of LABEL_PLACES that covers no other text.

    Texts without such a place are left out.

    Args:
        plot: matplotlib Axes, with its final size and limits.
        labels: list of (text, (x, y), color).
    """
    scale = plot.figure.dpi / 72  # pixels of a point
    taken = []
    for text, point, color in labels:
        left, bottom = plot.transData.transform(point)
        width, height = 0.65 * LABEL_SIZE * len(text) * scale, LABEL_SIZE * scale
        for dx, dy in LABEL_PLACES:
            x, y = left + dx * scale - (width if dx < 0 else 0), bottom + dy * scale
            if all(
                x > other_right or x + width < other_left or abs(y - other_y) > height
                for other_left, other_right, other_y in taken
            ):
                taken.append((x, x + width, y))
                plot.annotate(
                    text,
                    point,
                    xytext=(dx, dy),
                    textcoords="offset points",
                    fontsize=LABEL_SIZE,
                    color=color,
                    horizontalalignment="right" if dx < 0 else "left",
                )
                break


def grid_rows(instructions):
    """Sorted places of the pairs in grid.png: of all instructions, or of evenly spaced ones."""
    rows_of = defaultdict(list)
    for row, instruction in enumerate(instructions):
        rows_of[instruction].append(row)
    n = min(GRID_PAIRS, len(instructions))
    groups = list(rows_of.values())
    if len(groups) > n:
        groups = [groups[i * len(groups) // n] for i in range(n)]
    # Instructions take turns until their pairs are used up. Each turn takes a later pair, at
    # turn / n of them if it can, so that the images differ.
    places = [(i, group) for i in range(n) for group in groups if i < len(group)][:n]
    chosen = []
    for group in groups:
        turns = [turn for turn, (_, other) in enumerate(places) if other is group]
        at = -1
        for i, turn in enumerate(turns):
            last = len(group) - len(turns) + i  # leaves pairs for the later turns
            at = min(max(at + 1, turn * len(group) // n), last)
            chosen.append(group[at])
    return sorted(chosen)


def best_rows(rows, folder, shown):
    """Per model the row with the least L1 to the edited images, else the first row.

    Only rows with the files of all results in `shown` count.
    """
    best = {}
    for row in rows:
        if all(Path(folder, row["images"], file).is_file() for file in shown):
            other = best.setdefault(row["model"], row)
            if row.get("l1") is not None and row["l1"] < other["l1"]:
                best[row["model"]] = row
    return list(best.values())


def draw_grid(results, pairs, folder):
    """The grid: a row per pair; original, edited image if known, best result of each model.

    Args:
        results: content of results.json.
        pairs: list of (row, HeldOutPair, size (width, height)).
        folder: of the rows' images.

    Returns:
        PIL image.
    """
    box = (CELL_SIZE, CELL_SIZE)
    rows = best_rows(results["rows"], folder, [pair.result_file(i) for i, pair, _ in pairs])
    names = short_names(results["models"])
    has_truth = any(pair.edited is not None for _, pair, _ in pairs)
    tiles = []
    for i, pair, size in pairs:
        cells = [(pair.fitted_original(size), pair.instruction)]
        if has_truth:
            edited = pair.fitted_edited(size)
            cells.append((edited, "truth") if edited else (Image.new("RGB", size, "white"), ""))
        for row in rows:
            scales = f"{row['guidance_scale']:g} and {row['image_guidance_scale']:g}"
            image = load_image(Path(folder, row["images"], pair.result_file(i)))
            cells.append((image, f"{names[row['model']]}, guidance {scales}"))
        tiles += [captioned([ImageOps.contain(image, box)], text) for image, text in cells]
    return tile_grid(tiles, 1 + has_truth + len(rows), GRID_MARGIN)


def write_report(output_dir, results, pairs, sentences, tables=()):
    """Write results.md, curve.png and grid.png.

    Args:
        output_dir: directory of results.json.
        results: its content.
        pairs: the grid's pairs, list of (row, HeldOutPair, size).
        sentences: what is left out.
        tables: see markdown.
    """
    curve = draw_curve(results, output_dir / "curve.png")
    if curve is None:  # of earlier results
        (output_dir / "curve.png").unlink(missing_ok=True)
    if curve or results["settings"].get("protocol") not in PROTOCOLS:
        sentences = [
            *sentences,
            curve
            or "no curve: it needs captions and CLIP, or truths, and two image guidance scales",
        ]
    save_image(draw_grid(results, pairs, output_dir / "images"), output_dir / "grid.png")
    text = markdown(results, sentences, tables)
    write_text(output_dir / "results.md", text)
