"""compile_for.py: shapes against a run's, the report, the command line."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from gpu_programs import needs_gpu_compiler
from helpers import ROOT, slow
from tiny_models import make_tiny_pipeline, make_tiny_xl
from tpu_programs import elements, needs_libtpu, tensor_shapes

import compile_for
import flax_train_instruct_pix2pix as trainer
from compile_for import TrainFlags
from diffusers_flax.compiling import report as report_module
from diffusers_flax.compiling.chips import find_target
from diffusers_flax.compiling.report import Part, Program, compile_program, num_bytes
from diffusers_flax.flops import matmul_flops
from diffusers_flax.training.ema import ema_start
from diffusers_flax.training.models import cast_frozen, load_models
from diffusers_flax.training.sharding import replicate, shard_axes, shard_batch, start_state

NUM_DEVICES = 4  # conftest.py's


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny pipeline with an 8-channel UNet."""
    folder = tmp_path_factory.mktemp("compile_for") / "model"
    return make_tiny_pipeline(folder, vae_channels=(16, 32), unet_channels=(16, 32))


def flags(model, **more):
    """The flags `train` for a tiny pipeline."""
    paths = {"pretrained_model_name_or_path": str(model)}
    paths |= {"unet_model_name_or_path": str(Path(model, "unet"))}
    return TrainFlags(**{**paths, "tpu": "v5e-4", "resolution": 16, "train_batch_size": 8, **more})


