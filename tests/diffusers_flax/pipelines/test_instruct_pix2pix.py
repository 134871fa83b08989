"""The editing pipeline against PyTorch diffusers: devices, batches, scales, files."""

import json
import logging
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from diffusers import StableDiffusionInstructPix2PixPipeline
from flax.jax_utils import replicate
from helpers import PROMPTS, edit_json, files_of, psnr, random_inputs, slow
from mount_points import refuse_to_rename_folders
from PIL import Image
from references import check_output_types, edit_with_torch
from tiny_models import make_tiny_pipeline

from diffusers_flax.pipelines import running
from diffusers_flax.pipelines.instruct_pix2pix import (
    FlaxStableDiffusionInstructPix2PixPipeline,
)
from diffusers_flax.schedulers.factory import make_scheduler

# diffusers' Euler scheduler under NumPy 2.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # One level compiles faster than two.
    return make_tiny_pipeline(tmp_path_factory.mktemp("tiny") / "model", unet_channels=(16,))


@pytest.fixture(scope="module")
def loaded(folder):
    """(pipeline, params) of the DDIM model."""
    return FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained(folder)


@pytest.mark.parametrize(
    ("scheduler", "options", "batch", "height", "width", "negative_prompt"),
    [
        ("ddim", {}, 2, 64, 48, None),
        *slow(
            ("pndm", {"prediction_type": "v_prediction", "seed": 1}, 1, 32, 32, None),
            ("euler", {}, 2, 48, 64, ["upside colors", "red"]),
            ("dpmsolver++", {"vae_channels": (8, 8, 8, 16), "seed": 2}, 3, 64, 64, None),
            ("bfloat16 ddim", {}, 2, 64, 48, None),
        ),
    ],
)
def test_images_are_those_of_pytorch(
    tmp_path, scheduler, options, batch, height, width, negative_prompt
):
    *dtype, scheduler = scheduler.split()
    folder = make_tiny_pipeline(tmp_path / "model", scheduler=scheduler, **options)
    factor = 8 if "vae_channels" in options else 4
    input_images, latents = random_inputs(batch, height, width, factor)
    prompts = PROMPTS[:batch]
    expected = edit_with_torch(folder, prompts, input_images, latents, negative_prompt)

    pipeline, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained(
        folder, dtype=jnp.bfloat16 if dtype else None
    )
    if dtype:  # users cast the complete tree; the schedule keeps its precision
        low = jnp.bfloat16
        params = jax.tree.map(lambda x: x.astype(low) if x.dtype.kind == "f" else x, params)
    prompt_ids, image = pipeline.prepare_inputs(prompts, input_images)
    edit = partial(
        pipeline,
        image=image,
        params=params,
        prng_seed=jax.random.key(0),
        num_inference_steps=20,
        latents=latents,
        neg_prompt_ids=negative_prompt and pipeline.prepare_text_inputs(negative_prompt),
    )
    images = edit(prompt_ids).images
    assert images.dtype == jnp.float32
    assert images.shape == (batch, height, width, 3)
    assert psnr(images, expected) > (30 if dtype else 60)
    if dtype:
        return
    # The measure is sensitive to the instruction.
    others = pipeline.prepare_text_inputs(["make it black and white"] * batch)
    assert psnr(edit(others).images, expected) < 45


@pytest.mark.slow
def test_output_types(folder, loaded):
    arrays = random_inputs(2, 32, 32)
    torch_latents = edit_with_torch(folder, PROMPTS[:2], *arrays, output_type="latent")
    check_output_types(loaded, torch_latents, *arrays, num_inference_steps=20)


@pytest.mark.slow
@pytest.mark.parametrize(("s_T", "s_I"), [(1.0, 1.5), (7.5, 0.5)])
def test_scales_that_switch_guidance_off_in_pytorch(folder, loaded, monkeypatch, s_T, s_I):
    """PyTorch guides only if s_T > 1 and s_I >= 1; the paper's equation 3 has no threshold."""
    input_images, latents = random_inputs(1, 32, 32)
    scales = dict(guidance_scale=s_T, image_guidance_scale=s_I)
    unguided = edit_with_torch(folder, PROMPTS[:1], input_images, latents, **scales)
    monkeypatch.setattr(StableDiffusionInstructPix2PixPipeline, "do_classifier_free_guidance", True)
    expected = edit_with_torch(folder, PROMPTS[:1], input_images, latents, **scales)
    pipeline, params = loaded
    inputs = pipeline.prepare_inputs(PROMPTS[:1], input_images)
    images = pipeline(*inputs, params, jax.random.key(0), 20, s_T, s_I, latents=latents).images
    assert psnr(images, expected) > 60
    assert psnr(images, unguided) < 55


