"""Text-to-image and image-to-image against the PyTorch pipelines of the same weights."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import (
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
)
from helpers import matmuls_of_text, psnr, slow
from references import call_theirs, remove_variance
from tiny_models import SCHEDULERS, make_tiny_pipeline, make_tiny_xl

from diffusers_flax.messages import warn_once
from diffusers_flax.models.vae import FlaxAutoencoderKL
from diffusers_flax.pipelines import running, sampling
from diffusers_flax.pipelines.sampling import decode
from diffusers_flax.pipelines.stable_diffusion import (
    FlaxStableDiffusionImg2ImgPipeline,
    FlaxStableDiffusionPipeline,
)
from diffusers_flax.pipelines.stable_diffusion_xl import (
    FlaxStableDiffusionXLImg2ImgPipeline,
    FlaxStableDiffusionXLPipeline,
)
from diffusers_flax.schedulers.factory import make_scheduler

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
    """A directory per kind of model, whose VAE has a posterior without variance."""
    root = tmp_path_factory.mktemp("models")
    options = dict(in_channels=4, vae_channels=(8, 8, 16, 16))
    sd = make_tiny_pipeline(root / "sd", **options)
    xl = make_tiny_xl(root / "xl")
    refiner = make_tiny_xl(root / "refiner", refiner=True, force_zeros=False)
    for folder in (sd, xl, refiner):
        remove_variance(folder)
    return {"sd": sd, "sd image": sd, "xl": xl, "xl image": xl, "xl refiner": refiner}


FAST_CASES = (
    ("sd", "pndm", "plain"),
    ("sd image", "ddim", "plain"),
    ("xl", "dpmsolver++", "negative"),
)


def cases():
    """Every pipeline with three schedulers, and with a negative prompt; most are slow."""
    for kind in KINDS:
        found = [("ddim", "plain"), ("euler", "negative"), ("dpmsolver++", "negative")]
        if kind in ("sd", "xl", "sd image"):  # below strength 1 PyTorch is a timestep late with it
            found += [("pndm", "plain")]
        if kind in ("sd", "xl"):
            found += [("euler", "off")]
        if kind in ("sd", "xl", "xl image"):  # PyTorch's image-to-image of SD has none
            found += [("euler", "rescaled")]
        for case in ((kind, *x) for x in found):
            yield case if case in FAST_CASES else pytest.param(*case, marks=pytest.mark.slow)


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
    input_image = rng.random((2, 64, 48, 3), np.float32)
    options = dict(num_inference_steps=6, guidance_scale=5.0)
    if guidance == "off":  # as the distilled models' cards have it
        options["guidance_scale"] = 0.0 if kind == "xl" else 1.0
    negative = guidance == "negative"
    if guidance == "rescaled":
        options["guidance_rescale"] = 0.7
    if kind.endswith(("image", "refiner")):
        options["strength"] = 1.0 if scheduler == "pndm" else 0.7
        expected = call_theirs(
            theirs,
            noise,
            prompt=PROMPTS,
            image=torch.from_numpy(input_image).permute(0, 3, 1, 2),
            negative_prompt=[NEGATIVE] * 2 if negative else None,
            **options,
        )
        prompt_ids, image = ours.prepare_inputs(PROMPTS, input_image)
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


@pytest.fixture(scope="module")
def xl(folders):
    return FlaxStableDiffusionXLPipeline.from_pretrained(folders["xl"])


@pytest.mark.slow
def test_bfloat16(folders, xl):
    """Weights and computation in bfloat16, the VAE in float32 and the scheduler always."""
    pipeline, params = xl
    key = jax.random.key(0)
    options = dict(num_inference_steps=3, guidance_scale=2.0)
    expected = pipeline(pipeline.prepare_inputs(PROMPTS), params, key, **options).images
    assert pipeline.compute_vae.config.force_upcast
    half, params = FlaxStableDiffusionXLPipeline.from_pretrained(folders["xl"], dtype=jnp.bfloat16)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params)  # the scheduler's as well
    assert half.vae.dtype == half.unet.dtype == jnp.bfloat16
    assert half.compute_vae.dtype == jnp.float32
    images = half(half.prepare_inputs(PROMPTS), params, key, **options).images
    assert images.dtype == jnp.float32 and psnr(images, expected) > 30
    assert decoder_types(half, params) == {"f32"}

    whole = replace(half, vae_dtype="bfloat16")
    assert whole.compute_vae.dtype == jnp.bfloat16 and decoder_types(whole, params) == {"bf16"}
    assert whole.description() != half.description()
    found = whole(half.prepare_inputs(PROMPTS), params, key, **options).images
    assert found.dtype == jnp.float32 and (found != images).any() and psnr(found, images) > 35


def decoder_types(pipeline, params):
    """The types of the results of a decoder's convolutions, as XLA names them."""
    decoder = jax.jit(partial(decode, pipeline.compute_vae))
    text = decoder.lower(params["vae"], jnp.zeros((1, 4, 8, 8))).as_text(dialect="hlo")
    return {*re.findall(r"= (\w+)\[[\d,]*\]\S* convolution\(", text)}


