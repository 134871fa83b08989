"""Full-size exports: time and memory of export_model.py, and speed of what it writes.

    python -m benchmarks.export files

exports InstructPix2Pix of Stable Diffusion 1.5's shapes with random weights, or with --family sdxl
SDXL, by export_model.py; the comparison with the Flax model is part of the time. Needs 16 GB of
memory, 20 GB of disk and an hour. Tiny: --quick --output export.json.

    python -m benchmarks.export runtimes

times exported files on a CPU: an evaluation of the UNet with the three branches of an edit, and an
edit of 20 steps with DDIM, by our pipeline, PyTorch's, and examples/run_onnx.py with onnxruntime
and with OpenVINO, in turn, all in float32. Needs 16 GB of memory and, on two otherwise idle cores,
an hour. Tiny: --size tiny --resolution 64 --rounds 1 --seconds 1 --output export.json.

Both need requirements-export.txt. Rows go to benchmarks/results/full_size.json.
"""

import os
import re
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import jax
import numpy as np
import torch
from diffusers import UNet2DConditionModel

from benchmarks.full_size import format_commands, run_command
from benchmarks.harness import (
    PROMPT,
    SCALES,
    check_config,
    contenders_on,
    find_device,
    in_new_process,
    make_row,
    time_in_turn,
    write_contenders,
)
from benchmarks.images import make_images, our_edit, torch_edit
from benchmarks.random_models import TINY_UNET, make_pipeline, make_xl_pipeline
from benchmarks.rows import (
    PACKAGES,
    describe_machine,
    read_rows,
    report,
    rows_of,
    run_benchmark,
    write_rows,
)
from benchmarks.unet import SD15_EDIT, Case, count_flops, make_inputs
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.pipelines.instruct_pix2pix import BRANCHES
from examples import run_onnx

EXPORTS = {  # flags of export_model.py
    "onnx": [],
    "onnx float16": ["--dtype", "float16"],
    "onnx int8": ["--quantize", "int8"],
    "openvino": ["--format", "openvino"],
    "openvino float16": ["--format", "openvino", "--dtype", "float16"],
    "openvino int8": ["--format", "openvino", "--quantize", "int8"],
}
AGREEMENT = re.compile(r"^(\w+): largest difference (\S+) of (\S+),", re.MULTILINE)


@dataclass(frozen=True)
class Files:
    """Time and peak memory of export_model.py."""

    family: Literal["sd15", "sdxl"] = "sd15"
    names: tuple[Literal[tuple(EXPORTS)], ...] = ("onnx", "onnx int8", "openvino float16")
    work_dir: str = ""  # directory of the model and its exports, kept; "": a temporary one
    quick: bool = False  # tiny models, to try this script
    output: str = "benchmarks/results/full_size.json"


def make_model_to_export(folder, family, quick):
    """Write the model to export into folder / "model" unless it is there."""
    if (folder / "model" / "model_index.json").is_file():
        return
    if family == "sdxl":
        in_new_process(make_xl_pipeline, folder / "model", quick)
    else:
        in_new_process(make_pipeline, folder / "model", quick, 8, "DDIMScheduler")


def bench_export(folder, name):
    """Figures of run_command for one export, with its bytes and its agreement with our model."""
    target = folder / name.replace(" ", "_")
    flags = ["--model", f"{folder}/model", "--output_dir", str(target), "--overwrite_output_dir"]
    figures, output = run_command(["export_model.py", *flags, *EXPORTS[name]])
    parts = {part: [float(x), float(y)] for part, x, y in AGREEMENT.findall(output)}
    files = target.rglob("*")
    num_bytes = sum(file.stat().st_size for file in files if file.is_file())
    shares = [difference / scale for difference, scale in parts.values()]
    return figures | {"bytes": num_bytes, "parts": parts, "largest_share": max(shares)}


