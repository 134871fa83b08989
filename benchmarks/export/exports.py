"""Full-size exports: time and memory of export_model.py, and speed of what it writes.

    python -m benchmarks.export files

exports InstructPix2Pix of Stable Diffusion 1.5's shapes with random weights, or with --family sdxl
SDXL, to ONNX by export_model.py; the comparison with the Flax model is part of the time. Needs 16
GB of memory, 20 GB of disk and an hour. Tiny: --tiny --output export.json.

    python -m benchmarks.export runtimes

times exported files on a CPU: an evaluation of the UNet with the three branches of an edit, and an
edit of 20 steps with DDIM, by our pipeline, PyTorch's, and examples/run_onnx.py with onnxruntime
and with OpenVINO, in turn, all in float32. Needs 16 GB of memory and, on two otherwise idle cores,
an hour. Tiny: --tiny --resolution 64 --rounds 1 --seconds 1 --output export.json.

Both need make .venv/export. Rows go to benchmarks/results/full_size.json.
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

from benchmarks.full_size import run_command
from benchmarks.harness import (
    PROMPT,
    SCALES,
    check_timing,
    in_new_process,
    time_in_turn,
    write_contenders,
)
from benchmarks.images import EditTiming, our_edit, random_image, torch_edit
from benchmarks.random_models import TINY_UNET, make_pipeline, make_xl_pipeline
from benchmarks.rows import PACKAGES, describe_machine, run_benchmark, write_rows
from benchmarks.unet import SD15_EDIT, Case, count_flops, make_inputs
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.pipelines.instruct_pix2pix import EDIT_BRANCHES
from examples import run_onnx

AGREEMENT = re.compile(r"^(\w+): largest difference (\S+) of (\S+),", re.MULTILINE)


@dataclass(frozen=True)
class ExportFlags:
    """Time and peak memory of export_model.py."""

    family: Literal["sd15", "sdxl"] = "sd15"
    work_dir: str = ""  # directory of the model and its exports, kept; "": a temporary one
    tiny: bool = False  # tiny models, to try this
    output: str = "benchmarks/results/full_size.json"


def make_model_to_export(folder, family, tiny):
    """Write the model to export into folder / "model" unless it is there."""
    if (folder / "model" / "model_index.json").is_file():
        return
    if family == "sdxl":
        in_new_process(make_xl_pipeline, folder / "model", tiny)
    else:
        in_new_process(make_pipeline, folder / "model", tiny, 8, "DDIMScheduler")


def bench_export(folder, file_format):
    """Figures of run_command for one export, with its bytes and its agreement with our model."""
    target = folder / file_format
    flags = ["--model", f"{folder}/model", "--output_dir", str(target), "--overwrite_output_dir"]
    figures, output = run_command(["export_model.py", *flags, "--format", file_format])
    components = {name: [float(x), float(y)] for name, x, y in AGREEMENT.findall(output)}
    files = target.rglob("*")
    num_bytes = sum(file.stat().st_size for file in files if file.is_file())
    shares = [difference / scale for difference, scale in components.values()]
    return figures | {"bytes": num_bytes, "components": components, "largest_share": max(shares)}


def run_files(config):
    """Make the model, export it, write."""
    machine = describe_machine(("jax", "torch", "onnx", "onnxscript", "onnxruntime", "openvino"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(config.work_dir or temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        make_model_to_export(folder, config.family, config.tiny)
        row = bench_export(folder, "onnx")
    write_rows({f"export {config.family} onnx": row}, machine, config.output)


@dataclass(frozen=True, kw_only=True)
class RuntimeFlags(EditTiming):
    """Exported models in other runtimes."""

    work_dir: str = ""  # as of files; "": a temporary one
    output: str = "benchmarks/results/full_size.json"


RUNTIMES = {"onnxruntime": "onnx", "openvino": "openvino"}  # contender: format


def unet_inputs(config):
    """(case, sample, timestep, text states) of an evaluation for one edit, NumPy arrays."""
    case = Case(SD15_EDIT | (TINY_UNET if config.tiny else {}), config.resolution // 8)
    sample, timesteps, text, _ = make_inputs(case, len(EDIT_BRANCHES))
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
    import onnxruntime  # of make .venv/export

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))  # default: all of the machine
    onnxruntime.InferenceSession = partial(onnxruntime.InferenceSession, sess_options=options)
    return run_onnx.open_folder(folder)


def exported_unet(model, config, folder):
    """The UNet of an exported folder."""
    *_, components = open_exported(model.with_name(folder))
    _, sample, timestep, text = unet_inputs(config)
    return partial(components["unet"], sample=sample, timestep=timestep, encoder_hidden_states=text)


def exported_edit(model, config, folder):
    """examples/run_onnx.py with an exported folder, as a function that edits an image."""
    folder = model.with_name(folder)
    random_image(config).save(folder / "input.png")
    flags = {name: None if isinstance(x, type) else x for name, x in run_onnx.FLAGS.items()}
    flags |= {"model": folder, "input": folder / "input.png", "prompt": PROMPT} | SCALES
    flags["num_inference_steps"] = config.num_inference_steps
    return partial(run_onnx.make_image, SimpleNamespace(**flags), *open_exported(folder))


def bench_runtimes(model, config, machine):
    """Measure the UNet and an edit, write their rows."""
    case, *inputs = unet_inputs(config)
    flops, steps = count_flops(case, (*inputs, None), False), config.num_inference_steps
    edits = {"ours": our_edit, "torch eager": torch_edit}
    unets = {"ours": our_unet, "torch eager": torch_unet}
    for name, folder in RUNTIMES.items():
        edits[name] = partial(exported_edit, folder=folder)
        unets[name] = partial(exported_unet, folder=folder)
    for work, count, contenders in (("UNet", 1, unets), (f"edit, {steps} steps", steps, edits)):
        figures = time_in_turn(contenders, (model, config), config)
        name = f"{'tiny' if config.tiny else 'sd15'}_{config.resolution} runtimes, {work} 1"
        row = {"batch_size": 1, "flops": count * flops, **figures}
        write_contenders(name, row, machine, config.output)


def run_runtimes(config):
    """Export what is missing, measure, write."""
    check_timing(config, side="resolution", num_inference_steps=1)
    machine = describe_machine((*PACKAGES, *RUNTIMES))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(config.work_dir or temporary).absolute()
        make_model_to_export(folder, "sd15", config.tiny)
        for file_format in RUNTIMES.values():
            if not (folder / file_format / "model_index.json").is_file():
                bench_export(folder, file_format)
        bench_runtimes(folder / "model", config, machine)


SUBCOMMANDS = {"files": ExportFlags, "runtimes": RuntimeFlags}
RUN = {ExportFlags: run_files, RuntimeFlags: run_runtimes}


def main(args=None):
    """Command line."""
    run_benchmark(SUBCOMMANDS, lambda config: RUN[type(config)](config), __doc__, args)
