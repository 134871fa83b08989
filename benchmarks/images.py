"""Edited images and SDXL images against PyTorch diffusers' pipelines, alternating in one run.

    python -m benchmarks.images edit
    python -m benchmarks.images sdxl --image_size 1024 --num_inference_steps 30 --batch_sizes 1 8

`edit` edits images with Stable Diffusion 1.5's shapes and random weights, 20 steps, both guidance
scales. `sdxl` makes images from text with SDXL's shapes and guidance; its defaults, 256 pixels and
4 steps, are for a CPU, the command above is for a GPU. PyTorch's pipelines use the same scheduler;
on a GPU both compute in bfloat16 and PyTorch also runs with UNet and VAE through torch.compile, on
a CPU both compute in float32. Each measurement runs in its own process: the time from its start to
the first image ("first", with loading and compiling), then images for --seconds. The share of the
peak counts the UNet's FLOPs only. Tiny, a minute each:

    python -m benchmarks.images edit --size tiny --resolution 64 --rounds 1 --output images.json
    python -m benchmarks.images sdxl --size tiny --image_size 64 --rounds 1 --output images.json

    python -m benchmarks.images accelerations
    python -m benchmarks.images quality --lora demo/output/lcm --taesd demo/output/taesd

compare --accelerate's techniques with the plain pipeline. `accelerations`: seconds of an edit with
Stable Diffusion 1.5's shapes, the techniques in turn in one process; a quarter of an hour at 128
pixels. `quality`: edits of the demo's held-out images by edit_cli.py and the model of `make demo`;
their PSNR to the plain edits, edit_error_ratio and instruction_accuracy as in demo/evaluate.py;
also the PSNR of images that the demo's base model makes from captions; ten minutes.
docs/few-steps.md has the command of the LoRA, demo/make_tiny_vae.py makes the TAESD.

Rows go to benchmarks/results/images.json. `edit` needs 12 GB of memory, `sdxl` 18 GB and 14 GB of
disk; a quarter of an hour on two otherwise idle cores.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from diffusers import StableDiffusionInstructPix2PixPipeline, StableDiffusionXLPipeline
from PIL import Image
from tqdm import tqdm

from benchmarks.harness import (
    ACCELERATIONS,
    PROMPT,
    SCALES,
    check_config,
    contenders_on,
    find_device,
    in_new_process,
    make_row,
    params_on_device,
    psnr_db,
    time_in_this_process,
    time_in_turn,
    torch_pipeline,
    write_contenders,
)
from benchmarks.random_models import END_OF_TEXT, TINY_UNET, VAE, make_pipeline, write_pipeline
from benchmarks.rows import (
    PACKAGES,
    ROOT,
    describe_machine,
    psnr_cell,
    report,
    rows_of,
    run_benchmark,
    write_rows,
)
from benchmarks.unet import CASES, SD15_EDIT, Case, count_flops, make_inputs
from demo.evaluate import load_edits, read_held_out_edits, summarize_edits
from diffusers_flax.models.clip import FlaxCLIPTextModelWithProjectionModule, FlaxCLIPTextModule
from diffusers_flax.models.tiny_vae import FlaxAutoencoderTiny
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.pipelines.instruct_pix2pix import (
    BRANCHES,
    FlaxStableDiffusionInstructPix2PixPipeline,
)
from diffusers_flax.pipelines.stable_diffusion import FlaxStableDiffusionPipeline
from diffusers_flax.pipelines.stable_diffusion_xl import FlaxStableDiffusionXLPipeline
from diffusers_flax.published_configs import PUBLISHED_CONFIGS
from diffusers_flax.schedulers.factory import make_scheduler, scheduler_from_pretrained

Technique = Literal[tuple(ACCELERATIONS)]
# int8 convolutions take minutes on a CPU.
TIMED = tuple(x for x in ACCELERATIONS if x not in ("plain", "tgate", "int8", "int8 in all layers"))

BFLOAT16 = ("--dtype", "bfloat16")
STORAGE = {  # flags of edit_cli.py
    "storage int8": ("--storage", "int8"),
    "storage float8": ("--storage", "float8"),
    "bfloat16": BFLOAT16,
    "bfloat16, storage int8": (*BFLOAT16, "--storage", "int8"),
}


@dataclass(frozen=True)
class Edit:
    """Edited images with Stable Diffusion 1.5."""

    size: Literal["sd15", "tiny"] = "sd15"
    resolution: int = 256  # pixels
    batch_sizes: tuple[int, ...] = (1,)  # images at once
    num_inference_steps: int = 20
    rounds: int = 2  # each contender is measured once in each
    seconds: float = 30.0  # of a measurement, at least; one batch at least
    output: str = "benchmarks/results/images.json"


def make_images(config, batch_size):
    """Random images, PIL."""
    shape = (batch_size, config.resolution, config.resolution, 3)
    return [Image.fromarray(x) for x in np.random.default_rng(0).integers(0, 256, shape, np.uint8)]


def our_edit(folder, config, batch_size, device):
    """Our pipeline, as a function that makes a batch from PIL images."""
    dtype = jnp.bfloat16 if device == "cuda" else jnp.float32
    pipeline, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained(
        folder, dtype=dtype
    )
    params = params_on_device(params, dtype)
    images = make_images(config, batch_size)

    def run():
        ids, pixels = pipeline.prepare_inputs([PROMPT] * batch_size, images)
        key = jax.random.key(0)
        out = pipeline(ids, pixels, params, key, config.num_inference_steps, **SCALES)
        pipeline.numpy_to_pil(np.asarray(out.images))

    return run


def torch_edit(folder, config, batch_size, device, compiled):
    """PyTorch's."""
    pipeline = torch_pipeline(StableDiffusionInstructPix2PixPipeline, folder, device, compiled)
    images = make_images(config, batch_size)

    def run():
        steps = config.num_inference_steps
        pipeline([PROMPT] * batch_size, images, num_inference_steps=steps, **SCALES)

    return run


