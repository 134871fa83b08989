"""The report of evaluate_edits.py: results.md, curve.png, grid.png and best_and_worst.png.

EditReport(output_dir, results, pairs, sizes).write(sentences)
"""

from collections import Counter, defaultdict
from functools import partial

import numpy as np
from PIL import Image, ImageOps

from diffusers_flax.data.images import load_image
from diffusers_flax.evaluation.intervals import bootstrap_interval, mean_over, over_seeds
from diffusers_flax.evaluation.metrics import MASK_METRICS, METRICS
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
COSTS = {  # heading: (its number in a row of results.json, unit)
    "s per edit": ("seconds_per_edit", 1),
    "s to compile": ("compile_seconds", 1),
    "peak GiB": ("peak_memory_bytes", 2**30),
    "GFLOP per edit": ("flops_per_edit", 1e9),
}


def ranking_metric(row):
    """The first of RANKED that a row of results.json has, or None."""
    return next((metric for metric in RANKED if row.get(metric) is not None), None)


def best_and_worst(values, metric):
    """Places of the NUM_EXTREMES best pairs, and of as many worst ones; NaN is left out."""
    order = np.argsort(-RANKED[metric] * values, kind="stable")
    order = order[np.isfinite(values[order])]
    return order[:NUM_EXTREMES], order[::-1][:NUM_EXTREMES]


