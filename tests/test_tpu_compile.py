"""tpu_compile.py: shapes against a run's, figures by hand, the command line."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from helpers import ROOT, slow
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from safetensors import safe_open
from tiny_models import make_tiny_pipeline, make_tiny_xl

import flax_train_instruct_pix2pix as trainer
import tpu_compile
from compiling.hlo import (
    expected_cycles,
    first_group,
    hbm_bytes,
    interconnect_bytes,
    kernel_bytes,
    parse_program,
)
from compiling.jobs import image_job
from compiling.programs import (
    CHIPS,
    LIBTPU_ENVIRONMENT,
    find_slice,
    largest_fitting,
    num_bytes,
    program_costs,
    replicated_shapes,
    roofline_seconds,
    slice_devices,
)
from diffusers_flax.compilation_cache import no_compilation_cache
from diffusers_flax.flops import matmul_flops
from diffusers_flax.models.quantization import store
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.parameters import cast_params
from diffusers_flax.pipelines import sampling
from diffusers_flax.pipelines.stable_diffusion_xl import FlaxStableDiffusionXLPipeline
from tpu_compile import Edit, Sdxl, Train, Unet
from training.ema import start_average
from training.models import cast_frozen, load_models
from training.sharding import (
    Split,
    gather,
    reduce_scatter_mean,
    replicate,
    shard_axes,
    shard_batch,
    start_state,
    state_shapes,
    update_state,
)

NUM_DEVICES = 4  # conftest.py's
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason='the TPU\'s compiler is not installed: pip install "jax[tpu]"',
)


def compile_for(config, tpu, devices):
    """The report of a program."""
    return tpu_compile.compile_job(config, tpu_compile.make_job(config, devices), tpu)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny pipeline with an 8-channel UNet."""
    folder = tmp_path_factory.mktemp("tpu_compile") / "model"
    return make_tiny_pipeline(folder, vae_channels=(16, 32), unet_channels=(16, 32))


@pytest.fixture
def libtpu_environment(monkeypatch):
    """Restores the settings that slice_devices changes."""
    for name, value in LIBTPU_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def flags(model, **more):
    """The flags `train` for the tiny pipeline."""
    paths = {"pretrained_model_name_or_path": str(model)}
    return Train(**{**paths, "tpu": "v5e-4", "resolution": 16, "train_batch_size": 8, **more})


