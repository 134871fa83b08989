"""The report of evaluate_edits.py: results.md, curve.png, grid.png and best_and_worst.png.

EditReport(output_dir, results, pairs, sizes).write(sentences)
"""

from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from diffusers_flax.data.images import load_image
from diffusers_flax.evaluation.intervals import (
    bootstrap_interval,
    load_values,
    mean_over,
    over_seeds,
)
from diffusers_flax.evaluation.metrics import MASK_METRICS, METRICS
from diffusers_flax.evaluation.protocols import PROTOCOLS
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
SHOWN_SETTINGS = (
    *("scheduler", "timesteps", "eta", "timestep_spacing"),
    *("unet_delta", "lora", "embedding", "accelerate"),
)
# x and y of the curve, with their names: the first two metrics that all rows have
CURVES = (
    {
        "direction_similarity": "CLIP direction similarity (change of image and captions)",
        "image_similarity": "CLIP image similarity (to the input)",
    },
    {"l1": "L1 to the truth", "l1_to_input": "L1 to the input"},
)


COSTS = {  # heading: its number in a row of results.json
    "s per edit": lambda row: row["seconds_per_edit"],
    "s to compile": lambda row: row["compile_seconds"],
    "peak GiB": lambda row: row["peak_memory_bytes"] / 2**30,
    "GFLOP per edit": lambda row: row["flops_per_edit"] / 1e9,
}


