"""Tables of quality: edits and images, by what made them."""

import statistics

from benchmarks.rows import markdown_table, psnr_cell, rows_of
from benchmarks.tables.cells import edit_cells, median_spread, results

EMA_TITLES = {
    "full 0.9999": "full, 0.9999",
    "full 0.9999, scaled": "full, 0.9999 as of 15000 steps, here 0.9985",
    "full 0.9999, warm-up": "full, 0.9999, Hugging Face's warm-up",
    "late 3.6%": "late, last 3.6%, decay 1 - 5/window",
    "late 3.6%, 0.9999": "late, last 3.6%, 0.9999",
    "late 20%": "**late, last 20%, decay 1 - 5/window**",
    "late 20%, 0.9999": "late, last 20%, 0.9999",
    "post-hoc, best": "post-hoc, best length (0.05 each time)",
}


def demo_evaluation_table() -> str:
    """The demo's edits as evaluate_edits.py measures them."""
    lines = []
    for title, row in results("demo").items():
        cells = [f"{row['edit_error_ratio']:.3f}", f"{row['l1']:.4f}", f"{row['mse']:.4f}"]
        flops = "" if row["tflop_per_edit"] is None else f"{1000 * row['tflop_per_edit']:.1f}"
        lines.append([title, *cells, f"{row['l1_to_input']:.3f}", flops])
    return markdown_table("| error ratio | L1 | MSE | L1 to input | GFLOP per edit", lines)


def ema_table() -> str:
    """Benefit of an average: held-out loss and edit error."""
    lines = []
    for name, row in results("ema")["quality"]["summary"].items():
        if name.startswith("post-hoc 0"):
            continue
        cells = [median_spread(row["loss"], 3)]
        for measured in ("loss_to_none", "edit_error_ratio", "edit_error_ratio_to_none"):
            cells.append(median_spread(row[measured]))
        accuracy = f"{row['instruction_accuracy']['median']:.0%}"
        lines.append([EMA_TITLES.get(name, name), *cells, accuracy])
    header = "average | held-out loss | to none | edit error | to none | right edit"
    return markdown_table(header, lines)


def acceleration_quality_table() -> str:
    """Edits of the demo's model with each acceleration, and how much faster a CPU is."""
    rows, lines = results("images"), []
    timed = {case.partition(", ")[2]: row for case, row in rows_of(rows, "accelerated").items()}
    quality = {
        name: row
        for name, row in rows_of(rows, "quality").items()
        if "step" not in name and not is_of_storage(row)
    }
    for name in dict.fromkeys([*quality, *timed]):
        row, ratios = quality.get(name), timed.get(name, {}).get("times_as_fast", [])
        cells = [psnr_cell(row["psnr"]), *edit_cells(row)] if row else [""] * 3
        spec = (row or timed[name])["accelerate"]
        faster = f"{statistics.median(ratios):.2f}" if ratios else ""
        lines.append([name, f"`{spec}`" if spec else "", *cells, faster])
    return markdown_table(
        "| `--accelerate` | PSNR to plain | edit_error_ratio | instruction_accuracy "
        "| times as fast on a CPU",
        lines,
    )


def is_of_storage(row: dict) -> bool:
    """Whether a row is of edits with other weights, and no acceleration."""
    return "--storage" in row["flags"] or "--dtype" in row["flags"]


def storage_table() -> str:
    """Edits of the demo's model with weights in 8 bits."""
    lines = [
        [f"`{row['flags']}`", psnr_cell(row["psnr"])]
        for row in rows_of(results("images"), "quality").values()
        if is_of_storage(row)
    ]
    return markdown_table("| PSNR to the edits without", lines)


def text_to_image_table() -> str:
    """Images of the demo's base model with each acceleration."""
    lines = [
        [name, f"`{row['accelerate']}`", psnr_cell(row["psnr"])]
        for name, row in rows_of(results("images"), "text to image").items()
    ]
    return markdown_table("| `--accelerate` | PSNR to plain", lines)