def run_files(config):
    """Make the model, export it, write a row as soon as it is known."""
    read_rows(config.output)
    machine = describe_machine(("jax", "torch", "onnx", "onnxscript", "onnxruntime", "openvino"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(config.work_dir or temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        make_model_to_export(folder, config.family, config.quick)
        for name in config.names:
            row = bench_export(folder, name)
            results = write_rows({f"export {config.family} {name}": row}, machine, config.output)
    report(format_commands(rows_of(results, "export")), config.output)


@dataclass(frozen=True)
class Runtimes:
    """Exported models in other runtimes."""

    size: Literal["sd15", "tiny"] = "sd15"
    resolution: int = 256  # pixels
    num_inference_steps: int = 20
    rounds: int = 2  # each contender is measured once in each
    seconds: float = 30.0  # of a measurement, at least; one pass at least
    work_dir: str = ""  # as of files; "": a temporary one
    output: str = "benchmarks/results/full_size.json"


RUNTIMES = {"onnxruntime": "onnx", "openvino": "openvino"}  # contender: folder beside the model's


def unet_inputs(config):
    """(case, sample, timestep, text states) of an evaluation for one edit, NumPy arrays."""
    case = Case(SD15_EDIT | (TINY_UNET if config.size == "tiny" else {}), config.resolution // 8)
    sample, timesteps, text, _ = make_inputs(case, len(BRANCHES))
    return case, sample, np.float32(timesteps[:1]), text


def our_unet(model, config):
    """Our UNet, as a function that evaluates it."""
    unet, params = FlaxUNet2DConditionModel.from_pretrained(model, subfolder="unet")
    params = jax.device_put(params, jax.devices()[0])
    predict = jax.jit(lambda params, *inputs: unet.apply({"params": params}, *inputs).sample)
    _, *inputs = unet_inputs(config)
    return lambda: jax.block_until_ready(predict(params, *inputs))


def torch_unet(model, config):
    """PyTorch's."""
    unet = UNet2DConditionModel.from_pretrained(model, subfolder="unet").eval()
    _, *inputs = unet_inputs(config)
    inputs = [torch.from_numpy(x) for x in inputs]
    return torch.inference_mode()(lambda: unet(*inputs))


def open_exported(folder):
    """run_onnx.open_folder with as many threads as this process has cores."""
    import onnxruntime  # of requirements-export.txt

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))  # default: all of the machine
    onnxruntime.InferenceSession = partial(onnxruntime.InferenceSession, sess_options=options)
    return run_onnx.open_folder(folder)


def exported_unet(model, config, folder):
    """The UNet of an exported folder."""
    *_, parts = open_exported(model.with_name(folder))
    _, sample, timestep, text = unet_inputs(config)
    return partial(parts["unet"], sample=sample, timestep=timestep, encoder_hidden_states=text)


def exported_edit(model, config, folder):
    """examples/run_onnx.py with an exported folder, as a function that edits an image."""
    folder = model.with_name(folder)
    make_images(config, 1)[0].save(folder / "input.png")
    flags = {name: None if isinstance(x, type) else x for name, x in run_onnx.FLAGS.items()}
    flags |= {"model": folder, "input": folder / "input.png", "prompt": PROMPT} | SCALES
    flags["num_inference_steps"] = config.num_inference_steps
    return partial(run_onnx.make_image, SimpleNamespace(**flags), *open_exported(folder))


def bench_runtimes(model, config):
    """Rows of the UNet and of an edit, see harness.make_row."""
    case, *inputs = unet_inputs(config)
    flops, steps = count_flops(case, (*inputs, None), False), config.num_inference_steps
    edit = dict(batch_size=1, device="cpu")
    edits = contenders_on("cpu", partial(our_edit, **edit), partial(torch_edit, **edit))
    unets = {"ours": our_unet, "torch eager": torch_unet}
    for name, folder in RUNTIMES.items():
        edits[name] = partial(exported_edit, folder=folder)
        unets[name] = partial(exported_unet, folder=folder)
    for work, count, contenders in (("UNet", 1, unets), (f"edit, {steps} steps", steps, edits)):
        figures = time_in_turn(contenders, (model, config), config.rounds, config.seconds)
        name = f"{config.size}_{config.resolution}"
        yield make_row(name, f"runtimes, {work}", 1, count * flops, "cpu", figures)


def run_runtimes(config):
    """Export what is missing, measure, write, print."""
    check_config(config, "num_inference_steps")
    if find_device() != "cpu":
        raise ValueError("runtimes compares on a CPU; set JAX_PLATFORMS=cpu and hide the GPU")
    machine = describe_machine((*PACKAGES, *RUNTIMES))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(config.work_dir or temporary).absolute()
        make_model_to_export(folder, "sd15", config.size == "tiny")
        for name in RUNTIMES.values():
            if not (folder / name / "model_index.json").is_file():
                bench_export(folder, name)
        write_contenders(bench_runtimes(folder / "model", config), machine, config.output)


SUBCOMMANDS = {Files: run_files, Runtimes: run_runtimes}


def main(args=None):
    """Command line."""
    run_benchmark(SUBCOMMANDS, __doc__, args)
