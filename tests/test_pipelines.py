"""Text-to-image and image-to-image against the PyTorch pipelines of the same weights."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
)
from tiny_models import SCHEDULERS, make_tiny_pipeline, make_tiny_xl

from pipeline_flax_stable_diffusion import (
    FlaxStableDiffusionImg2ImgPipeline,
    FlaxStableDiffusionPipeline,
)
from pipeline_flax_stable_diffusion_xl import (
    FlaxStableDiffusionXLImg2ImgPipeline,
    FlaxStableDiffusionXLPipeline,
)
from scheduling_flax import make_scheduler

# diffusers' Euler scheduler under NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")

PROMPTS = ["make it red", "it"]
NEGATIVE = "red"
KINDS = {
    "sd": (StableDiffusionPipeline, FlaxStableDiffusionPipeline),
    "sd image": (StableDiffusionImg2ImgPipeline, FlaxStableDiffusionImg2ImgPipeline),
    "xl": (StableDiffusionXLPipeline, FlaxStableDiffusionXLPipeline),
    "xl image": (StableDiffusionXLImg2ImgPipeline, FlaxStableDiffusionXLImg2ImgPipeline),
    "xl refiner": (StableDiffusionXLImg2ImgPipeline, FlaxStableDiffusionXLImg2ImgPipeline),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for each kind; the posterior of its VAE is a point, so that nothing is drawn."""
    root = tmp_path_factory.mktemp("models")
    options = dict(in_channels=4, vae_channels=(8, 8, 16, 16))
    sd = make_tiny_pipeline(root / "sd", **options)
    xl = make_tiny_xl(root / "xl")
    refiner = make_tiny_xl(root / "refiner", refiner=True)
    for folder in (sd, xl, refiner):
        vae = AutoencoderKL.from_pretrained(folder / "vae")
        with torch.no_grad():
            vae.quant_conv.weight[4:] = 0
            vae.quant_conv.bias[4:] = -40
        vae.save_pretrained(folder / "vae")
    return {"sd": sd, "sd image": sd, "xl": xl, "xl image": xl, "xl refiner": refiner}


def psnr(ours, theirs):
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    return -10 * np.log10(np.mean((ours - theirs) ** 2))


def cases():
    """Every pipeline with three schedulers, with and without a negative prompt; most are slow."""
    for kind in KINDS:
        for scheduler in ("ddim", "euler", "dpmsolver++"):
            yield kind, scheduler, "plain"
            slow = [] if scheduler == "euler" else [pytest.mark.slow]
            yield pytest.param(kind, scheduler, "negative", marks=slow)
        if kind in ("sd", "xl"):
            yield kind, "euler", "off"
        if kind in ("sd", "xl", "xl image"):  # PyTorch's image-to-image of SD has none
            yield kind, "euler", "rescaled"


@pytest.mark.parametrize(("kind", "scheduler", "guidance"), list(cases()))
@torch.no_grad()
def test_equals_pytorch(folders, kind, scheduler, guidance):
    torch_class, flax_class = KINDS[kind]
    extra = {"safety_checker": None} if kind.startswith("sd") else {"add_watermarker": False}
    theirs = torch_class.from_pretrained(folders[kind], low_cpu_mem_usage=False, **extra)
    theirs.set_progress_bar_config(disable=True)
    theirs.scheduler = SCHEDULERS[scheduler][0].from_config(theirs.scheduler.config)
    ours, params = flax_class.from_pretrained(folders[kind])
    ours = replace_scheduler(ours, params, scheduler)

    rng = np.random.default_rng(0)
    noise = rng.standard_normal((2, 4, 8, 6), np.float32)
    picture = rng.random((2, 64, 48, 3), np.float32)
    options = dict(num_inference_steps=6, guidance_scale=1.0 if guidance == "off" else 5.0)
    negative = guidance == "negative"
    if guidance == "rescaled":
        options["guidance_rescale"] = 0.7
    if kind.endswith(("image", "refiner")):
        options["strength"] = 0.7
        expected = call_with_noise(
            theirs,
            noise,
            prompt=PROMPTS,
            image=torch.from_numpy(picture).permute(0, 3, 1, 2),
            negative_prompt=[NEGATIVE] * 2 if negative else None,
            **options,
        )
        prompt_ids, image = ours.prepare_inputs(PROMPTS, picture)
        inputs = (prompt_ids, image, params, jax.random.key(0))
        options["noise"] = noise
    else:
        expected = theirs(
            PROMPTS,
            height=64,
            width=48,
            latents=torch.from_numpy(noise),
            negative_prompt=[NEGATIVE] * 2 if negative else None,
            output_type="np",
            **options,
        ).images
        inputs = (ours.prepare_inputs(PROMPTS), params, jax.random.key(0))
        options |= dict(latents=noise, height=64, width=48)
    if negative:
        options["neg_prompt_ids"] = ours.prepare_text_inputs([NEGATIVE] * 2)
    images = ours(*inputs, **options).images
    assert images.shape == (2, 64, 48, 3) and images.dtype == jnp.float32
    assert psnr(images, expected) > 60
    assert np.std(expected) > 0.01


def replace_scheduler(pipeline, params, name):
    """The pipeline with another scheduler, made from its own one's options."""
    scheduler, params["scheduler"] = make_scheduler(name, pipeline.scheduler.config)
    return replace(pipeline, scheduler=scheduler)


def call_with_noise(pipeline, noise, **arguments):
    """A PyTorch image-to-image call that adds this noise."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("stable_diffusion", "stable_diffusion_xl"):
            name = "xl_" if module.endswith("xl") else ""
            patch.setattr(
                f"diffusers.pipelines.{module}.pipeline_stable_diffusion_{name}img2img.randn_tensor",
                lambda *args, **kwargs: torch.from_numpy(noise),
            )
        return pipeline(output_type="np", **arguments).images
