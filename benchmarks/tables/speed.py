"""Tables of measured speed and memory."""

import statistics

from benchmarks.rows import markdown_table, psnr_cell, rows_of
from benchmarks.tables.cells import results, seconds, spread

EDIT = ("images", "cpu sd15_256 edit, 20 steps 1")
SDXL_IMAGE = ("images", "cpu sdxl_256 images, 4 steps 1")
STEP = ("train", "cpu sd15_256 optimizer step 2")
PYTORCH_ROWS = (  # title, results file, case, contender
    ("UNet, two samples", "unet", "cpu sd15_256 forward 2", "ours"),
    ("UNet and its gradient, two samples", "unet", "cpu sd15_256 gradient 2", "ours"),
    ("UNet, 512 pixels, one sample", "unet", "cpu sd15_512 forward 1", "ours"),
    ("UNet and its gradient, 512 pixels", "unet", "cpu sd15_512 gradient 1", "ours"),
    ("optimizer step, two pairs", *STEP, "ours"),
    ("the same, `--cache_latents`", *STEP, "ours, latents cached"),
    ("edit, 20 steps, one image", *EDIT, "ours"),
    ("SDXL, 4 steps, one image", *SDXL_IMAGE, "ours"),
)


def pytorch_table() -> str:
    """Ours and eager PyTorch, alternating in one run."""
    lines = []
    for title, name, case, ours in PYTORCH_ROWS:
        row = results(name)[case]
        summary, batch_size = row["summary"], row["batch_size"]
        theirs, to_theirs = summary["torch eager"], ["", ""]
        if ours == "ours":
            low, high = theirs["ours_times_as_fast_range"]
            to_theirs = [
                seconds(batch_size / theirs["samples_per_second"]),
                spread(low, theirs["ours_times_as_fast"], high),
            ]
        lines.append(
            [
                title,
                str(len(row["seconds"][ours])),
                seconds(batch_size / summary[ours]["samples_per_second"]),
                f"{summary[ours]['peak_share']:.0%}",
                *to_theirs,
            ]
        )
    return markdown_table("| rounds | ours | of the peak | PyTorch | speed-up", lines)


GPU_CASES = {  # case of benchmarks.gpu without the device: title
    "full_256 optimizer step 16": "optimizer step, 16 pairs, 256 px",
    "full_256 optimizer step, latents cached 16": "the same from cached latents",
    "full_512 forward 8": "UNet, 8 samples, 512 px",
    "full_512 gradient 8": "UNet with gradients, 8 samples, 512 px",
    "full_512 edit, 20 steps 1": "edit, 512 px, 20 steps",
    "full_xl_1024 images, 20 steps 1": "SDXL image, 1024 px, 20 steps",
    "full_xl_1024 images, 20 steps 8": "8 SDXL images at once, 1024 px, 20 steps",
}


def gpu_lines(case: str, title: str) -> list[list[str]]:
    """The lines of a case of benchmarks.gpu, for every GPU: ours, accelerated, published."""
    lines = []
    for row in (row for name, row in results("gpu").items() if name.endswith(f" {case}")):
        gpu = row["device"].removeprefix("NVIDIA ").partition(" ")[0]
        for name in [x for x in row["seconds"] if x.startswith("ours")]:
            middle = statistics.median(row["seconds"][name])
            flags = name.removeprefix("ours").removeprefix(", ")
            share = row["summary"][name]["peak_share"]
            lines.append(
                [
                    f"the same, `{name_flag(flags)}`" if flags else title,
                    gpu,
                    seconds(middle),
                    f"{row['batch_size'] / middle:.3g}",
                    "" if flags else f"{share:.0%}",
                    ratio_cell(row, faster_eager(row), name),
                    ratio_cell(row, "torch compiled", name),
                ]
            )
        if published := row.get("published_samples_per_second"):
            title = "the same, TensorRT, published (MLPerf Inference v4.1)"
            lines.append([title, gpu, "", f"{published:.3g}", "", "", ""])
    return lines