def bench_edit(folder, config, batch_size, device):
    """A row of results, see harness.make_row."""
    contenders = contenders_on(device, our_edit, torch_edit)
    args = (folder, config, batch_size, device)
    figures = time_in_turn(contenders, args, config.rounds, config.seconds)
    case = Case(SD15_EDIT | (TINY_UNET if config.size == "tiny" else {}), config.resolution // 8)
    inputs = make_inputs(case, len(BRANCHES) * batch_size)
    scheduler, state = scheduler_from_pretrained(str(folder))
    # PNDM has one more call of the UNet than steps.
    num_calls = len(scheduler.set_timesteps(state, config.num_inference_steps).timesteps)
    return make_row(
        f"{config.size}_{config.resolution}",
        f"edit, {config.num_inference_steps} steps",
        batch_size,
        num_calls * count_flops(case, inputs, False),
        device,
        figures,
    )


def run_edit(config):
    """Measure, write, print."""
    check_config(config, "num_inference_steps", "batch_sizes")
    if config.resolution < 64 or config.resolution % 64:
        raise ValueError(f"--resolution {config.resolution} must be a multiple of 64")
    device, machine = find_device(), describe_machine(PACKAGES)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        in_new_process(make_pipeline, folder, config.size == "tiny", 8)
        rows = (bench_edit(folder, config, batch_size, device) for batch_size in config.batch_sizes)
        write_contenders(rows, machine, config.output)


GUIDANCE_SCALE = 5.0
TINY = TINY_UNET | {"transformer_layers_per_block": 1, "attention_head_dim": 8}


@dataclass(frozen=True)
class Sdxl:
    """SDXL images from text."""

    size: Literal["sdxl", "tiny"] = "sdxl"
    image_size: int = 256  # pixels of a side
    batch_sizes: tuple[int, ...] = (1,)  # images at once
    num_inference_steps: int = 4
    rounds: int = 2  # each contender is measured once in each
    seconds: float = 30.0  # of a measurement, at least; one batch at least
    output: str = "benchmarks/results/images.json"


def make_sdxl(folder, size):
    """Write the pipeline's directory; call it in a new process, which frees the memory."""
    jax.config.update("jax_platforms", "cpu")
    ids = {"bos_token_id": END_OF_TEXT - 1, "eos_token_id": END_OF_TEXT}
    ids |= {"pad_token_id": END_OF_TEXT}
    configs = {
        name: dict(PUBLISHED_CONFIGS["stable-diffusion-xl-base-1.0"][name])
        for name in ("unet", "vae", "text_encoder", "text_encoder_2")
    }
    if size == "tiny":
        configs["unet"] |= TINY
        configs["vae"] |= {"block_out_channels": (32,) * 4, "layers_per_block": 1}
        for name in ("text_encoder", "text_encoder_2"):
            configs[name] |= {"vocab_size": END_OF_TEXT + 1, "num_hidden_layers": 2}
    write_pipeline(
        folder,
        {
            "text_encoder": FlaxCLIPTextModule(**configs["text_encoder"], **ids),
            "text_encoder_2": FlaxCLIPTextModelWithProjectionModule(
                **configs["text_encoder_2"], **ids
            ),
            "vae": VAE.clone(**configs["vae"]),
            "unet": FlaxUNet2DConditionModel(**configs["unet"]),
        },
    )


def our_images(folder, config, batch_size, device):
    """Our pipeline, as a function that makes a batch from prompts."""
    dtype = jnp.bfloat16 if device == "cuda" else jnp.float32
    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained(folder, dtype=dtype)
    params = params_on_device(params, dtype)

    def run():
        out = pipeline(
            pipeline.prepare_text_inputs([PROMPT] * batch_size),
            params,
            jax.random.key(0),
            config.num_inference_steps,
            GUIDANCE_SCALE,
            config.image_size,
            config.image_size,
        )
        pipeline.numpy_to_pil(np.asarray(out.images))

    return run


def torch_images(folder, config, batch_size, device, compiled):
    """PyTorch's."""
    pipeline = torch_pipeline(StableDiffusionXLPipeline, folder, device, compiled)

    def run():
        pipeline(
            [PROMPT] * batch_size,
            height=config.image_size,
            width=config.image_size,
            num_inference_steps=config.num_inference_steps,
            guidance_scale=GUIDANCE_SCALE,
        )

    return run


def bench_sdxl(folder, config, batch_size, device):
    """A row of results, see harness.make_row."""
    contenders = contenders_on(device, our_images, torch_images)
    args = (folder, config, batch_size, device)
    figures = time_in_turn(contenders, args, config.rounds, config.seconds)
    unet = CASES["sdxl_1024"].config | (TINY if config.size == "tiny" else {})
    case = Case(unet, config.image_size // 8)
    flops = count_flops(case, make_inputs(case, 2 * batch_size), False)
    return make_row(
        f"{config.size}_{config.image_size}",
        f"images, {config.num_inference_steps} steps",
        batch_size,
        config.num_inference_steps * flops,
        device,
        figures,
    )


def run_sdxl(config):
    """Measure, write, print."""
    check_config(config, "num_inference_steps", "batch_sizes")
    if config.image_size < 64 or config.image_size % 64:
        raise ValueError(f"--image_size {config.image_size} must be a multiple of 64")
    device, machine = find_device(), describe_machine(PACKAGES)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        in_new_process(make_sdxl, folder, config.size)
        rows = (bench_sdxl(folder, config, batch_size, device) for batch_size in config.batch_sizes)
        write_contenders(rows, machine, config.output)


@dataclass(frozen=True)
class Accelerations:
    """Seconds of accelerated edits with Stable Diffusion 1.5."""

    size: Literal["sd15", "tiny"] = "sd15"
    resolution: int = 128  # pixels
    num_inference_steps: int = 20
    names: tuple[Technique, ...] = TIMED  # besides plain
    rounds: int = 2  # each technique is measured once in each
    seconds: float = 0.0  # of a measurement, at least; one edit at least
    output: str = "benchmarks/results/images.json"


def accelerated_edits(folder, config):
    """{name: (prepare, run)}, see time_in_this_process."""
    first, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained(
        folder, scheduler=make_scheduler("ddim", {})[0]
    )
    params = params_on_device(params, jnp.float32)
    images = make_images(config, 1)

    def edit(pipeline, params):
        ids, pixels = pipeline.prepare_inputs([PROMPT], images)
        key = jax.random.key(0)
        out = pipeline(ids, pixels, params, key, config.num_inference_steps, **SCALES)
        jax.block_until_ready(out.images)

    contenders = {}
    for name in ("plain", *config.names):
        tiny = FlaxAutoencoderTiny()
        pipeline = replace(first, accelerate=ACCELERATIONS[name][0], tiny_vae=tiny)
        these = params | {"tiny_vae": jax.jit(tiny.init_weights)(jax.random.key(0))}
        pipeline.quantize_params(these)
        contenders[name] = (lambda: None, partial(edit, pipeline, these))
    return contenders


def measure_accelerations(folder, config):
    """figures of time_in_this_process."""
    return time_in_this_process(accelerated_edits(folder, config), config.rounds, config.seconds)


def run_accelerations(config):
    """Measure, write, print."""
    check_config(config, "num_inference_steps")
    machine = describe_machine(PACKAGES)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        in_new_process(make_pipeline, folder, config.size == "tiny", 8)
        figures = in_new_process(measure_accelerations, folder, config)
    plain = figures["seconds"]["plain"]
    kind, rows = jax.devices()[0].device_kind, {}
    for name, seconds in figures["seconds"].items():
        rows[f"accelerated {kind} {config.size}_{config.resolution}, {name}"] = {
            "accelerate": ACCELERATIONS[name][0],
            "num_inference_steps": config.num_inference_steps,
            "first_seconds": figures["first_seconds"][name],
            "seconds": seconds,
            "times_as_fast": [a / b for a, b in zip(plain, seconds)],
        }
    results = write_rows(rows, machine, config.output)
    report(format_accelerated(results), config.output)


def format_accelerated(results):
    """Markdown of the rows of accelerations."""
    lines = ["| | s | times as fast as plain |", "|---|---|---|"]
    for name, row in rows_of(results, "accelerated").items():
        ratios = row["times_as_fast"]
        lines.append(
            f"| {name} | {statistics.median(row['seconds']):.3g} | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f}) |"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Quality:
    """What accelerations cost in quality, on the demo's model."""

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
        config: Quality.
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
    """Edit, measure, write, print."""
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
    machine, plain, cases = describe_machine(PACKAGES), None, quality_cases(config)
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
    results = write_rows(text_to_image_rows(config), machine, config.output)
    report(format_quality(results), config.output)


def format_quality(results):
    """Markdown of the rows of quality."""
    lines = ["| | PSNR | edit_error_ratio | instruction_accuracy |", "|---|---|---|---|"]
    for name, row in rows_of(results, "quality").items():
        lines.append(
            f"| {name} | {psnr_cell(row['psnr'])} | {row['edit_error_ratio']:.3f} | "
            f"{row['instruction_accuracy']:.3f} |"
        )
    for name, row in rows_of(results, "text to image").items():
        lines.append(f"| text to image, {name} | {psnr_cell(row['psnr'])} | | |")
    return "\n".join(lines)


SUBCOMMANDS = {
    Edit: run_edit,
    Sdxl: run_sdxl,
    Accelerations: run_accelerations,
    Quality: run_quality,
}


def main(args=None):
    """Command line."""
    run_benchmark(SUBCOMMANDS, __doc__, args)


if __name__ == "__main__":
    main()
