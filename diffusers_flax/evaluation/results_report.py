"""The report of evaluate_edits.py: results.md, curve.png, grid.png and best_and_worst.png.

write_report(output_dir, results, pairs, sizes, sentences)
"""

from collections import Counter, defaultdict
from functools import partial

import numpy as np
from PIL import Image, ImageOps

from diffusers_flax.data.images import load_image
from diffusers_flax.evaluation.intervals import bootstrap_interval, mean_over, over_seeds
from diffusers_flax.evaluation.metrics import METRICS
from diffusers_flax.evaluation.protocols import PROTOCOLS
from diffusers_flax.evaluation.results import load_values
from diffusers_flax.generating.captions import GRID_MARGIN, captioned, tile_grid
from diffusers_flax.images import save_image
from diffusers_flax.loading.files import save_whole, write_text

CELL_SIZE = 192  # of the longer side of an image in a grid, pixels
GRID_PAIRS = 8  # rows of grid.png, at most
NUM_EXTREMES = 4  # of the best and of the worst results
# Metrics that rank results, the first that is known; 1: the most is best, -1: the least
RANKED = {
    "overall": 1,
    "direction_similarity": 1,
    "dino": 1,
    "truth_similarity": 1,
    "error_ratio": -1,
    "l1": -1,
    "text_similarity": 1,
}
CURVE = {  # x and y with their labels
    "direction_similarity": "CLIP direction similarity (change of image and captions)",
    "image_similarity": "CLIP image similarity (to the input)",
}
MASKS = {"_inside": "inside of the masks", "_outside": "outside of the masks"}  # as Protocol.parts
COSTS = {  # number in a row of results.json: (heading, unit)
    "seconds_per_edit": ("s per edit", 1),
    "compile_seconds": ("s to compile", 1),
    "peak_memory_bytes": ("peak GiB", 2**30),
    "flops_per_edit": ("GFLOP per edit", 1e9),
}