def run(*args):
    """Run the command line as users do."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "compile_for.py", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd", *slow("xl")])
@pytest.mark.parametrize("lora_rank", [None, *slow(4)])
def test_arguments_are_those_of_a_real_run(model, tmp_path, lora_rank, family):
    """Every shape and dtype that train_step would get from train(), on the same devices."""
    if family == "xl":
        model = make_tiny_xl(tmp_path / "xl", edits=True)
    config = flags(
        model,
        mixed_precision="bf16",
        ema="full",
        lora_rank=lora_rank,
        lora_target_modules=("proj_in",) if lora_rank else trainer.Config.lora_target_modules,
    )
    program = compile_for.train_program(config, jax.devices())

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
    update = (jax.pmap(ema_start)(state.params), state.params, replicate(np.float32(0.5)))
    like = lambda x: (x.shape, x.dtype)  # noqa: E731
    assert jax.tree.map(like, real) == jax.tree.map(like, program.parts["step"].args)
    assert jax.tree.map(like, update) == jax.tree.map(like, program.parts["ema"].args)


@pytest.mark.slow
@pytest.mark.parametrize(("ema", "num_averages"), [("none", 0), ("late", 1), ("power", 2)])
def test_bytes_of_what_is_held(model, ema, num_averages):
    config = flags(model, ema=ema, mixed_precision="bf16")
    program = compile_for.train_program(config, jax.devices())
    held = {name: num_bytes(tree) for name, tree in program.held.items()}

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
        batches = compile_for.train_program(masked, jax.devices()).held["batches"]
        assert num_bytes(batches) - held["batches"] == 3 * 2 * 16 * 16
    assert ("ema" in program.parts) == (num_averages > 0)
    assert num_averages == 0 or program.parts["ema"].times == num_averages


@pytest.mark.slow
def test_without_a_path_it_is_stable_diffusion_1_5(tmp_path):
    config = compile_for.with_model(TrainFlags(tpu="v5e-16"), tmp_path)
    _, frozen, params = compile_for.training_model_shapes(config)
    published = json.loads((ROOT / "tests" / "published_flax_param_shapes.json").read_text())
    published["sd15_unet"]["conv_in/kernel"] = [3, 3, 8, 320]
    trees = {"sd15_unet": params, "vae": frozen["vae"], "clip_l_text": frozen["text_encoder"]}
    for name, tree in trees.items():
        shapes = {key: list(x.shape) for key, x in flatten_dict(tree, sep="/").items()}
        assert shapes == published[name]


def test_models_must_fit_together(tmp_path):
    """A narrow UNet is taken as widened, unless it is named."""
    narrow = make_tiny_pipeline(tmp_path / "narrow", in_channels=4)
    (folder := tmp_path / "configs").mkdir()
    config = flags(narrow)
    with pytest.raises(ValueError, match=r"narrow/unet has 4 input channels.*create_modified_unet"):
        compile_for.training_model_shapes(config)
    config = compile_for.with_model(replace(config, unet_model_name_or_path=""), folder)
    _, _, params = compile_for.training_model_shapes(config)
    assert params["conv_in"]["kernel"].shape == (3, 3, 8, 16)
    xl = make_tiny_xl(tmp_path / "xl")
    config = compile_for.with_model(flags("", unet_model_name_or_path=str(xl / "unet")), folder)
    with pytest.raises(ValueError, match=r"xl/unet does not fit the text encoders of "):
        compile_for.training_model_shapes(config)


def report_by_hand(monkeypatch, target, program, costs):
    """compile_program with costs {function: its program_costs} instead of a compilation."""
    given = {"hbm_bytes": 0, "interconnect_bytes": 0, "host_bytes": 0, "kernels": {}}
    found = {function: given | x for function, x in costs.items()}
    monkeypatch.setattr(report_module, "program_costs", lambda part, *_: found[part.function])
    return compile_program(TrainFlags(tpu=target), "train", program, find_target(target).chip)


def test_report_by_hand(monkeypatch):
    """A step, an average every second step, and a product of 197 / 6 TFLOP in six passes."""
    x = jax.ShapeDtypeStruct((4, 1000), jnp.float32)
    factors = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((10**6, 197), (197, 83333))]

    def step(x):
        return x

    def update(x, y):
        return x

    def product(a, b):
        return a @ b

    parts = {"step": Part(step, (x,)), "ema": Part(update, (x, x), 0.5, held=0.5)}
    parts["CLIP"] = Part(product, tuple(factors), passes=6)
    program = Program(parts, {"parameters": x, "ema": [x]}, batch_per_chip=4, num_chips=4)
    names, costs = ("padding", "temporaries", "outputs", "code"), {}
    costs[step] = {"memory": dict(zip(names, (1000, 100, 10, 1)))}
    costs[step] |= {"hbm_bytes": 2 * 0.82e12, "interconnect_bytes": 0.4e9}
    costs[update] = {"memory": dict(zip(names, (800, 200, 7, 2))), "hbm_bytes": 1.64e12}
    costs[product] = {"memory": dict.fromkeys(names, 0)}
    report = report_by_hand(monkeypatch, "v5e-4", program, costs)
    parts = {"padding": 1000 + 400, "temporaries": 200, "outputs": 10, "code": 3}
    assert report["memory"] == {"parameters": 4000, "ema": 4000} | parts
    assert report["memory_total"] == 9613
    assert report["fits"]
    assert report["step_seconds"] == pytest.approx(2.0 + 1.0 + 1.0, rel=1e-4)
    assert report["estimated_seconds"] == pytest.approx(4.0 / 0.61, rel=1e-4)
    assert report["images_per_second"] == pytest.approx(4, rel=1e-4)
    costs[update] = {"needs": 20 * 2**30}
    report = report_by_hand(monkeypatch, "v5p-8", program, costs)
    assert not report["fits"] and report["memory_total"] == 20 * 2**30


def test_flops_by_hand():
    """Matmuls, convolutions, loops, switches and int8."""
    left, right = jnp.ones((3, 4)), jnp.ones((4, 5))

    def f(x, image, kernel, integers):
        def step(carry, kind):
            one, two = (lambda y: y @ right), (lambda y: 2 * y @ right + y @ right)
            with jax.named_scope("kinds"):
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
    assert matmul_flops(program.jaxpr, {"kinds": (0.6, 0.4)}) == pytest.approx((expected, int8))
    worst, _ = matmul_flops(program.jaxpr)
    assert worst == 5 * 2 * matmul + convolution + int8


@needs_libtpu
def test_command_line(tmp_path):
    """An image on a TPU."""
    model, output = make_tiny_xl(tmp_path / "xl"), tmp_path / "report.json"
    command = ["sdxl", "--tpu", "v5e-1", "--image_size", 64, "--model", model, "--output", output]
    done = run(*command, "--compiler_options", "xla_tpu_scoped_vmem_limit_kib=16384")
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    assert (report["chips"], report["batch_per_chip"]) == (1, 1)
    assert report["interconnect_bytes"] == 0
    assert "\nfits: 1 per chip need " in done.stdout and "61% of the peak" in done.stdout
    assert report["memory_total"] == sum(report["memory"].values()) < report["memory_usable"]
    least = max(report["flops"] / 197e12, report["hbm_bytes"] / 0.82e12)
    assert report["step_seconds"] == pytest.approx(least)
    assert report["images_per_second"] == pytest.approx(1 / least)


@pytest.mark.slow
@needs_libtpu
def test_a_compiler_option_that_xla_does_not_have(tmp_path):
    command = ["sdxl", "--tpu", "v5e-1", "--image_size", 64, "--model", make_tiny_xl(tmp_path)]
    done = run(*command, "--compiler_options", "xla_tpu_nothing=1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: XLA does not compile with these --compiler_options: ")


@pytest.mark.slow
@needs_libtpu
def test_training_step(model, tmp_path):
    """Sizes of a training step's parts, of the largest size."""
    output = tmp_path / "report.json"
    command = ["train", "--tpu", "v5e-4", "--resolution", 16, "--train_batch_size", 16]
    command += ["--pretrained_model_name_or_path", model, "--ema", "full", "--output", output]
    done = run(*command, "--mixed_precision", "bf16", "--aspect_ratio_buckets", "16x16", "12x20")
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    unet, memory = tensor_shapes(model / "unet"), report["memory"]
    assert report["fits"]
    assert report["batch_per_chip"] == 4
    assert memory["parameters"] == memory["ema"] == 4 * elements(unet, 4)
    assert memory["optimizer"] == 8 * elements(unet, 4) + 8
    assert memory["padding"] > 0
    images, text = 2 * 3 * 16 * 16, 4 * 77
    assert memory["batches"] == 3 * 4 * (images + text)
    assert report["flags"]["aspect_ratio_buckets"] == ["16x16", "12x20"]


