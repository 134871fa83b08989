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
COSTS = {  # number in a row of results.json: (heading, unit)
    "seconds_per_edit": ("s per edit", 1),
    "compile_seconds": ("s to compile", 1),
    "peak_memory_bytes": ("peak GiB", 2**30),
    "flops_per_edit": ("GFLOP per edit", 1e9),
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


def best_rows(rows, metric):
    """{model: its row with the best mean of a metric of RANKED}."""
    best = {}
    for row in rows:
        other = best.setdefault(row["model"], row)
        if row.get(metric) is not None and RANKED[metric] * (row[metric] - other[metric]) > 0:
            best[row["model"]] = row
    return best


def table(first, headings, lines):
    """Lines of a Markdown table, whose columns without texts are left out; [] without columns.

    Args:
        first: heading of the model.
        headings: {name of a column: text}.
        lines: list of (model, guidance_scale, image_guidance_scale, {name of a column: text}).
    """
    names = [name for name in headings if any(texts.get(name) for *_, texts in lines)]
    rows = [[first, "guidance", "image guidance", *(headings[name] for name in names)]]
    rows += [["---"] * len(rows[0])]
    rows += [[*map(str, key), *(texts.get(x, "") for x in names)] for *key, texts in lines]
    return ["", *(f"| {' | '.join(row)} |" for row in rows)] if names else []


class EditReport:
    """What the files of a report show.

    Args:
        output_dir: directory of results.json.
        results: its content.
        pairs: list of HeldOutPair.
        sizes: (width, height) of each pair's edit.
    """

    def __init__(self, output_dir, results, pairs, sizes):
        self.output_dir, self.rows, self.pairs, self.sizes = (
            output_dir,
            results["rows"],
            pairs,
            sizes,
        )
        self.settings, self.baselines = results["settings"], results["baselines"]
        self.protocol = PROTOCOLS[self.settings["protocol"]]
        self.groups = defaultdict(list)  # rows of the same model and scales, one per seed
        for row in self.rows:
            key = row["model"], row["guidance_scale"], row["image_guidance_scale"]
            self.groups[key].append(row)

    def write(self, sentences):
        """Write all files; sentences: for results.md."""
        write_text(self.output_dir / "results.md", "\n".join(self.lines(sentences)) + "\n")
        save_image(self.grid(), self.output_dir / "grid.png")
        if figure := self.curve():
            file = self.output_dir / "curve.png"
            save_whole(file, partial(figure.savefig, format="png", dpi=120))
        if metric := ranking_metric(self.rows[0]):
            save_image(self.extremes(metric), self.output_dir / "best_and_worst.png")

    def lines(self, sentences):
        """The lines of results.md.

        An interval of a difference to the first model that lacks 0 means that the models differ,
        which two overlapping intervals of means do not rule out.
        """
        means = {  # over seeds, {key: {metric: (n,)}}
            key: over_seeds([load_values(self.output_dir, row["images"]) for row in rows])
            for key, rows in self.groups.items()
        }
        first, measured, differences, costs = self.rows[0]["model"], [], [], []
        for row in self.baselines:
            name = " of ".join(filter(None, (row["baseline"], row["model"])))
            texts = {metric: f"{x:.4f}" for metric, x in row.items() if isinstance(x, float)}
            measured.append((name, "", "", texts))
        for key, rows in self.groups.items():
            texts = {metric: self.mean_text(x, metric, rows) for metric, x in means[key].items()}
            measured.append((*key, texts))
            other = means.get((first, *key[1:]), {})
            if key[0] != first and other:
                both = [metric for metric in means[key] if metric in other]
                texts = {x: self.mean_text(means[key][x] - other[x]) for x in both}
                differences.append((*key, texts))
            texts = {}
            for name, (_, unit) in COSTS.items():
                texts[name] = "/".join(f"{row[name] / unit:.3g}" for row in rows)
            costs.append((*key, texts))

        given = [f"{name} {value}" for name, value in self.settings.items() if value]
        lines = ["# Edits", "", *(f"- {sentence}" for sentence in sentences)]
        lines += [f"- {', '.join(given)}"]
        lines += ["- mean over pairs and seeds ± standard deviation over seeds, [95% interval]"]
        if self.protocol.title:
            lines += [f"- {self.protocol.title}: {self.protocol.source}"]
        for title, headings in self.sections():
            if found := table("model", headings, measured):
                lines += ["", title, *found]
                lines += table(f"difference to {first}", headings, differences)
        if any("overall" in row for row in self.rows):
            lines += ["", "Overall scores by type of edit, and numbers of edits:"]
            groups, scores = np.array([pair.group for pair in self.pairs]), []
            names = {x: f"{x} ({n})" for x, n in Counter(sorted(groups.tolist())).items()}
            for key, values in means.items():
                of_type = {x: mean_over(values["overall"][groups == x]) for x in names}
                scores.append((*key, {x: f"{y:.2f}" for x, y in of_type.items() if y is not None}))
            lines += table("overall", names, scores)
        return lines + table("model", {name: x for name, (x, _) in COSTS.items()}, costs)

    def sections(self):
        """Yield (title, {metric: heading}) of the tables of metrics."""
        names = (*self.protocol.metrics, *self.settings["metrics"])
        headings = {x: METRICS[x].heading for x in names if x in METRICS} | self.protocol.metrics
        for part, title in self.protocol.parts.items():
            num_pairs = sum(part in pair.parts for pair in self.pairs)
            in_part = {f"{metric}{part}": heading for metric, heading in headings.items()}
            yield f"{title.capitalize()}, {num_pairs} pairs:", in_part
        num_masks = sum(pair.mask is not None for pair in self.pairs)
        sides = [metric.rsplit("_", 1) for metric in MASK_METRICS]  # l1_inside
        heads = [f"{METRICS[name].heading} {side}" for name, side in sides]
        title = f"Inside and outside of the masks, {num_masks} pairs:"
        yield title, dict(zip(MASK_METRICS, heads))

    def mean_text(self, values, metric="", rows=()):
        """A cell "mean ± deviation [low, high]", "" if no value is known.

        Args:
            values: per pair (n,).
            metric, rows: for the deviation over seeds.
        """
        strata = [pair.group for pair in self.pairs] if self.protocol.is_judged else None
        clusters = [pair.session or f"pair {place}" for place, pair in enumerate(self.pairs)]
        mean = mean_over(values, strata)
        if mean is None:
            return ""
        text = f"{mean:.4f}"
        of_seeds = [row[metric] for row in rows if row.get(metric) is not None]
        if len(of_seeds) > 1:
            text += f" ± {np.std(of_seeds, ddof=1):.4f}"
        if interval := bootstrap_interval(values, clusters, strata):
            text += f" [{interval[0]:.4f}, {interval[1]:.4f}]"
        return text

    def curve(self):
        """A matplotlib Figure of both CLIP similarities over image_guidance_scale, or None.

        Source: InstructPix2Pix (arXiv 2211.09800), section 4.1.
        """
        import matplotlib.figure  # seconds to import; without pyplot no display is used

        if any(row.get(metric) is None for row in self.rows for metric in CURVE):
            return None
        lines = defaultdict(list)
        for (model, guidance_scale, image_guidance_scale), rows in self.groups.items():
            point = [np.mean([row[metric] for row in rows]) for metric in CURVE]
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
        best, tiles = best_rows(self.rows, "l1"), []
        has_truth = any(pair.edited is not None for pair in self.pairs)
        for place in grid_places(len(self.pairs)):
            tiles.append(self.tile(place, "original", self.pairs[place].instruction))
            tiles += [self.tile(place, "edited", "truth")] * has_truth
            for model, row in best.items():
                scales = f"{row['guidance_scale']:g} and {row['image_guidance_scale']:g}"
                tiles.append(self.tile(place, row, f"{model}, guidance {scales}"))
        return tile_grid(tiles, 1 + has_truth + len(best), GRID_MARGIN)

    def extremes(self, metric):
        """An image of the best and worst results of each model, with input and truth.

        Each model has two lines, at the scales and seed whose mean is best.
        """
        tiles = []
        for model, row in best_rows(self.rows, metric).items():
            values = load_values(self.output_dir, row["images"])[metric]
            for word, places in zip(("best", "worst"), best_and_worst(values, metric)):
                for place in places:
                    pair = self.pairs[place]
                    images = [self.tile(place, "original", "input")]
                    images += [self.tile(place, row, "result")]
                    images += [self.tile(place, "edited", "truth")] * (pair.edited is not None)
                    value = f"{word}, {metric} {values[place]:.3f}"
                    tiles.append(captioned(images, f"{model}, {value}: {pair.instruction}"))
        return tile_grid(tiles, len(places), GRID_MARGIN)
