"""All models and pipelines in float16 and bfloat16 on a CPU, against float32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import StableDiffusionInstructPix2PixPipeline, UNet2DConditionModel
from helpers import slow
from tiny_models import make_tiny_pipeline

from diffusers_flax.messages import warn_once
from diffusers_flax.models.clip import FlaxCLIPTextModel, FlaxCLIPTextModelWithProjection
from diffusers_flax.models.clip_similarities import FlaxStableDiffusionSafetyChecker
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.models.vae import FlaxAutoencoderKL
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline

# Relative to the largest value. float16 rounds by 0.05%, bfloat16 by 0.4%, dozens of times.
TOLERANCES = {"float16": 6e-3, "bfloat16": 5e-2}
BLOCKS = dict(
    block_out_channels=(32, 64),
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    layers_per_block=1,
    attention_head_dim=4,
    cross_attention_dim=24,
)
XL = dict(
    use_linear_projection=True,
    addition_embed_type="text_time",
    addition_time_embed_dim=8,
    projection_class_embeddings_input_dim=20 + 6 * 8,
)
CLIP = dict(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=64,
    projection_dim=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=9,
    eos_token_id=99,
)
TEXT_ENTRIES = ("vocab_size", "max_position_embeddings", "eos_token_id")
IDS = jnp.asarray([[1, 5, 7, 99, 0, 0, 0, 0, 0], [2, 3, 4, 5, 6, 7, 99, 0, 0]])
MASK = (jnp.arange(9) < 7).astype(jnp.int32)[None]


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def unet(dtype, **config):
    module = FlaxUNet2DConditionModel(**BLOCKS, **config, dtype=dtype)
    added = {"text_embeds": normal(2, 20), "time_ids": jnp.ones((2, 6))} if config else None
    args = normal(2, 4, 16, 16), jnp.asarray([3, 500]), normal(2, 7, 24, seed=1), added
    return module, lambda params: module.apply({"params": params}, *args).sample


def vae(dtype):
    module = FlaxAutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        dtype=dtype,
    )

    def call(params):
        apply = partial(module.apply, {"params": params})
        posterior = apply(normal(1, 3, 32, 32), method=module.encode).latent_dist
        assert posterior.mean.dtype == jnp.float32
        decoded = apply(normal(1, 4, 16, 16), method=module.decode).sample
        assert decoded.dtype == dtype
        return posterior.mode(), decoded

    return module, call


def text_model(cls, dtype):
    model = cls.from_config(CLIP, dtype=dtype)

    def call(params):
        plain = model(IDS, params=params, return_dict=True)
        masked = model(IDS, MASK, params=params, output_attentions=True, output_hidden_states=True)
        return tuple(plain.values()), masked.to_tuple()

    return model.module, call


def safety_checker(dtype):
    tower = {name: CLIP[name] for name in CLIP if name not in TEXT_ENTRIES}
    vision = tower | {"image_size": 32, "patch_size": 16, "hidden_act": "quick_gelu"}
    config = {"vision_config": vision, "projection_dim": 16}
    model = FlaxStableDiffusionSafetyChecker.from_config(config, dtype=dtype)
    module = model.module

    def call(params):
        params = params | {"concept_embeds": normal(17, 16), "special_care_embeds": normal(3, 16)}
        images = normal(2, 3, 32, 32)
        return module.apply({"params": params}, images, method=module.cosine_distances)

    return module, call


MODELS = {
    "CLIP text": partial(text_model, FlaxCLIPTextModel),
    "UNet": unet,
    "UNet of SDXL": partial(unet, **XL),
    "VAE": vae,
    "CLIP text with projection": partial(text_model, FlaxCLIPTextModelWithProjection),
    "safety checker": safety_checker,
}


def error(ours, expected):
    """Largest difference, relative to the largest value."""
    return np.abs(np.asarray(ours, np.float32) - expected).max() / np.abs(expected).max()


@pytest.mark.variants
@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    """With float32 parameters."""
    module, call = MODELS[name](jnp.float32)
    params = jax.jit(module.init_weights)(jax.random.key(0))
    exact = jax.tree.leaves(jax.jit(call)(params))
    for dtype, tolerance in TOLERANCES.items():
        results = jax.tree.leaves(jax.jit(MODELS[name](jnp.dtype(dtype))[1])(params))
        for ours, expected in zip(results, exact, strict=True):
            assert error(ours, expected) < tolerance, dtype


def dtypes(tree):
    return {str(x.dtype) for x in jax.tree.leaves(tree)}


@pytest.fixture
def half_pipeline(tmp_path):
    """The directory of a pipeline whose files are float16, as PyTorch writes it."""
    folder = make_tiny_pipeline(tmp_path / "model")
    options = dict(dtype=torch.float16, safety_checker=None)
    pipeline = StableDiffusionInstructPix2PixPipeline.from_pretrained(folder, **options)
    pipeline.save_pretrained(tmp_path / "half")
    return tmp_path / "half"


def test_param_dtype(half_pipeline, caplog):
    """float32 parameters of a float16 file are PyTorch's; the file's own dtype has a warning."""
    load = partial(FlaxUNet2DConditionModel.from_pretrained, half_pipeline, subfolder="unet")
    theirs = UNet2DConditionModel.from_pretrained(half_pipeline, subfolder="unet").state_dict()
    kernel = theirs["conv_in.weight"].numpy().transpose(2, 3, 1, 0)  # OIHW
    _, params = load(param_dtype=jnp.float32)
    assert dtypes(params) == {"float32"} and not caplog.messages
    np.testing.assert_array_equal(params["conv_in"]["kernel"], kernel)
    warn_once.cache_clear()
    for dtype in (jnp.float16, jnp.float32):
        _, params = load(dtype=dtype)
        assert dtypes(params) == {"float16"}
    (message,) = caplog.messages
    assert "float16" in message and "param_dtype=jnp.float32" in message


@pytest.mark.parametrize("dtype", [jnp.float16, *slow(jnp.bfloat16, jnp.float32)])
def test_pytorch_opens_a_saved_pipeline_in_one_dtype(half_pipeline, tmp_path, dtype):
    pipeline, params = FlaxDiffusionPipeline.from_pretrained(half_pipeline, param_dtype=dtype)
    pipeline.save_pretrained(tmp_path / "saved", params)
    for options, expected in ({}, torch.float32), ({"dtype": torch.float16}, torch.float16):
        theirs = StableDiffusionInstructPix2PixPipeline.from_pretrained(
            tmp_path / "saved", **options
        )
        found = [component.dtype for component in (theirs.unet, theirs.vae, theirs.text_encoder)]
        assert found == [expected] * 3
        if expected == torch.float32:
            image = torch.zeros((1, 3, 32, 32))
            theirs.set_progress_bar_config(disable=True)
            theirs("make it red", image, num_inference_steps=1)
