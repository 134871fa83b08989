"""The published pipelines' other methods, and inpainting, against PyTorch."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from flax.jax_utils import replicate
from helpers import psnr
from PIL import Image
from tiny_models import make_tiny_pipeline, make_tiny_safety_checker, make_tiny_xl
from transformers import CLIPImageProcessor

from diffusers_flax.images import prepare_masks
from diffusers_flax.messages import warn_once
from diffusers_flax.models.clip_similarities import FlaxStableDiffusionSafetyChecker
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline
from diffusers_flax.pipelines.stable_diffusion import (
    FlaxStableDiffusionImg2ImgPipeline,
    FlaxStableDiffusionInpaintPipeline,
    FlaxStableDiffusionPipeline,
)
from diffusers_flax.pipelines.stable_diffusion_xl import FlaxStableDiffusionXLPipeline

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy")

PROMPTS = ["make it red", "it"]
RNG = np.random.default_rng(0)
IMAGES = [Image.fromarray(RNG.integers(0, 256, (64, 48, 3), np.uint8)) for _ in PROMPTS]
MASK = np.zeros((64, 48), np.uint8)
MASK[5:41, 10:33] = 255
MASK[50:52] = 128
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    options = dict(vae_channels=(8, 8, 16, 16))
    sd = make_tiny_pipeline(root / "sd", in_channels=4, **options)
    inpaint = make_tiny_pipeline(root / "inpaint", in_channels=9, **options)
    return {
        "sd": sd,
        "inpaint": inpaint,
        "p2p": make_tiny_pipeline(root / "p2p", in_channels=8, **options),
        "xl": make_tiny_xl(root / "xl"),
        "checker": make_tiny_safety_checker(root / "checker"),
    }


# --- inpainting ---


def test_inputs_of_inpainting(folders):
    pipeline, params = FlaxStableDiffusionInpaintPipeline.from_pretrained(folders["inpaint"])
    prompt_ids, masked_image, mask = pipeline.prepare_inputs("it", IMAGES, MASK)
    assert prompt_ids.shape == (2, 77)
    np.testing.assert_array_equal(mask, np.tile(MASK >= 128, (2, 1, 1, 1)).astype(np.float32))
    image = np.asarray(IMAGES[1], np.float32).transpose(2, 0, 1) / 127.5 - 1
    np.testing.assert_allclose(masked_image[1], image * (mask[1] == 0), atol=1e-6)
    for white in (MASK >= 128, MASK / 255, Image.fromarray(MASK).convert("RGB"), [MASK]):
        np.testing.assert_array_equal(prepare_masks(white), mask[:1])

    with pytest.raises(ValueError, match="they need one batch and one size"):
        pipeline(prompt_ids[:1], mask, masked_image, params, KEY)


# --- safety checker ---


def make_checker_that_flags(folder, images, feature_extractor):
    """Weights with which PyTorch's checker flags the first of two images."""
    checker = StableDiffusionSafetyChecker.from_pretrained(folder)
    features = feature_extractor(images, return_tensors="pt").pixel_values
    embeds = checker.visual_projection(checker.vision_model(features)[1])
    cosines = torch.nn.functional.cosine_similarity(embeds, embeds[:1])
    assert cosines[1] < 0.997
    checker.concept_embeds[:] = embeds[0]
    checker.concept_embeds_weights[:] = (1 + cosines[1]) / 2
    checker.special_care_embeds_weights[:] = 2
    checker.save_pretrained(folder)
    return checker


