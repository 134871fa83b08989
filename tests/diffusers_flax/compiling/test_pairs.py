"""compile_for.py pairs: shared attention, CLIP, the report, the command line."""

import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from diffusers_flax.compiling.cards import CARDS, find_gpus, gpu_devices, traced_for
from diffusers_flax.compiling.pairs import (
    PairProgramFlags,
    count_clip_flops,
    pair_program,
    sharing_fractions,
)
from flax.traverse_util import flatten_dict
from gpu_programs import needs_gpu_compiler
from tiny_models import make_tiny_clip, make_tiny_pipeline
from tpu_programs import needs_libtpu

import compile_for
from diffusers_flax import FlaxStableDiffusionPipeline
from diffusers_flax.compilation_cache import no_compilation_cache
from diffusers_flax.compiling.chips import find_slice, slice_devices
from diffusers_flax.compiling.costs import num_bytes
from diffusers_flax.compiling.hlo import executed
from diffusers_flax.compiling.kernels import kernel_table
from diffusers_flax.compiling.programs import Program
from diffusers_flax.compiling.report import make_report
from diffusers_flax.flops import Scoped, matmul_flops
from diffusers_flax.pipelines import attention_sharing

STEPS = 5


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a tiny text-to-image model and a tiny CLIP."""
    folder = tmp_path_factory.mktemp("pairs")
    sizes = {"vae_channels": (16, 32), "unet_channels": (16, 32)}
    model = make_tiny_pipeline(folder / "model", in_channels=4, **sizes)
    make_tiny_clip(folder / "clip")
    return str(model), str(folder / "clip")


def flags(models, **more):
    """PairProgramFlags of the tiny models, 64 pixels, 2 pairs."""
    model, clip = models
    options = {"tpu": "v5e-1", "batch_size": 2, "num_inference_steps": STEPS}
    sizes = {"width": 64, "height": 64}
    return PairProgramFlags(model=model, clip_model=clip, **options | sizes | more)


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


def test_flops_of_clip_by_hand():
    """ViT-L/14's image encoder: patches, 24 layers of 257 positions, projection."""
    layer = 257 * (4 * 1024**2 + 2 * 1024 * 4096) + 2 * 257**2 * 1024
    image = 256 * 3 * 14**2 * 1024 + 24 * layer + 1024 * 768
    config = PairProgramFlags(gpu="h100", batch_size=3)
    assert count_clip_flops(config) == 2 * 6 * image


@pytest.mark.slow
def test_flops_are_of_a_plain_program(models):
    """Attention sharing selects queries and keys, and adds no matmul."""
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(models[0], dtype=jnp.bfloat16)
    ids = jnp.zeros((4, 77), jnp.int32)

    def plain(params):
        scales = {"guidance_scale": 7.5, "num_inference_steps": STEPS, "neg_prompt_ids": ids}
        return pipeline._generate(ids, params, jax.random.key(0), height=64, width=64, **scales)

    expected = matmul_flops(jax.make_jaxpr(plain)(params).jaxpr)[0]
    for fractions in ((0, 0), (0.1, 0.9), (1, 1)):
        config = flags(models, attention_sharing=fractions)
        assert compile_for.count_step_flops(config, 2)[0] == pytest.approx(expected)


def test_flops_of_conditions_in_a_scope():
    """Of five trips one computes the product; the condition outside counts in full."""

    def step(i, x):
        with jax.named_scope("chosen"):
            x = jax.lax.cond(x.sum() > i, lambda: x @ x, lambda: x)
        return jax.lax.cond(x.sum() > i, lambda: x @ x, lambda: x)

    loop = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 5, step, x))(jnp.ones((4, 4))).jaxpr
    assert matmul_flops(loop, [Scoped("chosen", (0.8, 0.2))]) == ((1 + 5) * 2 * 4**3, 0)
    assert matmul_flops(loop) == (10 * 2 * 4**3, 0)


@pytest.mark.slow
def test_parameters_of_clip_and_few_steps(models):
    """The published CLIP has 427,616,513 parameters; timesteps, guidance and sizes matter."""
    devices = jax.devices()[:1]
    config = flags((models[0], ""), scheduler="lcm", timesteps=(999, 749, 499), height=32)
    program = pair_program(config, devices)
    assert num_bytes(program.held["CLIP"]) == 4 * 427_616_513
    assert program.evaluations == 2 * 3
    assert program.scoring_args[1].shape == (1, 4, 3, 224, 224)
    assert jax.eval_shape(program.step, *program.args).shape == (1, 4, 32, 64, 3)
    lcm = {"scheduler": "lcm", "num_inference_steps": 8, "guidance_scale": (1.0, 1.0)}
    assert pair_program(flags(models, **lcm), devices).evaluations == 8
    cached = flags(models, accelerate=("deepcache:interval=2",), num_inference_steps=12)
    assert pair_program(cached, devices).evaluations == 2 * 6