def name_flag(flags: str) -> str:
    """The flags of a contender: its accelerations, or another flag with its value."""
    return f"--accelerate {flags}" if ":" in flags else f"--{flags}"


def faster_eager(row: dict) -> str:
    """The faster one of PyTorch's eager contenders."""
    names = [x for x in ("torch eager", "torch channels_last") if x in row["seconds"]]
    return min(names, key=lambda x: statistics.median(row["seconds"][x]), default="torch eager")


def ratio_cell(row: dict, contender: str, ours: str) -> str:
    """How many times as fast ours is, with the range over rounds; empty: not measured."""
    if contender not in row["seconds"]:
        return ""
    ratios = [a / b for a, b in zip(row["seconds"][contender], row["seconds"][ours])]
    return spread(min(ratios), statistics.median(ratios), max(ratios))


def agreement_line(case: str, psnr: dict) -> str:
    """How far a GPU's edits are from a CPU's."""
    cells = [f"{dtype} {psnr_cell(value, 'equal')}" for dtype, value in psnr.items()]
    return f"{case}: {', '.join(cells)}.\n"


def gpu_table() -> str:
    """benchmarks.gpu's rows: ours, PyTorch's and the accelerated image, in turn."""
    lines = [line for case, title in GPU_CASES.items() for line in gpu_lines(case, title)]
    agreement = [
        agreement_line(case, row["psnr"]) for case, row in results("gpu").items() if "psnr" in row
    ]
    header = "| GPU | a pass | samples/s | of the peak | to eager PyTorch | to `torch.compile`"
    return "\n".join([markdown_table(header, lines), *agreement])


def commands_table(kind: str, *trainings: tuple[str, str]) -> str:
    """Time and peak memory of command lines.

    Args:
        kind: of the rows.
        *trainings: (title, name) of the trainer's.
    """
    lines = []
    for title, name in (
        ("`create_modified_unet.py`", "widen"),
        *trainings,
        ("`edit_cli.py`, 2 steps", "edit"),
    ):
        row = results("full_size")[f"{kind} {name}"]
        lines.append([title, f"{row['seconds']:.0f}", f"{row['peak_gib']:.1f} GiB"])
    return markdown_table("| seconds | peak memory", lines)


def full_size_table() -> str:
    """Stable Diffusion 1.5's command lines."""
    return commands_table(
        "command",
        ("`flax_train_instruct_pix2pix.py`, killed after step 1", "train, killed"),
        ("the same command again, from the checkpoint to the model", "train, resumed"),
    )


def full_size_xl_table() -> str:
    """SDXL's command lines."""
    title = "`flax_train_instruct_pix2pix.py --lora_rank 16 --merge_lora`, 1 step"
    return commands_table("sdxl_command", (title, "train a LoRA"))


def exports_table() -> str:
    """Full-size exports: time and peak memory of export_model.py, and agreement with our model."""
    lines = []
    families = {"sd15": "Stable Diffusion 1.5, edits", "sdxl": "SDXL"}
    for name, row in rows_of(results("full_size"), "export").items():
        family, _, files = name.partition(" ")
        lines.append(
            [
                f"{families[family]}: {files}",
                f"{row['seconds']:.0f}",
                f"{row['peak_gib']:.1f} GiB",
                f"{row['bytes'] / 1e9:.2f} GB",
                f"{row['largest_share']:.1e}",
            ]
        )
    return markdown_table("| seconds | peak memory | files | largest difference", lines)


def runtimes_table() -> str:
    """Our pipeline, PyTorch's, and exported files in other runtimes, in turn in one run."""
    lines = []
    for title, work in (("UNet, three branches", "UNet"), ("edit, 20 steps", "edit, 20 steps")):
        row = results("full_size")[f"cpu sd15_256 runtimes, {work} 1"]
        ours = statistics.median(row["seconds"]["ours"])
        cells = [title, str(len(row["seconds"]["ours"])), seconds(ours)]
        for name in ("torch eager", "onnxruntime", "openvino"):
            middle = statistics.median(row["seconds"][name])
            cells.append(f"{seconds(middle)}: {ratio_cell(row, name, 'ours')}")
        lines.append(cells)
    return markdown_table("| rounds | ours | PyTorch | onnxruntime | OpenVINO", lines)