@pytest.mark.parametrize("accelerate", ["", *slow("guidance:stop=0.5", "deepcache:interval=2")])
def test_text_is_projected_before_the_loop(folders, accelerate):
    """Keys and values of the text are the same in all steps."""
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(
        folders["sd"], accelerate=accelerate
    )
    ids, key = pipeline.prepare_inputs(PROMPTS), jax.random.key(0)
    generate = partial(pipeline._generate, num_inference_steps=10)
    program = jax.make_jaxpr(generate)(ids, params, key).jaxpr
    assert matmuls_of_text(program) == 0
    assert matmuls_of_text(program, in_loop=True) > 0  # by the text encoder, and once for the UNet


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sd", "xl"])
def test_float16(folders, kind):
    """As on GPUs without bfloat16: closer to float32 than bfloat16, with the VAE in float32."""
    cls, images = KINDS[kind][1], {}
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        pipeline, params = cls.from_pretrained(folders[kind], dtype=dtype)
        inputs = pipeline.prepare_inputs(PROMPTS), params, jax.random.key(0)
        images[dtype] = pipeline(*inputs, num_inference_steps=3, guidance_scale=2.0).images
    assert pipeline.unet.dtype == jnp.float16 and pipeline.compute_vae.dtype == jnp.float32
    of_float16, of_bfloat16 = (psnr(images[x], images[jnp.float32]) for x in list(images)[:0:-1])
    assert of_float16 > max(50, of_bfloat16 + 10)
    half = replace(pipeline, vae_dtype="float16")
    assert decoder_types(pipeline, params) == {"f32"} and decoder_types(half, params) == {"f16"}
    found = half(*inputs, num_inference_steps=3, guidance_scale=2.0).images
    assert psnr(found, images[jnp.float16]) > 50


@pytest.mark.slow
@pytest.mark.parametrize(("pixels", "at_once"), [(1, 1), (4 * 16 * 16, 3), (10**6, 6)])
def test_many_images_are_decoded_in_parts(folders, monkeypatch, pixels, at_once):
    """Images are decoded in equal groups of limited size."""
    vae, params = FlaxAutoencoderKL.from_pretrained(folders["sd"], subfolder="vae")
    latents = np.random.default_rng(0).standard_normal((6, 4, 2, 2), np.float32)
    whole = decode(vae, params, jnp.asarray(latents))
    monkeypatch.setattr(sampling, "DECODED_PIXELS", pixels)
    jaxpr = str(jax.make_jaxpr(lambda x: decode(vae, params, x))(latents))
    assert f"f32[{at_once},16,16,3]" in jaxpr
    np.testing.assert_allclose(decode(vae, params, latents), whole, atol=1e-5)


@pytest.fixture
def params_of_program(monkeypatch):
    """Calls return the parameters that reach the compiled program."""
    monkeypatch.setattr(running, "generate_on_one", lambda *args: args[-1])


def test_params_are_used_where_they_are(folders, params_of_program, monkeypatch, caplog):
    """Loaded arrays are on the CPU, and calls neither copy nor move what they are given."""
    pipeline, loaded = FlaxStableDiffusionPipeline.from_pretrained(folders["sd"])
    weights = {name: tree for name, tree in loaded.items() if name != "scheduler"}
    assert {tuple(x.devices()) for x in jax.tree.leaves(weights)} == {(jax.devices("cpu")[0],)}
    prompt_ids, key = pipeline.prepare_inputs("it"), jax.random.key(0)
    for params in (loaded, jax.device_put(loaded, jax.devices()[1])):
        found = pipeline(prompt_ids, params, key).images
        assert all(x is y for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(params)))
    warn_once.cache_clear()
    assert not caplog.records
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    pipeline(prompt_ids, loaded, key)
    assert "jax.device_put(params, jax.devices()[0])" in caplog.text


def replace_scheduler(pipeline, params, name):
    """The pipeline with another scheduler, made from the config of its own."""
    scheduler, params["scheduler"] = make_scheduler(name, pipeline.scheduler.config)
    return replace(pipeline, scheduler=scheduler)
