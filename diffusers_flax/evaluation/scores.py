"""Scores in the report of evaluate_edits.py: means with intervals, the best and the worst results.

tables = score_tables(results, pairs, output_dir)
draw_extremes(results, pairs, output_dir)
"""

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from diffusers_flax.data.images import load_image
from diffusers_flax.evaluation.intervals import (
    bootstrap_interval,
    load_values,
    mean_over,
    over_rows,
)
from diffusers_flax.evaluation.metrics import CLIP_METRICS, PIXEL_METRICS
from diffusers_flax.evaluation.protocols import EXTRA, PROTOCOLS
from diffusers_flax.evaluation.report import (
    CELL_SIZE,
    HEADINGS,
    cell,
    merge_baselines,
    over_seeds,
    short_names,
    table_head,
)
from diffusers_flax.generating.captions import GRID_MARGIN, captioned, tile_grid

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


def ranking_metric(values):
    """The metric that ranks results, or None; values: {metric: floats, NaN where unknown}."""
    return next((x for x in RANKED if np.isfinite(values.get(x, np.nan)).any()), None)


def score_tables(results, pairs, output_dir):
    """Lines of Markdown: for every part of the protocol a table of means with 95% intervals.

    Args:
        results: content of results.json.
        pairs: list of HeldOutPair.
        output_dir: directory of the values per pair.
    """
    settings, names = results["settings"], short_names(results["models"])
    groups = over_seeds(results["rows"])
    all_values = {
        key: [load_values(output_dir, row["images"]) for row in rows]
        for key, rows in groups.items()
    }
    protocol, lines = PROTOCOLS.get(settings.get("protocol")), []
    if protocol is None:
        headings, parts = (
            {x: HEADINGS[x] for x in (*PIXEL_METRICS, *CLIP_METRICS, *EXTRA)},
            {"": ""},
        )
    else:
        headings, parts = {**protocol.metrics, **EXTRA}, protocol.parts
        lines = [f"**{protocol.title}** ({protocol.source}). {protocol.says}", ""]
    for part, title in parts.items():
        shown = {
            f"{metric}{part}": heading
            for metric, heading in headings.items()
            if any(f"{metric}{part}" in x for values in all_values.values() for x in values)
            and any(row.get(f"{metric}{part}") is not None for row in results["rows"])
        }
        if shown:
            lines += part_title(title, part, pairs)
            lines += interval_table(results, all_values, shown, pairs, names, protocol)
            lines += difference_table(all_values, shown, pairs, names, protocol)
    if protocol and protocol.is_judged and any("overall" in x[0] for x in all_values.values()):
        lines += group_table(all_values, pairs, names)
    return lines


def group_table(all_values, pairs, names):
    """Lines of a table of the overall score of each group of edits; arguments: interval_table."""
    groups = sorted({pair.group for pair in pairs})
    numbers = [f"{group} ({sum(pair.group == group for pair in pairs)})" for group in groups]
    lines = table_head(("overall", "guidance", "image guidance", *numbers))
    for (model, *scales), values in all_values.items():
        mine = over_rows(values, "overall")
        cells = [names[model], *map(str, scales)]
        for group in groups:
            mean = mean_over(mine[[pair.group == group for pair in pairs]])
            cells.append("" if mean is None else f"{mean:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return ["Overall scores by kind of edit, and numbers of edits:", "", *lines, ""]


def part_title(title, part, pairs):
    """Lines above a table: the part and its numbers of pairs."""
    used = [pair for pair in pairs if part in pair.parts]
    sessions = len({pair.session for pair in used})
    of = f" of {sessions} sessions" if sessions > 1 else ""
    title = f"{title[:1].upper()}{title[1:]}, " if title else ""
    return [f"{title}{len(used)} pairs{of}; means and their 95% intervals by bootstrap:", ""]


def interval_table(results, all_values, shown, pairs, names, protocol):
    """Lines of a table of means and intervals.

    Args:
        results: content of results.json.
        all_values: {(model, guidance_scale, image_guidance_scale): values of each seed}.
        shown: {metric: heading}.
        pairs: list of HeldOutPair.
        names: of short_names.
        protocol: Protocol or None; its baselines are shown.
    """
    clusters, strata = clusters_and_strata(pairs, protocol)
    lines = table_head(("model", "guidance", "image guidance", "seeds", *shown.values()))
    for label, row in merge_baselines(results["baselines"], list(shown), names) if protocol else ():
        lines.append(f"| {' | '.join([label, '', '', '', *(cell([row], x) for x in shown)])} |")
    for (model, *scales), values in all_values.items():
        cells = [names[model], *map(str, scales), str(len(values))]
        for metric in shown:
            numbers = over_rows(values, metric)
            cells.append(mean_and_interval(numbers, clusters, strata))
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def difference_table(all_values, shown, pairs, names, protocol):
    """Lines of a table of the differences to the first model, pair by pair; [] with one model.

    An interval without 0 means that the models differ, which two overlapping intervals of means do
    not rule out. Arguments: interval_table.
    """
    clusters, strata = clusters_and_strata(pairs, protocol)
    first = next(iter(all_values))
    heading = f"difference to {names[first[0]]}"
    lines = table_head((heading, "guidance", "image guidance", *shown.values()))
    others = [key for key in all_values if key[0] != first[0]]
    for model, *scales in others:
        base = all_values[first[0], *scales]
        cells = [names[model], *map(str, scales)]
        for metric in shown:
            both = [over_rows(x, metric) for x in (all_values[model, *scales], base)]
            known = all(x is not None for x in both) and len({len(x) for x in both}) == 1
            cells.append(mean_and_interval(both[0] - both[1], clusters, strata) if known else "")
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""] if others else []


