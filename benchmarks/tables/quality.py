"""Tables of quality: edits and images, by what made them."""

import statistics

from benchmarks.rows import markdown_table, psnr_cell, rows_of
from benchmarks.tables.cells import edit_cells, mean_spread, median_spread, results

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
FAMILY_TITLES = {"sd": "Stable Diffusion", "sdxl": "SDXL"}


def demo_table() -> str:
    """Edit error and accuracy of the demo's model."""
    lines = [
        [title, *edit_cells(row, 2)]
        for title, row in results("demo").items()
        if "instruction_accuracy" in row
    ]
    return markdown_table("| edit_error_ratio | instruction_accuracy", lines)


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
    for name, row in results("ema")["quality constant"]["summary"].items():
        if name.startswith("post-hoc 0"):
            continue
        cells = [median_spread(row["loss"], 3)]
        for measured in ("loss_to_none", "edit_error_ratio", "edit_error_ratio_to_none"):
            cells.append(median_spread(row[measured]))
        accuracy = f"{row['instruction_accuracy']['median']:.0%}"
        lines.append([EMA_TITLES.get(name, name), *cells, accuracy])
    header = "average | held-out loss | to none | edit error | to none | right edit"
    return markdown_table(header, lines)


def families() -> dict:
    """{family: its row over all seeds}; {} until demo/compare_families.py has run."""
    rows = results("families")
    return {name: rows[case] for name in FAMILY_TITLES if (case := f"{name} summary") in rows}


def families_models_table() -> str:
    """Size, training and speed of both families."""
    lines = []
    for name, row in families().items():
        parameters, edits = row["parameters"], row["edits"][0]
        text = sum(count for part, count in parameters.items() if part.startswith("text_encoder"))
        lines.append(
            [
                FAMILY_TITLES[name],
                f"{parameters['unet']:,}",
                f"{text:,}",
                mean_spread(row["final_loss"], 3),
                f"{row['train_seconds']['mean']:.0f} s",
                f"{edits['flops_per_edit']['mean'] / 1e9:.1f}",
                mean_spread(edits["seconds_per_edit"], 3),
            ]
        )
    return markdown_table(
        "| widened UNet, parameters | text encoders | training loss, last tenth | a run takes "
        "| GFLOP per edit | s per edit",
        lines,
    )


def families_table() -> str:
    """Edits of both families on held-out images, and what needs no model."""
    measures, lines = {"l1": 3, "mse": 4, "error_ratio": 2}, []
    for name, row in families().items():
        for edit in row["edits"]:
            scales = [str(edit["guidance_scale"]), str(edit["image_guidance_scale"])]
            cells = [mean_spread(edit[x], digits) for x, digits in measures.items()]
            lines.append([FAMILY_TITLES[name], *scales, *cells])
    for case, row in rows_of(results("families"), "baseline").items():
        if "error_ratio" in row and case != "truth":
            cells = [f"{row[x]:.{digits}f}" for x, digits in measures.items()]
            lines.append([case, "", "", *cells])
    return markdown_table(
        "| text guidance | image guidance | L1 to the truth | MSE to the truth | edit error", lines
    )


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
