"""Write the tables of the docs from the results files.

    python -m benchmarks.tables

All results files are written by benchmarks, apart from demo.json: it has the figures of the demo's
summary.json and of the tables that evaluate_edits.py prints.

README or a page of docs/ marks the place of a table with the lines `<!-- results: NAME -->` and
`<!-- end of results -->`; NAME is a key of TABLES. tests/test_docs.py compares the pages with the
results files.
"""

import re
import statistics
from collections.abc import Callable
from functools import cache, partial

from benchmarks.gpu import PLANS
from benchmarks.harness import GIB, ROOT, psnr_cell, read_rows, rows_of
from benchmarks.tpu import OPTIONS
from benchmarks.tpu_kernels import CASES
from tpu.programs import find_slice, roofline_seconds
from training.flags import Config as TrainingConfig

PLACE = re.compile(r"(<!-- results: (\S+) -->\n)(.*?)(<!-- end of results -->)", re.DOTALL)


# Of a v5e chip's peak in bfloat16: SDXL, 20 steps, by the classes that diffusers 0.40 removed.
MEASURED_SHARE = 0.61


@cache
def rows(name: str) -> dict:
    """The rows of benchmarks/results/NAME.json."""
    return read_rows(ROOT / "benchmarks" / "results" / f"{name}.json")


def table(header: str, lines: list[list[str]]) -> str:
    """Markdown; header: the titles of the columns, separated by |."""
    columns = [title.strip() for title in header.split("|")]
    form = ["| " + " | ".join(cells) + " |" for cells in [columns, *lines]]
    return "\n".join([form[0], "|---" * len(columns) + "|", *form[1:]]) + "\n"


def seconds(value: float) -> str:
    """A time with three digits."""
    return f"{value:.3g} s"


def spread(low: float, middle: float, high: float) -> str:
    """A median and its range."""
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def pytorch_table() -> str:
    """Ours and eager PyTorch, alternating in one run."""
    lines = []
    for title, name, case, ours in (
        ("UNet, two samples", "unet", "cpu sd15_256 forward 2", "ours"),
        ("UNet and its gradient, two samples", "unet", "cpu sd15_256 gradient 2", "ours"),
        ("UNet, 512 pixels, one sample", "unet", "cpu sd15_512 forward 1", "ours"),
        ("UNet and its gradient, 512 pixels", "unet", "cpu sd15_512 gradient 1", "ours"),
        ("optimizer step, two pairs", "train", "cpu sd15_256 optimizer step 2", "ours"),
        (
            "the same, `--cache_latents`",
            "train",
            "cpu sd15_256 optimizer step 2",
            "ours, latents cached",
        ),
        ("edit, 20 steps, one image", "images", "cpu sd15_256 edit, 20 steps 1", "ours"),
        ("SDXL, 4 steps, one image", "images", "cpu sdxl_256 images, 4 steps 1", "ours"),
    ):
        row = rows(name)[case]
        summary, batch_size = row["summary"], row["batch_size"]
        theirs = summary["torch eager"]
        cells = [
            title,
            str(len(row["seconds"][ours])),
            seconds(batch_size / summary[ours]["samples_per_second"]),
            f"{summary[ours]['peak_share']:.0%}",
        ]
        if ours == "ours":
            low, high = theirs["ours_times_as_fast_range"]
            cells.append(seconds(batch_size / theirs["samples_per_second"]))
            cells.append(spread(low, theirs["ours_times_as_fast"], high))
        else:
            cells += ["", ""]
        lines.append(cells)
    return table("| rounds | ours | of the peak | PyTorch | speed-up", lines)


def gpu_plan_table() -> str:
    """The plan of benchmarks/gpu.py."""
    lines = [
        [f"`{name}`", *(f"{x:.0f} s" if x else "" for x in plan)] for name, plan in PLANS.items()
    ]
    return table("row | XLA compiles | `torch.compile` | measurement", lines)