CONDITIONS = """
%rare (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %copy.1 = f32[4]{0} copy(%p)
}

%often (p.1: f32[4]) -> f32[4] {
  %p.1 = f32[4]{0} parameter(0)
  %copy.2 = f32[4]{0} copy(%p.1)
  %copy.3 = f32[4]{0} copy(%copy.2)
  ROOT %copy.4 = f32[4]{0} copy(%copy.3)
}

%body (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %c.1 = f32[4]{0} conditional(%x, %x, %x), branch_computations={%often, %rare}, metadata={op_name="a/chosen/cond"}
  %c.2 = f32[4]{0} conditional(%x, %x, %x), true_computation=%rare, false_computation=%often, metadata={op_name="b/chosen/cond"}
  ROOT %c.3 = f32[4]{0} conditional(%x, %x, %x), branch_computations={%often, %rare}, metadata={op_name="c/cond"}
}

ENTRY %main (y: f32[4]) -> f32[4] {
  %y = f32[4]{0} parameter(0)
  ROOT %while.1 = f32[4]{0} while(%y), condition=%none, body=%body, backend_config={"known_trip_count":{"n":"10"}}
}

%none (z: f32[4]) -> pred[] {
  ROOT %z = pred[] parameter(0)
}
"""  # noqa: E501


def test_conditions_in_a_scope_count_by_their_fractions():
    """Also among switches; the other condition counts by its own fractions, or in full."""

    def copies(switches):
        lines, _ = executed(CONDITIONS, switches)
        return sum(times for line, _, times in lines if line.operation == "copy")

    scoped = Scoped("chosen", (0.75, 0.25))
    one = 0.75 * 3 + 0.25
    assert copies([scoped]) == 10 * (2 * one + 3 + 1)
    assert copies([(0.5, 0.5), scoped]) == 10 * (2 * one + 2)


def test_float32_of_the_highest_precision_has_no_tf32():
    text = """
ENTRY %main (a: f32[64,32], b: f32[32,16]) -> f32[64,16] {
  %a = f32[64,32]{1,0} parameter(0)
  %b = f32[32,16]{1,0} parameter(1)
  ROOT %gemm.1 = (f32[64,16]{1,0}, s8[16]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"lhs_contracting_dimensions":["1"],"precision_config":{"operand_precision":["HIGHEST","HIGHEST"]}}
}
"""  # noqa: E501
    card = CARDS["h100"]._replace(bandwidth=1e30)
    flops = 2 * 64 * 32 * 16
    full = kernel_table(text, card)["matmul"]["least_seconds"]
    assert full == pytest.approx(flops / 66.9e12, rel=1e-3)  # NVIDIA's data sheet: 67 TFLOP/s
    tf32 = kernel_table(text.replace("HIGHEST", "DEFAULT"), card)["matmul"]["least_seconds"]
    assert tf32 == pytest.approx(flops / (989.4e12 / 2))


