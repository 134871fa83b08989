"""Edited images and SDXL images against PyTorch diffusers' pipelines, and accelerations.

    python -m benchmarks.images edit
    python -m benchmarks.images sdxl

times an edit of 20 steps with Stable Diffusion 1.5's shapes, or an SDXL image of 4 steps, with
random weights, in float32 on a CPU. PyTorch's pipelines use the same weights and scheduler. Each
measurement runs in its own process: the time from its start to the first image ("first", with
loading and compiling), then images for --seconds. The share of the peak counts the UNet's FLOPs
only. `edit` needs 12 GB of memory, `sdxl` 18 GB and 14 GB of disk; a quarter of an hour on two
otherwise idle cores. With tiny models, a minute each:

    python -m benchmarks.images edit --tiny --resolution 64 --rounds 1 --output images.json

    python -m benchmarks.images accelerations
    python -m benchmarks.images quality --lora demo/output/lcm --taesd demo/output/taesd

compare --accelerate's techniques with the plain pipeline. `accelerations`: seconds of an edit with
Stable Diffusion 1.5's shapes, the techniques in turn in one process; a quarter of an hour at 128
pixels. `quality`: edits of the demo's held-out images by edit_cli.py and the model of `make demo`;
their PSNR to the plain edits, edit_error_ratio and instruction_accuracy as in demo/evaluate.py;
also the PSNR of images that the demo's base model makes from captions; ten minutes.
docs/few-steps.md has the command of the LoRA, demo/make_tiny_vae.py makes the TAESD.

Rows go to benchmarks/results/images.json.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from diffusers import StableDiffusionInstructPix2PixPipeline, StableDiffusionXLPipeline
from PIL import Image
from tqdm import tqdm

from benchmarks.harness import (
    ACCELERATIONS,
    PROMPT,
    SCALES,
    TimingFlags,
    check_timing,
    in_new_process,
    psnr_db,
    time_in_this_process,
    time_in_turn,
    write_contenders,
)
from benchmarks.random_models import TINY_UNET, TINY_XL_UNET, make_pipeline, make_xl_pipeline
from benchmarks.rows import ROOT, describe_machine, run_benchmark, write_rows
from benchmarks.unet import CASES, SD15_EDIT, Case, count_flops, make_inputs
from demo.evaluate import load_edits, read_held_out_edits, summarize_edits
from diffusers_flax.models.tiny_vae import FlaxAutoencoderTiny
from diffusers_flax.parameters import replace_leaves
from diffusers_flax.pipelines.instruct_pix2pix import (
    EDIT_BRANCHES,
    FlaxStableDiffusionInstructPix2PixPipeline,
)
from diffusers_flax.pipelines.stable_diffusion import FlaxStableDiffusionPipeline
from diffusers_flax.pipelines.stable_diffusion_xl import FlaxStableDiffusionXLPipeline
from diffusers_flax.schedulers.factory import make_scheduler, scheduler_from_pretrained

Technique = Literal[tuple(ACCELERATIONS)]
# int8 convolutions take minutes on a CPU.
TIMED = tuple(x for x in ACCELERATIONS if x not in ("plain", "tgate", "int8", "int8 in all layers"))
GUIDANCE_SCALE = 5.0  # of SDXL images

BFLOAT16 = ("--dtype", "bfloat16")
STORAGE = {  # flags of edit_cli.py
    "storage int8": ("--storage", "int8"),
    "storage float8": ("--storage", "float8"),
    "bfloat16": BFLOAT16,
    "bfloat16, storage int8": (*BFLOAT16, "--storage", "int8"),
}


@dataclass(frozen=True, kw_only=True)
class EditTiming(TimingFlags):
    """Edited images with Stable Diffusion 1.5."""

    tiny: bool = False  # tiny models, to try this
    resolution: int = 256  # pixels
    num_inference_steps: int = 20
    output: str = "benchmarks/results/images.json"


@dataclass(frozen=True, kw_only=True)
class SdxlTiming(EditTiming):
    """SDXL images from text."""

    num_inference_steps: int = 4


def random_image(config):
    """A random PIL image."""
    shape = (config.resolution, config.resolution, 3)
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, np.uint8))


def our_edit(folder, config):
    """Our pipeline, as a function that edits a PIL image."""
    pipeline, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained(folder)
    replace_leaves(jax.device_put, params)
    image = random_image(config)

    def run():
        inputs = pipeline.prepare_inputs(PROMPT, image)
        key = jax.random.key(0)
        out = pipeline(*inputs, params, key, config.num_inference_steps, **SCALES)
        pipeline.numpy_to_pil(np.asarray(out.images))

    return run


def torch_edit(folder, config):
    """PyTorch's."""
    pipeline = StableDiffusionInstructPix2PixPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    steps = config.num_inference_steps
    return partial(pipeline, PROMPT, random_image(config), num_inference_steps=steps, **SCALES)