@pytest.mark.slow
@torch.no_grad()
def test_flagged_images_are_black_as_in_pytorch(folders, tmp_path, caplog):
    theirs = StableDiffusionPipeline.from_pretrained(folders["sd"], low_cpu_mem_usage=False)
    theirs.set_progress_bar_config(disable=True)
    noise = np.random.default_rng(3).standard_normal((2, 4, 8, 8), np.float32)
    options = dict(num_inference_steps=2, guidance_scale=2.0, height=64, width=64)

    def call_theirs():
        latents = torch.from_numpy(noise)
        return theirs(PROMPTS, latents=latents, output_type="np", **options)

    feature_extractor = CLIPImageProcessor()
    free = call_theirs()
    assert free.nsfw_content_detected is None
    pil = theirs.numpy_to_pil(free.images)
    checker = make_checker_that_flags(folders["checker"], pil, feature_extractor)
    theirs.register_modules(safety_checker=checker, feature_extractor=feature_extractor)
    expected = call_theirs()
    assert expected.nsfw_content_detected == [True, False]

    ours, params = FlaxStableDiffusionPipeline.from_pretrained(
        folders["sd"],
        safety_checker=FlaxStableDiffusionSafetyChecker.from_pretrained(folders["checker"]),
        feature_extractor=feature_extractor,
    )
    inputs = [ours.prepare_inputs(PROMPTS), params, KEY]
    with caplog.at_level(logging.WARNING):
        checked = ours(*inputs, latents=noise, **options)
    assert "1 of 2 images may not be safe for work and are black" in caplog.text
    assert checked.nsfw_content_detected == [True, False]
    assert not checked.images[0].any() and checked.images[1].any()
    assert psnr(checked.images, expected.images) > 60

    images, flags = ours(*inputs, latents=noise, output_type="pil", return_dict=False, **options)
    assert flags == [True, False] and images[0].getextrema() == ((0, 0),) * 3
    sharded = ours(
        inputs[0][:, None],
        replicate(params, jax.devices()[:2]),
        KEY,
        latents=noise[:, None],
        jit=True,
        **options,
    )
    assert sharded.nsfw_content_detected == [True, False]
    assert psnr(sharded.images[:, 0], expected.images) > 60

    plain, params = FlaxStableDiffusionPipeline.from_pretrained(folders["sd"], safety_checker=None)
    output = plain(inputs[0], params, KEY, latents=noise, **options)
    assert output.nsfw_content_detected is False and output[1] is False
    assert psnr(output.images, free.images) > 60

    ours.save_pretrained(tmp_path, inputs[1])
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["safety_checker"] == ["stable_diffusion", "StableDiffusionSafetyChecker"]
    assert index["requires_safety_checker"] is True
    theirs = StableDiffusionPipeline.from_pretrained(tmp_path, low_cpu_mem_usage=False)
    theirs.set_progress_bar_config(disable=True)
    assert call_theirs().nsfw_content_detected == [True, False]
    warn_once.cache_clear()
    for given, warns in ({}, True), ({"safety_checker": None}, False):
        caplog.clear()
        again, params = FlaxStableDiffusionPipeline.from_pretrained(tmp_path, **given)
        assert again.safety_checker is None and "safety_checker" not in params
        assert ("is not read: images are not checked" in caplog.text) == warns


# --- constructors, components, folders ---


def test_parts_in_the_published_order(folders):
    pipeline = FlaxStableDiffusionPipeline.open(folders["sd"])
    names = ["vae", "text_encoder", "tokenizer", "unet", "scheduler"]
    names += ["safety_checker", "feature_extractor"]
    assert list(pipeline.components) == names
    other = FlaxStableDiffusionImg2ImgPipeline(*pipeline.components.values(), jnp.bfloat16)
    assert other.components == pipeline.components and other.dtype == jnp.bfloat16
    assert other.vae_scale_factor == 8
    xl = FlaxStableDiffusionXLPipeline.open(folders["xl"])
    names = ["text_encoder", "text_encoder_2", "vae", "tokenizer", "tokenizer_2"]
    assert list(xl.components) == [*names, "unet", "scheduler"]
    assert FlaxStableDiffusionXLPipeline(*xl.components.values()).components == xl.components


def test_config_of_a_pipeline(folders, tmp_path):
    pipeline = FlaxStableDiffusionXLPipeline.open(folders["xl"])
    published = json.loads((folders["xl"] / "model_index.json").read_text())
    ours = dict(pipeline.config)
    del published["_diffusers_version"], ours["_diffusers_version"]
    assert ours == published | {"feature_extractor": [None, None], "image_encoder": [None, None]}
    assert pipeline.config.unet == ["diffusers", "UNet2DConditionModel"]
    pipeline.save_config(tmp_path)
    assert FlaxStableDiffusionXLPipeline.load_config(tmp_path) == pipeline.config
    assert json.loads(pipeline.to_json_string()) == pipeline.config
    with pytest.raises(ValueError, match="push_to_hub=True is not supported"):
        pipeline.save_pretrained(tmp_path, {}, push_to_hub=True)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["sd", "p2p"])
def test_the_text_encoders_config_may_change(folders, folder):
    """The text encoder's config is the only one that may change; programs are recompiled."""
    pipeline, params = FlaxDiffusionPipeline.from_pretrained(folders[folder])
    prompt_ids = pipeline.prepare_text_inputs("make it red")
    images = {"p2p": [np.zeros((1, 3, 16, 16), np.float32)]}.get(folder, [])
    size = {"height": 16, "width": 16}

    def call():
        inputs = [prompt_ids, *images, params, KEY]
        return np.asarray(pipeline(*inputs, num_inference_steps=1, **size).images)

    before = call()
    config = pipeline.text_encoder.config
    config.return_dict = False
    np.testing.assert_array_equal(call(), before)
    config.hidden_act = {"quick_gelu": "gelu", "gelu": "quick_gelu"}[config.hidden_act]
    after = call()
    assert np.abs(after - before).max() > 1e-6
    pipeline = type(pipeline)(**pipeline.components)
    np.testing.assert_allclose(call(), after, atol=1e-6)


def test_progress_bar(folders, capsys):
    pipeline = FlaxStableDiffusionPipeline.open(folders["sd"])
    assert list(pipeline.progress_bar(range(3))) == [0, 1, 2]
    assert "3/3" in capsys.readouterr().err
    pipeline.set_progress_bar_config(disable=True)
    assert list(pipeline.progress_bar(range(3))) == [0, 1, 2]
    assert not capsys.readouterr().err