def gpu_table() -> str:
    """benchmarks/gpu.py's rows: ours, PyTorch's and the accelerated image, in turn."""
    results, lines = rows("gpu"), []
    for case, row in results.items():
        if "summary" not in row:
            continue
        middle = {name: statistics.median(x) for name, x in row["seconds"].items()}
        for name in [x for x in middle if x.startswith("ours")]:
            ratios = [
                f"{middle[x] / middle[name]:.2f}" if x in middle else ""
                for x in ("torch eager", "torch compiled")
            ]
            rate = f"{row['batch_size'] / middle[name]:.3g}"
            share = f"{row['summary'][name]['peak_share']:.0%}" if name == "ours" else ""
            title = f"{case}{name.removeprefix('ours')}"
            lines.append([title, seconds(middle[name]), rate, share, *ratios])
    if not lines:
        return "No GPU has been measured.\n"
    header = "| a pass | samples/s | of the peak | to eager PyTorch | to `torch.compile`"
    agreement = []
    for case, row in results.items():
        if "psnr" in row:
            cells = [f"{k} {psnr_cell({'psnr': v}) or 'equal'}" for k, v in row["psnr"].items()]
            agreement.append(f"{case}: {', '.join(cells)}.\n")
    return "\n".join([table(header, lines), *agreement])


def gpu_memory_table() -> str:
    """Full fine-tuning on one GPU: memory as compiled for a chip as if it were alone."""
    lines, results, totals = [], rows("train"), {}
    parts = ("parameters", "optimizer", "ema", "frozen models", "batches", "temporaries")
    parts += ("padding", "outputs", "code")
    for gpu, pairs, variant in (
        ("24 GB", 32, "bf16, checkpointing"),
        ("24 GB", 32, "bf16"),
        ("40 GB", 64, "bf16"),
    ):
        row = results[f"memory v5p-8 one chip, {pairs} pairs, ema full {variant}"]
        total, temporaries = sum(row[part] for part in parts) / GIB, row["temporaries"] / GIB
        flags = "`--gradient_checkpointing`" if "checkpointing" in variant else ""
        lines.append([gpu, str(pairs), flags, f"{total:.1f}", f"{temporaries:.1f}"])
        totals[pairs] = total
    more = totals[64] + 128 * (totals[64] - totals[32]) / 32
    lines.append(["80 GB", "192", "", f"about {more:.0f}, extrapolated", ""])
    header = "GPU | `--train_batch_size` | flags | memory, GiB | of which temporaries"
    return table(header, lines)


def results_table() -> str:
    """README's measured results, each with its command."""
    demo = rows("demo")["fine-tuned, guidance 2 and 1.2"]
    edit = rows("images")["cpu sd15_256 edit, 20 steps 1"]
    unet = rows("unet")["cpu sd15_256 gradient 2"]
    loader = rows("data")["ratio ours/datasets"]
    ratios = [x["median"] for threads in loader["summary"].values() for x in threads.values()]
    compiling, loading = middle_start("AOT, first start"), middle_start("AOT, executable kept")
    ema = rows("ema")["quality constant"]["summary"]
    with_ema, without = (ema[x]["edit_error_ratio"]["median"] for x in ("late 20%", "none"))

    def speed_up(row):
        return f"{row['summary']['torch eager']['ours_times_as_fast']:.2f} times as fast"

    right = round(demo["instruction_accuracy"] * demo["num_edits"])
    lines = [
        [
            "demo: edit error, copying the input is 1",
            f"{demo['edit_error_ratio']:.2f}",
            "make demo",
        ],
        [
            "demo: results nearest to the true edit of their instruction",
            f"{right} of {demo['num_edits']}",
            "make demo",
        ],
        ["edit, 20 steps, two CPU cores, to PyTorch", speed_up(edit), edit["command"]],
        [
            "UNet and gradient, two CPU cores, to PyTorch",
            speed_up(unet),
            "python -m benchmarks.unet time --cases sd15_256 --rounds 4",
        ],
        [
            "data loader, to Hugging Face `datasets`",
            f"{min(ratios):.1f} to {max(ratios):.1f} times as fast",
            "python -m benchmarks.data --output data.json",
        ],
        [
            "SDXL executable, loading instead of compiling",
            f"{loading['compile_seconds']:.2f} s instead of {compiling['compile_seconds']:.2f} s",
            "python -m benchmarks.full_size starts --rounds 3",
        ],
        [
            "EMA over the last fifth of a run: edit error",
            f"{with_ema:.2f}; {without:.2f} without",
            "python -m benchmarks.ema --parts quality",
        ],
    ]
    lines = [[title, result, f"`{command}`"] for title, result, command in lines]
    return table("| result | command", lines)


