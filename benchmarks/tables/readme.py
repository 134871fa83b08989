"""README's tables: what was measured, and what a TPU can do at best."""

from benchmarks.rows import markdown_table
from benchmarks.tables.cells import at_share, estimated_seconds, results, seconds
from benchmarks.tables.speed import faster_eager
from diffusers_flax.compiling.chips import CHIPS

H100, STEP = "H100 80GB HBM3", "full_256 optimizer step 16"  # of benchmarks.gpu
SDXL_IMAGE = "full_xl_1024 images, 20 steps 1"


def to_pytorch(name: str, case: str) -> str:
    """How many times as fast ours is as eager PyTorch."""
    ratio = results(name)[case]["summary"]["torch eager"]["ours_times_as_fast"]
    return f"{ratio:.2f} times as fast"


def to_datasets() -> str:
    """How many times as fast the data loader is as Hugging Face's."""
    summary = results("data")["ratio ours/datasets"]["summary"]
    ratios = [figure["median"] for threads in summary.values() for figure in threads.values()]
    return f"{min(ratios):.1f} to {max(ratios):.1f} times as fast"


def on_gpu(compiled: bool, *cases: str) -> str:
    """How many times as fast ours is as PyTorch on NVIDIA GPUs, with torch.compile or eager."""
    rows = [results("gpu")[f"NVIDIA {case}"] for case in cases]
    names = ["torch compiled" if compiled else faster_eager(row) for row in rows]
    summaries = [row["summary"][name] for row, name in zip(rows, names)]
    return " and ".join(f"{x['ours_times_as_fast']:.2f}" for x in summaries) + " times as fast"


def with_average() -> str:
    """The edit error with an average of the weights and without."""
    summary = results("ema")["quality"]["summary"]
    late, none = (summary[x]["edit_error_ratio"]["median"] for x in ("late 20%", "none"))
    return f"{late:.2f}; {none:.2f} without"


def results_table() -> str:
    """Measured results, each with its command."""
    demo = results("demo")["fine-tuned, guidance 2 and 1.2"]
    right = round(demo["instruction_accuracy"] * demo["num_edits"])
    edit = "cpu sd15_256 edit, 20 steps 1"
    lines = [
        (
            "demo: edit error (a copy of the input has 1); results nearest to their true edit",
            f"{demo['edit_error_ratio']:.2f}; {right} of {demo['num_edits']}",
            "make demo",
        ),
        (
            "edit, 20 steps, two CPU cores, to PyTorch",
            to_pytorch("images", edit),
            results("images")[edit]["command"],
        ),
        (
            "UNet and gradient, two CPU cores, to PyTorch",
            to_pytorch("unet", "cpu sd15_256 gradient 2"),
            "python -m benchmarks.unet --cases sd15_256 --rounds 4",
        ),
        (
            "edit of 20 steps and training step, H100, bfloat16, to eager PyTorch",
            on_gpu(False, f"{H100} full_512 edit, 20 steps 1", f"{H100} {STEP}"),
            "python -m benchmarks.gpu",
        ),
        (
            "UNet, H100, and SDXL image, H200, bfloat16, to `torch.compile`",
            on_gpu(True, f"{H100} full_512 forward 8", f"H200 {SDXL_IMAGE}"),
            "python -m benchmarks.gpu",
        ),
        (
            "data loader, to Hugging Face `datasets`",
            to_datasets(),
            "python -m benchmarks.data --output data.json",
        ),
        (
            "EMA over the last fifth of a run: edit error",
            with_average(),
            "python -m benchmarks.ema --measure quality",
        ),
    ]
    lines = [[title, result, f"`{command}`"] for title, result, command in lines]
    return markdown_table("| result | command", lines)


def bounds_table() -> str:
    """Bounds for a v5e chip, with the time at its published share of the peak."""
    lines, v5e = [], CHIPS["v5e"]
    for title, name in (
        ("SDXL image, 1024 pixels, 20 steps", "plain"),
        ("the same with DeepCache and guidance in half of the steps", "deepcache 2, guidance"),
    ):
        bound = results("tpu")[f"acceleration sdxl, {name}"]["seconds"]["v5e"]
        lines.append([title, seconds(bound), estimated_seconds(bound, v5e)])
    return markdown_table(f"| at the chip's peak | {at_share(v5e)}", lines)