def distillation_table() -> str:
    """Few-step edits of the demo's model, with and without a distilled LoRA."""
    lines = [
        ["20 steps" if name == "plain" else name, *edit_cells(row)]
        for name, row in rows_of(results("images"), "quality").items()
        if name == "plain" or "step" in name
    ]
    return markdown_table("| edit_error_ratio | instruction_accuracy", lines)


def made_pairs_table() -> str:
    """Errors of made pairs and of models trained on made and true pairs, by instruction."""
    short = {
        "cover it in fog": "fog",
        "turn day into night": "night",
        "give it a green tint": "green",
        "give it a red tint": "red",
        "put a white frame around it": "frame",
        "make it black and white": "grey",
        "invert the colors": "invert",
        "swap red and blue": "swap",
    }
    rows, sharing = (rows_of(results("pairs"), kind) for kind in ("model", "p"))
    order = sorted(rows, key=lambda name: (name.startswith("true"), rows[name]["pairs"]))
    pairs = {f"p = {p}": sharing[p] for p in sorted(sharing)}
    pairs["pairs for training"] = rows["made"]["made_pairs"]
    lines = []
    for title, row in pairs.items():
        errors = [row["edit_error_ratio_by_instruction"][x] for x in short]
        lines.append([title, *(f"{x:.2f}" for x in (*errors, row["edit_error_ratio"])), ""])
    for name in order:
        row = rows[name]
        errors = [row["by_instruction"][x]["edit_error_ratio"] for x in short]
        title, error, nearest = model_cells(name, row)
        lines.append([title, *(f"{x:.2f}" for x in errors), error, nearest])
    header = f"edit error | {' | '.join(short.values())} | all | right"
    return markdown_table(header, lines)


def model_cells(name, row):
    """A model's title, edit error and number of right edits; name: "made", "true", "true, ..."."""
    nearest = f"{round(row['instruction_accuracy'] * row['num_edits'])} of {row['num_edits']}"
    title = f"model of {row['pairs']} {name.partition(',')[0]} pairs"
    return [title, f"{row['edit_error_ratio']:.2f}", nearest]


def made_pairs_short_table() -> str:
    """Errors of models and of pairs with one p."""
    models, sharing = (rows_of(results("pairs"), kind) for kind in ("model", "p"))
    lines = []
    for name in sorted(models, key=lambda name: -models[name]["edit_error_ratio"]):
        lines.append(model_cells(name, models[name]))
    made = {f"made pairs, p = {p}": sharing[p] for p in sorted(sharing)}
    titles = {"all": "all made pairs", "90": "as good as 90% of true ones", "75": "as good as 75%"}
    made |= {title: results("pairs")[f"thresholds {name}"] for name, title in titles.items()}
    lines += [[title, f"{row['edit_error_ratio']:.2f}", ""] for title, row in made.items()]
    return markdown_table("| edit error (the input has 1) | right edits", lines)


def made_pairs_fast_table() -> str:
    """Pairs made in less time."""
    lines = [
        [
            name,
            f"{row['seconds_per_pair']:.2f} s",
            f"{row['good'] / row['pairs']:.0%}",
            f"{row['edit_error_ratio']:.2f}",
            f"{row['seconds_per_pair'] * row['pairs'] / max(row['good'], 1):.2f} s",
        ]
        for name, row in rows_of(results("pairs"), "fast").items()
    ]
    return markdown_table("| a pair | good | edit error | a good pair", lines)


def made_pairs_thresholds_table() -> str:
    """Pairs by thresholds."""
    rows = results("pairs")
    titles = {
        "thresholds all": "all samples",
        "thresholds none": "4 best of a line",
        "thresholds 90": "thresholds of 90%",
        "thresholds 75": "75%",
        "thresholds 50": "50%",
    }
    lines = []
    for name, title in titles.items():
        row = rows[name]
        values = row["edit_error_ratio"], row["clip_image"], row["clip_direction"]
        lines.append([title, str(row["pairs"]), *(f"{value:.2f}" for value in values)])
    return markdown_table("| pairs | edit error | image | direction", lines)
