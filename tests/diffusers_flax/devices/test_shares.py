"""Images whose branches of guidance and rows several devices share equal those of one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow
from jax.sharding import Mesh, PartitionSpec
from tiny_models import make_tiny_pipeline, make_tiny_xl

from diffusers_flax.devices.layout import parse_layout
from diffusers_flax.devices.rows import split_rows
from diffusers_flax.models.blocks import (
    Conv,
    Downsample2D,
    GroupNorm,
    Transformer2D,
    Upsample2D,
)
from diffusers_flax.models.quantization import to_int8
from diffusers_flax.models.vae import AttentionBlock
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline


def largest_difference(found, expected):
    """Relative to the largest value."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    return np.abs(found - expected).max() / np.abs(expected).max()


def int8_params(params):
    """Of a convolution."""
    kernel, scale = to_int8(params["kernel"], (0, 1, 2))
    return params | {"kernel": kernel, "dynamic_scale": scale.reshape(-1)}


@pytest.mark.parametrize(
    "module",
    [
        GroupNorm(4),
        Conv(8),
        Downsample2D(8, ((0, 1), (0, 1))),
        Transformer2D(2, 1, 4),
        *slow(
            *(Downsample2D(8), Conv(8, 1), Upsample2D(8)),
            *(AttentionBlock(4, jnp.float32), Transformer2D(2, 1, 4, only_cross_attention=True)),
        ),
    ],
)
@pytest.mark.parametrize("axes", ["a", *slow("b"), *slow((("a", "b"),))])
def test_blocks_on_parts_of_the_rows(module, axes):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    x = jax.random.normal(jax.random.key(0), (2, 8, 6, 16))
    context = (jnp.ones((2, 3, 16)),) if isinstance(module, Transformer2D) else ()
    variables = jax.jit(module.init)(jax.random.key(1), x, *context)

    def apply(variables, x):
        return module.apply(variables, x, *context)

    def apply_to_part(variables, x):
        with split_rows(axes):
            return apply(variables, x)

    spec = PartitionSpec(None, axes)
    specs = dict(in_specs=(PartitionSpec(), spec), out_specs=spec)
    shared = jax.jit(jax.shard_map(apply_to_part, mesh=mesh, check_vma=False, **specs))
    cases = [variables]
    if isinstance(module, Conv):
        cases.append({"params": int8_params(variables["params"])})
    for case in cases:  # the trace without parts, before or after, is another one
        expected = jax.jit(apply)(case, x)
        assert largest_difference(shared(case, x), expected) < 2e-6


OPTIONS = dict(num_inference_steps=2, guidance_scale=3.0)
EDIT = OPTIONS | {"image_guidance_scale": 1.5}


@pytest.fixture(scope="module")
def xl(tmp_path_factory):
    return FlaxDiffusionPipeline.from_pretrained(make_tiny_xl(tmp_path_factory.mktemp("xl")))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Stable Diffusion with a UNet of two levels, so a device has a multiple of two rows."""
    folder = tmp_path_factory.mktemp("text") / "model"
    make_tiny_pipeline(folder, in_channels=4, unet_channels=(16, 32))
    return FlaxDiffusionPipeline.from_pretrained(folder)


@pytest.fixture(scope="module")
def edit(tmp_path_factory):
    folder = make_tiny_pipeline(tmp_path_factory.mktemp("edit") / "model", unet_channels=(16, 32))
    return FlaxDiffusionPipeline.from_pretrained(folder)


def shared_images(loaded, layout, inputs, **options):
    """The images of a loaded pipeline on a Layout."""
    pipeline, params = loaded
    pipeline = dataclasses.replace(pipeline, layout=layout, compiled=set())
    params = jax.tree.map(np.asarray, params)
    layout.place_params(params)
    return pipeline(*inputs, params, jax.random.key(3), **options).images


def layout_of(**sizes):
    sizes = {"data": 1} | sizes
    return parse_layout([f"{name}={n}" for name, n in sizes.items()])


@pytest.mark.parametrize(
    "sizes, tolerance",
    [
        (dict(branches=2, rows=2), 1e-5),
        *slow(
            (dict(branches=2), 1e-6),
            (dict(rows=2), 1e-5),
            (dict(rows=4), 1e-5),
            (dict(data=2, branches=2), 1e-6),
            (dict(data=2, rows=2), 1e-5),
        ),
    ],
)
@pytest.mark.parametrize("family", ["text", *slow("xl")])
def test_images_from_text(family, sizes, tolerance, request):
    loaded = pipeline, params = request.getfixturevalue(family)
    B, options = sizes.get("data", 1), OPTIONS | dict(height=64, width=32)
    inputs = (pipeline.prepare_inputs(["make it red", "it"][:B]),)
    expected = pipeline(*inputs, params, jax.random.key(3), **options).images
    images = shared_images(loaded, layout_of(**sizes), inputs, **options)
    np.testing.assert_allclose(images, expected, atol=tolerance)
