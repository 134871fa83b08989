"""The plan of images: which devices, tiles and memory they take."""

import math
from dataclasses import replace

import jax
import pytest
from tiny_models import make_tiny_pipeline, make_tiny_xl

from diffusers_flax import FlaxStableDiffusionXLPipeline
from diffusers_flax.devices.layout import Layout
from diffusers_flax.generating.models import plan_images
from diffusers_flax.pipelines import memory


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {"edit": make_tiny_pipeline(root / "edit"), "xl": make_tiny_xl(root / "xl")}


def test_the_plan_says_which_tile(folders, monkeypatch):
    pipeline = FlaxStableDiffusionXLPipeline.open(folders["xl"])
    monkeypatch.setattr("diffusers_flax.devices.memory.host_memory", lambda: 2**30)

    def plan(**options):
        batch = dict(num_images=4, batch_size=1, branches=("text", "null"), sizes=[(512, 512)])
        return plan_images(pipeline, jax.devices()[:2], **batch, **options)

    planned, line = plan(vae_tile=32)
    assert planned.vae.tile == 32
    assert line.endswith("; the VAE works in tiles of 32 pixels")
    planned, line = plan()
    assert planned.vae.tile is None and "tiles" not in line
    planned, line = plan(vae_tile=1024)
    assert planned.vae.tile == 1024 and "tiles" not in line
    of_vae = memory.bytes_of_vae(pipeline.compute_vae, 1, (512, 512), "cpu")
    needed = memory.num_bytes_of_params(pipeline) + 2 * of_vae
    monkeypatch.setattr("diffusers_flax.devices.memory.host_memory", lambda: needed - 1)
    planned, line = plan()
    assert planned.vae.tile == 64
    assert line.endswith("tiles of 64 pixels")
    assert plan(vae_tile=0)[0].vae.tile is None
    with pytest.raises(ValueError, match="vae_tile=33 is not a multiple of 32"):
        plan(vae_tile=33)


def test_the_plan_counts_each_device(folders):
    layout = Layout(jax.devices()[:3], components="balanced")
    pipeline = replace(FlaxStableDiffusionXLPipeline.open(folders["xl"]), layout=layout)
    batch = dict(num_images=4, batch_size=2, branches=("text", "null"), sizes=[(64, 64)])
    planned, line = plan_images(pipeline, layout.groups, **batch)
    assert sorted(number for _, number in planned.layout.components) == [0, 1, 2]
    places = ", ".join(
        f"{x} on {dict(planned.layout.components)[x]}" for x in ("text", "unet", "vae")
    )
    assert f"2 at once with {places} of 3 cpu" in line
    held = memory.bytes_of_devices(planned)
    assert sum(held) == memory.num_bytes_of_params(pipeline)
    unet = sum(4 * math.prod(shape) for shape in pipeline.unet._param_shapes().values())
    assert held[dict(planned.layout.components)["unet"]] == unet


@pytest.mark.slow
def test_offload_is_counted(folders, monkeypatch):
    """Parameters of the largest component or group count; on a CPU it changes nothing."""
    monkeypatch.setattr("diffusers_flax.devices.layout.HOST_PLATFORMS", ())
    devices, counts = jax.devices()[:1], {}
    for mode in (None, "component", "group", "layer"):
        layout = Layout(devices, offload=mode)
        pipeline = FlaxStableDiffusionXLPipeline.open(folders["xl"], layout=layout)
        counts[mode] = memory.num_bytes_at_once(pipeline)
    assert counts[None] > counts["component"] > counts["group"] >= counts["layer"]
