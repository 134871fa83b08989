"""Programs that make images: parameters, FLOPs, tiles."""

import json
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from tiny_models import make_tiny_pipeline, make_tiny_xl
from tpu_programs import accelerated, elements, needs_libtpu, tensor_shapes

import compile_for
from compile_for import SdxlFlags
from diffusers_flax.compilation_cache import no_compilation_cache
from diffusers_flax.compiling.chips import (
    find_slice,
    slice_devices,
)
from diffusers_flax.compiling.costs import num_bytes
from diffusers_flax.compiling.hlo import (
    parse_program,
)
from diffusers_flax.compiling.programs import image_program
from diffusers_flax.parameters import cast_params
from diffusers_flax.pipelines.stable_diffusion_xl import FlaxStableDiffusionXLPipeline

NUM_DEVICES = 4  # conftest.py's


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny pipeline with an 8-channel UNet."""
    folder = tmp_path_factory.mktemp("compile_for") / "model"
    return make_tiny_pipeline(folder, vae_channels=(16, 32), unet_channels=(16, 32))


@pytest.mark.slow
def test_sdxl_parameters_are_those_of_the_script(tmp_path):
    """The VAE's are float32."""
    model = make_tiny_xl(tmp_path / "xl")
    config = SdxlFlags(tpu="v5e-4", pretrained_model_name_or_path=str(model), image_size=64)
    found = image_program(config, jax.devices()).held["parameters"]
    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained(model, dtype=jnp.bfloat16)
    cast_params(pipeline, params)
    expected = jax.tree.map(lambda x: ((NUM_DEVICES, *x.shape), x.dtype), params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == expected
    assert expected["vae"]["post_quant_conv"]["bias"][1] == np.float32


@pytest.mark.slow
def test_flops_of_a_cache_are_those_of_its_steps(model):
    """Of 12 steps of three branches 6, 4 and 3 are whole ones, as DeepCache's plan says."""
    counts, evaluations = {}, {}
    for interval in (2, 3, 4):
        config = accelerated(model, f"deepcache:interval={interval}", num_inference_steps=12)
        counts[interval], int8_flops = compile_for.count_step_flops(config, 1)
        evaluations[interval] = image_program(config, jax.devices()[:1]).evaluations
        assert int8_flops == 0
    assert evaluations == {2: 3 * 6, 3: 3 * 4, 4: 3 * 3}
    assert counts[2] - counts[3] == pytest.approx(2 * (counts[3] - counts[4]))
    config = accelerated(model, num_inference_steps=1)
    assert counts[4] > 3 * compile_for.count_step_flops(config, 1)[0] * 0.7  # it has the VAE too


@pytest.mark.slow
def test_flops_of_branches_and_int8(model):
    """Guidance ends after half of the steps; int8's share of the UNet's FLOPs."""
    plain, _ = compile_for.count_step_flops(accelerated(model, num_inference_steps=4), 1)
    two, _ = compile_for.count_step_flops(accelerated(model, num_inference_steps=2), 1)
    half = accelerated(model, "guidance:stop=0.5", num_inference_steps=4)
    found, _ = compile_for.count_step_flops(half, 1)
    # 3 + 3 + 1 + 1 of 12 branches; each loop projects its text, so one branch's text counts twice
    kernels = tensor_shapes(model / "unet", r"attn2\.to_[kv]\.weight$")
    of_text = 2 * 77 * elements(kernels)
    assert found == pytest.approx(plain - (plain - two) * 2 / 3 + of_text)
    int8 = accelerated(model, "int8:mode=dynamic", num_inference_steps=4)
    flops, int8_flops = compile_for.count_step_flops(int8, 1)
    assert flops == pytest.approx(plain)
    assert 0.3 < int8_flops / (2 * (plain - two)) < 1  # of the UNet in four steps
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
    with pytest.raises(ValueError, match="madebyollin/taesd decodes latents of 4 channels to"):
        image_program(accelerated(model, "taesd"), jax.devices()[:1])
    assert {"tiny_vae", "vae", "unet"} < found.held["parameters"].keys()
    kernels = jax.tree.leaves(found.held["parameters"]["unet"])
    assert {x.dtype for x in kernels} == {jnp.dtype(x) for x in ("bfloat16", "float32", "int8")}


@pytest.mark.slow
def test_tiles_of_the_vae(model, monkeypatch):
    """Chosen if the chip needs them; a chip has no parts of the model of its own."""
    devices = jax.devices()[:1]
    assert image_program(accelerated(model), devices).vae_tile == 0
    assert image_program(accelerated(model, vae_tile=32), devices).vae_tile == 32
    assert image_program(accelerated(model, vae_tile=64), devices).vae_tile == 0  # one tile
    monkeypatch.setattr("diffusers_flax.compiling.programs.GIB", 2**16)  # a v5e has a megabyte
    assert image_program(accelerated(model, resolution=256), devices).vae_tile == 64 // 4
    with pytest.raises(ValueError, match="--devices unet=1 makes several programs"):
        compile_for.check_flags(accelerated(model, devices=("unet=1",)), 4)


@pytest.mark.slow
def test_parameters_in_the_hosts_memory_take_none_of_a_chip(model, monkeypatch):
    monkeypatch.setattr("diffusers_flax.devices.layout.HOST_PLATFORMS", ())
    devices = jax.devices()[:1]

    def held(**options):
        return num_bytes(image_program(accelerated(model, **options), devices).held["parameters"])

    plain, int8 = held(), held(storage="int8")
    component, layer = held(offload="component"), held(offload="layer")
    assert plain > int8 > component > 5 * layer  # layer keeps vectors there


@pytest.mark.slow
@needs_libtpu
def test_text_keys_and_values_are_computed_once_per_image(tmp_path, libtpu_environment):
    """They are matmuls before the loop, which has the queries."""
    model = make_tiny_xl(tmp_path / "xl")  # text states are as wide as the widest layer
    config = SdxlFlags(tpu="v5e-1", pretrained_model_name_or_path=str(model), image_size=64)
    program = image_program(config, slice_devices(find_slice("v5e-1")))
    with no_compilation_cache():
        text = program.step.lower(*program.args).compile().as_text()
    computations, entry = parse_program(text)
    once, loops = Counter(), Counter()
    for name, instructions in computations.items():
        for line in instructions.values():
            layer = re.search(r"(attn2/to_[qkv]|/Dense)/[^/]*/dot_general", line.text)
            if layer and line.operation in ("fusion", "convolution") and "fused" not in name:
                (once if name == entry else loops)[layer[1]] += 1
    layers = flatten_dict(program.held["parameters"]["unet"])
    num_layers = sum(path[-3:] == ("attn2", "to_k", "kernel") for path in layers)
    assert once == {"/Dense": 2 * num_layers} and num_layers  # project_text's
    assert loops.keys() <= {"attn2/to_q"} and "attn2/to_q/to_q/dot_general" in text
