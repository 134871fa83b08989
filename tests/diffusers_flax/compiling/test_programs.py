"""Programs that make images and pairs: parameters, FLOPs, tiles."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import make_tiny_pipeline, make_tiny_xl
from tpu_programs import accelerated, count_flops, elements, needs_libtpu, tensor_shapes

from diffusers_flax.compilation_cache import no_compilation_cache
from diffusers_flax.compiling.chips import Chip, Target, find_target, target_devices
from diffusers_flax.compiling.programs import (
    PairProgramFlags,
    SdxlFlags,
    clip_part,
    image_program,
    sharing_fractions,
)
from diffusers_flax.compiling.report import num_bytes
from diffusers_flax.flops import matmul_flops
from diffusers_flax.parameters import cast_params
from diffusers_flax.pipelines import attention_sharing, sampling
from diffusers_flax.pipelines.stable_diffusion_xl import FlaxStableDiffusionXLPipeline

NUM_DEVICES = 4  # conftest.py's


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny pipeline with an 8-channel UNet."""
    folder = tmp_path_factory.mktemp("compile_for") / "model"
    return make_tiny_pipeline(folder, vae_channels=(16, 32), unet_channels=(16, 32))


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    """A tiny pipeline for images from text."""
    folder, sizes = tmp_path_factory.mktemp("pairs") / "model", ((16, 32), (16, 32))
    return make_tiny_pipeline(folder, 4, vae_channels=sizes[0], unet_channels=sizes[1])


def sdxl(model, **more):
    """Flags of `sdxl` with a tiny model."""
    options = {"pretrained_model_name_or_path": str(model), "image_size": 64} | more
    return SdxlFlags(tpu="v5e-1", **options)


def pairs(model, **more):
    """Flags of `pairs` with a tiny model, 64 pixels, 2 pairs."""
    options = {"batch_size": 2, "num_inference_steps": 5, "width": 64, "height": 64} | more
    return PairProgramFlags(tpu="v5e-1", pretrained_model_name_or_path=str(model), **options)


