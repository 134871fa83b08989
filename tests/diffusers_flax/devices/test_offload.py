"""Parameters in the host's memory: same images, and what is fetched when."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from helpers import random_inputs
from tiny_models import make_tiny_controlnet, make_tiny_pipeline, make_tiny_xl

from diffusers_flax import FlaxStableDiffusionXLControlNetPipeline
from diffusers_flax.compiling.hlo import traffic
from diffusers_flax.devices import layout as layout_module
from diffusers_flax.devices.layout import Layout
from diffusers_flax.devices.offload import GROUPS, fetching, group_of
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline

MODES = tuple(GROUPS)
OPTIONS = dict(num_inference_steps=2, guidance_scale=3.0)
KEY = jax.random.key(3)


@pytest.fixture
def pinned(monkeypatch):
    """Let CPUs keep parameters in pinned memory, as accelerators do."""
    monkeypatch.setattr(layout_module, "HOST_PLATFORMS", ())


def two_images(pipeline, params, jit=False, image=None, **more):
    """Two images of a pipeline, (2, H, W, 3)."""
    prompts = ["make it red", "it"]
    inputs = pipeline.prepare_inputs(*([prompts] if image is None else [prompts, image]))
    inputs = jax.tree.map(np.asarray, inputs if isinstance(inputs, tuple) else (inputs,))
    if jit:
        inputs = [x[:, None] for x in inputs]
    images = np.asarray(pipeline(*inputs, params, KEY, **OPTIONS | more, jit=jit).images)
    return images.reshape(2, *images.shape[-3:])


def place(params, layout):
    params = jax.tree.map(np.asarray, params)
    layout.place_params(params)
    return params


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, accelerate, modes",
    [
        ("edit", (), ("component", "layer")),
        ("xl", (), MODES),
        ("xl edit", (), ("group",)),
        ("xl", ("deepcache",), ("layer",)),
        ("controlnet", (), ("group",)),
        ("xl", ("tgate:gate=5,interval=2",), ("group",)),
        ("xl", ("tome:ratio=0.5",), ("layer",)),
    ],
)
def test_images_are_those_without(family, accelerate, modes, tmp_path, pinned):
    """Bit for bit, in one call and, without accelerations, with an axis of devices."""
    make = make_tiny_pipeline if family == "edit" else make_tiny_xl
    folder = make(tmp_path / "model", **({"edits": True} if family == "xl edit" else {}))
    pipeline_type, more = FlaxDiffusionPipeline, {}
    if family == "controlnet":
        pipeline_type = FlaxStableDiffusionXLControlNetPipeline
        more["controlnet"] = make_tiny_controlnet(tmp_path / "net", folder, halvings=3)
    image = None if family == "xl" else random_inputs(2, 32, 32)[0]
    # Caches refuse few steps.
    more_steps = {"num_inference_steps": 12} if accelerate and "tome" not in accelerate[0] else {}
    calls = (False, jax.devices()[:1]), (True, jax.devices()[:2])
    for jit, devices in calls[:1] if accelerate else calls:
        options = {"accelerate": accelerate, "layout": Layout(devices), **more}
        pipeline, params = pipeline_type.from_pretrained(folder, **options)
        placed = place(params, Layout(devices))
        expected = two_images(pipeline, placed, jit, image, **more_steps)
        for mode in modes:
            layout = Layout(devices, offload=mode)
            pipeline, _ = pipeline_type.from_pretrained(folder, **options | {"layout": layout})
            placed = place(params, layout)
            for name, part in placed.items():
                kinds = {x.sharding.memory_kind for x in jax.tree.leaves(part) if x.ndim > 1}
                stays = mode == "component" and name in ("unet", "controlnet")
                assert kinds == ({"device"} if stays else {"pinned_host"} if kinds else set())
            images = two_images(pipeline, placed, jit, image, **more_steps)
            np.testing.assert_array_equal(images, expected)


def test_a_cpu_keeps_its_parameters(tmp_path):
    """Offload is the identity there."""
    layout = Layout(jax.devices()[:1], offload="group")
    params = place({"unet": {"kernel": np.ones((2, 2))}}, layout)
    assert params["unet"]["kernel"].sharding.memory_kind == "device"


TINY = {
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "attention_head_dim": 2,
    "cross_attention_dim": 24,
    "norm_num_groups": 8,
}


def unet_loop(mode, layout):
    """A program of three steps of a tiny UNet, and its arguments as shapes."""
    unet = FlaxUNet2DConditionModel(**TINY)
    shapes = flatten_dict(jax.eval_shape(unet.init_weights, jax.random.key(0)))
    for path, x in shapes.items():
        if group_of(path, mode):  # the part fetches what is in no group
            shapes[path] = jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=layout.placement_of("unet", x)
            )

    def loop(params, x, context):
        with fetching(mode):
            return jax.lax.fori_loop(
                0, 3, lambda i, x: unet.apply({"params": params}, x, i, context).sample, x
            )

    arrays = jnp.zeros((1, 4, 8, 8)), jnp.zeros((1, 7, 24))
    return loop, (unflatten_dict(shapes), *arrays)


@pytest.mark.variants
@pytest.mark.parametrize("mode, matrices, groups", [("group", 79, 14), ("layer", 71, 14)])
def test_lowering_for_gpus(mode, matrices, groups, pinned):
    """Every matrix is fetched once in a step, each group behind its own barrier."""
    loop, args = unet_loop(mode, Layout(jax.devices()[:1], offload=mode))
    text = jax.jit(loop).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@annotate_device_placement") == matrices
    # Features of three or four axes are known before a fetch. Barriers of group norms, which have
    # two arrays of one shape, are not counted.
    barriers = re.findall(r"optimization_barrier .*<1x\d+x\d+(?:x\d+)?xf32>", text)
    assert len([x for x in barriers if not re.search(r": (tensor<.*>), \1$", x)]) == groups


def test_refusals():
    with pytest.raises(ValueError, match="offload='disk' is not known; known are component"):
        Layout(jax.devices()[:1], offload="disk")
    with pytest.raises(ValueError, match="exclude data, branches and rows, and offload"):
        Layout(jax.devices()[:2], components={"unet": 1}, offload="layer")


def test_fetched_bytes_count_trips():
    """Of a program's text: a loop's fetches as often as it runs."""
    text = """
%body (x: f32[2]) -> f32[2] {
  %w.1 = (bf16[64,128]{1,0}, bf16[64,128]{1,0:T(8,128)S(5)}, u32[]{:S(2)}) copy-start(%a)
  %v.1 = (bf16[64]{0:S(1)}, bf16[64]{0}, u32[]{:S(2)}) copy-start(%b)
}
ENTRY %main (x: f32[2]) -> f32[2] {
  %w.2 = (s8[4,8]{1,0}, s8[4,8]{1,0:S(5)}, u32[]{:S(2)}) copy-start(%a)
  %l = f32[2] while(%x), condition=%c, body=%body, config={"known_trip_count":{"n":"20"}}
}
%c (x: f32[2]) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
"""
    assert traffic(text)["host_bytes"] == 20 * 2 * 64 * 128 + 4 * 8