def test_report_with_clip_by_hand():
    """On v5e chips: memory, and times of both programs one after the other."""
    x = jax.ShapeDtypeStruct((4, 25), jnp.float32)
    program = Program(step=None, args=(), held={"parameters": x}, batch_per_chip=4)
    step = {"padding": 1, "temporaries": 50, "outputs": 2, "code": 3, "compile_seconds": 5.0}
    step |= {"hbm_bytes": 3 * 0.82e12, "interconnect_bytes": 0, "host_bytes": 0, "cycles": 1}
    scoring = {"temporaries": 70, "padding": 10, "code": 20, "hbm_bytes": 0, "compile_seconds": 1.0}
    config = PairProgramFlags(tpu="v5e-4")
    report = partial(make_report, config, "pairs", find_slice("v5e-4"), program)
    flops = {"step": (0, 0), "scoring": 197e12 / 6}
    found = report({"step": step, "scoring": scoring}, flops)
    parts = {"temporaries": 70, "padding": 11, "outputs": 2, "code": 23}
    assert found["memory"] == {"parameters": 100} | parts
    assert found["clip_seconds"] == pytest.approx(1.0)  # six products in bfloat16
    assert found["images_per_second_per_chip"] == pytest.approx(8 / 4)
    assert found["images_per_second"] == pytest.approx(8)
    assert found["clip_estimated_seconds"] == pytest.approx(1 / 0.61)
    assert found["estimated_images_per_second_per_chip"] == pytest.approx(2 * 0.61)
    too_large = {"needs": 900.0, "compile_seconds": 1.0}
    assert not report({"step": step, "scoring": too_large}, flops)["fits"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--batch_size 0", "--batch_size 0 must be at least 1"),
        ("--guidance_scale 15 7.5", "--guidance_scale 15 7.5 must be in order: the least, the"),
        ("--guidance_scale 1 3", "--guidance_scale 1 3: up to 1 there is no guidance; take both"),
        ("--attention_sharing 0 1.5", "--attention_sharing 1.5 must be from 0 to 1"),
        ("--accelerate tome", "--accelerate tome merges other positions in each image of a pair"),
        ("--height 0", "--height 0 must be at least 1"),
    ],
)
def test_flags_that_do_not_work(capsys, args, message):
    assert mistake(capsys, *args.split()).startswith(f"error: {message}")


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--height", "61"), "size 61x32 (height x width) is not divisible by 2"),
        (("--scheduler", "none"), "--scheduler none is unknown"),
        (("--timesteps", "ays", "5"), "--timesteps"),
        (("--clip_model", "MODEL/unet"), "--clip_model MODEL/unet is a model of type"),
        (("--model", "CLIP"), "CLIP has no model_index.json"),
    ],
)
def test_models_that_do_not_work(models, libtpu_environment, capsys, tmp_path, args, message):
    def named(text):
        return text.replace("MODEL", models[0]).replace("CLIP", models[1])

    output = tmp_path / "report.json"
    words = [*map(named, args), "--output", str(output)]
    words += [] if "--model" in args else ["--model", models[0]]
    assert named(message) in mistake(capsys, *words)
    assert not output.exists()


def mistake(capsys, *args):
    """The error line of a command that fails."""
    with pytest.raises(SystemExit) as stopped:
        compile_for.main(["pairs", "--tpu", "v5e-1", *args])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.slow
@needs_gpu_compiler
def test_compiled_for_a_gpu(models):
    """A shared step has two kernels in each layer of self-attention, another step one."""
    host, kernels = find_gpus("h100"), []
    for fractions in ((0, 0), (1, 1)):
        with traced_for(host.chip):
            config = flags(models, tpu="", gpu="h100", attention_sharing=fractions)
            program = compile_for.make_program(config, gpu_devices(host))
            report = compile_for.compile_program(config, program, host)
        kernels.append(report["kernels"]["attention"]["kernels"])
        assert report["fits"] and report["clip_seconds"] > 0
        assert report["memory"]["CLIP"] == num_bytes(program.held["CLIP"])
    layers = flatten_dict(program.held["parameters"]["unet"], sep="/")
    num_layers = sum(name.endswith("attn1/to_q/kernel") for name in layers)
    assert kernels[1] - kernels[0] == pytest.approx((STEPS - 1) * num_layers)


@pytest.mark.slow
@needs_libtpu
def test_command_line(models, libtpu_environment, capsys, tmp_path):
    """For a v5e chip: the report, and conditions with the scope that their fractions need."""
    output = tmp_path / "report.json"
    words = ["pairs", "--tpu", "v5e-1", "--model", models[0], "--clip_model", models[1]]
    words += ["--width", "64", "--height", "64", "--num_inference_steps", str(STEPS)]
    compile_for.main([*words, "--batch_size", "2", "--output", str(output)])
    said, report = capsys.readouterr().out, json.loads(output.read_text())
    assert "\nfits: 2 per chip need " in said
    assert re.search(r"^at least \S+ ms, \S+ ms \(\S+%\) of them by CLIP", said, re.M)
    assert "at 61% of the peak" in said
    seconds = report["step_seconds"] + report["clip_seconds"]
    assert report["images_per_second"] == pytest.approx(4 / seconds)
    assert report["memory_total"] == sum(report["memory"].values())
    assert report["unet_evaluations"] == 2 * STEPS

    program = pair_program(flags(models), slice_devices(find_slice("v5e-1")))
    with no_compilation_cache():
        text = program.step.lower(*program.args).compile().as_text()
    conditions = [line for line in text.splitlines() if " conditional(" in line]
    assert conditions and all(attention_sharing.SCOPE in line for line in conditions)