@pytest.mark.slow
def test_sdxl_parameters_are_those_of_the_script(tmp_path):
    """The VAE's are float32."""
    model = make_tiny_xl(tmp_path / "xl")
    found = image_program(sdxl(model), jax.devices()).held["parameters"]
    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained(model, dtype=jnp.bfloat16)
    cast_params(pipeline, params)
    expected = jax.tree.map(lambda x: ((NUM_DEVICES, *x.shape), x.dtype), params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == expected
    assert expected["vae"]["post_quant_conv"]["bias"][1] == np.float32


@pytest.mark.slow
def test_flops_of_steps_and_images(tmp_path, monkeypatch):
    """Of a loop's steps all count, and of images that are decoded one after the other."""
    monkeypatch.setattr(sampling, "DECODED_PIXELS", 1)
    model = make_tiny_xl(tmp_path / "xl")
    one, two, three, images = (
        count_flops(sdxl(model, num_inference_steps=steps, num_images=n))
        for steps, n in ((1, 1), (2, 1), (3, 1), (1, 4))
    )
    assert three - two == pytest.approx(two - one) and two > one
    assert images == pytest.approx(4 * one)


@pytest.mark.slow
def test_flops_of_a_cache_are_those_of_its_steps(model):
    """Of 12 steps of three branches 6, 4 and 3 are whole ones, as DeepCache's plan says."""
    counts = {}
    for interval in (2, 3, 4):
        config = accelerated(model, f"deepcache:interval={interval}", num_inference_steps=12)
        counts[interval] = count_flops(config)
    assert counts[2] - counts[3] == pytest.approx(2 * (counts[3] - counts[4]))
    one = count_flops(accelerated(model, num_inference_steps=1))
    assert counts[4] > 3 * one * 0.7  # it has the VAE too


@pytest.mark.slow
def test_flops_of_branches_and_int8(model):
    """Guidance ends after half of the steps; int8's share of the UNet's FLOPs."""
    plain, two = (count_flops(accelerated(model, num_inference_steps=n)) for n in (4, 2))
    half = accelerated(model, "guidance:stop=0.5", num_inference_steps=4)
    # 3 + 3 + 1 + 1 of 12 branches; each loop projects its text, so one branch's text counts twice
    kernels = tensor_shapes(model / "unet", r"attn2\.to_[kv]\.weight$")
    of_text = 2 * 77 * elements(kernels)
    assert count_flops(half) == pytest.approx(plain - (plain - two) * 2 / 3 + of_text)
    int8 = accelerated(model, "int8:mode=dynamic", num_inference_steps=4)
    assert count_flops(int8) == pytest.approx(plain)
    assert 0.3 < count_flops(int8, 1) / (2 * (plain - two)) < 1  # of the UNet in four steps
    with pytest.raises(ValueError, match="tgate is for text to image"):
        image_program(accelerated(model, "tgate"), jax.devices()[:1])


@pytest.mark.slow
def test_an_edit_by_the_tiny_decoder(model, tmp_path):
    sizes = {f"{part}_block_out_channels": [8, 8] for part in ("encoder", "decoder")}
    sizes |= {f"num_{part}_blocks": [1, 1] for part in ("encoder", "decoder")}
    config = {"_class_name": "AutoencoderTiny"} | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    specs = f"taesd:path={tmp_path}", "int8:mode=weight"
    found = image_program(accelerated(model, *specs), jax.devices()[:1])
    assert {"tiny_vae", "vae", "unet"} < found.held["parameters"].keys()
    kernels = jax.tree.leaves(found.held["parameters"]["unet"])
    assert {x.dtype for x in kernels} == {jnp.dtype(x) for x in ("bfloat16", "float32", "int8")}


@pytest.mark.slow
def test_tiles_of_the_vae(model, monkeypatch):
    """Chosen if the chip needs them."""
    devices = jax.devices()[:1]
    assert image_program(accelerated(model), devices).vae_tile == 0
    assert image_program(accelerated(model, vae_tile=32), devices).vae_tile == 32
    assert image_program(accelerated(model, vae_tile=64), devices).vae_tile == 0  # one tile
    small = Target(Chip("small", 1, 1, 1, 1, 1, num_bytes=2**20), 1)
    monkeypatch.setattr("diffusers_flax.compiling.programs.find_target", lambda name: small)
    assert image_program(accelerated(model, resolution=256), devices).vae_tile == 64 // 4


@pytest.mark.slow
def test_parameters_in_the_hosts_memory_take_none_of_a_chip(model, monkeypatch):
    monkeypatch.setattr("diffusers_flax.devices.layout.HOST_PLATFORMS", ())
    devices = jax.devices()[:1]

    def held(**options):
        return num_bytes(image_program(accelerated(model, **options), devices).held["parameters"])

    plain, int8 = held(), held(storage="int8")
    component, layer = held(offload="component"), held(offload="layer")
    assert plain > int8 > component > 5 * layer  # layer keeps vectors there


@pytest.mark.parametrize(("num_pairs", "num_steps"), [(1, 100), (4, 100), (4, 8)])
def test_expected_fraction_of_shared_steps(num_pairs, num_steps):
    """Against pairs that are drawn."""
    p = np.random.default_rng(0).uniform(0.1, 0.9, (40_000, num_pairs, 1))
    shared = p > np.arange(num_steps) / (num_steps - 1)
    expected = [np.mean(~shared.any(axis=1)), np.mean(shared.all(axis=1))]
    expected.insert(1, 1 - sum(expected))
    found = sharing_fractions(0.1, 0.9, num_pairs, num_steps)
    assert found == pytest.approx(expected, abs=0.004)
    assert sharing_fractions(0.5, 0.5, num_pairs, 11) == pytest.approx((6 / 11, 0, 5 / 11))
    assert sharing_fractions(0, 0, num_pairs, 11) == (1, 0, 0)


def test_flops_and_parameters_of_clip():
    """ViT-L/14's image encoder: patches, 24 layers of 257 positions, projection."""
    layer = 257 * (4 * 1024**2 + 2 * 1024 * 4096) + 2 * 257**2 * 1024
    image = 256 * 3 * 14**2 * 1024 + 24 * layer + 1024 * 768
    clip = clip_part(6, jax.devices()[:1])
    assert matmul_flops(jax.make_jaxpr(clip.function)(*clip.args).jaxpr) == (2 * 6 * image, 0)
    assert num_bytes(clip.args[0]) == 4 * 427_616_513  # of the published CLIP


@pytest.mark.slow
@needs_libtpu
def test_conditions_have_the_scopes_of_their_fractions(model, text_model, libtpu_environment):
    """In programs that XLA compiled; XLA may give a condition no name."""
    devices = target_devices(find_target("v5e-1"))
    for config, scope in (
        (pairs(text_model), attention_sharing.SCOPE),
        (accelerated(model, "deepcache:interval=3"), "steps_from_0"),
    ):
        step = image_program(config, devices).parts["step"]
        assert scope in step.fractions
        with no_compilation_cache():
            text = step.function.lower(*step.args).compile().as_text()
        conditions = [line for line in text.splitlines() if " conditional(" in line]
        assert conditions
        assert all(f'{scope}/cond"' in line or "op_name" not in line for line in conditions)
