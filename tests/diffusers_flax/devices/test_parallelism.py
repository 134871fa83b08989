"""Images whose branches of guidance and rows several devices share equal those of one device."""

import dataclasses
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.jax_utils import replicate
from helpers import ROOT, free_port, photo, psnr, slow
from jax.sharding import Mesh, PartitionSpec
from PIL import Image
from several_devices import make_images
from tiny_models import make_tiny_controlnet, make_tiny_pipeline, make_tiny_xl

from diffusers_flax import (
    FlaxStableDiffusionControlNetPipeline,
)
from diffusers_flax.devices.layout import Layout, parse_layout
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

    def apply(variables, x, module=module):
        return module.apply(variables, x, *context)

    spec = PartitionSpec(None, axes)
    specs = dict(in_specs=(PartitionSpec(), spec), out_specs=spec)
    apply_to_part = partial(apply, module=module.clone(rows_axis=axes))
    shared = jax.jit(jax.shard_map(apply_to_part, mesh=mesh, check_vma=False, **specs))
    cases = [variables]
    if isinstance(module, Conv):
        cases.append({"params": int8_params(variables["params"])})
    for case in cases:
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
    pipeline = dataclasses.replace(pipeline, layout=layout)
    params = jax.tree.map(np.asarray, params)
    layout.place_params(params)
    return pipeline(*inputs, params, jax.random.key(3), **options).images


def layout_of(**sizes):
    sizes = {"data": 1} | sizes
    return parse_layout([f"{name}={n}" for name, n in sizes.items()])


@pytest.mark.slow
def test_batches_on_several_devices_are_pmaps(text):
    pipeline, params = text
    ids, neg_ids = map(pipeline.prepare_inputs, (["red", "it", "blue", "make"], "green"))
    replicated = replicate(params, jax.devices()[:2])
    halves = ids.reshape(2, 2, -1), replicated, jax.random.key(3)
    many = np.broadcast_to(neg_ids, (2, *neg_ids.shape))
    pmapped = pipeline(*halves, neg_prompt_ids=many, jit=True, **OPTIONS).images
    images = shared_images(
        text, Layout(jax.devices()[:2]), (ids,), neg_prompt_ids=neg_ids, **OPTIONS
    )
    np.testing.assert_array_equal(images, np.concatenate(pmapped))