@pytest.mark.slow
@needs_gpu_compiler
def test_gpu_command_line(model, tmp_path):
    """A training step: parts of the memory, kernels, times."""
    output = tmp_path / "report.json"
    command = ["train", "--gpu", "l4", "--pretrained_model_name_or_path", model, "--output", output]
    command += ["--resolution", 16, "--train_batch_size", 4, "--mixed_precision", "bf16"]
    done = run(*command, "--ema", "full")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report = json.loads(output.read_text())
    unet, memory, kernels = tensor_shapes(model / "unet"), report["memory"], report["kernels"]
    assert memory["parameters"] == memory["ema"] == 4 * elements(unet)
    assert memory["optimizer"] == 8 * elements(unet) + 8
    assert memory["padding"] == 0
    assert report["memory_total"] == sum(memory.values())
    assert "\nfits: 4 per chip need " in done.stdout
    assert {"convolution", "matmul", "reduction", "element-wise"} < kernels.keys()
    least = sum(row["least_seconds"] for row in kernels.values())
    assert report["step_seconds"] == pytest.approx(least)
    assert report["estimated_seconds"] > 1.2 * least
    # The backward pass of XLA's attention and the padding of convolutions make small differences.
    flops = sum(row["flops"] for row in kernels.values())
    assert flops == pytest.approx(report["flops"], rel=0.35)


@pytest.mark.slow
@needs_gpu_compiler
def test_a_batch_that_does_not_fit(model, tmp_path):
    """Its verdict is no error; an automatic batch is smaller."""
    command = ["edit", "--gpu", "rtx4090", "--model", model, "--resolution", 256]
    output = tmp_path / "report.json"
    done = run(*command, "--num_images", 100_000, "--output", output)
    assert done.returncode == 0, done.stderr
    assert "does not fit: 100000 per chip need " in done.stdout
    report = json.loads(output.read_text())
    assert not report["fits"] and "step_seconds" not in report


def mistake(capsys, *args):
    """The error line of a command that fails."""
    with pytest.raises(SystemExit) as stopped:
        compile_for.main(list(args))
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


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
            "--tpu v4-8 --resolution 32",
            "resolution=32 is too small: this model takes 64 or more",
        ),
        ("", "give one of --tpu, such as v5e-4, and --gpu, such as h100"),
        ("--tpu v5e-4 --output compile_for.py/x", "--output compile_for.py/x: "),
    ],
)
def test_flags_that_do_not_work(libtpu_environment, capsys, args, message):
    assert mistake(capsys, "train", *args.split()).startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("sdxl --gpu h100 --offload group", "--offload is for --tpu: "),
        ("pairs --gpu h100 --batch_size 0", "--batch_size 0 must be at least 1"),
        (
            "train --gpu h100 --train_batch_size many",
            "Error parsing --train_batch_size: no type matching INT|{auto}",
        ),
    ],
)
def test_flags_that_do_not_work_with_gpus(capsys, args, message):
    assert mistake(capsys, *args.split()).startswith(f"error: {message}")


@pytest.mark.parametrize(("micro_batches", "least"), [(1, 32), (12, 36)])
def test_auto_finds_the_largest_batch(monkeypatch, tmp_path, micro_batches, least):
    """Batches begin with the default; one GPU's memory holds 37 pairs of each of two GPUs."""
    compiled = []

    def fake(config, name, program, chip):
        per_gpu = config.train_batch_size // 2
        compiled.append(per_gpu)
        report = {"batch_per_chip": per_gpu, "fits": per_gpu <= 37, "memory_total": per_gpu}
        return report | {"memory_usable": 37}

    monkeypatch.setattr(compile_for, "compile_program", fake)
    monkeypatch.setattr(compile_for, "train_program", lambda config, devices: None)
    monkeypatch.setattr(compile_for, "target_devices", lambda target: None)
    monkeypatch.setattr(compile_for, "print_report", lambda report, chip: None)
    output = tmp_path / "report.json"
    command = ["train", "--gpu", "h100x2", "--train_batch_size", "auto", "--output", str(output)]
    compile_for.main([*command, "--gradient_accumulation_steps", str(micro_batches)])
    report = json.loads(output.read_text())
    assert compiled[:2] == ([8, 16] if micro_batches == 1 else [12, 24])
    assert least <= report["batch_per_chip"] <= 37 < report["smallest_not_fitting"] <= 48