def bounds_table() -> str:
    """README's bounds for TPUs, with the time at the share of the peak that was measured once."""
    lines = []
    for title, name in (
        ("SDXL image, 1024 pixels, 20 steps", "plain"),
        ("the same with DeepCache and guidance in half of the steps", "deepcache 2, guidance"),
    ):
        bound = rows("tpu")[f"acceleration sdxl, {name}"]["seconds"]["v5e"]
        lines.append([title, seconds(bound), seconds(bound / MEASURED_SHARE)])
    return table(f"| at the chip's peak | at {MEASURED_SHARE:.0%} of it", lines)


def demo_table() -> str:
    """Edit error and accuracy of the demo's model."""
    lines = []
    for title, row in rows("demo").items():
        if "instruction_accuracy" in row:
            figures = [row["edit_error_ratio"], row["instruction_accuracy"]]
            lines.append([title, *(f"{x:.2f}" for x in figures)])
    return table("| edit_error_ratio | instruction_accuracy", lines)


def demo_evaluation_table() -> str:
    """The demo's edits as evaluate_edits.py measures them."""
    lines = []
    for title, row in rows("demo").items():
        cells = [f"{row['edit_error_ratio']:.3f}", f"{row['l1']:.4f}", f"{row['mse']:.4f}"]
        flops = "" if row["tflop_per_edit"] is None else f"{1000 * row['tflop_per_edit']:.1f}"
        lines.append([title, *cells, f"{row['l1_to_input']:.3f}", flops])
    return table("| error ratio | L1 | MSE | L1 to input | GFLOP per edit", lines)


def first_steps_table() -> str:
    """From the start of a process to the end of the first step, edit or image."""
    lines = []
    for title, name, case in (
        ("optimizer step, two pairs", "train", "cpu sd15_256 optimizer step 2"),
        ("edit, 20 steps", "images", "cpu sd15_256 edit, 20 steps 1"),
        ("SDXL image, 4 steps", "images", "cpu sdxl_256 images, 4 steps 1"),
    ):
        summary = rows(name)[case]["summary"]
        found = [summary[x]["first_seconds"] for x in ("torch eager", "ours")]
        lines.append([title, *(f"{x:.0f} s" for x in found)])
    return table("to the end of the first | PyTorch | ours", lines)


def operations_table() -> str:
    """The factors by which ours is faster than XLA's operation and PyTorch's faster layout."""
    results = rows("operations")

    def ratio(name, work, contenders):
        summary = results[f"cpu {name} {work} 2"]["summary"]
        found = [summary[x]["ours_times_as_fast"] for x in contenders if x in summary]
        return f"{min(found):.2f}" if found else ""

    torch = ("torch eager", "torch channels_last")
    lines = [
        [title, *(ratio(name, w, c) for c in (("xla",), torch) for w in ("forward", "gradient"))]
        for title, name in (
            ("3x3 convolution, 32x32 positions, 320 channels", "conv_32"),
            ("3x3 convolution, 16x16 positions, 640 channels", "conv_16"),
            ("3x3 convolution, 8x8 positions, 1280 channels", "conv_8"),
            ("matmul, 1024 positions, 320 to 2560 channels", "dense_1024"),
            ("self-attention, 1024 positions, 8 heads of 40", "self_attention_1024"),
            ("attention to 77 tokens of text", "text_attention_1024"),
        )
    ]
    return table("| XLA: forward | with gradients | PyTorch: forward | with gradients", lines)