@pytest.mark.parametrize(
    "family, sizes",
    [
        ("text", dict(branches=2, rows=2)),
        *slow(
            ("text", dict(data=2, branches=2)),
            ("text", dict(data=2, rows=2)),
            ("xl", dict(branches=2, rows=2)),
            ("xl", dict(rows=4)),
        ),
    ],
)
def test_images_from_text(family, sizes, request):
    """Images that several devices share are those of one device."""
    loaded = pipeline, params = request.getfixturevalue(family)
    B, options = sizes.get("data", 1), OPTIONS | dict(height=64, width=32)
    inputs = (pipeline.prepare_inputs(["make it red", "it"][:B]),)
    expected = pipeline(*inputs, params, jax.random.key(3), **options).images
    images = shared_images(loaded, layout_of(**sizes), inputs, **options)
    np.testing.assert_allclose(images, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "with_mask"),
    [
        (dict(branches=3), True),
        (dict(rows=4), False),
        (dict(data=2, rows=2), True),
    ],
)
def test_edits(edit, sizes, with_mask):
    pipeline, params = edit
    image = photo(32, 64)
    mask = Image.fromarray(np.eye(64, 32, dtype=np.uint8) * 255) if with_mask else None
    ids, images, *masks = pipeline.prepare_inputs(["it"] * sizes.get("data", 1), image, mask)
    options = EDIT | ({"mask": masks[0]} if with_mask else {})
    expected = pipeline(ids, images, params, jax.random.key(3), **options).images
    found = shared_images(edit, layout_of(**sizes), (ids, images), **options)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accelerate", "sizes"),
    [
        ("guidance:stop=0.5", dict(branches=2)),
        ("deepcache:interval=2 guidance:stop=0.5", dict(branches=2, rows=2)),
        ("spectrum", dict(rows=2)),
        ("tgate:gate=5,interval=2", dict(branches=2)),
        ("fbcache:threshold=0.5", dict(branches=2, rows=2)),
        ("tome:ratio=0.5", dict(rows=2)),
        ("int8:mode=dynamic", dict(rows=2)),
        ("int8:mode=weight", dict(branches=2, rows=2)),
    ],
)
def test_accelerations(tmp_path, sizes, accelerate):
    model = make_tiny_pipeline(tmp_path / "model", in_channels=4, unet_channels=(16, 32))
    loaded = FlaxDiffusionPipeline.from_pretrained(model, accelerate=accelerate)
    pipeline, params = loaded
    inputs = (pipeline.prepare_inputs("it"),)
    options = dict(num_inference_steps=12, guidance_scale=3.0, height=64, width=32)
    if "rows" in sizes and accelerate.startswith(("fbcache", "tome")):
        with pytest.raises(ValueError, match="needs all rows of an image on one device"):
            shared_images(loaded, layout_of(**sizes), inputs, **options)
        return
    expected = pipeline(*inputs, params, jax.random.key(3), **options).images
    found = shared_images(loaded, layout_of(**sizes), inputs, **options)
    if "dynamic" in accelerate:  # rounding moves some activations to the next of 255 values
        assert psnr(found, expected) > 50
    else:
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.slow
def test_controlnet(tmp_path):
    model = make_tiny_pipeline(tmp_path / "model", in_channels=4, unet_channels=(16, 32))
    controlnet = make_tiny_controlnet(tmp_path / "controlnet", model)
    loaded = pipeline, params = FlaxStableDiffusionControlNetPipeline.from_pretrained(
        model, controlnet=controlnet
    )
    inputs = pipeline.prepare_inputs("it", photo(32, 64))
    expected = pipeline(*inputs, params, jax.random.key(3), **OPTIONS).images
    found = shared_images(loaded, layout_of(branches=2, rows=2), inputs, **OPTIONS)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_what_devices_cannot_share(text):
    inputs = (text[0].prepare_inputs("it"),)
    for sizes, options, message in (
        (
            dict(branches=2),
            {"guidance_scale": 1.0},
            "branches=2 does not divide the number of branches of guidance, 1",
        ),
        (dict(branches=3), {}, r"branches=3 does not divide .*, 2 \(text, null\)"),
        (dict(rows=3), {}, "rows=3 does not divide a height of 64 .*; take a multiple of 24"),
    ):
        with pytest.raises(ValueError, match=message):
            shared_images(text, layout_of(**sizes), inputs, **OPTIONS | options)


def start_processes(model, parallel, folder, num_devices, num_processes=1, height=96):
    """Images of processes with as many devices in all, started by several_devices.py."""
    env = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices // num_processes}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    outputs, children = [folder / f"{k}.npy" for k in range(num_processes)], []
    address = f"localhost:{free_port()}"
    for k, output in enumerate(outputs):
        command = [
            sys.executable,
            ROOT / "tests/several_devices.py",
            model,
            parallel,
            output,
            height,
        ]
        command += [address, num_processes, k] if num_processes > 1 else []
        children.append(subprocess.Popen(list(map(str, command)), env=env))
    codes = [child.wait(300) for child in children]
    assert codes == [0] * num_processes
    return [np.load(output) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, parallel, num_devices, num_processes",
    [
        ("xl", "rows=3,data=2", 6, 1),
        ("text", "data=1,rows=6", 6, 1),
        ("edit", "data=1,rows=8", 8, 1),
        ("xl", "data=1,rows=4", 4, 2),
        ("text", "data=2,rows=2", 4, 2),
    ],
)
def test_many_devices_and_processes(family, parallel, num_devices, num_processes, tmp_path):
    make = make_tiny_xl if family == "xl" else make_tiny_pipeline
    options = {"in_channels": 4} if family == "text" else {}
    model = make(tmp_path / "model", **options)
    height = 128 if "rows=8" in parallel else 96  # of latents a multiple of rows, and of levels
    found = start_processes(model, parallel, tmp_path, num_devices, num_processes, height)
    for images in found:
        expected = make_images(model, None, len(images), height)
        np.testing.assert_allclose(images, expected, atol=1e-5)