def data_table() -> str:
    """Pairs per second of the data loaders."""
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
        ("images of five aspect ratios, as squares", "method squares", 0),
        ("the same images at three sizes", "method buckets", 0),
        ("three sizes / squares", "ratio buckets/squares", 2),
    ):
        summary = results("data")[case]["summary"]
        figures = [
            summary[threads][figure]["median"]
            for figure in ("pairs_per_second", "pairs_per_cpu_second")
            for threads in ("1", "2")
        ]
        lines.append([title, *(f"{x:.{digits}f}" for x in figures)])
    return markdown_table(
        "| pairs/s, 1 thread | pairs/s, 2 threads | pairs per CPU second, 1 thread "
        "| pairs per CPU second, 2 threads",
        lines,
    )


def streaming_table() -> str:
    """The share of the time that the demo's training waits for batches, streamed and local."""
    rows = results("streaming")
    lines = []
    for name in dict.fromkeys(case.partition(":")[0] for case in rows):
        ways = ("local", "streamed", "streamed, killed")
        of_ways = [rows[f"{name}: {way}"] for way in ways]
        same = all(row["is_bit_identical"] for row in of_ways[1:])
        waits = [f"{row['data_wait']:.1%}" for row in of_ways]
        requests = f"{of_ways[1]['requests']}, {of_ways[1]['failed_requests']}"
        lines.append([name, *waits, requests, "yes" if same else "no"])
    return markdown_table(
        "| local files | streamed | the same, killed | requests, failed | bit-identical", lines
    )


def pairs_table() -> str:
    """What make_pairs.py does besides its compiled programs, and its memory."""
    rows = results("pairs")
    time, memory, host = rows["time"], rows["memory"], rows["host"]
    first, last = (f"{memory[x] / 1e6:.0f} MB" for x in ("bytes_first", "bytes_last"))
    alone = [sum(x.values()) for x in time["seconds_alone"].values()]
    made = f"{time['samples']} samples, {time['side']}x{time['side']}, {time['steps']} steps"
    lines = [
        [made, "time", f"{time['seconds']:.0f} s"],
        ["", "outside of the compiled programs", f"{time['share_outside']:.2%}"],
        ["", f"a batch of {time['batch_size']} pairs", seconds(time["seconds_of_a_batch"])],
        ["", "its programs alone, before and after", " and ".join(map(seconds, alone))],
        [
            f"{host['side']}x{host['side']}, without programs",
            "a pair, of one core of the host",
            f"{1000 * host['cpu_seconds_per_pair']:.0f} ms",
        ],
        [f"{memory['lines']} lines", f"memory after {memory['first_lines']} lines", first],
        ["", "after all", last],
    ]
    return markdown_table("run | figure | measured", lines)


def archives_table() -> str:
    """Conversions of archives to shards."""
    titles = {
        "samples": "WebDataset",
        "index": "index of JSON lines in a random order, tar",
        "gzip": "the same, tar.gz in two parts",
    }
    lines = []
    for case, row in results("archives").items():
        title, summary = titles[case], row["summary"]
        cells = [f"{summary['pairs_per_second']:.0f}"]
        for kind in ("seconds", "cpu_seconds"):
            low, high = summary[f"{kind}_to_tarfile_range"]
            cells.append(spread(low, summary[f"{kind}_to_tarfile"], high))
        lines.append([title, *cells, f"{summary['peak_mb']:.0f} MB"])
    header = "100,000 pairs of 8 kB images | pairs/s | to tarfile | CPU time to tarfile's | memory"
    return markdown_table(header, lines)
