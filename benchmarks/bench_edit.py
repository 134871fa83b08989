"""Edited pictures, ours against PyTorch diffusers' pipeline, in turn in one run.

    python benchmarks/bench_edit.py

Edits pictures with Stable Diffusion 1.5's shapes and random weights, 20 steps with both guidance
scales: FlaxStableDiffusionInstructPix2PixPipeline, and PyTorch's pipeline with the same scheduler,
on a GPU in bfloat16 and also with UNet and VAE through torch.compile, on a CPU in float32. Each
measurement is a process of its own: from its start to the first edit ("first", with loading and
compiling), then edits for --seconds. --batch_sizes 1 16 measures both.

The share of the peak counts the UNet's FLOPs alone. Tiny, in a minute:

    python benchmarks/bench_edit.py --size tiny --resolution 64 --rounds 1 --output edit.json

Adds to benchmarks/results/edit.json, a row for each device, size and batch, and prints a table.
Needs 12 GB of memory; a quarter of an hour on two cores that do nothing else.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from diffusers import StableDiffusionInstructPix2PixPipeline
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_unet import (  # noqa: E402
    SD15,
    Case,
    count_flops,
    make_inputs,
)
from benchmarks.full_size import (  # noqa: E402
    TINY_UNET,
    command_line,
    describe_machine,
    in_new_process,
    make_pipeline,
)
from benchmarks.side_by_side import (  # noqa: E402
    PACKAGES,
    check_config,
    contenders_on,
    find_device,
    make_row,
    on_device,
    report,
    time_in_turn,
    torch_pipeline,
)
from pipeline_flax_stable_diffusion_instruct_pix2pix import (  # noqa: E402
    BRANCHES,
    FlaxStableDiffusionInstructPix2PixPipeline,
)
from scheduling_flax import scheduler_from_pretrained  # noqa: E402

PROMPT = "invert the colors"
SCALES = {"guidance_scale": 7.5, "image_guidance_scale": 1.5}


@dataclass(frozen=True)
class Config:
    size: Literal["sd15", "tiny"] = "sd15"
    resolution: int = 256  # pixels
    batch_sizes: tuple[int, ...] = (1,)  # pictures at once
    num_inference_steps: int = 20
    rounds: int = 2  # each contender is measured once in each
    seconds: float = 30.0  # of a measurement, at least; one batch at least
    output: str = "benchmarks/results/edit.json"


def make_pictures(config, batch_size):
    """Random pictures, PIL."""
    shape = (batch_size, config.resolution, config.resolution, 3)
    return [Image.fromarray(x) for x in np.random.default_rng(0).integers(0, 256, shape, np.uint8)]


def our_edit(folder, config, batch_size, device):
    """Ours, from pictures to pictures."""
    dtype = jnp.bfloat16 if device == "cuda" else jnp.float32
    pipeline, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained(
        folder, dtype=dtype
    )
    params = on_device(params, dtype)
    pictures = make_pictures(config, batch_size)

    def run():
        ids, images = pipeline.prepare_inputs([PROMPT] * batch_size, pictures)
        key = jax.random.key(0)
        out = pipeline(ids, images, params, key, config.num_inference_steps, **SCALES)
        pipeline.numpy_to_pil(np.asarray(out.images))

    return run


def torch_edit(folder, config, batch_size, device, compiled):
    """PyTorch's."""
    pipeline = torch_pipeline(StableDiffusionInstructPix2PixPipeline, folder, device, compiled)
    pictures = make_pictures(config, batch_size)

    def run():
        steps = config.num_inference_steps
        pipeline([PROMPT] * batch_size, pictures, num_inference_steps=steps, **SCALES)

    return run


def bench(folder, config, batch_size, device):
    """A row of results, as in side_by_side.py."""
    contenders = contenders_on(device, our_edit, torch_edit)
    args = (folder, config, batch_size, device)
    figures = time_in_turn(contenders, args, config.rounds, config.seconds)
    case = Case(SD15 | (TINY_UNET if config.size == "tiny" else {}), config.resolution // 8)
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


def run(config):
    """Measure, write, print."""
    check_config(config, "num_inference_steps", "batch_sizes")
    if config.resolution < 64 or config.resolution % 64:
        raise ValueError(f"resolution={config.resolution} must be a multiple of 64")
    device, machine = find_device(), describe_machine(PACKAGES)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        in_new_process(make_pipeline, folder, config.size == "tiny", 8)
        rows = (bench(folder, config, batch_size, device) for batch_size in config.batch_sizes)
        report(rows, machine, config.output)


def main(args=None):
    """Command line."""
    command_line(Config, __doc__, run, args)


if __name__ == "__main__":
    main()
