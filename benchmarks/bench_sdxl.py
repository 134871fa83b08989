"""SDXL pictures, ours against PyTorch diffusers' pipeline, in turn in one run.

    python benchmarks/bench_sdxl.py --image_size 1024 --num_inference_steps 30 --batch_sizes 1 8

Makes pictures with SDXL's shapes and random weights, with guidance: FlaxStableDiffusionXLPipeline,
and PyTorch's pipeline with the same scheduler, on a GPU in bfloat16 and also with UNet and VAE
through torch.compile, on a CPU in float32. Each measurement is a process of its own: from its start
to the first picture ("first", with loading and compiling), then pictures for --seconds. The
defaults are for a CPU: 256 pixels and 4 steps; the command above is for a GPU.

The share of the peak counts the UNet's FLOPs alone. Tiny, in a minute:

    python benchmarks/bench_sdxl.py --size tiny --image_size 64 --rounds 1 --output sdxl.json

Adds to benchmarks/results/sdxl.json, a row for each device, size and batch, and prints a table.
Needs 14 GB of disk and, at full size on a CPU, 18 GB of memory.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from diffusers import StableDiffusionXLPipeline

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_start import write_pipeline  # noqa: E402
from benchmarks.bench_unet import CASES, Case, count_flops, make_inputs  # noqa: E402
from benchmarks.full_size import (  # noqa: E402
    END_OF_TEXT,
    TINY_UNET,
    VAE,
    command_line,
    describe_machine,
    in_new_process,
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
from config_flax import PUBLISHED_CONFIGS  # noqa: E402
from modeling_flax_clip import FlaxCLIPTextModelWithProjectionModule, FlaxCLIPTextModule  # noqa: E402
from modeling_flax_unet import FlaxUNet2DConditionModel  # noqa: E402
from pipeline_flax_stable_diffusion_xl import FlaxStableDiffusionXLPipeline  # noqa: E402

PROMPT = "invert the colors"
GUIDANCE_SCALE = 5.0
TINY = TINY_UNET | {"transformer_layers_per_block": 1, "attention_head_dim": 8}


@dataclass(frozen=True)
class Config:
    size: Literal["sdxl", "tiny"] = "sdxl"
    image_size: int = 256  # pixels of a side
    batch_sizes: tuple[int, ...] = (1,)  # pictures at once
    num_inference_steps: int = 4
    rounds: int = 2  # each contender is measured once in each
    seconds: float = 30.0  # of a measurement, at least; one batch at least
    output: str = "benchmarks/results/sdxl.json"


def make_model(folder, size):
    """Write the pipeline's folder; in a process of its own, so that its memory is returned."""
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


def our_pictures(folder, config, batch_size, device):
    """Ours, from prompts to pictures."""
    dtype = jnp.bfloat16 if device == "cuda" else jnp.float32
    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained(folder, dtype=dtype)
    params = on_device(params, dtype)

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


def torch_pictures(folder, config, batch_size, device, compiled):
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


def bench(folder, config, batch_size, device):
    """A row of results, as in side_by_side.py."""
    contenders = contenders_on(device, our_pictures, torch_pictures)
    args = (folder, config, batch_size, device)
    figures = time_in_turn(contenders, args, config.rounds, config.seconds)
    unet = CASES["sdxl_1024"].config | (TINY if config.size == "tiny" else {})
    case = Case(unet, config.image_size // 8)
    flops = count_flops(case, make_inputs(case, 2 * batch_size), False)
    return make_row(
        f"{config.size}_{config.image_size}",
        f"pictures, {config.num_inference_steps} steps",
        batch_size,
        config.num_inference_steps * flops,
        device,
        figures,
    )


def run(config):
    """Measure, write, print."""
    check_config(config, "num_inference_steps", "batch_sizes")
    if config.image_size < 64 or config.image_size % 64:
        raise ValueError(f"image_size={config.image_size} must be a multiple of 64")
    device, machine = find_device(), describe_machine(PACKAGES)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        in_new_process(make_model, folder, config.size)
        rows = (bench(folder, config, batch_size, device) for batch_size in config.batch_sizes)
        report(rows, machine, config.output)


def main(args=None):
    """Command line."""
    command_line(Config, __doc__, run, args)


if __name__ == "__main__":
    main()