def grid_places(num_pairs):
    """Places of the pairs in grid.png, evenly spaced."""
    n = min(GRID_PAIRS, num_pairs)
    return [i * num_pairs // n for i in range(n)]


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
        self.protocol = PROTOCOLS[results["settings"]["protocol"]]
        self.groups = defaultdict(list)  # rows of the same model and scales, one per seed
        self.values = defaultdict(list)  # their values per pair
        for row in results["rows"]:
            key = row["model"], row["guidance_scale"], row["image_guidance_scale"]
            self.groups[key].append(row)
            self.values[key].append(load_values(output_dir, row["images"]))

    def write(self, sentences=()):
        """Write all files; sentences: for results.md."""
        if figure := self.curve():
            file = self.output_dir / "curve.png"
            save_whole(file, partial(figure.savefig, format="png", dpi=120))
        save_image(self.grid(), self.output_dir / "grid.png")
        if extremes := self.extremes():
            save_image(extremes, self.output_dir / "best_and_worst.png")
        write_text(self.output_dir / "results.md", "\n".join(self.lines(sentences)) + "\n")

    # ---------------------------------------------------------------- results.md

    def lines(self, sentences):
        """The lines of results.md."""
        settings, rows = self.results["settings"], self.results["rows"]
        first, *others = models = dict.fromkeys(model for model, *_ in self.groups)
        lines = ["# Edits", "", *(f"- {sentence}" for sentence in sentences)]
        given = [f"{name} {value}" for name, value in settings.items() if value]
        lines += [f"- {', '.join(given)}"]
        lines += ["- mean over pairs and seeds ± standard deviation over seeds, [95% interval]"]
        if self.protocol.title:
            lines += [f"- {self.protocol.title}: {self.protocol.source}"]
        for title, num_pairs, headings in self.sections():
            known = {}
            for metric, heading in headings.items():
                counts = [
                    np.isfinite(x.get(metric, [])).sum() for y in self.values.values() for x in y
                ]
                if any(counts):
                    few = f" of {max(counts)}" if max(counts) < num_pairs else ""
                    known[metric] = heading + few
            if known:
                title = f"{title.capitalize()}, {num_pairs} pairs:"
                lines += ["", title, "", *self.means(known)]
                lines += ["", *self.means(known, minus=first)] if others else []
        if any("overall" in row for row in rows):
            lines += ["", "Overall scores by type of edit, and numbers of edits:", ""]
            lines += self.types_of_edits()
        costs = [
            ["/".join(f"{row[name] / unit:.3g}" for row in group) for name, unit in COSTS.values()]
            for group in self.groups.values()
        ]
        lines += ["", *self.table("model", COSTS, costs)]
        for name in models:
            model = self.results["models"][name]
            sizes = ", ".join(f"{part} {n:,}" for part, n in model["parameters"].items())
            lines += ["", f"{name}: {model['pipeline']}; parameters: {sizes}."]
        return lines

    def sections(self):
        """Yield (title, number of pairs, {metric: heading}) of the tables of metrics."""
        names = (*self.protocol.metrics, *self.results["settings"]["metrics"])
        headings = {x: METRICS[x].heading for x in names if x in METRICS} | self.protocol.metrics
        for part, title in self.protocol.parts.items():
            num_pairs = sum(part in pair.parts for pair in self.pairs)
            yield title, num_pairs, {f"{x}{part}": heading for x, heading in headings.items()}
        sides = [metric.rsplit("_", 1) for metric in MASK_METRICS]  # l1_inside
        heads = [f"{METRICS[name].heading} {side}" for name, side in sides]
        num_masks = sum(pair.mask is not None for pair in self.pairs)
        yield "inside and outside of the masks", num_masks, dict(zip(MASK_METRICS, heads))

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
        lines += [[*map(str, key), *texts] for key, texts in zip(self.groups, cells) if texts]
        return [f"| {' | '.join(line)} |" for line in lines]

    def means(self, shown, minus=None):
        """The table of means of metrics {name: heading}.

        Without `minus`, a model, below the baselines and with standard deviations over the seeds;
        else of the differences to this model, pair by pair. A difference whose interval lacks 0
        means that the models differ, which two overlapping intervals of means do not rule out.
        """
        baselines, cells = [], []
        for row in self.results["baselines"]:
            name = " of ".join(filter(None, (row["baseline"], row["model"])))
            means = (row.get(metric) for metric in shown)
            baselines.append([name, "", "", *("" if x is None else f"{x:.4f}" for x in means)])
        for (model, *scales), rows in self.groups.items():
            cells.append([])
            for metric in shown:
                values, spread = over_seeds(self.values[model, *scales], metric), ""
                means = [row[metric] for row in rows if row.get(metric) is not None]
                if minus:
                    other = over_seeds(self.values.get((minus, *scales), ()), metric)
                    unknown = model == minus or values is None or other is None
                    values = None if unknown else values - other
                elif len(means) > 1:
                    spread = f" ± {np.std(means, ddof=1):.4f}"
                cells[-1].append(self.mean_text(values, spread))
        cells = [texts if any(texts) else [] for texts in cells]
        if minus:
            return self.table(f"difference to {minus}", shown.values(), cells)
        return self.table("model", shown.values(), cells, baselines)

    def mean_text(self, values, spread):
        """A cell "mean spread [low, high]" of values per pair (n,), "" if none is known."""
        strata = [pair.group for pair in self.pairs] if self.protocol.is_judged else None
        clusters = [pair.session or f"pair {place}" for place, pair in enumerate(self.pairs)]
        mean = None if values is None else mean_over(values, strata)
        if mean is None:
            return ""
        interval = bootstrap_interval(values, clusters, strata)
        text = f" [{interval[0]:.4f}, {interval[1]:.4f}]" if interval else ""
        return f"{mean:.4f}{spread}{text}"

    def types_of_edits(self):
        """The table of the overall score of each type of edit."""
        groups, cells = np.array([pair.group for pair in self.pairs]), []
        sizes = dict(sorted(Counter(groups.tolist()).items()))
        for values in self.values.values():
            overall = over_seeds(values, "overall")
            means = [None if overall is None else mean_over(overall[groups == x]) for x in sizes]
            cells.append(["" if mean is None else f"{mean:.2f}" for mean in means])
        return self.table("overall", [f"{x} ({n})" for x, n in sizes.items()], cells)

    # ---------------------------------------------------------------- images

    def curve(self):
        """A matplotlib Figure of both CLIP similarities over image_guidance_scale, or None.

        Source: InstructPix2Pix (arXiv 2211.09800), section 4.1.
        """
        import matplotlib.figure  # seconds to import; without pyplot no display is used

        rows, lines = self.results["rows"], defaultdict(list)
        if any(row.get(metric) is None for row in rows for metric in CURVE):
            return None
        for (model, guidance_scale, image_guidance_scale), group in self.groups.items():
            point = [np.mean([row[metric] for row in group]) for metric in CURVE]
            lines[f"{model}, guidance {guidance_scale:g}"].append((image_guidance_scale, *point))
        figure = matplotlib.figure.Figure(figsize=(8, 7), layout="constrained")
        plot = figure.add_subplot(**dict(zip(("xlabel", "ylabel"), CURVE.values())))
        for label, points in lines.items():
            scales, x, y = zip(*sorted(points))
            plot.plot(x, y, marker="o", label=label)
            for scale, *point in zip(scales, x, y):
                plot.annotate(f" {scale:g}", point, fontsize=8)
        plot.set_title(f"{len(self.pairs)} pairs; numbers: image guidance", fontsize=10)
        figure.legend(loc="outside lower center", ncols=2, fontsize=8)
        return figure

    def best_rows(self, metric, sign):
        """{model: its row with the best mean of a metric}; sign: as in RANKED."""
        best = {}
        for row in self.results["rows"]:
            other = best.setdefault(row["model"], row)
            if row.get(metric) is not None and sign * row[metric] > sign * other[metric]:
                best[row["model"]] = row
        return best

    def tile(self, place, what, text):
        """An image of a pair with a text: "original", "edited", or the result of a row."""
        pair = self.pairs[place]
        if isinstance(what, str):
            image = pair.decoded(what, self.sizes[place]) or Image.new("RGB", (1, 1), "white")
        else:
            folder = self.output_dir / "images" / what["images"]
            image = load_image(folder / pair.result_file(place))
        return captioned([ImageOps.contain(image, (CELL_SIZE, CELL_SIZE))], text)

    def grid(self):
        """A row per pair: input, truth if known, each model's result at its scales of least L1."""
        best, tiles = self.best_rows("l1", -1), []
        has_truth = any(pair.edited is not None for pair in self.pairs)
        for place in grid_places(len(self.pairs)):
            tiles.append(self.tile(place, "original", self.pairs[place].instruction))
            tiles += [self.tile(place, "edited", "truth")] * has_truth
            for model, row in best.items():
                scales = f"{row['guidance_scale']:g} and {row['image_guidance_scale']:g}"
                tiles.append(self.tile(place, row, f"{model}, guidance {scales}"))
        return tile_grid(tiles, 1 + has_truth + len(best), GRID_MARGIN)

    def extremes(self):
        """An image of the best and worst results of each model; None if no metric ranks them.

        Each model has two lines, at the scales and seed whose mean is best. A tile has input,
        result and, if there is one, truth.
        """
        if (metric := ranking_metric(self.results["rows"][0])) is None:
            return None
        tiles = []
        for model, row in self.best_rows(metric, RANKED[metric]).items():
            values = load_values(self.output_dir, row["images"])[metric]
            both = best_and_worst(values, metric)
            for word, place in ((w, p) for w, x in zip(("best", "worst"), both) for p in x):
                pair = self.pairs[place]
                images = [self.tile(place, "original", "input"), self.tile(place, row, "result")]
                images += [self.tile(place, "edited", "truth")] * (pair.edited is not None)
                value = f"{word}, {metric} {values[place]:.3f}"
                tiles.append(captioned(images, f"{model}, {value}: {pair.instruction}"))
        return tile_grid(tiles, len(both[0]), GRID_MARGIN)