def run(*args):
    """Run the command line as users do."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "tpu_compile.py", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def tensor_shapes(folder):
    """The shapes of a directory's weights, in PyTorch's naming."""
    with safe_open(next(folder.glob("*.safetensors")), "np") as tensors:
        return [tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()]  # noqa: SIM118


def elements(shapes, num_slices=1):
    """Number of values in one of num_slices shards; arrays without a divisible axis count fully."""
    cut = [any(size % num_slices == 0 for size in shape) for shape in shapes]
    return sum(int(np.prod(shape)) // (num_slices if c else 1) for shape, c in zip(shapes, cut))


# Types and topologies


@pytest.mark.variants
@pytest.mark.parametrize(
    ("name", "num_chips", "num_hosts", "shape"),
    [
        ("v4-8", 4, 1, "2x2x1"),
        ("v4-32", 16, 4, "2x2x4"),
        ("v5p-8", 4, 1, "2x2x1"),
        ("v5e-1", 1, 1, "1x1"),
        ("v5e-8", 8, 1, "2x4"),
        ("v5e-16", 16, 4, "4x4"),
        ("v5litepod-16", 16, 4, "4x4"),
        ("v6e-8", 8, 1, "2x4"),
        ("v6e-256", 256, 64, "16x16"),
    ],
)
def test_types_count_cores_or_chips(name, num_chips, num_hosts, shape):
    tpu = find_slice(name)
    assert (tpu.num_chips, tpu.num_hosts, tpu.shape) == (num_chips, num_hosts, shape)


@needs_libtpu
@pytest.mark.parametrize("name", ["v4-32", "v5p-8", "v5e-1", "v5e-16", "v6e-8", "v4-1024"])
def test_topologies_have_as_many_devices(name, libtpu_environment):
    tpu = find_slice(name)
    devices = slice_devices(tpu)
    assert len(devices) == tpu.num_chips
    kinds = {"v4": "TPU v4", "v5p": "TPU v5", "v5e": "TPU v5 lite", "v6e": "TPU v6 lite"}
    assert {device.device_kind for device in devices} == {kinds[name.split("-")[0]]}


# Shapes


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd", *slow("xl")])
@pytest.mark.parametrize("lora_rank", [None, *slow(4)])
def test_arguments_are_those_of_a_real_run(model, tmp_path, lora_rank, family):
    """Every shape and dtype that train_step would get from train(), on the same devices."""
    if family == "xl":
        model = make_tiny_xl(tmp_path / "xl", edits=True)
    config = flags(
        model,
        unet_model_name_or_path=str(model / "unet"),
        mixed_precision="bf16",
        ema="full",
        lora_rank=lora_rank,
        lora_target_modules=("proj_in",) if lora_rank else trainer.Config.lora_target_modules,
    )
    job = tpu_compile.train_job(config, jax.devices())

    models, pipeline, frozen, params = load_models(config, jnp.bfloat16)
    frozen = cast_frozen(frozen, models)
    tx, _ = trainer.make_optimizer(config, config.max_train_steps)
    images = np.zeros((8, 16, 16, 3), np.uint8)
    batch = {
        "original_pixel_values": images,
        "edited_pixel_values": images,
        "input_ids": pipeline.prepare_text_inputs(["make it red"] * 8),
    }
    if family == "xl":
        batch["time_ids"] = np.zeros((8, 6), np.float32)
    state = start_state(params, tx, shard_axes(params, NUM_DEVICES))
    base_rng = np.asarray(jax.random.PRNGKey(0))
    real = (state, replicate(frozen), shard_batch(batch), replicate(base_rng))
    update = (start_average(state.params), state.params, replicate(np.float32(0.5)))
    like = lambda x: (x.shape, x.dtype)  # noqa: E731
    assert jax.tree.map(like, real) == jax.tree.map(like, job.args)
    assert jax.tree.map(like, update) == jax.tree.map(like, job.update_args)


@pytest.mark.slow
@pytest.mark.parametrize(("ema", "num_averages"), [("none", 0), ("late", 1), ("power", 2)])
def test_bytes_of_what_is_held(model, ema, num_averages):
    config = flags(model, ema=ema, mixed_precision="bf16")
    job = tpu_compile.train_job(config, jax.devices())
    held = {name: num_bytes(tree) for name, tree in job.held.items()}

    unet = tensor_shapes(model / "unet")
    share = elements(unet, NUM_DEVICES)
    assert share < elements(unet)
    assert held["parameters"] == 4 * share
    assert held["optimizer"] == 2 * 4 * share + 2 * 4  # two moments, Adam's and the schedule's step
    assert held["ema"] == num_averages * 4 * share
    frozen = [*tensor_shapes(model / "vae"), *tensor_shapes(model / "text_encoder"), (77, 24)]
    scheduler = 4 * (4 * 1000 + 2)  # betas, alphas, their product, timesteps; sigma, index
    assert held["frozen models"] == 2 * elements(frozen) + scheduler
    assert held["batches"] == 3 * 2 * (2 * 16 * 16 * 3 + 77 * 4)  # in use and two ahead, 2 pairs
    if ema == "none":
        masked = replace(config, mask_loss_weight=3.0)
        batches = tpu_compile.train_job(masked, jax.devices()).held["batches"]
        assert num_bytes(batches) - held["batches"] == 3 * 2 * 16 * 16
    assert job.updates_per_step == num_averages
    assert (job.update is None) == (num_averages == 0)


@pytest.mark.slow
def test_without_a_path_it_is_stable_diffusion_1_5():
    _, frozen, params = tpu_compile.training_model_shapes(Train(tpu="v5e-16"))
    published = json.loads((ROOT / "tests" / "published_flax_param_shapes.json").read_text())
    published["sd15_unet"]["conv_in/kernel"] = [3, 3, 8, 320]
    trees = {"sd15_unet": params, "vae": frozen["vae"], "clip_l_text": frozen["text_encoder"]}
    for name, tree in trees.items():
        shapes = {key: list(x.shape) for key, x in flatten_dict(tree, sep="/").items()}
        assert shapes == published[name]


def test_a_narrow_unet_is_taken_as_widened(tmp_path):
    model = make_tiny_pipeline(tmp_path / "narrow", in_channels=4)
    models, _, params = tpu_compile.training_model_shapes(flags(model))
    assert models.unet.in_channels == 8
    assert params["conv_in"]["kernel"].shape == (3, 3, 8, 16)


def test_models_must_fit_together_and_output_dir_does_not_matter(tmp_path):
    """The UNet of a training command may be a part of its --output_dir; nothing is written."""
    narrow = make_tiny_pipeline(tmp_path / "narrow", in_channels=4)
    config = flags(narrow, unet_model_name_or_path=str(narrow / "unet"), output_dir=str(narrow))
    tpu_compile.check_flags(config, num_devices=4)
    with pytest.raises(ValueError, match=r"narrow/unet has 4 input channels.*create_modified_unet"):
        tpu_compile.training_model_shapes(config)
    xl = make_tiny_xl(tmp_path / "xl")
    config = flags("", unet_model_name_or_path=str(xl / "unet"))
    with pytest.raises(ValueError, match=r"^sd15 is Stable Diffusion 1 or 2, but the UNet in "):
        tpu_compile.training_model_shapes(config)


# Arithmetic


def test_roofline_by_hand():
    v5e = CHIPS["v5e"]
    assert roofline_seconds(v5e, 394e12, 0.82e12) == pytest.approx(2.0)  # 2 x 197 TFLOP
    assert roofline_seconds(v5e, 197e12, 2.46e12) == pytest.approx(3.0)  # 3 x 0.82 TB
    # 98.5 TFLOP in bfloat16 and 786 in int8
    assert roofline_seconds(v5e, 884.5e12, 0.0, int8_flops=786e12) == pytest.approx(2.5)


@needs_libtpu
def test_report_by_hand(model):
    """Two micro-batches and an average every second step, on a v5e chip."""
    config = flags(model, tpu="v5e-4", train_batch_size=16, gradient_accumulation_steps=2)
    x = jax.ShapeDtypeStruct((4, 1000), jnp.float32)
    job = tpu_compile.Job(
        step=None,
        args=(x, x),
        held={"parameters": x, "ema": [x]},
        batch_per_chip=4,
        update_args=(x, x),
        updates_per_step=0.5,
    )
    step = {"padding": 1000, "temporaries": 100, "outputs": 10, "code": 1, "compile_seconds": 1.0}
    step |= {"bytes_accessed": 9e12, "hbm_bytes": 0.82e12, "interconnect_bytes": 1e9}
    step |= {"cycles": 5, "host_bytes": 0}
    update = {"padding": 800, "temporaries": 200, "code": 2}
    update |= {"bytes_accessed": 5e12, "hbm_bytes": 1.64e12}
    report = tpu_compile.make_report(config, find_slice("v5e-4"), job, step, update, (394e12, 0.0))
    assert report["memory"] == {
        "parameters": 4000,
        "ema": 4000,
        "padding": 1000 + 400,
        "temporaries": 200,
        "outputs": 10,
        "code": 3,
    }
    assert report["memory_total"] == 9613
    assert report["fits"]
    assert report["step_seconds"] == pytest.approx(2.0 + 1.0)
    assert (report["bytes_accessed"], report["ema_bytes_accessed"]) == (9e12, 2.5e12)
    assert report["images_per_second_per_chip"] == pytest.approx(4 / 3)
    assert report["images_per_second"] == pytest.approx(16 / 3)
    assert report["flags"].keys() == {
        "tpu",
        "pretrained_model_name_or_path",
        "resolution",
        "gradient_accumulation_steps",
    }


@pytest.mark.slow
def test_sdxl_parameters_are_those_of_the_script(tmp_path):
    """The VAE's are float32."""
    model = make_tiny_xl(tmp_path / "xl")
    config = Sdxl(tpu="v5e-4", pretrained_model_name_or_path=str(model), image_size=64)
    found = image_job(config, jax.devices()).held["parameters"]
    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained(model, dtype=jnp.bfloat16)
    cast_params(pipeline, params)
    expected = jax.tree.map(lambda x: ((NUM_DEVICES, *x.shape), x.dtype), params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == expected
    assert expected["vae"]["post_quant_conv"]["bias"][1] == np.float32


@pytest.mark.slow
def test_sdxl_counts_every_step(tmp_path):
    """The program has the loop's body once; the figures count it for every step."""
    model = make_tiny_xl(tmp_path / "xl")
    few, more = (
        Sdxl(
            tpu="v5e-4",
            pretrained_model_name_or_path=str(model),
            image_size=64,
            num_images=2,
            num_inference_steps=steps,
        )
        for steps in (1, 4)
    )
    reports = [compile_for(config, find_slice("v5e-4"), jax.devices()) for config in (few, more)]
    assert [report["batch_per_chip"] for report in reports] == [2, 2]
    one_step = Unet(
        tpu="v5e-4",
        gradient=False,
        batch_size=4,  # two images, two branches
        resolution=64,
        pretrained_model_name_or_path=str(model),
    )
    unet = compile_for(one_step, find_slice("v5e-4"), jax.devices())
    extra = reports[1]["flops"] - reports[0]["flops"]
    assert extra == pytest.approx(3 * unet["flops"], rel=0.05)
    extra = reports[1]["hbm_bytes"] - reports[0]["hbm_bytes"]
    assert extra == pytest.approx(3 * unet["hbm_bytes"], rel=0.3)
    memory = reports[1]["memory"]
    files = ("unet", "vae", "text_encoder", "text_encoder_2")
    size = 2 * sum(elements(tensor_shapes(model / file)) for file in files)
    size += 2 * elements(tensor_shapes(model / "vae"))  # in float32
    assert memory["parameters"] == pytest.approx(size, rel=0.1)  # and the scheduler's state
    assert reports[1]["images_per_second_per_chip"] == pytest.approx(2 / reports[1]["step_seconds"])


@pytest.mark.slow
def test_sdxl_counts_every_image(tmp_path, monkeypatch):
    """Also if images are decoded one after the other, in a loop."""
    monkeypatch.setattr(sampling, "DECODED_PIXELS", 1)
    model = make_tiny_xl(tmp_path / "xl")
    config = Sdxl(
        tpu="v5e-4",
        pretrained_model_name_or_path=str(model),
        image_size=64,
        num_inference_steps=1,
    )
    one, four = (
        compile_for(replace(config, num_images=n), find_slice("v5e-4"), jax.devices())
        for n in (1, 4)
    )
    assert four["flops"] == pytest.approx(4 * one["flops"])
    assert 2 < four["hbm_bytes"] / one["hbm_bytes"] < 4.5  # weights are read once


def accelerated(model, *accelerate, **more):
    """Flags of `edit` with a tiny model."""
    return Edit(
        tpu="v5e-1",
        pretrained_model_name_or_path=str(model),
        **{"resolution": 64, "scheduler": "ddim", "accelerate": accelerate, **more},
    )


@pytest.mark.slow
def test_flops_of_a_cache_are_those_of_its_steps(model):
    """Of 12 steps of three branches 6, 4 and 3 are whole ones, as DeepCache's plan says."""
    counts, evaluations = {}, {}
    for interval in (2, 3, 4):
        config = accelerated(model, f"deepcache:interval={interval}", num_inference_steps=12)
        counts[interval], int8_flops = tpu_compile.count_step_flops(config, 1)
        evaluations[interval] = image_job(config, jax.devices()[:1]).evaluations
        assert int8_flops == 0
    assert evaluations == {2: 3 * 6, 3: 3 * 4, 4: 3 * 3}
    assert counts[2] - counts[3] == pytest.approx(2 * (counts[3] - counts[4]))
    config = accelerated(model, num_inference_steps=1)
    assert counts[4] > 3 * tpu_compile.count_step_flops(config, 1)[0] * 0.7  # it has the VAE too


@pytest.mark.slow
def test_flops_of_branches_and_int8(model):
    """Guidance ends after half of the steps; int8's share of the UNet's FLOPs."""
    plain, _ = tpu_compile.count_step_flops(accelerated(model, num_inference_steps=4), 1)
    two, _ = tpu_compile.count_step_flops(accelerated(model, num_inference_steps=2), 1)
    half = accelerated(model, "guidance:stop=0.5", num_inference_steps=4)
    found, _ = tpu_compile.count_step_flops(half, 1)
    assert found == pytest.approx(plain - (plain - two) * 2 / 3)  # 3 + 3 + 1 + 1 of 12 branches
    int8 = accelerated(model, "int8:mode=dynamic", num_inference_steps=4)
    flops, int8_flops = tpu_compile.count_step_flops(int8, 1)
    assert flops == pytest.approx(plain)
    assert 0.3 < int8_flops / (2 * (plain - two)) < 1  # of the UNet in four steps
    with pytest.raises(ValueError, match="tgate is for text to image"):
        image_job(accelerated(model, "tgate"), jax.devices()[:1])


@pytest.mark.slow
def test_an_edit_by_the_tiny_decoder(model, tmp_path):
    sizes = {f"{part}_block_out_channels": [8, 8] for part in ("encoder", "decoder")}
    sizes |= {f"num_{part}_blocks": [1, 1] for part in ("encoder", "decoder")}
    config = {"_class_name": "AutoencoderTiny"} | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    specs = f"taesd:path={tmp_path}", "int8:mode=weight"
    found = image_job(accelerated(model, *specs), jax.devices()[:1])
    with pytest.raises(ValueError, match="madebyollin/taesd decodes latents of 4 channels to"):
        image_job(accelerated(model, "taesd"), jax.devices()[:1])
    assert {"tiny_vae", "vae", "unet"} < found.held["parameters"].keys()
    kernels = jax.tree.leaves(found.held["parameters"]["unet"])
    assert {x.dtype for x in kernels} == {jnp.dtype(x) for x in ("bfloat16", "float32", "int8")}


@pytest.mark.slow
def test_tiles_of_the_vae(model, monkeypatch):
    """Chosen if the chip needs them; a chip has no parts of the model of its own."""
    devices = jax.devices()[:1]
    assert image_job(accelerated(model), devices).vae_tile == 0
    assert image_job(accelerated(model, vae_tile=32), devices).vae_tile == 32
    assert image_job(accelerated(model, vae_tile=64), devices).vae_tile == 0  # one tile
    monkeypatch.setattr("compiling.jobs.GIB", 2**16)  # a v5e has a megabyte
    assert image_job(accelerated(model, resolution=256), devices).vae_tile == 64 // 4
    with pytest.raises(ValueError, match="--devices unet=1 makes several programs"):
        tpu_compile.check_flags(accelerated(model, devices=("unet=1",)), 4)


@pytest.mark.slow
def test_parameters_in_the_hosts_memory_take_none_of_a_chip(model, monkeypatch):
    monkeypatch.setattr("diffusers_flax.devices.layout.HOST_PLATFORMS", ())
    devices = jax.devices()[:1]

    def held(**options):
        return num_bytes(image_job(accelerated(model, **options), devices).held["parameters"])

    plain, int8 = held(), held(storage="int8")
    component, layer = held(offload="component"), held(offload="layer")
    assert plain > int8 > component > 5 * layer  # layer keeps vectors there


def test_counts_below_one_are_refused():
    for config, message in (
        (Sdxl(tpu="v5e-4", num_images=0), "--num_images 0 must be at least 1"),
        (Unet(tpu="v5e-4", batch_size=-1), "--batch_size -1 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            tpu_compile.check_flags(config, 4)


def test_measure_counts_what_a_program_does():
    def multiply(total, x, unused):
        return total + x @ x

    square = jax.ShapeDtypeStruct((NUM_DEVICES, 64, 64), jnp.float32)
    unused = jax.ShapeDtypeStruct((NUM_DEVICES, 1000), jnp.float32)
    result = program_costs(jax.pmap(multiply, donate_argnums=0), (square, square, unused))
    assert result["padding"] == 0  # a CPU has none
    assert result["outputs"] < 64  # the sum takes its argument's place


@needs_libtpu
def test_padding_is_that_of_tiles(libtpu_environment):
    """A TPU keeps the last axis in tiles of 128."""
    devices = slice_devices(find_slice("v5e-4"))
    narrow = jax.ShapeDtypeStruct((4, 8, 100), jnp.float32)
    unused = jax.ShapeDtypeStruct((4, 1000), jnp.float32)
    result = program_costs(jax.pmap(lambda x, y: x + 1, devices=devices), (narrow, unused))
    assert result["padding"] == 4 * 8 * (128 - 100)


@pytest.mark.slow
@needs_libtpu
def test_kernels_in_8_bits_are_cast_up_one_at_a_time(libtpu_environment):
    """A loop does not keep its kernels in bfloat16."""
    devices = slice_devices(find_slice("v5e-4"))
    unet = FlaxUNet2DConditionModel(
        block_out_channels=(128, 256),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        attention_head_dim=8,
        cross_attention_dim=128,
        dtype=jnp.bfloat16,
    )
    params = jax.eval_shape(unet.init_weights, jax.random.key(0))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params)

    def loop(params, x, context):
        def step(i, x):
            return unet.apply({"params": params}, x, i, context).sample.astype(x.dtype)

        return jax.lax.fori_loop(0, 3, step, x)

    temporaries = {}
    for storage in (None, "int8"):
        stored = jax.eval_shape(partial(store, storage=storage), params)
        args = stored, jnp.zeros((1, 4, 16, 16)), jnp.zeros((1, 77, 128), jnp.bfloat16)
        args = replicated_shapes(args, len(devices))
        costs = program_costs(jax.pmap(loop, devices=devices), args)
        temporaries[storage] = costs["temporaries"]
    kernels = sum(2 * x.size for x in jax.tree.leaves(stored) if x.dtype == jnp.int8)
    assert kernels > 2**24
    assert temporaries["int8"] - temporaries[None] < kernels / 4, temporaries


@needs_libtpu
def test_nothing_is_kept_in_the_cache(libtpu_environment, programs, tmp_path):
    """jax cannot read such an executable back and would warn."""
    devices = slice_devices(find_slice("v5e-4"))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        program_costs(
            jax.pmap(lambda x: x - 2, devices=devices), (jax.ShapeDtypeStruct((4,), "int32"),)
        )
    finally:
        jax.config.update("jax_compilation_cache_dir", programs)
    assert not list(tmp_path.iterdir())


def test_traffic_by_hand():
    """Counts a fusion, copies to VMEM and every iteration of a loop, but no access to VMEM."""
    text = """HloModule jit_f, is_scheduled=true

%fused (p: f32[256]) -> f32[256] {
  %p = f32[256]{0:T(256)} parameter(0)
  ROOT %n = f32[256]{0:T(256)} negate(%p)
}

%body (state: (s32[], f32[256])) -> (s32[], f32[256]) {
  %state = (s32[]{:T(128)S(6)}, f32[256]{0:T(256)}) parameter(0)
  %i = s32[]{:T(128)S(6)} get-tuple-element(%state), index=0
  %x.1 = f32[256]{0:T(256)} get-tuple-element(%state), index=1
  %y = f32[256]{0:T(256)} add(%x.1, %x.1), backend_config={"estimated_cycles":"7"}
  ROOT %out = (s32[]{:T(128)S(6)}, f32[256]{0:T(256)}) tuple(%i, %y)
}

%more (state.1: (s32[], f32[256])) -> pred[] {
  %state.1 = (s32[]{:T(128)S(6)}, f32[256]{0:T(256)}) parameter(0)
  %limit = s32[]{:T(128)S(6)} constant(5)
  %count = s32[]{:T(128)S(6)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)S(6)} compare(%count, %limit), direction=LT
}

ENTRY %main (a: f32[256]) -> f32[256] {
  %a = f32[256]{0:T(256)} parameter(0)
  %zero = s32[]{:T(128)S(6)} constant(0)
  %copy-start = (f32[256]{0:T(256)S(1)}, f32[256]{0:T(256)}, u32[]{:S(2)}) copy-start(%a)
  %near = f32[256]{0:T(256)S(1)} copy-done(%copy-start)
  %part = ((f32[256]{0:T(256)}), f32[64]{0:T(256)S(1)}, s32[]{:S(2)}) slice-start(%a)
  %done = f32[64]{0:T(256)S(1)} slice-done(%part)
  %far = f32[256]{0:T(256)} fusion(%near, %done), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"100"}
  %init = (s32[]{:T(128)S(6)}, f32[256]{0:T(256)}) tuple(%zero, %far)
  %loop = (s32[]{:T(128)S(6)}, f32[256]{0:T(256)}) while(%init), condition=%more, body=%body
  ROOT %end = f32[256]{0:T(256)} get-tuple-element(%loop), index=1
}
"""  # noqa: E501
    assert expected_cycles(text) == 100 + 5 * 7
    # Read to copy, read to slice, written by the fusion; in the loop twice read and once written.
    assert hbm_bytes(text) == 1024 + 256 + 1024 + 5 * 3 * 1024
    bytes_of = {"f32": 1024, "f8e4m3fn": 256, "s4": 128, "c64": 2048, "pred": 256, "token": 0}
    for dtype, size in bytes_of.items():
        negated = f"ENTRY %main (a: x) -> x {{\n  %a = {dtype}[256]{{0}} parameter(0)\n  ROOT %n = "
        assert hbm_bytes(f"{negated}{dtype}[256]{{0}} negate(%a)\n}}") == 2 * size
    endless = text.replace("direction=LT", "direction=NE")
    assert hbm_bytes(endless) == 1024 + 256 + 1024 + 3 * 1024


@pytest.mark.variants
@pytest.mark.parametrize(
    "groups", ["{{0,1,2,3}}", "[2,4]<=[8]", "mesh['batch'=4,'model'=2] {'batch'}"]
)
def test_groups_in_every_notation(groups):
    rest = f"%x), channel_id=1, replica_groups={groups}, dimensions={{0}}"
    assert first_group(rest) == [0, 2, 4, 6] if "mesh" in groups else [0, 1, 2, 3]


@needs_libtpu
def test_bytes_to_other_chips_by_hand(libtpu_environment):
    """A ring of four: 3/4 of a gathered or scattered array, 6/4 of an array that is summed."""
    devices = slice_devices(find_slice("v5e-4"))
    x = jax.ShapeDtypeStruct((4, 1024, 128), jnp.float32)
    size = 4 * 1024 * 128

    def sent(f):
        program = jax.pmap(f, axis_name="batch", devices=devices)
        return interconnect_bytes(program.lower(x).compile().as_text())

    gathered = sent(lambda x: jax.lax.all_gather(x, "batch"))
    scattered = sent(lambda x: jax.lax.psum_scatter(x, "batch", tiled=True))
    summed = sent(lambda x: jax.lax.psum(x, "batch"))
    assert (gathered, scattered, summed) == (3 * size, 3 * size // 4, 3 * size // 2)


@needs_libtpu
@pytest.mark.parametrize(("dtype", "size"), [(jnp.bfloat16, 2), (jnp.float32, 4)])
def test_sixteen_chips_reduce_and_scatter_gradients(dtype, size, libtpu_environment):
    """In bfloat16 a chip sends to its host's, in float32 a quarter of the sum to other hosts.

    Chips of a host are one link apart on average, hosts two links. Padding is left aside.
    """
    devices = slice_devices(find_slice("v5e-16"))
    x = jax.ShapeDtypeStruct((16, 51200, 512), dtype)
    step = partial(reduce_scatter_mean, axes=Split(0, 16))
    text = jax.pmap(step, axis_name="batch", devices=devices).lower(x).compile().as_text()
    sent = interconnect_bytes(text, [device.coords for device in devices]) / (51200 * 512)
    in_host = {2: 1.0, 4: 3 / 4}[size]  # all to all, or a ring
    assert sent == pytest.approx(in_host * size + 2 * 3 / 4 * 4 / 4, rel=0.06)


def test_bytes_that_pass_through_chips_count_once_for_each_link():
    """Two hosts of 2x2 chips side by side, in every notation of groups."""
    coords = [(x + 2 * host, y, 0) for host in (0, 1) for y in (0, 1) for x in (0, 1)]

    def crossed(operation, groups, coords=coords):
        text = f"ENTRY %main (a: x) -> x {{\n  %a = f32[256]{{0}} {operation}(%x), {groups}\n}}"
        return interconnect_bytes(text, coords)

    hosts = "replica_groups={{0,1,2,3},{4,5,6,7}}"
    assert crossed("all-to-all", hosts, None) == 3 * 256
    assert crossed("all-to-all", hosts) == (1 + 1 + 2) * 256  # two neighbours, one across
    between = "replica_groups=[4,2]<=[2,4]T(1,0)"
    assert crossed("all-to-all", between) == 2 * 512
    assert crossed("reduce-scatter", between) == 2 * 1024
    assert crossed("reduce-scatter", between, None) == 1024
    assert crossed("all-gather", "replica_groups=mesh['host'=2,'chip'=4] {'chip'}") == 3 * 256
    assert crossed("all-reduce", "replica_groups={{0}}") == 0
    assert crossed("collective-permute", "source_target_pairs={{0,1},{3,2}}") == 1024
    assert crossed("collective-permute", "source_target_pairs={{0,1},{1,2}}") == 2 * 1024


def test_of_a_sliced_operand_the_slices_are_read():
    text = """
%cut (p: f32[256], q: f32[64], i: s32[]) -> f32[64] {
  %p = f32[256]{0:T(256)} parameter(0)
  %q = f32[64]{0:T(256)} parameter(1)
  %i = s32[]{:T(128)} parameter(2)
  %s = f32[64]{0:T(256)} dynamic-slice(%p, %i), dynamic_slice_sizes={64}
  ROOT %n = f32[64]{0:T(256)} add(%s, %q)
}

ENTRY %main (a: f32[256], b: f32[64], i: s32[]) -> f32[32] {
  %a = f32[256]{0:T(256)} parameter(0)
  %b = f32[64]{0:T(256)} parameter(1)
  %i.1 = s32[]{:T(128)S(6)} parameter(2)
  %near = f32[64]{0:T(256)} fusion(%a, %b, %i.1), kind=kLoop, calls=%cut
  ROOT %end = f32[32]{0:T(256)} slice(%near), slice={[0:32]}
}
"""
    assert hbm_bytes(text) == (256 + 256 + 256) + (128 + 128)
    both = text.replace("add(%s, %q)", "add(%s, %p)")  # also the full array
    assert hbm_bytes(both) == (1024 + 256) + (128 + 128)
    slice_again = "bitcast(%p)\n  %t = f32[64]{0:T(256)} dynamic-slice(%v, %i)"
    twice = text.replace("  ROOT %n", f"  %v = f32[256]{{0:T(256)}} {slice_again}\n  ROOT %n", 1)
    assert hbm_bytes(twice) == hbm_bytes(text) + 256
    at_most_whole = twice.replace("%t = f32[64]", "%t = f32[255]")
    assert hbm_bytes(at_most_whole) == hbm_bytes(both) + 256
    near = text.replace("%a = f32[256]{0:T(256)}", "%a = f32[256]{0:T(256)S(1)}")
    assert hbm_bytes(near) == hbm_bytes(text) - 256


def test_kernels_count_operands_and_results_wherever_they_are():
    text = """
%body (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %k = (f32[8]{0:T(256)}, bf16[8,128]{1,0:T(8,128)(2,1)S(1)}) custom-call(%p, %p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={}}
  ROOT %o = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%k), index=1
}

ENTRY %main (a: bf16[8,128]) -> bf16[8,128] {
  %a = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %c = bf16[8,128]{1,0:T(8,128)(2,1)} custom-call(%a), custom_call_target="ConcatBitcast"
}
"""  # noqa: E501
    assert kernel_bytes(text) == 32 + 3 * 2048


@pytest.mark.slow
def test_flops_count_all_micro_batches(model):
    """Twice the pairs need twice the FLOPs; micro-batches change nothing."""
    paths = {"pretrained_model_name_or_path": str(model)}
    unet = Unet(tpu="v5e-4", resolution=16, mixed_precision="no", **paths)
    one, two = (tpu_compile.count_step_flops(unet, n)[0] for n in (2, 4))
    assert two == pytest.approx(2 * one, rel=0.01)
    with jax.numpy_dtype_promotion("standard"):  # optax promotes
        whole, halves = (
            tpu_compile.count_step_flops(flags(model, gradient_accumulation_steps=parts), 4)[0]
            for parts in (1, 2)
        )
    assert halves == pytest.approx(whole, rel=0.1)


def test_flops_by_hand():
    """Matmuls, convolutions, loops, switches and int8."""
    left, right = jnp.ones((3, 4)), jnp.ones((4, 5))

    def f(x, image, kernel, integers):
        def step(carry, kind):
            one, two = (lambda y: y @ right), (lambda y: 2 * y @ right + y @ right)
            return carry, jax.lax.switch(kind, (one, two), x)

        _, products = jax.lax.scan(step, 0, jnp.array([0, 1, 0, 0, 1]))
        convolved = jax.lax.conv_general_dilated(
            image, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return products, convolved, jnp.matmul(integers, integers, preferred_element_type=jnp.int32)

    program = jax.make_jaxpr(f)(
        left, jnp.ones((2, 8, 8, 6)), jnp.ones((3, 3, 6, 7)), jnp.ones((9, 9), jnp.int8)
    )
    matmul, convolution, int8 = 2 * 3 * 4 * 5, 2 * (2 * 4 * 4 * 7) * 9 * 6, 2 * 9**3
    expected = 5 * (0.6 * matmul + 0.4 * 2 * matmul) + convolution + int8
    assert matmul_flops(program.jaxpr, [(0.6, 0.4)]) == pytest.approx((expected, int8))
    worst, _ = matmul_flops(program.jaxpr)
    assert worst == 5 * 2 * matmul + convolution + int8


def test_traffic_of_a_switch_by_hand():
    """A loop of ten trips computes its branches in seven and three of them."""
    text = """HloModule jit_f, is_scheduled=true

%one (a: f32[1024]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  ROOT %b = f32[1024]{0} negate(%a), backend_config={"estimated_cycles":"3"}
}

%two (c: f32[1024]) -> f32[1024] {
  %c = f32[1024]{0} parameter(0)
  %d = f32[1024]{0} negate(%c)
  ROOT %e = f32[1024]{0} negate(%d)
}

%body (x: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %x = (s32[], f32[1024]{0}) parameter(0)
  %i = s32[]{:S(6)} get-tuple-element(%x), index=0
  %y = f32[1024]{0} get-tuple-element(%x), index=1
  %z = f32[1024]{0} conditional(%i, %y, %y), branch_computations={%one, %two}
  ROOT %t = (s32[], f32[1024]{0}) tuple(%i, %z)
}

%condition (u: (s32[], f32[1024])) -> pred[] {
  %u = (s32[], f32[1024]{0}) parameter(0)
  ROOT %v = pred[]{:S(6)} custom-call(%u)
}

ENTRY %main (p: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %p = (s32[], f32[1024]{0}) parameter(0)
  ROOT %w = (s32[], f32[1024]{0}) while(%p), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"10"}}
}
"""  # noqa: E501
    one, two = 2 * 4096, 4 * 4096
    assert hbm_bytes(text, [(0.7, 0.3)]) == 7 * one + 3 * two
    assert hbm_bytes(text) == 10 * (one + two)
    assert expected_cycles(text, [(0.7, 0.3)]) == 7 * 3
    unknown = text.replace('"estimated_cycles":"3"', f'"estimated_cycles":"{2**64 - 1}"')
    assert expected_cycles(unknown, [(0.7, 0.3)]) == 0
    with pytest.raises(ValueError, match="1 of 2 switches are not in the program"):
        hbm_bytes(text, [(0.7, 0.3), (0.5, 0.5)])


@pytest.mark.slow
@needs_libtpu
def test_a_compiled_cache_has_the_cost_of_its_steps(model, libtpu_environment):
    """Three branches, then two, then one; a switch in each of the three loops.

    HBM traffic says nothing here: newer compilers keep all weights of a tiny model in VMEM.
    """
    specs = "deepcache:interval=3", "guidance:image_stop=0.3,stop=0.6"
    tpu, reports = find_slice("v5e-1"), []
    for accelerate in ((), specs):
        config = accelerated(model, *accelerate, num_inference_steps=20)
        reports.append(compile_for(config, tpu, slice_devices(tpu)))
    plain, fast = reports
    assert (plain["unet_evaluations"], fast["unet_evaluations"]) == (60, 13)
    assert fast["flops"] < 0.5 * plain["flops"]
    assert 0 < fast["cycles"] < 0.7 * plain["cycles"]


@pytest.mark.slow
@needs_libtpu
def test_text_keys_and_values_are_computed_once_per_image(tmp_path, libtpu_environment):
    """The compiler moves them out of the loop, but not the queries."""
    model = make_tiny_xl(tmp_path / "xl")  # text states are as wide as the widest layer
    config = Sdxl(tpu="v5e-1", pretrained_model_name_or_path=str(model), image_size=64)
    job = image_job(config, slice_devices(find_slice("v5e-1")))
    with no_compilation_cache():
        text = job.step.lower(*job.args).compile().as_text()
    computations, entry = parse_program(text)
    loops = {"to_q": 0, "to_k": 0, "to_v": 0}
    once = dict(loops)
    for name, instructions in computations.items():
        for _, _, operation, rest in instructions:
            layer = re.search(r"attn2/(to_[qkv])/\1/dot_general", rest)
            if layer and operation in ("fusion", "convolution") and "fused" not in name:
                (once if name == entry else loops)[layer[1]] += 1
    assert once["to_k"] == once["to_v"] > 0 == loops["to_k"] == loops["to_v"]
    assert once["to_q"] == 0 and "attn2/to_q/to_q/dot_general" in text


@needs_libtpu
def test_traffic_is_what_does_not_fit_on_the_chip(libtpu_environment):
    devices = slice_devices(find_slice("v5e-4"))
    large = jax.ShapeDtypeStruct((4, 16384, 4096), jnp.float32)  # twice the VMEM
    result = program_costs(jax.pmap(lambda x: x + 1, devices=devices), (large,))
    assert result["hbm_bytes"] == result["bytes_accessed"] == 2 * 16384 * 4096 * 4
    # 16 results of 4 MiB stay on the chip: arguments and the last result travel, one of them twice.
    small = jax.ShapeDtypeStruct((4, 1024, 1024), jnp.float32)

    def chain(x, w):
        for _ in range(16):
            x = jnp.tanh(x @ w)
        return x

    result = program_costs(jax.pmap(chain, devices=devices), (small, small))
    size = 1024 * 1024 * 4
    assert 3 * size <= result["hbm_bytes"] <= 4 * size < result["bytes_accessed"] / 8


@needs_libtpu
def test_what_kernels_access_is_added(libtpu_environment):
    """A kernel reads two matrices and writes one; the compiler counts none of it."""

    def add(x_ref, y_ref, out_ref):
        out_ref[...] = x_ref[...] + y_ref[...]

    matrix = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    kernel = pl.pallas_call(add, matrix)
    devices = slice_devices(find_slice("v5e-4"))
    program = jax.pmap(lambda x, y: 2 * kernel(x, y), devices=devices)
    args = replicated_shapes((matrix, matrix), 4)
    by_compiler = program.lower(*args).compile().cost_analysis()["bytes accessed"]
    added = program_costs(program, args)["bytes_accessed"] - by_compiler
    assert added == 3 * 1024 * 1024 * 4 > by_compiler, by_compiler  # which has the multiplication


@pytest.mark.slow
@needs_libtpu
def test_a_step_does_not_copy_the_parameters(libtpu_environment):
    """The optimizer moves less than 9 times the parameters' size, in place."""
    n, tx = 4, optax.adamw(1e-4)
    devices = slice_devices(find_slice("v5e-4"))
    shapes = [jax.ShapeDtypeStruct((2560, 2560), jnp.float32)] * 20  # more than the VMEM holds
    axes = shard_axes(shapes, n)

    def step(state, x):
        def loss(shards):
            y = x
            for w in gather(shards, axes, jnp.bfloat16):
                y = y + jnp.tanh(y @ w)
            return jnp.mean(jnp.square(y.astype(jnp.float32)))

        value, grads = jax.value_and_grad(loss)(state.params)
        return update_state(tx, state, value, grads, axes, max_grad_norm=1)[0]

    state = state_shapes(shapes, tx, axes, n)
    x = jax.ShapeDtypeStruct((n, 256, 2560), jnp.bfloat16)
    step = jax.pmap(step, axis_name="batch", devices=devices, donate_argnums=0)
    size = 4 * 20 * 2560**2  # of the whole parameters in float32
    with jax.numpy_dtype_promotion("standard"):  # optax promotes
        result = program_costs(step, (state, x))
    print({name: figure / size for name, figure in result.items()})
    assert result["hbm_bytes"] < 9 * size


def test_an_output_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for output, said in (
        (tmp_path, "is a directory; name a file"),
        (tmp_path / "file/x", "is not a directory"),
    ):
        with pytest.raises(ValueError, match=said):
            tpu_compile.report_file(Train(tpu="v5e-1", output=str(output)))


def test_a_report_of_other_flags_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Sdxl(tpu="v5e-4", num_images=2)
    file = tpu_compile.report_file(config)
    assert str(file) == "tpu_compile_v5e-4_sdxl_2.json"
    file.write_text(json.dumps({"flags": tpu_compile.changed_flags(config)}))
    assert tpu_compile.report_file(config) == file
    smaller = replace(config, image_size=64)
    with pytest.raises(ValueError, match=r"is the report of other flags .* give --output"):
        tpu_compile.report_file(smaller)
    assert str(tpu_compile.report_file(replace(smaller, output="small.json"))) == "small.json"


@needs_libtpu
def test_too_large_for_the_chip(libtpu_environment):
    devices = slice_devices(find_slice("v5e-4"))
    square = jax.ShapeDtypeStruct((4, 50_000, 50_000), jnp.float32)  # 9.3 GiB each
    result = program_costs(jax.pmap(lambda x: x + 1, devices=devices), (square,))
    assert 18.6 < result["needs"] / 2**30 < 19
    job = tpu_compile.Job(step=None, args=(), held={}, batch_per_chip=1)
    config = Train(tpu="v5e-4")
    report = tpu_compile.make_report(config, find_slice("v5e-4"), job, result, None, None)
    assert tpu_compile.verdict(report) == (
        f"does not fit: 1 per chip need {result['needs'] / 2**30:.2f} of 15.75 GiB"
    )


@given(capacity=st.integers(0, 5000), start=st.integers(1, 600))
def test_largest_fitting(capacity, start):
    asked = []

    def fits(number):
        asked.append(number)
        return number <= capacity

    good, bad = largest_fitting(fits, start)
    assert good <= capacity < bad
    assert bad - good <= max(1, good / 8)
    assert good in (0, *asked)
    assert bad in asked
    assert len(asked) == len(set(asked))
    assert len(asked) <= 7 + abs(np.log2(max(capacity, 1) / start))


# The command line


@needs_libtpu
def test_command_line(model, tmp_path):
    output = tmp_path / "report.json"
    command = [
        *("unet", "--tpu", "v5e-1", "--resolution", 8, "--batch_size", 2),
        *("--pretrained_model_name_or_path", model),
        *("--output", output),
    ]
    done = run(*command, "--compiler_options", "xla_tpu_scoped_vmem_limit_kib=16384")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report = json.loads(output.read_text())
    assert (report["chips"], report["batch_per_chip"]) == (1, 2)
    assert report["interconnect_bytes"] == 0
    assert f"{report['cycles'] / 1e6:.4g} million cycles expected, without kernels" in done.stdout
    assert "\nfits: 2 per chip need " in done.stdout
    memory = report["memory"]
    assert report["memory_total"] == sum(memory.values()) < report["memory_usable"]
    assert memory["parameters"] == 4 * elements(tensor_shapes(model / "unet"))
    assert memory["outputs"] > memory["parameters"]  # the gradient, with padding
    assert report["step_seconds"] == pytest.approx(
        max(report["flops"] / 197e12, report["hbm_bytes"] / 0.82e12)
    )
    assert report["images_per_second"] == pytest.approx(2 / report["step_seconds"])
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.slow
@needs_libtpu
def test_unknown_compiler_option(model, tmp_path):
    command = ["unet", "--tpu", "v5e-1", "--resolution", 8, "--batch_size", 2]
    command += ["--pretrained_model_name_or_path", model, "--output", tmp_path / "report.json"]
    done = run(*command, "--compiler_options", "xla_tpu_nothing=1")
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert done.stderr.startswith("error: XLA does not take the compiler options xla_tpu_nothing=1")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@needs_libtpu
def test_training_step(model, tmp_path):
    """Sizes of a training step's parts; micro-batches change neither these nor the FLOPs."""
    output = tmp_path / "report.json"
    reports = []
    for num_micro_batches in (1, 2):
        done = run(
            *(
                "train",
                "--tpu",
                "v5e-4",
                "--pretrained_model_name_or_path",
                model,
                "--resolution",
                16,
            ),
            *("--train_batch_size", 16, "--ema", "full", "--mixed_precision", "bf16"),
            *("--gradient_accumulation_steps", num_micro_batches, "--output", output),
        )
        assert done.returncode == 0, done.stderr
        reports.append(json.loads(output.read_text()))
    unet = tensor_shapes(model / "unet")
    for report in reports:
        assert report["fits"]
        assert report["batch_per_chip"] == 4
        assert report["memory"]["parameters"] == 4 * elements(unet, 4)
        assert report["memory"]["optimizer"] == 8 * elements(unet, 4) + 8
        assert report["memory"]["ema"] == 4 * elements(unet, 4)
        assert report["memory"]["padding"] > 0
        assert report["memory_total"] == sum(report["memory"].values())
        assert report["step_seconds"] == pytest.approx(
            max(
                report["flops"] / 197e12,
                report["hbm_bytes"] / 0.82e12,
                report["interconnect_bytes"] / 0.2e12,
            )
            + report["ema_hbm_bytes"] / 0.82e12
        )
    assert reports[1]["flops"] == pytest.approx(reports[0]["flops"], rel=0.1)


@pytest.mark.slow
@needs_libtpu
def test_training_step_of_every_size(model, tmp_path):
    output, command = tmp_path / "report.json", ["train", "--tpu", "v5e-4", "--resolution", 16]
    command += ["--pretrained_model_name_or_path", model, "--train_batch_size", 16]
    done = run(*command, "--aspect_ratio_buckets", "16x16", "12x20", "--output", output)
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    assert report["flags"]["aspect_ratio_buckets"] == ["16x16", "12x20"]
    tall, square = (report["sizes"][size] for size in ("12x20", "16x16"))
    assert tall["fits"] and square["fits"] and report["size"] in report["sizes"]
    assert 0.8 < tall["flops"] / square["flops"] < 1  # 240 pixels to 256
    assert report["memory_total"] >= max(tall["memory_total"], square["memory_total"])
    for size in ("12x20", "16x16"):
        assert re.search(rf"^  {size} +\S+ GiB, \S+ TFLOP, at least", done.stdout, re.MULTILINE)
    config = Train(
        tpu="v5e-4",
        pretrained_model_name_or_path=str(model),
        resolution=16,
        train_batch_size=16,
        aspect_ratio_buckets=("16x16", "12x20"),
    )
    job = tpu_compile.train_job(config, jax.devices()[:4])
    assert job.args[2]["original_pixel_values"].shape == (4, 4, 16, 16, 3)


def mistake(monkeypatch, capsys, *args):
    """The error line of a command that fails."""
    with pytest.raises(SystemExit) as stopped:
        tpu_compile.main(["train", *args])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_unknown_type():
    done = run("train", "--tpu", "v7-8")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --tpu v7-8 is not known; known are v4-8, v4-16, ")
    assert done.stderr.count("\n") == 1


@pytest.mark.variants
@needs_libtpu
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            "--tpu v5e-16 --train_batch_size 24",
            "--train_batch_size 24 is not divisible by 16 devices; try 16 or 32",
        ),
        (
            "--tpu v5e-1 --compiler_options xla_tpu_rwb_fusion",
            "--compiler_options xla_tpu_rwb_fusion is not NAME=VALUE",
        ),
        (
            "--tpu v5e-1 --compiler_options a=1 a=2",
            "--compiler_options names a 2 times; give it once",
        ),
        (
            "--tpu v4-8 --gradient_accumulation_steps 3",
            "--gradient_accumulation_steps 3 must divide the 4 pairs per device",
        ),
        (
            "--tpu v4-8 --pretrained_model_name_or_path .",
            ". has no model_index.json",
        ),
        (
            "--tpu v4-8 --resolution 32",
            "--resolution 32 is too small: this model's VAE and UNet reduce sides to 1/64, which "
            "takes 64 pixels or more; its UNet was made for 512",
        ),
        ("--tpu v4-8 --resolution 96", "--resolution 96 is not a multiple of 64; try 64 or 128"),
    ],
)
def test_flags_that_do_not_work(libtpu_environment, tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    assert mistake(monkeypatch, capsys, *args.split()).startswith(f"error: {message}")


def test_compiler_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    error = mistake(monkeypatch, capsys, "--tpu", "v5e-16")
    assert error.startswith("error: libtpu, the TPU's compiler, is not installed; get the one for")
    assert f'pip install "jax[tpu]=={jax.__version__}"' in error