def test_saved_folder_has_the_files_of_pytorch(folder, loaded, tmp_path):
    pipeline, params = loaded
    saved = tmp_path / "out" / "model"
    pipeline.save_pretrained(saved, params)
    assert [p.name for p in saved.parent.iterdir()] == ["model"]

    index = json.loads((saved / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusionInstructPix2PixPipeline"
    assert index["scheduler"] == ["diffusers", "DDIMScheduler"]
    # Files that transformers before 5.0 opens.
    for name in ("vocab.json", "merges.txt"):
        assert (saved / "tokenizer" / name).exists()
    vocab = json.loads((saved / "tokenizer" / "vocab.json").read_text())
    assert vocab == json.loads((folder / "tokenizer" / "vocab.json").read_text())


def test_pytorch_opens_a_sharded_pipeline(folder, loaded, tmp_path):
    pipeline, params = loaded
    images, latents = random_inputs(1, 32, 32)
    expected = edit_with_torch(folder, PROMPTS[:1], images, latents)
    zeros = jax.tree.map(np.zeros_like, params)
    for saved, size in ((zeros, None), (params, "30KB"), (zeros, "20KB"), (params, None)):
        pipeline.save_pretrained(tmp_path, saved, max_shard_size=size)
        if saved is params:
            edited = edit_with_torch(tmp_path, PROMPTS[:1], images, latents)
            np.testing.assert_allclose(edited, expected, atol=1e-6)
            _, again = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained(tmp_path)
            jax.tree.map(np.testing.assert_array_equal, again, params)


PARTS = ["model_index.json", "scheduler", "text_encoder", "tokenizer", "unet", "vae"]


@pytest.mark.variants
@pytest.mark.parametrize("target", ["link", "sharded"])
def test_any_folder_can_be_saved_into(loaded, tmp_path, monkeypatch, target):
    pipeline, params = loaded
    folder = tmp_path / "folder"
    folder.mkdir()
    if target == "sharded":  # the UNet of an older model; PyTorch would prefer its index
        pipeline.unet.save_pretrained(folder / "unet", params["unet"], max_shard_size="300KB")
    (tmp_path / "link").symlink_to(folder)
    refuse_to_rename_folders(monkeypatch)

    pipeline.save_pretrained(folder if target == "sharded" else tmp_path / "link", params)
    assert sorted(path.name for path in folder.iterdir()) == PARTS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link"]
    assert len(list((folder / "unet").iterdir())) == 2
    _, again = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained(folder)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def fail(*args):
    raise KeyboardInterrupt


def test_a_save_that_is_interrupted_while_writing_changes_nothing(
    folder, loaded, tmp_path, monkeypatch
):
    pipeline, params = loaded
    shutil.copytree(folder, tmp_path / "model")
    before, paths = files_of(tmp_path), sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(type(pipeline.scheduler), "save_pretrained", fail)  # the last part
    with pytest.raises(KeyboardInterrupt):
        pipeline.save_pretrained(tmp_path / "model", jax.tree.map(lambda x: x + x, params))
    assert sorted(tmp_path.rglob("*")) == paths
    assert files_of(tmp_path) == before


def test_a_save_that_is_interrupted_while_moving_is_no_model(folder, loaded, tmp_path, monkeypatch):
    """An interrupted save over an old model does not leave a directory that looks complete."""
    pipeline, params = loaded
    pipeline.save_pretrained(tmp_path / "expected", params)
    expected = files_of(tmp_path / "expected")
    target = shutil.copytree(folder, tmp_path / "model")
    move, count = shutil.move, iter(range(100))
    monkeypatch.setattr(shutil, "move", lambda *paths: fail() if next(count) == 4 else move(*paths))
    with pytest.raises(KeyboardInterrupt):
        pipeline.save_pretrained(target, params)
    assert not (target / "model_index.json").exists()
    (rest,) = target.glob(".saving-*")
    for name, content in expected.items():
        places = [root / name for root in (target, rest) if (root / name).is_file()]
        assert content in [place.read_bytes() for place in places], name


@pytest.mark.slow
def test_devices_and_batches_share_out_the_same_images(folder):
    """With a scheduler that draws noise, the noise of every step also depends on the image only."""
    config = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    scheduler, _ = make_scheduler("euler_ancestral", config)
    pipeline, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained(
        folder, scheduler=scheduler
    )
    assert pipeline.scheduler is scheduler
    input_images, _ = random_inputs(4, 32, 32)
    prompt_ids, image = pipeline.prepare_inputs(PROMPTS, input_images)
    key = jax.random.key(3)
    whole = None
    for devices, key_ in ((1, key), (2, key), (4, jax.random.PRNGKey(3))):
        p_params = replicate(params, jax.local_devices()[:devices])
        p_ids, p_image = (x.reshape(devices, -1, *x.shape[1:]) for x in (prompt_ids, image))
        images = np.asarray(pipeline(p_ids, p_image, p_params, key_, 3, jit=True).images)
        assert images.shape == (devices, 4 // devices, 32, 32, 3)
        whole = images[0] if whole is None else whole
        np.testing.assert_allclose(images.reshape(whole.shape), whole, atol=2e-5)
    others = pipeline(p_ids, p_image, p_params, jax.random.key(4), 3, jit=True).images
    assert psnr(others[:, 0], whole) < 30

    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.array([3, 1, 2, 0]))[:, None]
    p_ids, p_image = (x[jnp.array([3, 1, 2, 0])] for x in (p_ids, p_image))
    images = pipeline(p_ids, p_image, p_params, keys, 3, jit=True).images  # a key per image
    np.testing.assert_allclose(images[:, 0], whole[[3, 1, 2, 0]], atol=2e-5)


@pytest.mark.slow
def test_generate_under_pmap_with_everything_defaulted(loaded):
    pipeline, params = loaded
    input_images, _ = random_inputs(6, 16, 16)
    prompt_ids, image = pipeline.prepare_inputs((PROMPTS * 2)[:6], input_images)
    prompt_ids, image = (x.reshape(2, 3, *x.shape[1:]) for x in (prompt_ids, image))
    rng = jax.random.split(jax.random.PRNGKey(0), 2)
    p_params = replicate(params, jax.local_devices()[:2])
    images = np.asarray(jax.pmap(pipeline._generate)(prompt_ids, image, p_params, rng))
    assert images.shape == (2, 3, 16, 16, 3)
    for i in range(2):
        expected = pipeline(prompt_ids[i], image[i], params, rng[i]).images
        np.testing.assert_allclose(images[i], expected, atol=1e-4)


@pytest.mark.slow
def test_scales_of_each_image(loaded):
    """Arrays of scales give the images of calls with these numbers."""
    pipeline, params = loaded
    input_images, _ = random_inputs(3, 32, 32)
    inputs = (*pipeline.prepare_inputs(PROMPTS[:3], input_images), params)
    keys = jax.random.split(jax.random.key(0), 3)
    s_T, s_I = np.float32([7.5, 2, 1]), np.float32([1.5, 2, 1])
    images = pipeline(*inputs, keys, 3, s_T, s_I).images
    for i in range(3):
        one = (x[i : i + 1] for x in inputs[:2])
        expected = pipeline(*one, params, keys[i : i + 1], 3, s_T[i], s_I[i]).images
        np.testing.assert_allclose(images[i : i + 1], expected, atol=1e-5)
    with pytest.raises(ValueError, match=r"guidance_scale=-1.0 must be 0 or more"):
        pipeline(*inputs, keys, 3, np.float32([1, 2, -1]), 1.5)


@pytest.mark.slow
def test_other_scale_values_do_not_recompile(loaded):
    pipeline, params = loaded
    inputs = (*pipeline.prepare_inputs("", np.ones((16, 16, 3), np.uint8)), params)
    inputs += (jax.random.key(0), 1)
    before = running.generate_on_one._cache_size()
    for s_T in (7.5, 7, np.float32(3), np.int64(2), jnp.float32(4)):
        pipeline(*inputs, guidance_scale=s_T)
    assert running.generate_on_one._cache_size() == before + 1
    for s_I in (1, np.float32(1)):
        pipeline(*inputs, guidance_scale=1.0, image_guidance_scale=s_I)
    assert running.generate_on_one._cache_size() == before + 2


@pytest.mark.slow
def test_height_and_width_resize_the_images(folder, loaded):
    pipeline, params = loaded
    input_images, latents = random_inputs(1, 64, 32)  # to be resized from 32 x 32
    small = input_images[:, ::2]
    resized = [
        Image.fromarray(small[0, :, :, c]).resize((32, 64), Image.Resampling.LANCZOS)
        for c in range(3)
    ]
    resized = np.clip(np.stack([np.asarray(c) for c in resized], -1), 0, 1)[None]
    expected = edit_with_torch(folder, PROMPTS[:1], resized, latents)
    inputs = pipeline.prepare_inputs(PROMPTS[:1], small)
    images = pipeline(
        *inputs, params, jax.random.key(0), 20, height=64, width=32, latents=latents
    ).images
    assert psnr(images, expected) > 50


def test_long_prompt_is_cut_with_a_warning_that_names_what_went(loaded, caplog):
    with caplog.at_level(logging.WARNING):
        ids = loaded[0].prepare_text_inputs(["red " * 73 + "make it make it red", "short"])
    assert ids.shape == (2, 77)
    full = loaded[0].prepare_text_inputs("red " * 73 + "make it")
    np.testing.assert_array_equal(ids[:1], full)  # 75 words, start and end
    (record,) = caplog.records
    assert "80 tokens" in record.getMessage()
    assert record.getMessage().endswith("its last 3 tokens are ignored, 'make it red'")


def test_numpy_to_pil():
    images = np.zeros((2, 3, 4, 6, 3), np.float32)
    images[1, 2, 0, 0] = (1, 0.5, 0.25)
    input_images = FlaxStableDiffusionInstructPix2PixPipeline.numpy_to_pil(jnp.asarray(images))
    assert [image.size for image in input_images] == [(6, 4)] * 6
    assert input_images[5].getpixel((0, 0)) == (255, 128, 64)
    (grey,) = FlaxStableDiffusionInstructPix2PixPipeline.numpy_to_pil(images[:1, 0, ..., :1])
    assert grey.mode == "L"


@pytest.mark.variants
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda f: edit_json(f / "unet/config.json", in_channels=4),
            "pipeline needs 8 or 12; edit",
        ),
        (
            lambda f: edit_json(
                f / "model_index.json", _class_name="StableDiffusionXLInstructPix2PixPipeline"
            ),
            "StableDiffusionXL.*; open it with FlaxStableDiffusionXLInstructPix2Pix",
        ),
        (lambda f: shutil.rmtree(f / "vae"), "lacks vae/config.json"),
        (lambda f: (f / "tokenizer/vocab.json").unlink(), "the tokenizer of "),
        (lambda f: shutil.rmtree(f), "is not a directory.*check the path"),
    ],
)
def test_what_is_no_instruct_pix2pix_is_refused(folder, tmp_path, spoil, message):
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    spoil(copy)
    with pytest.raises(ValueError, match=message) as error:
        FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained(copy)
    assert str(copy) in str(error.value)
    assert "\n" not in str(error.value)


IMAGE = np.zeros((16, 16, 3), np.uint8)


@pytest.mark.variants
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"guidance_scale": -1}, "guidance_scale=-1.0 must be 0 or more"),
        ({"num_inference_steps": 0}, "num_inference_steps=0"),
        ({"prng_seed": 0}, "prng_seed=0 is not a PRNG key"),
        ({"height": 30}, "30x16 .* is not divisible by 4; try 32x16"),
        ({"image": np.zeros((2, 3, 16, 16), np.float32)}, "one batch and one size"),
        ({"jit": True}, "shard prompt_ids"),
    ],
)
def test_calls_that_do_not_fit_are_refused(loaded, changes, message):
    pipeline, params = loaded
    prompt_ids, image = pipeline.prepare_inputs("", IMAGE)
    arguments = {
        "prompt_ids": prompt_ids,
        "image": image,
        "params": params,
        "prng_seed": jax.random.key(0),
    }
    with pytest.raises(ValueError, match=message):
        pipeline(**(arguments | changes))