def profile_table() -> str:
    """Seconds of the UNet by kind of operation."""
    results = rows("unet")
    kinds = ("convolutions", "matmuls", "attention", "norms", "other")
    lines = []
    for work, title in (("forward", "forward"), ("gradient", "with gradient")):
        for name, whose in (("ours", "ours"), ("torch eager", "PyTorch")):
            times = results[f"profile {work} {name}"]["seconds_by_kind"]
            figures = [*(times[kind] for kind in kinds), sum(times.values())]
            lines.append([title, whose, *(f"{x:.2f}" for x in figures)])
    return table(f"| | {' | '.join(kinds)} | all", lines)


def full_size_table(
    kind="command",
    trainings=(
        ("`flax_train_instruct_pix2pix.py`, killed after step 1", "train, killed"),
        ("the same command again, from the checkpoint to the model", "train, resumed"),
    ),
) -> str:
    """Time and peak memory of the command lines."""
    results = rows("full_size")
    lines = []
    for title, name in (
        ("`create_modified_unet.py`", "widen"),
        *trainings,
        ("`edit_cli.py`, 2 steps", "edit"),
    ):
        row = results[f"{kind} {name}"]
        lines.append([title, f"{row['seconds']:.0f}", f"{row['peak_gib']:.1f} GiB"])
    return table("| seconds | peak memory", lines)


def full_size_xl_table() -> str:
    """Time and peak memory of SDXL's command lines."""
    title = "`flax_train_instruct_pix2pix.py --lora_rank 16 --merge_lora`, 1 step"
    return full_size_table("sdxl_command", [(title, "train a LoRA")])