def write_report(output_dir, results, pairs, sizes, sentences):
    """Write all files.

    Args:
        output_dir: directory of results.json.
        results: its content.
        pairs: list of HeldOutPair.
        sizes: (width, height) of each pair's edit.
        sentences: for results.md.
    """
    rows = results["rows"]
    lines = report_lines(output_dir, results, pairs, sentences)
    write_text(output_dir / "results.md", "\n".join(lines) + "\n")
    if figure := curve(rows, len(pairs)):
        save_whole(output_dir / "curve.png", partial(figure.savefig, format="png", dpi=120))
    best = {}
    for row in best_rows(rows, "l1"):
        scales = f"{row['guidance_scale']:g} and {row['image_guidance_scale']:g}"
        best[f"{row['model']}, guidance {scales}"] = row
    num_shown = min(GRID_PAIRS, len(pairs))
    shown = [(i * len(pairs) // num_shown, best) for i in range(num_shown)]  # evenly spaced
    save_image(image_rows(output_dir, pairs, sizes, shown), output_dir / "grid.png")
    metric = next((name for name in RANKED if rows[0].get(name) is not None), None)
    if metric:
        image = image_rows(output_dir, pairs, sizes, extremes(output_dir, rows, metric))
        save_image(image, output_dir / "best_and_worst.png")


def rows_of_scales(rows):
    """{(model, guidance_scale, image_guidance_scale): its rows, one per seed}."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["model"], row["guidance_scale"], row["image_guidance_scale"]].append(row)
    return groups


def report_lines(output_dir, results, pairs, sentences):
    """The lines of results.md; arguments as of write_report.

    An interval of a difference to the first model that lacks 0 means that the models differ, which
    two overlapping intervals of means do not rule out.
    """
    rows, settings = results["rows"], results["settings"]
    protocol, groups = PROTOCOLS[settings["protocol"]], rows_of_scales(rows)
    types = np.array([pair.group for pair in pairs])
    clusters = [pair.session or f"pair {place}" for place, pair in enumerate(pairs)]
    means = {  # over seeds, {key: {metric: (n,)}}
        key: over_seeds([load_values(output_dir, row["images"]) for row in group])
        for key, group in groups.items()
    }

    def mean_text(values, of_seeds=()):
        """A cell "mean ± deviation over seeds [low, high]", "" if no value is known."""
        mean = mean_over(values, types)
        if mean is None:
            return ""
        deviation = f" ± {np.std(of_seeds, ddof=1):.4f}" if len(of_seeds) > 1 else ""
        interval = bootstrap_interval(values, clusters, types)
        between = f" [{interval[0]:.4f}, {interval[1]:.4f}]" if interval else ""
        return f"{mean:.4f}{deviation}{between}"

    first, cells = rows[0]["model"], defaultdict(dict)  # {key: {column: text}}
    for row in results["baselines"]:
        name = " of ".join(filter(None, (row["baseline"], row["model"])))
        known = {metric: x for metric, x in row.items() if isinstance(x, float)}
        cells[name, "", ""] = {metric: f"{x:.4f}" for metric, x in known.items()}
    for key, group in groups.items():
        texts, of_first = cells[key], means.get((first, *key[1:]), {})
        for metric, values in means[key].items():
            of_seeds = [row[metric] for row in group if row.get(metric) is not None]
            texts[metric] = mean_text(values, of_seeds)
            if key[0] != first and metric in of_first:
                texts["difference", metric] = mean_text(values - of_first[metric])
        for name in types if "overall" in means[key] else ():
            score = mean_over(means[key]["overall"][types == name])
            texts["type", name] = "" if score is None else f"{score:.2f}"
        for name, (_, unit) in COSTS.items():
            texts[name] = "/".join(f"{row[name] / unit:.3g}" for row in group)

    given = [f"{name} {value}" for name, value in settings.items() if value]
    lines = ["# Edits", "", *(f"- {sentence}" for sentence in sentences), f"- {', '.join(given)}"]
    lines += ["- mean over pairs and seeds ± standard deviation over seeds, [95% interval]"]
    if protocol.title:
        lines += [f"- {protocol.title}: {protocol.source}"]
    names = (*protocol.metrics, *settings["metrics"])
    headings = {x: METRICS[x].heading for x in names if x in METRICS} | protocol.metrics
    counts = {part: sum(part in pair.parts for pair in pairs) for part in protocol.parts}
    counts |= dict.fromkeys(MASKS, sum(pair.mask is not None for pair in pairs))
    for part, title in (protocol.parts | MASKS).items():
        in_part = {f"{metric}{part}": heading for metric, heading in headings.items()}
        if found := table("model", in_part, cells):
            lines += ["", f"{title.capitalize()}, {counts[part]} pairs:", *found]
            of_differences = {("difference", name): heading for name, heading in in_part.items()}
            lines += table(f"difference to {first}", of_differences, cells)
    numbers = Counter(sorted(types.tolist()))
    of_types = {("type", name): f"{name} ({n})" for name, n in numbers.items()}
    if found := table("overall", of_types, cells):
        lines += ["", "Overall scores by type of edit, and numbers of edits:", *found]
    return lines + table("model", {name: heading for name, (heading, _) in COSTS.items()}, cells)


def table(first, headings, cells):
    """Lines of a Markdown table, without empty rows and columns; [] if all are empty.

    Args:
        first: heading of the model.
        headings: {column: text}.
        cells: {(model, guidance_scale, image_guidance_scale): {column: text}}.
    """
    names = [x for x in headings if any(texts.get(x) for texts in cells.values())]
    rows = [[first, "guidance", "image guidance", *(headings[name] for name in names)]]
    rows += [["---"] * len(rows[0])]
    for key, texts in cells.items():
        if any(texts.get(x) for x in names):
            rows.append([*map(str, key), *(texts.get(x, "") for x in names)])
    return ["", *(f"| {' | '.join(row)} |" for row in rows)] if names else []


def curve(rows, num_pairs):
    """A matplotlib Figure of both CLIP similarities over image_guidance_scale, or None.

    Source: InstructPix2Pix (arXiv 2211.09800), section 4.1.
    """
    import matplotlib.figure  # seconds to import; without pyplot no display is used

    if any(row.get(metric) is None for row in rows for metric in CURVE):
        return None
    lines = defaultdict(list)
    for (model, guidance_scale, image_guidance_scale), group in rows_of_scales(rows).items():
        point = [np.mean([row[metric] for row in group]) for metric in CURVE]
        lines[f"{model}, guidance {guidance_scale:g}"].append((image_guidance_scale, *point))
    figure = matplotlib.figure.Figure(figsize=(8, 7), layout="constrained")
    plot = figure.add_subplot(**dict(zip(("xlabel", "ylabel"), CURVE.values())))
    for label, points in lines.items():
        scales, x, y = zip(*sorted(points))
        plot.plot(x, y, marker="o", label=label)
        for scale, *point in zip(scales, x, y):
            plot.annotate(f" {scale:g}", point, fontsize=8)
    plot.set_title(f"{num_pairs} pairs; numbers: image guidance", fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def best_rows(rows, metric):
    """Each model's row with the best mean of a metric of RANKED; of unknown means the first."""
    best = {}
    for row in rows:
        other = best.setdefault(row["model"], row)
        if row.get(metric) is not None and RANKED[metric] * (row[metric] - other[metric]) > 0:
            best[row["model"]] = row
    return [*best.values()]


def extremes(output_dir, rows, metric):
    """For image_rows the best, then the worst results of each model in its best row."""
    shown = []
    for row in best_rows(rows, metric):
        values = load_values(output_dir, row["images"])[metric]
        order = np.argsort(-RANKED[metric] * values, kind="stable")
        order = order[np.isfinite(values[order])]
        for word, places in (("best", order), ("worst", order[::-1])):
            for place in places[:NUM_EXTREMES]:
                text = f"{row['model']}, {word}, {metric} {values[place]:.3f}"
                shown.append((place, {text: row}))
    return shown


def image_rows(output_dir, pairs, sizes, shown):
    """An image with a line per pair: input, truth if any pair has one, and results.

    Args:
        output_dir, pairs, sizes: as of write_report.
        shown: list of (place of the pair, {text: row of results.json whose result is shown}).
    """
    has_truth, tiles = any(pair.edited is not None for pair in pairs), []
    for place, rows in shown:
        pair, size = pairs[place], sizes[place]
        images = {f"input: {pair.instruction}": pair.decoded("original", size)}
        if has_truth:
            images["truth"] = pair.decoded("edited", size) or Image.new("RGB", (1, 1), "white")
        for text, row in rows.items():
            file = output_dir / "images" / row["images"] / pair.result_file(place)
            images[text] = load_image(file)
        for text, image in images.items():
            tiles.append(captioned([ImageOps.contain(image, (CELL_SIZE, CELL_SIZE))], text))
    return tile_grid(tiles, 1 + has_truth + len(rows), GRID_MARGIN)
