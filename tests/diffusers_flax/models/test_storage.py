"""Kernels stored as float8 or int8: numbers, files, and which layers."""

import inspect
import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from diffusers.hooks import apply_layerwise_casting
from flax.traverse_util import flatten_dict, unflatten_dict
from helpers import psnr, random_inputs
from tiny_models import make_tiny_pipeline, make_tiny_xl

from diffusers_flax.models.quantization import storage_of
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.parameters import cast_params
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline
from diffusers_flax.pipelines.memory import num_bytes_of_params

KEY = jax.random.key(3)
STORED = re.compile(
    r"(?:(?:down_blocks|up_blocks|mid_block).*/(?:conv[12]?|to_[qkv]|to_out_0|proj|net_2|proj_in"
    r"|proj_out)|text_model/encoder/layers/.*)/kernel"
)


def dequantized(params, storage, dtype):
    """Parameters after a layer's cast, by NumPy."""
    found = {}
    for name, x in flatten_dict(params, sep="/").items():
        x = np.asarray(x, np.float32)
        if STORED.fullmatch(name) and storage == "float8":
            x = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        elif STORED.fullmatch(name):
            scale = np.abs(x).max(tuple(range(x.ndim - 1))) / np.float32(127)
            x = np.rint(x / scale).astype(np.int8).astype(np.float32) * scale
        found[name] = x.astype(dtype)
    return unflatten_dict(found, sep="/")


def run_pipeline(pipeline, params):
    prompts = ["make it red"]
    if "image" in inspect.signature(type(pipeline).__call__).parameters:
        inputs = pipeline.prepare_inputs(prompts, random_inputs(1, 32, 32)[0])
    else:
        inputs = (pipeline.prepare_inputs(prompts),)
    options = {"num_inference_steps": 2, "guidance_scale": 3.0}
    return np.asarray(pipeline(*inputs, params, KEY, **options).images)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, storage, dtype",
    [
        ("edit", "int8", jnp.float32),
        ("edit", "float8", jnp.float32),
        ("xl", "int8", jnp.bfloat16),
        ("xl", "float8", jnp.bfloat16),
    ],
)
def test_images_equal_those_of_dequantized_parameters(family, storage, dtype, tmp_path):
    """Stored parameters make the images of the numbers that they stand for."""
    folder = (make_tiny_pipeline if family == "edit" else make_tiny_xl)(tmp_path / "model")
    plain, params = FlaxDiffusionPipeline.from_pretrained(folder, dtype=dtype)
    exact = {
        name: dequantized(x, storage, dtype) if name.startswith(("unet", "text_encoder")) else x
        for name, x in params.items()
    }
    pipeline, stored = FlaxDiffusionPipeline.from_pretrained(folder, dtype=dtype, storage=storage)
    cast_params(pipeline, stored)
    cast_params(plain, exact)
    found, expected = run_pipeline(pipeline, stored), run_pipeline(plain, exact)
    np.testing.assert_array_equal(found, expected)
    assert psnr(found, run_pipeline(plain, params)) > 25  # random weights, two steps
    num_bytes = sum(
        x.nbytes
        for name in stored.keys() - {"scheduler"}
        for path, x in flatten_dict(stored[name], sep="/").items()
        if not path.endswith("weight_scale")
    )
    assert num_bytes_of_params(pipeline) == num_bytes


@pytest.mark.slow
def test_float8_unet_equals_pytorchs_layerwise_casting(tmp_path):
    folder = make_tiny_xl(tmp_path / "model") / "unet"
    theirs = UNet2DConditionModel.from_pretrained(folder)
    kept = ("norm", "conv_in", "conv_out", "time_emb", "add_embedding", "conv_shortcut")
    apply_layerwise_casting(theirs, torch.float8_e4m3fn, torch.float32, skip_modules_pattern=kept)
    ours, params = FlaxUNet2DConditionModel.from_pretrained(folder, storage="float8")
    assert storage_of(params) == "float8"
    flat = flatten_dict(params, sep="/")
    for name, x in flat.items():  # theirs rounds biases, too
        if name.endswith("bias") and STORED.fullmatch(name.replace("bias", "kernel")):
            flat[name] = x.astype(jnp.float8_e4m3fn)
    params = unflatten_dict(flat, sep="/")
    rng = np.random.default_rng(0)
    x, text, pooled, ids = (
        rng.standard_normal(shape, np.float32)
        for shape in (
            (2, 4, 8, 8),
            (2, 7, ours.cross_attention_dim),
            (2, ours.projection_class_embeddings_input_dim - 6 * ours.addition_time_embed_dim),
            (2, 6),
        )
    )
    added = {"text_embeds": pooled, "time_ids": ids}
    found = jax.jit(ours.apply)({"params": params}, x, 500, text, added).sample
    with torch.no_grad():
        added = {name: torch.from_numpy(y) for name, y in added.items()}
        arguments = torch.from_numpy(x), torch.tensor(500), torch.from_numpy(text)
        expected = theirs(*arguments, added_cond_kwargs=added).sample
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """{storage: directory that a pipeline with it saved}; None: the original."""
    root = tmp_path_factory.mktemp("saved")
    folders = {None: make_tiny_xl(root / "model")}
    for storage in ("float8", "int8"):
        pipeline, params = FlaxDiffusionPipeline.from_pretrained(folders[None], storage=storage)
        pipeline.save_pretrained(root / storage, params)
        folders[storage] = root / storage
    return folders


@pytest.mark.parametrize("storage", ["float8", "int8"])
def test_saved_weights_are_those_that_were_stored(saved, storage):
    _, expected = FlaxDiffusionPipeline.from_pretrained(saved[None], storage=storage)
    _, found = FlaxDiffusionPipeline.from_pretrained(saved[storage], storage=storage)
    found.pop("scheduler")
    expected.pop("scheduler")
    for name, tree in found.items():
        assert storage_of(tree) == (None if name == "vae" else storage)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert {x.dtype for x in jax.tree.leaves(found)} == {x.dtype for x in jax.tree.leaves(expected)}


def test_opening_in_another_storage(saved):
    """float8 files are plain numbers, which any pipeline and PyTorch open; int8 files are not."""
    _, params = FlaxDiffusionPipeline.from_pretrained(saved["float8"])
    assert storage_of(params["unet"]) == "float8"
    StableDiffusionXLPipeline.from_pretrained(saved["float8"], dtype=torch.float32)
    for storage in (None, "float8"):
        with pytest.raises(ValueError, match="are int8; open them with storage='int8'") as error:
            FlaxDiffusionPipeline.from_pretrained(saved["int8"], storage=storage)
        assert str(error.value).count("\n") == 0
    with pytest.raises(ValueError, match="are int8; open them with storage='int8'"):
        FlaxUNet2DConditionModel.from_pretrained(saved["int8"], subfolder="unet")
    with pytest.raises(ValueError, match="diffusers_flax_int8"):
        UNet2DConditionModel.from_pretrained(saved["int8"], subfolder="unet")
    config = json.loads((saved["int8"] / "vae/config.json").read_text())
    assert "quantization_config" not in config