def middle_start(kind: str) -> dict:
    """The start with the median time of those of a kind."""
    starts = rows("full_size")[f"start sd15 {kind}"]["starts"]
    return sorted(starts, key=lambda start: start["seconds"])[len(starts) // 2]


def start_table() -> str:
    """From the command to the first SDXL image."""
    lines = []
    for case in rows("full_size"):
        if case.startswith("start sd15 "):
            middle = middle_start(case.removeprefix("start sd15 "))
            compiling = middle["compile_seconds"]
            lines.append(
                [
                    case.removeprefix("start sd15 "),
                    f"{middle['seconds']:.1f} s",
                    "" if compiling is None else f"{compiling:.2f} s",
                ]
            )
    return table("start | to the image | of which tracing, compiling or loading", lines)


def memory_cells(row: dict) -> str:
    """Memory of a program and of the chip."""
    return f"{row['memory_total'] / GIB:.1f} of {row['memory_usable'] / GIB:.2f}"


def tpu_sdxl_table() -> str:
    """SDXL images as compiled."""
    results = rows("tpu")
    lines = []
    for tpu in ("v5e-4", "v4-8", "v6e-4"):
        for num_images in (1, 2, 4):
            row = results[f"program {tpu} sdxl {num_images}"]
            lines.append(
                [
                    tpu.split("-")[0],
                    str(num_images),
                    memory_cells(row),
                    f"{row['hbm_bytes'] / num_images / 1e9:.0f}",
                    f"{row['step_seconds'] / num_images:.2f}",
                    f"{row['images_per_second_per_chip']:.2f}",
                ]
            )
    return table(
        "chip | images at once | holds, GiB | to and from HBM, GB per image "
        "| at least, s per image | at most, images/s per chip",
        lines,
    )


def training_settings(flags: dict) -> str:
    """Model, resolution and memory settings of a training step, from its non-default flags."""
    model = "SDXL" if flags.get("family") == "sdxl" else "Stable Diffusion 1.5"
    settings = [flags.get("pretrained_model_name_or_path", model)]
    settings.append(f"{flags.get('resolution', TrainingConfig.resolution)} px")
    if "cache_latents" in flags:
        settings.append("cached latents")
    if "gradient_checkpointing" in flags:
        settings.append("checkpointing")
    if "gather_by_block" in flags:
        settings.append("by block")
    if "lora_rank" in flags:
        settings.append(f"LoRA of rank {flags['lora_rank']}")
    if "optimization_level" in flags:
        settings.append(flags["optimization_level"])
    return ", ".join(settings)


def tpu_train_table() -> str:
    """Training steps as compiled."""
    lines = []
    programs = [row for row in rows("tpu").values() if row.get("program") == "train"]
    for row in sorted(programs, key=lambda x: (-x["batch_per_chip"], x["chips"])):
        state = sum(row["memory"][name] for name in ("parameters", "optimizer", "ema"))
        sent = f"{row['interconnect_bytes'] / 1e9:.2f}" if "interconnect_bytes" in row else ""
        hbm_bytes = row["hbm_bytes"] + row["ema_hbm_bytes"]
        moved = f"{hbm_bytes / 1e9:.1f}"
        chip = find_slice(row["tpu"]).chip
        limits = {
            "FLOPs": roofline_seconds(chip, row["flops"], 0),
            "HBM": roofline_seconds(chip, 0, row["hbm_bytes"]),  # the average's comes on top
            "other chips": roofline_seconds(chip, 0, 0, row.get("interconnect_bytes", 0)),
        }
        seconds, note = row["step_seconds"], ""
        if "optimization_level" in row["flags"]:  # the default level moves less
            moved = f"less than {moved}"
            at_most = roofline_seconds(chip, 0, hbm_bytes)
            note = f", or HBM: less than {at_most * 1e3:.0f} ms"
            del limits["HBM"]
            seconds = max(limits.values())
        limit = max(limits, key=limits.get) + note
        lines.append(
            [
                row["tpu"],
                training_settings(row["flags"]),
                str(row["chips"]),
                str(row["batch_per_chip"]),
                memory_cells(row),
                f"{state / GIB:.1f}",
                f"{row['memory']['temporaries'] / GIB:.1f}",
                f"{row['flops'] / 1e12:.1f}",
                moved,
                sent,
                f"{seconds * 1e3:.0f}",
                limit,
            ]
        )
    return table(
        "slice | model | chips | pairs per chip | memory, GiB | of which state | temporaries "
        "| TFLOP | to and from HBM, GB | to other chips, GB | at least, ms | limit",
        lines,
    )


def tpu_recipes_table() -> str:
    """The two recipes of docs/training.md: memory and least time as compiled."""
    lines, results = [], rows("tpu")
    for title, pairs, num_steps in (("toy run", " 4 pairs", 1000), ("full dataset", "", 15000)):
        for slice_name in ("v4-32", "v5e-16"):
            row = results[f"program {slice_name} train{pairs}"]
            seconds_of_run = num_steps * row["step_seconds"]
            lines.append(
                [
                    title,
                    slice_name,
                    f"{row['batch_per_chip'] * row['chips']}",
                    str(row["batch_per_chip"]),
                    memory_cells(row),
                    f"{row['step_seconds'] * 1e3:.0f} ms",
                    f"{num_steps}",
                    f"{seconds_of_run / 60:.1f} min",
                ]
            )
    return table(
        "recipe | slice | batch size | pairs per chip | memory per chip, GiB | a step, at least "
        "| steps | all steps, at least",
        lines,
    )


def tpu_unet_table() -> str:
    """The UNet as compiled for a v5e chip, and other classes."""
    row = rows("tpu")["program v5e-1 unet"]
    lines = [
        [
            "ours",
            f"{row['memory']['temporaries'] / 1e9:.2f} GB",
            f"{row['bytes_accessed'] / 1e9:.1f} GB",
            f"{row['hbm_bytes'] / 1e9:.1f} GB",
            f"{row['flops'] / 1e12:.2f} T",
        ]
    ]
    return table("| temporaries | bytes accessed | of them to and from HBM | FLOPs", lines)


def attention_table() -> str:
    """Cycles of an attention layer."""
    results = rows("tpu")
    lines = []
    for case in CASES:
        cells = [case]
        for variant in ("ours", "all three"):
            row = results[f"attention {case}, {variant}"]
            cells += [f"{sum(row['kernels'].values()) / 1e3:.0f}", f"{row['rest'] / 1e3:.0f}"]
        lines.append(cells)
    return table(
        "an attention layer, thousand cycles | kernels | all else | blocks of 512: kernels "
        "| all else",
        lines,
    )


def ema_cost_table() -> str:
    """Cost of an average: time of a step and memory."""
    cost = rows("ema")["cost"]
    lines = []
    for name, plan in cost["figures"]["plans"].items():
        summary, held = cost["summary"][name], plan["average_bytes"]
        time = spread(summary["min"], summary["median"], summary["max"])
        lines.append([name, time, f"{held / 1e6:.1f} MB" if held else "0"])
    return table("| time of a step to that of none | held by a device", lines)


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


def ema_quality_table() -> str:
    """Benefit of an average: held-out loss and edit error."""
    summary = rows("ema")["quality constant"]["summary"]
    lines = []
    for name, row in summary.items():
        if name.startswith("post-hoc 0"):
            continue
        names = ("loss", "loss_to_none", "edit_error_ratio", "edit_error_ratio_to_none")
        cells = [spread(row[x]["min"], row[x]["median"], row[x]["max"]) for x in names]
        cells[0] = "{median:.3f} ({min:.3f} to {max:.3f})".format(**row["loss"])
        accuracy = f"{row['instruction_accuracy']['median']:.0%}"
        lines.append([EMA_TITLES.get(name, name), *cells, accuracy])
    return table("average | held-out loss | to none | edit error | to none | right edit", lines)


def data_table() -> str:
    """Pairs per second of the data loaders."""
    results = rows("data")
    lines = []
    for title, case, digits in (
        ("ceiling", "method ceiling", 0),
        ("**ParquetImagePairs**", "method ours", 0),
        ("ceiling, Lanczos", "method ceiling_lanczos", 0),
        ("ParquetImagePairs, Lanczos", "method ours_lanczos", 0),
        ("Hugging Face `datasets`, streaming", "method datasets", 0),
        ("PyTorch DataLoader, pyarrow, Pillow", "method torch", 0),
        ("ours / ceiling", "ratio ours/ceiling", 2),
        ("ours / `datasets`", "ratio ours/datasets", 2),
    ):
        summary = results[case]["summary"]
        figures = [
            summary[threads][figure]["median"]
            for figure in ("pairs_per_second", "pairs_per_cpu_second")
            for threads in ("1", "2")
        ]
        lines.append([title, *(f"{x:.{digits}f}" for x in figures)])
    return table(
        "| pairs/s, 1 thread | pairs/s, 2 threads | pairs per CPU second, 1 thread "
        "| pairs per CPU second, 2 threads",
        lines,
    )


FAMILY_TITLES = {"sd": "Stable Diffusion", "sdxl": "SDXL"}


def families() -> dict:
    """{family: its row over all seeds}; {} until demo/compare_families.py has run."""
    results = rows("families")
    return {name: results[case] for name in FAMILY_TITLES if (case := f"{name} summary") in results}


def around(figures: dict, digits: int) -> str:
    """A mean over seeds and the range."""
    return "{mean:.{digits}f} ({min:.{digits}f} to {max:.{digits}f})".format(
        **figures, digits=digits
    )


def families_models_table() -> str:
    """Size, training and speed of both families."""
    lines = []
    for name, row in families().items():
        parameters = row["parameters"]
        text = sum(count for part, count in parameters.items() if part.startswith("text_encoder"))
        cells = [f"{parameters['unet']:,}", f"{text:,}", around(row["final_loss"], 3)]
        flops = row["edits"][0]["flops_per_edit"]["mean"]
        seconds_per_edit = around(row["edits"][0]["seconds_per_edit"], 3)
        cells += [f"{row['train_seconds']['mean']:.0f} s", f"{flops / 1e9:.1f}", seconds_per_edit]
        lines.append([FAMILY_TITLES[name], *cells])
    return table(
        "| widened UNet, parameters | text encoders | training loss, last tenth | a run takes "
        "| GFLOP per edit | s per edit",
        lines,
    )


def families_table() -> str:
    """Edits of both families on held-out images, and what needs no model."""
    lines = []
    for name, row in families().items():
        for edit in row["edits"]:
            scales = [str(edit["guidance_scale"]), str(edit["image_guidance_scale"])]
            cells = [around(edit["l1"], 3), around(edit["mse"], 4), around(edit["error_ratio"], 2)]
            lines.append([FAMILY_TITLES[name], *scales, *cells])
    for case, row in rows_of(rows("families"), "baseline").items():
        if "error_ratio" in row and case != "truth":
            cells = [f"{row['l1']:.3f}", f"{row['mse']:.4f}", f"{row['error_ratio']:.2f}"]
            lines.append([case, "", "", *cells])
    return table(
        "| text guidance | image guidance | L1 to the truth | MSE to the truth | edit error", lines
    )


def convolution_table() -> str:
    """Cycles of 3x3 convolutions on TPUs."""
    cycles: dict[str, list[str]] = {}
    for case, row in rows_of(rows("tpu"), "convolution").items():
        shape = case.partition(", ")[2]
        names = ("xla", "matmuls", "int8")
        cycles.setdefault(shape, []).extend(f"{row[name]['cycles'] / 1e3:.0f}" for name in names)
    lines = [[shape, *cells] for shape, cells in cycles.items()]
    columns = ("XLA", "matmuls", "in int8")
    header = [f"{chip}: {column}" for chip in ("v5e", "v6e") for column in columns]
    return table(f"| {' | '.join(header)}", lines)


def acceleration_flops_table() -> str:
    """UNet evaluations, FLOPs and their least time with each acceleration."""
    counts, lines = rows_of(rows("tpu"), "acceleration"), []
    for name in dict.fromkeys(case.partition(", ")[2] for case in counts):
        cells = []
        for program in ("sdxl", "edit"):
            row = counts.get(f"{program}, {name}")
            cells += acceleration_cells(row) if row else [""] * 4
        lines.append([name, *cells])
    columns = "| evaluations | TFLOP | v5e | v6e"
    return table(f"| SDXL: {columns[2:]} | edit: {columns[2:]}", lines)


def acceleration_cells(row: dict) -> list[str]:
    """Evaluations, TFLOP and the seconds of two chips."""
    seconds = [f"{row['seconds'][chip]:.3g} s" for chip in ("v5e", "v6e")]
    return [str(row["unet_evaluations"]), f"{row['flops'] / 1e12:.3g}", *seconds]


def acceleration_quality_table() -> str:
    """Edits of the demo's model with each acceleration, and how much faster a CPU is."""
    results, lines = rows("images"), []
    timed = {case.partition(", ")[2]: row for case, row in rows_of(results, "accelerated").items()}
    quality = {name: row for name, row in rows_of(results, "quality").items() if "step" not in name}
    for name in dict.fromkeys([*quality, *timed]):
        row, ratios = quality.get(name), timed.get(name, {}).get("times_as_fast", [])
        cells = ["", "", ""]
        if row:
            cells = [
                psnr_cell(row),
                f"{row['edit_error_ratio']:.3f}",
                f"{row['instruction_accuracy']:.3f}",
            ]
        spec = (row or timed[name])["accelerate"]
        faster = f"{statistics.median(ratios):.2f}" if ratios else ""
        lines.append([name, f"`{spec}`" if spec else "", *cells, faster])
    return table(
        "| `--accelerate` | PSNR to plain | edit_error_ratio | instruction_accuracy "
        "| times as fast on a CPU",
        lines,
    )


def text_to_image_table() -> str:
    """Images of the demo's base model with each acceleration."""
    lines = [
        [name, f"`{row['accelerate']}`", psnr_cell(row)]
        for name, row in rows_of(rows("images"), "text to image").items()
    ]
    return table("| `--accelerate` | PSNR to plain", lines)


def distillation_table() -> str:
    """Few-step edits of the demo's model, with and without a distilled LoRA."""
    quality = rows_of(rows("images"), "quality")
    lines = [
        [
            "20 steps" if name == "plain" else name,
            f"{row['edit_error_ratio']:.3f}",
            f"{row['instruction_accuracy']:.3f}",
        ]
        for name, row in quality.items()
        if name == "plain" or "step" in name
    ]
    return table("| edit_error_ratio | instruction_accuracy", lines)


def acceleration_tpu_table(program: str) -> str:
    """Compiled programs with each acceleration. program: sdxl or edit."""
    lines, counts = [], rows_of(rows("tpu"), "acceleration")
    for case in counts:
        job, _, name = case.partition(", ")
        if job == program:
            found = [compiled_row(tpu, case) for tpu in ("v5e-1", "v6e-1")]
            lines.append([name, *(cell for row in found for cell in compiled_cells(row))])
    columns = [f"{chip}: {title}" for chip in ("v5e", "v6e") for title in ("GiB", "HBM", "time")]
    return table(f"| {' | '.join(columns)}", lines)


def compiled_row(tpu: str, job: str) -> dict | None:
    """A compiled image or edit, of the highest of XLA's levels; None if it was not compiled."""
    results = rows("tpu")
    cases = (f"program {tpu} {job}{level}" for level in ("", " O1", " O0"))
    return next((results[case] for case in cases if case in results), None)


def compiled_cells(row: dict | None) -> list[str]:
    """Memory, traffic and least time of a compiled program; empty if it was not compiled."""
    if row is None:
        return [""] * 3
    if "flops" not in row:
        return ["does not fit", "", ""]
    chip = find_slice(row["tpu"]).chip
    compute = roofline_seconds(chip, row["flops"], 0, int8_flops=row["int8_flops"])
    times = [compute, max(compute, roofline_seconds(chip, 0, row["hbm_bytes"]))]
    memory, moved = f"{row['memory_total'] / GIB:.1f}", f"{row['hbm_bytes'] / 1e9:.0f} GB"
    if "optimization_level" not in row["flags"]:
        return [memory, moved, seconds(times[1])]
    low_high = dict.fromkeys(f"{time:.3g}" for time in times)
    return [memory, f"< {moved}", f"{' to '.join(low_high)} s"]


def options_table() -> str:
    """What compiler options change: cycles and HBM traffic, relative to the default options."""
    costs: dict[str, dict] = {}
    for case, row in rows_of(rows("tpu"), "options").items():
        program, _, name = case.rpartition(", ")
        costs.setdefault(program, {})[name] = row
    names = [name for name in OPTIONS if name != "default"]
    lines = []
    for program, found in sorted(costs.items()):
        if "default" not in found:
            continue
        default, cells = found["default"], []
        for name in names:
            row = found.get(name)
            keys = ("cycles", "hbm_bytes") if row and row["tpu"] == default["tpu"] else ()
            cells.append(", ".join(f"{row[key] / default[key]:.2f}" for key in keys))
        if any(cells):
            lines.append([program, *cells])
    return table(f"| {' | '.join(names)}", lines)


TABLES: dict[str, Callable[[], str]] = {
    "results": results_table,
    "bounds": bounds_table,
    "demo": demo_table,
    "demo_evaluation": demo_evaluation_table,
    "pytorch": pytorch_table,
    "gpu_plan": gpu_plan_table,
    "gpu": gpu_table,
    "gpu_memory": gpu_memory_table,
    "first_steps": first_steps_table,
    "operations": operations_table,
    "profile": profile_table,
    "full_size": full_size_table,
    "full_size_xl": full_size_xl_table,
    "start": start_table,
    "tpu_recipes": tpu_recipes_table,
    "tpu_sdxl": tpu_sdxl_table,
    "tpu_train": tpu_train_table,
    "tpu_unet": tpu_unet_table,
    "attention": attention_table,
    "convolution": convolution_table,
    "ema_cost": ema_cost_table,
    "ema_quality": ema_quality_table,
    "data": data_table,
    "families": families_table,
    "families_models": families_models_table,
    "acceleration_flops": acceleration_flops_table,
    "acceleration_quality": acceleration_quality_table,
    "text_to_image": text_to_image_table,
    "acceleration_tpu_sdxl": partial(acceleration_tpu_table, "sdxl"),
    "acceleration_tpu_edit": partial(acceleration_tpu_table, "edit"),
    "distillation": distillation_table,
    "options": options_table,
}


def fill(page: str) -> str:
    """A page with the tables of the results files."""
    return PLACE.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[4]}", page)


def main() -> None:
    """Write all pages."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        if (filled := fill(text)) != text:
            path.write_text(filled)
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