def run_edit(config):
    """Measure, write."""
    check_timing(config, side="resolution", num_inference_steps=1)
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        in_new_process(make_pipeline, folder, config.tiny, 8)
        contenders = {"ours": our_edit, "torch eager": torch_edit}
        figures = time_in_turn(contenders, (folder, config), config)
        scheduler, state = scheduler_from_pretrained(str(folder))
    # PNDM has one more call of the UNet than steps.
    num_calls = len(scheduler.set_timesteps(state, config.num_inference_steps).timesteps)
    case = Case(SD15_EDIT | (TINY_UNET if config.tiny else {}), config.resolution // 8)
    flops = num_calls * count_flops(case, make_inputs(case, len(EDIT_BRANCHES)), False)
    name = f"{'tiny' if config.tiny else 'sd15'}_{config.resolution}"
    name += f" edit, {config.num_inference_steps} steps 1"
    write_contenders(name, {"batch_size": 1, "flops": flops, **figures}, machine, config.output)


def our_image(folder, config):
    """Our pipeline, as a function that makes an image of a prompt."""
    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained(folder)
    replace_leaves(jax.device_put, params)
    side = config.resolution

    def run():
        ids, steps = pipeline.prepare_text_inputs([PROMPT]), config.num_inference_steps
        out = pipeline(ids, params, jax.random.key(0), steps, GUIDANCE_SCALE, side, side)
        pipeline.numpy_to_pil(np.asarray(out.images))

    return run


def torch_image(folder, config):
    """PyTorch's."""
    pipeline = StableDiffusionXLPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    size = {"height": config.resolution, "width": config.resolution}
    steps = config.num_inference_steps
    options = {"num_inference_steps": steps, "guidance_scale": GUIDANCE_SCALE}
    return partial(pipeline, PROMPT, **size, **options)


def run_sdxl(config):
    """Measure, write."""
    check_timing(config, side="resolution", num_inference_steps=1)
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        in_new_process(make_xl_pipeline, folder, config.tiny)
        contenders = {"ours": our_image, "torch eager": torch_image}
        figures = time_in_turn(contenders, (folder, config), config)
    unet = CASES["sdxl_1024"].config | (TINY_XL_UNET if config.tiny else {})
    case = Case(unet, config.resolution // 8)
    flops = config.num_inference_steps * count_flops(case, make_inputs(case, 2), False)
    name = f"{'tiny' if config.tiny else 'sdxl'}_{config.resolution}"
    name += f" images, {config.num_inference_steps} steps 1"
    write_contenders(name, {"batch_size": 1, "flops": flops, **figures}, machine, config.output)


@dataclass(frozen=True, kw_only=True)
class AcceleratedTiming(EditTiming):
    """Seconds of accelerated edits with Stable Diffusion 1.5."""

    resolution: int = 128  # pixels
    names: tuple[Technique, ...] = TIMED  # besides plain
    seconds: float = 0.0  # of a measurement, at least; one edit at least


def time_accelerated(folder, config):
    """Figures of time_in_this_process for edits with each technique."""
    first, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained(
        folder, scheduler=make_scheduler("ddim", {})[0]
    )
    params, image = jax.device_put(params, jax.devices()[0]), random_image(config)

    def edit(pipeline, params):
        inputs = pipeline.prepare_inputs(PROMPT, image)
        key = jax.random.key(0)
        out = pipeline(*inputs, params, key, config.num_inference_steps, **SCALES)
        jax.block_until_ready(out.images)

    contenders = {}
    for name in ("plain", *config.names):
        tiny = FlaxAutoencoderTiny()
        pipeline = replace(first, accelerate=ACCELERATIONS[name][0], tiny_vae=tiny)
        these = params | {"tiny_vae": jax.jit(tiny.init_weights)(jax.random.key(0))}
        pipeline.quantize_params(these)
        contenders[name] = (lambda: None), partial(edit, pipeline, these)
    return time_in_this_process(contenders, config.rounds, config.seconds)


def run_accelerations(config):
    """Measure, write."""
    check_timing(config, num_inference_steps=1)
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        in_new_process(make_pipeline, folder, config.tiny, 8)
        figures = in_new_process(time_accelerated, folder, config)
    plain, rows = figures["seconds"]["plain"], {}
    for name, seconds in figures["seconds"].items():
        size = f"{'tiny' if config.tiny else 'sd15'}_{config.resolution}"
        rows[f"accelerated {jax.devices()[0].device_kind} {size}, {name}"] = {
            "accelerate": ACCELERATIONS[name][0],
            "num_inference_steps": config.num_inference_steps,
            "first_seconds": figures["first_seconds"][name],
            "seconds": seconds,
            "times_as_fast": [a / b for a, b in zip(plain, seconds)],
        }
    write_rows(rows, machine, config.output)


@dataclass(frozen=True)
class QualityFlags:
    """Quality of accelerated images, with the demo's model."""

    demo_dir: Path = Path("demo/output")  # of `make demo`
    text_to_image_model: Path = Path("demo/base_model")  # makes images of the edits' captions
    lora: Path | None = None  # an LCM-LoRA of distill_lcm.py; also edits in 4, 2 and 1 steps
    taesd: Path | None = None  # a TAESD of demo/make_tiny_vae.py; also decodes with it
    names: tuple[Technique, ...] = tuple(name for name in ACCELERATIONS if name != "taesd")
    storage: bool = True  # also edits with weights stored in 8 bits, and in bfloat16
    output: str = "benchmarks/results/images.json"


def edit_held_out(config, flags, folder):
    """Edit the demo's held-out images into folder by edit_cli.py; returns load_edits' crops."""
    edits = [
        {
            "input": str(edit["original_image"].absolute()),
            "edit": edit["edit_prompt"],
            "output": str(folder / edit["output"].name),
        }
        for edit in read_held_out_edits(config.demo_dir)
    ]
    (folder / "edits.jsonl").write_text("".join(json.dumps(edit) + "\n" for edit in edits))
    command = [sys.executable, "edit_cli.py", "--model", str(config.demo_dir / "model")]
    command += ["--edits_jsonl", str(folder / "edits.jsonl"), "--resolution", "64"]
    command += ["--guidance_scale", "2", "--image_guidance_scale", "1.2", "--batch_size", "18"]
    command += ["--num_inference_steps", "20", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr.strip().splitlines()[-1].removeprefix("error: "))
    return load_edits(config.demo_dir, folder)


def text_to_images(model, captions, specs):
    """Images of captions by a text-to-image pipeline, 20 steps: float32 (n, 64, 64, 3)."""
    size = {"height": 64, "width": 64}  # of the demo's images
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(model, accelerate=specs)
    params = jax.device_put(params, jax.devices()[0])
    inputs = pipeline.prepare_inputs(captions), params, jax.random.key(0)
    return np.asarray(pipeline(*inputs, 20, guidance_scale=2.0, **size).images)


def quality_specs(config, family):
    """What is measured besides the plain pipeline.

    Args:
        config: QualityFlags.
        family: 0 for edits, 1 for text to image.

    Returns:
        {technique: specs of --accelerate}. The published TAESD does not fit the demo's latents.
    """
    specs = {name: ACCELERATIONS[name][family] for name in config.names if name != "plain"}
    specs = {name: tuple(spec.split()) for name, spec in specs.items() if spec is not None}
    return specs | ({"taesd": (f"taesd:path={config.taesd}",)} if config.taesd else {})


def quality_cases(config):
    """{name: (specs of --accelerate, further flags of edit_cli.py)}, the plain pipeline first."""
    cases = {"plain": ((), ())}
    cases |= {name: (specs, ()) for name, specs in quality_specs(config, 0).items()}
    if config.storage:
        cases |= {name: ((), flags) for name, flags in STORAGE.items()}
    for steps in (4, 2, 1) if config.lora else ():
        few = ("--num_inference_steps", str(steps))
        name = f"{steps} steps" if steps > 1 else "1 step"
        cases[name] = (), few
        few += ("--guidance_scale", "1", "--image_guidance_scale", "1")
        cases[f"{name}, no guidance"] = (), few
        few += ("--scheduler", "lcm", "--lora", str(config.lora))
        cases[f"{name}, LCM-LoRA"] = (), few
        if config.taesd and steps == 4:
            specs = ("int8", f"taesd:path={config.taesd}")
            cases[f"{name}, LCM-LoRA, int8, taesd"] = specs, few
    return cases


def text_to_image_rows(config):
    """Rows of images of the held-out edits' captions with each acceleration."""
    captions = sorted({edit["edited_prompt"] for edit in read_held_out_edits(config.demo_dir)})
    plain = text_to_images(config.text_to_image_model, captions, ())
    rows = {}
    for name, specs in tqdm(quality_specs(config, 1).items(), "text to image", unit="technique"):
        images = text_to_images(config.text_to_image_model, captions, specs)
        rows[f"text to image {name}"] = {
            "accelerate": " ".join(specs),
            "num_images": len(captions),
            "psnr": psnr_db(images, plain),
        }
    return rows


def run_quality(config):
    """Edit, measure, write."""
    if "taesd" in config.names and config.taesd is None:
        raise ValueError("--names taesd needs --taesd, the directory of demo/make_tiny_vae.py")
    edits = config.demo_dir / "held_out" / "edits.jsonl"
    if not ((config.demo_dir / "model").is_dir() and edits.is_file()):
        raise ValueError(f"--demo_dir {config.demo_dir} is not complete; run `make demo`")
    if not config.text_to_image_model.is_dir():
        raise ValueError(f"--text_to_image_model {config.text_to_image_model} is not a directory")
    for flag in ("lora", "taesd"):
        if (path := getattr(config, flag)) and not path.is_dir():
            raise ValueError(f"--{flag} {path} is not a directory")
    machine, plain, cases = describe_machine(), None, quality_cases(config)
    with tempfile.TemporaryDirectory() as temporary:
        for name, (specs, flags) in tqdm(cases.items(), unit="technique"):
            folder = Path(temporary) / name.replace(" ", "_")
            folder.mkdir()
            if specs:
                flags = (*flags, "--accelerate", *specs)
            crops = edit_held_out(config, flags, folder)
            plain = plain or crops
            pairs = [
                (crops[key]["results"][i], plain[key]["results"][i])
                for key in crops
                for i in crops[key]["results"]
            ]
            measured = summarize_edits(crops)
            row = {
                "accelerate": " ".join(specs),
                "flags": " ".join(flags),
                "psnr": psnr_db(*map(np.stack, zip(*pairs))),
                "edit_error_ratio": measured["edit_error_ratio"],
                "instruction_accuracy": measured["instruction_accuracy"],
            }
            write_rows({f"quality {name}": row}, machine, config.output)
    write_rows(text_to_image_rows(config), machine, config.output)


SUBCOMMANDS = {
    "edit": EditTiming,
    "sdxl": SdxlTiming,
    "accelerations": AcceleratedTiming,
    "quality": QualityFlags,
}
RUN = {
    EditTiming: run_edit,
    SdxlTiming: run_sdxl,
    AcceleratedTiming: run_accelerations,
    QualityFlags: run_quality,
}


def main(args=None):
    """Command line."""
    run_benchmark(SUBCOMMANDS, lambda config: RUN[type(config)](config), __doc__, args)


if __name__ == "__main__":
    main()