def clusters_and_strata(pairs, protocol):
    """Labels of each pair, for bootstrap_interval; strata None: one for all."""
    clusters = [pair.session or f"pair {place}" for place, pair in enumerate(pairs)]
    strata = [pair.group for pair in pairs] if protocol and protocol.is_judged else None
    return clusters, strata


def mean_and_interval(numbers, clusters, strata):
    """The cell "mean [low, high]" of values per pair, "" without any."""
    mean = None if numbers is None else mean_over(numbers, strata)
    if mean is None:
        return ""
    interval = bootstrap_interval(numbers, clusters, strata)
    return f"{mean:.4f}" + (" [{:.4f}, {:.4f}]".format(*interval) if interval else "")


def draw_extremes(results, pairs, output_dir, folder):
    """An image of the best and worst results of each model, or None.

    Each model has two lines, at the scales and seed whose mean is best. A tile has input, result
    and, if there is one, truth.

    Args:
        results: content of results.json.
        pairs: list of HeldOutPair.
        output_dir: directory of the values per pair.
        folder: of the rows' images.

    Returns:
        PIL image.
    """
    tiles, names = [], short_names(results["models"])
    for model, row in rows_to_show(results["rows"]).items():
        metric = row["ranked_by"]
        values = load_values(output_dir, row["images"]).get(metric)
        if values is None or len(values) != len(pairs):
            continue
        order = np.argsort(RANKED[metric] * values, kind="stable")
        order = order[np.isfinite(values[order])][::-1]
        best, worst = order[:NUM_EXTREMES], order[NUM_EXTREMES:][-NUM_EXTREMES:][::-1]
        files = (pairs[place].result_file(place) for place in (*best, *worst))
        if not all(Path(folder, row["images"], file).is_file() for file in files):
            continue  # deleted
        for word, places in (("best", best), ("worst", worst)):
            for number in range(NUM_EXTREMES):
                if number < len(places):
                    place = int(places[number])
                    text = f"{names[model]}, {word} {number + 1}, {metric} {values[place]:.3f}: "
                    tiles.append(tile_of(pairs[place], place, Path(folder, row["images"]), text))
                elif len(places):
                    tiles.append(None)
    tiles = [tile or Image.new("RGB", (1, 1), "white") for tile in tiles]
    return tile_grid(tiles, NUM_EXTREMES, GRID_MARGIN) if tiles else None


def rows_to_show(rows):
    """{model: its row with the best mean of the metric that ranks its results}."""
    chosen = {}
    for row in rows:
        if (metric := row.get("ranked_by")) and row.get(metric) is not None:
            other = chosen.setdefault(row["model"], row)
            is_better = RANKED[metric] * row[metric] > RANKED[metric] * (other[metric] or 0)
            if other["ranked_by"] == metric and is_better:
                chosen[row["model"]] = row
    return chosen


def tile_of(pair, place, folder, text):
    """Input, result and truth side by side with the instruction below; folder: of the results."""
    images = {"input": pair.fitted_original()}
    images["result"] = load_image(folder / pair.result_file(place))
    if pair.edited is not None:
        images["truth"] = pair.fitted_edited()
    tiles = [
        captioned([ImageOps.contain(image, (CELL_SIZE, CELL_SIZE))], name)
        for name, image in images.items()
    ]
    return captioned(tiles, text + pair.instruction)