class EditReport:
    """What the files of a report show.

    Args:
        output_dir: directory of results.json.
        results: its content.
        pairs: list of HeldOutPair.
        sizes: (width, height) of each pair's edit.
    """

    def __init__(self, output_dir, results, pairs, sizes):
        self.output_dir, self.results, self.pairs, self.sizes = output_dir, results, pairs, sizes
        self.settings = results["settings"]
        self.protocol = PROTOCOLS[self.settings["protocol"] or "instruct_pix2pix"]
        last = {model: Path(model).name or model for model in results["models"]}
        counts = Counter(last.values())  # models that share a name have their whole path
        self.names = {model: x if counts[x] == 1 else model for model, x in last.items()}
        self.groups = defaultdict(list)  # rows of the same model and scales, one per seed
        for row in results["rows"]:
            key = row["model"], row["guidance_scale"], row["image_guidance_scale"]
            self.groups[key].append(row)
        self.values = {  # values per pair of these rows
            key: [load_values(output_dir, row["images"]) for row in rows]
            for key, rows in self.groups.items()
        }

    def write(self, sentences):
        """Write all files; sentences: for results.md, such as what is left out."""
        curve = self.output_dir / "curve.png"
        if figure := self.curve():
            save_whole(curve, partial(figure.savefig, format="png", dpi=120))
        else:
            curve.unlink(missing_ok=True)  # of earlier results
        save_image(self.grid(), self.output_dir / "grid.png")
        if extremes := self.extremes():
            save_image(extremes, self.output_dir / "best_and_worst.png")
        write_text(self.output_dir / "results.md", "\n".join(self.lines(sentences)) + "\n")

    # ---------------------------------------------------------------- results.md

    def lines(self, sentences):
        """The lines of results.md."""
        settings, rows = self.settings, self.results["rows"]
        conditions = [
            f"{settings['num_pairs']} pairs",
            f"{settings['num_inference_steps']} steps",
            f"longer side {settings['resolution']} pixels",
            *(settings["dtype"], settings["devices"]),
        ]
        for name in SHOWN_SETTINGS:
            if (value := settings.get(name)) is not None:
                value = " ".join(map(str, value)) if isinstance(value, list) else value
                conditions.append(f"--{name} {value}")
        seeds = ", ".join(map(str, sorted({row["seed"] for row in rows})))
        lines = [
            "# Edits",
            "",
            f"{', '.join(conditions)}. CLIP model: {settings['clip_model']}. Means over the pairs "
            f"and the seeds ({seeds}) ± standard deviation over the seeds, [95% interval].",
            "",
            *(f"- {sentence}" for sentence in sentences),
        ]
        if self.protocol.title:
            title, source = self.protocol.title, self.protocol.source
            lines += ["", f"**{title}** ({source}). {self.protocol.says}"]
        for title, headings in self.sections():
            shown = {
                x: heading
                for x, heading in headings.items()
                if any(row.get(x) is not None for row in rows)
            }
            if shown:
                lines += ["", title, "", *self.means(shown)] if title else ["", *self.means(shown)]
                lines += self.differences(shown)
        if self.protocol.is_judged and any("overall" in row for row in rows):
            lines += ["", "Overall scores by type of edit, and numbers of edits:", ""]
            lines += self.types_of_edits()
        costs = [
            ["/".join(f"{get(row):.3g}" for row in group) for get in COSTS.values()]
            for group in self.groups.values()
        ]
        lines += ["", *self.table("model", COSTS, costs)]
        for name, model in self.results["models"].items():
            if "parameters" in model:
                sizes = ", ".join(f"{part} {n:,}" for part, n in model["parameters"].items())
                lines += ["", f"{name}: {model['pipeline']}; parameters: {sizes}."]
        return lines

    def sections(self):
        """[(title, {metric: heading})] of the tables of metrics."""
        extra = {name: METRICS[name].heading for name in self.settings["metrics"] or ()}
        headings, found = self.protocol.metrics | extra, []
        for part, title in self.protocol.parts.items():
            used = [pair for pair in self.pairs if part in pair.parts]
            if title:
                title = f"{title.capitalize()}, {len(used)} pairs:"
            found.append((title, {f"{metric}{part}": x for metric, x in headings.items()}))
        if self.settings["num_masks"] and not self.protocol.is_benchmark:
            title = f"Inside and outside of the masks of {self.settings['num_masks']} pairs:"
            names = [metric.rsplit("_", 1) for metric in MASK_METRICS]  # l1_inside
            heads = [f"{METRICS[name].heading} {side}" for name, side in names]
            found.append((title, dict(zip(MASK_METRICS, heads))))
        return found

    def table(self, first, heads, cells, before=()):
        """Lines of a Markdown table with a line for every model and scales.

        Args:
            first: heading of the model.
            heads: headings of the cells.
            cells: for each of self.groups a list of texts; [] leaves the line out.
            before: lines above, lists of texts.
        """
        lines = [[first, "guidance", "image guidance", *heads]]
        lines += [["---"] * len(lines[0]), *before]
        for (model, *scales), texts in zip(self.groups, cells):
            if texts:
                lines.append([self.names[model], *map(str, scales), *texts])
        return [f"| {' | '.join(line)} |" for line in lines]

    def mean_text(self, values, spread=None):
        """A cell "mean ± spread [low, high]" of values per pair (n,), "" if none is known."""
        strata = [pair.group for pair in self.pairs] if self.protocol.is_judged else None
        clusters = [pair.session or f"pair {place}" for place, pair in enumerate(self.pairs)]
        mean = None if values is None else mean_over(values, strata)
        if mean is None:
            return ""
        text = f"{mean:.4f}" if spread is None else f"{mean:.4f} ± {spread:.4f}"
        interval = bootstrap_interval(values, clusters, strata)
        return f"{text} [{interval[0]:.4f}, {interval[1]:.4f}]" if interval else text

    def means(self, shown):
        """The table of means of metrics {name: heading}, below the baselines."""
        baselines, cells = [], []
        for row in self.results["baselines"]:
            of_model = f" ({self.names[row['model']]})" if row["model"] else ""
            means = (row.get(metric) for metric in shown)
            texts = ("" if mean is None else f"{mean:.4f}" for mean in means)
            baselines.append([f"{row['baseline']}{of_model}", "", "", *texts])
        for key, rows in self.groups.items():
            cells.append([])
            for metric in shown:
                means = [row[metric] for row in rows if row.get(metric) is not None]
                spread = np.std(means, ddof=1) if len(means) > 1 else None
                cells[-1].append(self.mean_text(over_seeds(self.values[key], metric), spread))
        return self.table("model", shown.values(), cells, baselines)

    def differences(self, shown):
        """The table of the differences to the first model, pair by pair; [] with one model.

        An interval without 0 means that the models differ, which two overlapping intervals of means
        do not rule out.
        """
        first, cells = next(iter(self.names)), []
        for model, *scales in self.groups:
            other = self.values.get((first, *scales))
            cells.append([])
            for metric in shown if model != first and other else ():
                both = over_seeds(self.values[model, *scales], metric), over_seeds(other, metric)
                change = None if any(x is None for x in both) else both[0] - both[1]
                cells[-1].append(self.mean_text(change))
        heading = f"difference to {self.names[first]}"
        return ["", *self.table(heading, shown.values(), cells)] if any(cells) else []

    def types_of_edits(self):
        """The table of the overall score of each type of edit."""
        sizes, cells = Counter(pair.group for pair in self.pairs), []
        for values in self.values.values():
            overall = over_seeds(values, "overall")
            of_groups = ([pair.group == group for pair in self.pairs] for group in sorted(sizes))
            means = (None if overall is None else mean_over(overall[x]) for x in of_groups)
            cells.append(["" if mean is None else f"{mean:.2f}" for mean in means])
        return self.table("overall", [f"{x} ({sizes[x]})" for x in sorted(sizes)], cells)

    # ---------------------------------------------------------------- images

    def curve(self):
        """A matplotlib Figure of one metric against another over image_guidance_scale.

        As in the paper, CLIP direction similarity (x) and image similarity (y); without captions or
        CLIP, L1 to the truth and to the input. None without two scales with both metrics.

        Source: InstructPix2Pix (arXiv 2211.09800), section 4.1.
        """
        import matplotlib.figure  # seconds to import; without pyplot no display is used

        rows, lines = self.results["rows"], defaultdict(list)
        axes = next((x for x in CURVES if all(r.get(m) is not None for r in rows for m in x)), {})
        for (model, guidance_scale, image_guidance_scale), group in self.groups.items():
            means = [[row[metric] for row in group] for metric in axes]
            point = [function(x) for function in (np.mean, np.std) for x in means]
            lines[model, guidance_scale].append((image_guidance_scale, *point))
        if not axes or max(map(len, lines.values())) < 2:
            return None
        figure = matplotlib.figure.Figure(figsize=(8, 7), layout="constrained")
        plot = figure.add_subplot(**dict(zip(("xlabel", "ylabel"), axes.values())))
        plot.margins(0.25)
        for (model, guidance_scale), points in lines.items():
            scales, x, y, x_spread, y_spread = zip(*sorted(points))
            label = f"{self.names[model]}, guidance {guidance_scale:g}"
            plot.errorbar(x, y, y_spread, x_spread, marker="o", capsize=2, label=label)
            for scale, *point in zip(scales, x, y):
                plot.annotate(f" {scale:g}", point, fontsize=8)
        plot.set(xlim=plot.get_xlim(), ylim=plot.get_ylim())  # distant baselines are outside
        for row in self.results["baselines"]:
            if all(row.get(metric) is not None for metric in axes):
                x, y = (row[metric] for metric in axes)
                of_model = f" ({self.names[row['model']]})" if row["model"] else ""
                plot.plot(x, y, "x", label=f"{row['baseline']}{of_model} at ({x:.3g}, {y:.3g})")
        clip = f", {self.settings['clip_model']}" if axes is CURVES[0] else ""
        plot.set_title(f"{len(self.pairs)} pairs{clip}; numbers: image guidance", fontsize=10)
        figure.legend(loc="outside lower center", ncols=2, fontsize=8)
        return figure

    def result(self, row, place):
        """The result of a row for a pair, PIL."""
        file = self.pairs[place].result_file(place)
        return load_image(self.output_dir / "images" / row["images"] / file)

    def grid(self):
        """A row per pair: input, truth if known, each model's result at its scales of least L1."""
        best, tiles, blank = {}, [], Image.new("RGB", (1, 1), "white")
        for row in self.results["rows"]:
            other = best.setdefault(row["model"], row)
            if row.get("l1") is not None and row["l1"] < other["l1"]:
                best[row["model"]] = row
        has_truth = any(pair.edited is not None for pair in self.pairs)
        for place in grid_places(len(self.pairs)):
            pair, size = self.pairs[place], self.sizes[place]
            tiles.append(cell(pair.decoded("original", size), pair.instruction))
            if has_truth:
                tiles.append(cell(pair.decoded("edited", size) or blank, "truth"))
            for model, row in best.items():
                scales = f"{row['guidance_scale']:g} and {row['image_guidance_scale']:g}"
                caption = f"{self.names[model]}, guidance {scales}"
                tiles.append(cell(self.result(row, place), caption))
        return tile_grid(tiles, 1 + has_truth + len(best), GRID_MARGIN)

    def extremes(self):
        """An image of the best and worst results of each model; None if no metric ranks them.

        Each model has two lines, at the scales and seed whose mean is best. A tile has input,
        result and, if there is one, truth.
        """
        tiles, best, blank = [], {}, Image.new("RGB", (1, 1), "white")
        for row in self.results["rows"]:
            metric = row["ranked_by"]
            if metric and row.get(metric) is not None:
                other = best.setdefault(row["model"], row)
                if RANKED[metric] * row[metric] > RANKED[metric] * other[metric]:
                    best[row["model"]] = row
        for model, row in best.items():
            metric = row["ranked_by"]
            values = load_values(self.output_dir, row["images"])[metric]
            order = np.argsort(RANKED[metric] * values, kind="stable")
            order = order[np.isfinite(values[order])][::-1]
            worst = order[NUM_EXTREMES:][-NUM_EXTREMES:][::-1]
            for word, places in (("best", order[:NUM_EXTREMES]), ("worst", worst)):
                line = [blank] * (NUM_EXTREMES if len(places) else 0)
                for number, place in enumerate(places):
                    pair = self.pairs[place]
                    images = [cell(pair.decoded("original"), "input")]
                    images.append(cell(self.result(row, place), "result"))
                    if pair.edited is not None:
                        images.append(cell(pair.decoded("edited"), "truth"))
                    value = f"{word} {number + 1}, {metric} {values[place]:.3f}"
                    caption = f"{self.names[model]}, {value}: {pair.instruction}"
                    line[number] = captioned(images, caption)
                tiles += line
        return tile_grid(tiles, NUM_EXTREMES, GRID_MARGIN) if tiles else None


def cell(image, text):
    """A PIL image, at most CELL_SIZE on a side, above a text."""
    return captioned([ImageOps.contain(image, (CELL_SIZE, CELL_SIZE))], text)


def grid_places(num_pairs):
    """Places of the pairs in grid.png, evenly spaced."""
    n = min(GRID_PAIRS, num_pairs)
    return [i * num_pairs // n for i in range(n)]
