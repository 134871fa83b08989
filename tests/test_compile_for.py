"""compile_for.py: shapes against a run's, the report, the command line."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from diffusers_flax.compiling.cards import find_gpus
from flax.traverse_util import flatten_dict
from gpu_programs import needs_gpu_compiler
from helpers import ROOT, slow
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import make_tiny_pipeline, make_tiny_xl
from tpu_programs import accelerated, elements, needs_libtpu, tensor_shapes

import compile_for
import flax_train_instruct_pix2pix as trainer
from compile_for import SdxlFlags, TrainFlags, UnetFlags, largest_fitting
from diffusers_flax.compiling.chips import (
    find_slice,
    slice_devices,
)
from diffusers_flax.compiling.costs import num_bytes
from diffusers_flax.compiling.programs import Program
from diffusers_flax.compiling.report import make_report, print_report
from diffusers_flax.flops import matmul_flops
from diffusers_flax.pipelines import sampling
from diffusers_flax.training.ema import start_average
from diffusers_flax.training.models import cast_frozen, load_models
from diffusers_flax.training.sharding import (
    replicate,
    shard_axes,
    shard_batch,
    start_state,
)

NUM_DEVICES = 4  # conftest.py's


def report_of(config, tpu, devices):
    """The report of a program."""
    return compile_for.compile_program(config, compile_for.make_program(config, devices), tpu)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny pipeline with an 8-channel UNet."""
    folder = tmp_path_factory.mktemp("compile_for") / "model"
    return make_tiny_pipeline(folder, vae_channels=(16, 32), unet_channels=(16, 32))


def flags(model, **more):
    """The flags `train` for the tiny pipeline."""
    paths = {"pretrained_model_name_or_path": str(model)}
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
        unet_model_name_or_path=str(model / "unet"),
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
    update = (start_average(state.params), state.params, replicate(np.float32(0.5)))
    like = lambda x: (x.shape, x.dtype)  # noqa: E731
    assert jax.tree.map(like, real) == jax.tree.map(like, program.args)
    assert jax.tree.map(like, update) == jax.tree.map(like, program.update_args)


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
    assert program.updates_per_step == num_averages
    assert (program.update is None) == (num_averages == 0)


@pytest.mark.slow
def test_without_a_path_it_is_stable_diffusion_1_5():
    _, frozen, params = compile_for.training_model_shapes(TrainFlags(tpu="v5e-16"))
    published = json.loads((ROOT / "tests" / "published_flax_param_shapes.json").read_text())
    published["sd15_unet"]["conv_in/kernel"] = [3, 3, 8, 320]
    trees = {"sd15_unet": params, "vae": frozen["vae"], "clip_l_text": frozen["text_encoder"]}
    for name, tree in trees.items():
        shapes = {key: list(x.shape) for key, x in flatten_dict(tree, sep="/").items()}
        assert shapes == published[name]


@pytest.mark.slow
def test_a_narrow_unet_is_taken_as_widened(tmp_path):
    model = make_tiny_pipeline(tmp_path / "narrow", in_channels=4)
    models, _, params = compile_for.training_model_shapes(flags(model))
    assert models.unet.in_channels == 8
    assert params["conv_in"]["kernel"].shape == (3, 3, 8, 16)


def test_models_must_fit_together_and_output_dir_does_not_matter(tmp_path):
    """The UNet of a training command may be a part of its --output_dir; nothing is written."""
    narrow = make_tiny_pipeline(tmp_path / "narrow", in_channels=4)
    config = flags(narrow, unet_model_name_or_path=str(narrow / "unet"), output_dir=str(narrow))
    compile_for.check_flags(config, num_devices=4)
    with pytest.raises(ValueError, match=r"narrow/unet has 4 input channels.*create_modified_unet"):
        compile_for.training_model_shapes(config)
    xl = make_tiny_xl(tmp_path / "xl")
    config = flags("", unet_model_name_or_path=str(xl / "unet"))
    with pytest.raises(ValueError, match=r"^sd15 is Stable Diffusion 1 or 2, but the UNet in "):
        compile_for.training_model_shapes(config)


@needs_libtpu
def test_report_by_hand(model):
    """Two micro-batches and an average every second step, on a v5e chip."""
    config = flags(model, tpu="v5e-4", train_batch_size=16, gradient_accumulation_steps=2)
    x = jax.ShapeDtypeStruct((4, 1000), jnp.float32)
    program = Program(
        step=None,
        args=(x, x),
        held={"parameters": x, "ema": [x]},
        batch_per_chip=4,
        update_args=(x, x),
        updates_per_step=0.5,
    )
    step = {"padding": 1000, "temporaries": 100, "outputs": 10, "code": 1, "compile_seconds": 1.0}
    step |= {"hbm_bytes": 0.82e12, "interconnect_bytes": 1e9}
    step |= {"cycles": 5, "host_bytes": 0}
    update = {"padding": 800, "temporaries": 200, "code": 2}
    update |= {"hbm_bytes": 1.64e12}
    report = make_report(
        config,
        "train",
        find_slice("v5e-4"),
        program,
        {"step": step, "update": update},
        {"step": (394e12, 0.0)},
    )
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
    assert report["estimated_seconds"] == pytest.approx(3.0 / 0.61)
    assert report["images_per_second_per_chip"] == pytest.approx(4 / 3)
    assert report["images_per_second"] == pytest.approx(16 / 3)
    assert report["flags"].keys() == {
        "tpu",
        "pretrained_model_name_or_path",
        "resolution",
        "gradient_accumulation_steps",
    }


@pytest.mark.slow
def test_sdxl_counts_every_step(tmp_path):
    """The program has the loop's body once; the figures count it for every step.

    The keys and values of the text are computed once.
    """
    model = make_tiny_xl(tmp_path / "xl")
    few, more = (
        SdxlFlags(
            tpu="v5e-4",
            pretrained_model_name_or_path=str(model),
            image_size=64,
            num_images=2,
            num_inference_steps=steps,
        )
        for steps in (1, 4)
    )
    reports = [report_of(config, find_slice("v5e-4"), jax.devices()) for config in (few, more)]
    assert [report["batch_per_chip"] for report in reports] == [2, 2]
    one_step = UnetFlags(
        tpu="v5e-4",
        gradient=False,
        batch_size=4,  # two images, two branches
        resolution=64,
        pretrained_model_name_or_path=str(model),
    )
    unet = report_of(one_step, find_slice("v5e-4"), jax.devices())
    kernels = tensor_shapes(model / "unet", r"attn2\.to_[kv]\.weight$")
    of_text = 2 * 4 * 77 * elements(kernels)
    extra = reports[1]["flops"] - reports[0]["flops"]
    assert extra == pytest.approx(3 * (unet["flops"] - of_text), rel=0.05)
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
    config = SdxlFlags(
        tpu="v5e-4",
        pretrained_model_name_or_path=str(model),
        image_size=64,
        num_inference_steps=1,
    )
    one, four = (
        report_of(replace(config, num_images=n), find_slice("v5e-4"), jax.devices()) for n in (1, 4)
    )
    assert four["flops"] == pytest.approx(4 * one["flops"])
    assert 2 < four["hbm_bytes"] / one["hbm_bytes"] < 4.5  # weights are read once


@pytest.mark.slow
def test_flops_count_all_micro_batches(model):
    """Twice the pairs need twice the FLOPs; micro-batches change nothing."""
    paths = {"pretrained_model_name_or_path": str(model)}
    unet = UnetFlags(tpu="v5e-4", resolution=16, mixed_precision="no", **paths)
    one, two = (compile_for.count_step_flops(unet, n)[0] for n in (2, 4))
    assert two == pytest.approx(2 * one, rel=0.01)
    with jax.numpy_dtype_promotion("standard"):  # optax promotes
        whole, halves = (
            compile_for.count_step_flops(flags(model, gradient_accumulation_steps=parts), 4)[0]
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
        reports.append(report_of(config, tpu, slice_devices(tpu)))
    plain, fast = reports
    assert (plain["unet_evaluations"], fast["unet_evaluations"]) == (60, 13)
    assert fast["flops"] < 0.5 * plain["flops"]
    assert 0 < fast["cycles"] < 0.7 * plain["cycles"]


def test_an_output_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for output, said in (
        (tmp_path, "is a directory; name a file"),
        (tmp_path / "file/x", "is not a directory"),
    ):
        with pytest.raises(ValueError, match=said):
            compile_for.report_file(TrainFlags(tpu="v5e-1", output=str(output)))


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
    assert re.sub(r"tracing, .*?\d\d:\d\d", "", done.stderr).strip() == ""  # of a slow machine
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
    config = TrainFlags(
        tpu="v5e-4",
        pretrained_model_name_or_path=str(model),
        resolution=16,
        train_batch_size=16,
        aspect_ratio_buckets=("16x16", "12x20"),
    )
    program = compile_for.train_program(config, jax.devices()[:4])
    assert program.args[2]["original_pixel_values"].shape == (4, 4, 16, 16, 3)


def mistake(capsys, *args):
    """The error line of a command that fails."""
    with pytest.raises(SystemExit) as stopped:
        compile_for.main(list(args) if args[:1] == ("sdxl",) else ["train", *args])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_unknown_type(capsys):
    error = mistake(capsys, "--tpu", "v7-8")
    assert error.startswith("error: --tpu v7-8 is not known; known are v4-8, v4-16, ")


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
    assert mistake(capsys, *args.split()).startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("", "nothing to compile for; give --tpu v5e-4 or --gpu h100"),
        (
            "--tpu v5e-4 --gpu h100",
            "--tpu v5e-4 and --gpu h100 are both given; give --tpu v5e-4 or --gpu h100",
        ),
        ("--gpu h10", "--gpu h10 is not known; known are a100_40, a100_80, h100, h200, l4, "),
        ("--gpu h100 --train_batch_size many", "invalid choice"),
        (
            "sdxl --gpu h100 --offload group",
            "--offload is not supported with --gpu: the host's memory is not modelled; try "
            "--storage int8",
        ),
    ],
)
def test_targets_that_do_not_work(capsys, args, message):
    if "many" in args:
        with pytest.raises(SystemExit):
            compile_for.main(["train", *args.split()])
        assert "auto" in capsys.readouterr().err
        return
    assert mistake(capsys, *args.split()).startswith(f"error: {message}")


def test_gpu_compiler_not_installed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("diffusers_flax.compiling.cards.FOLDER", tmp_path / "gpu")
    error = mistake(capsys, "--gpu", "h100")
    assert error.startswith("error: the compiler for NVIDIA GPUs is not installed; 140 MB: pip ")


def test_auto_finds_the_largest_batch(monkeypatch):
    """Batches begin with the default; one card's memory holds 37 pairs of each of two GPUs."""
    compiled = []

    def fake(config, program, target):
        per_gpu = config.train_batch_size // 2
        compiled.append(per_gpu)
        return {
            "gpu": "h100x2",
            "batch_per_chip": per_gpu,
            "compile_seconds": 1.0,
            "fits": per_gpu <= 37,
            "memory_total": per_gpu,
            "memory_usable": 37,
        }

    monkeypatch.setattr(compile_for, "compile_program", fake)
    monkeypatch.setattr(compile_for, "make_program", lambda config, devices: None)
    config = TrainFlags(gpu="h100x2", train_batch_size="auto")
    first = compile_for.with_first_batch(config, 2)
    assert first.train_batch_size == 16
    report = compile_for.find_batch(first, find_gpus("h100x2"), None)
    assert compiled[:3] == [8, 16, 32]
    assert 32 <= report["batch_per_chip"] <= 37 < report["smallest_not_fitting"] <= 42
    micro = replace(config, gradient_accumulation_steps=12)
    assert compile_for.with_first_batch(micro, 2).train_batch_size == 24
    assert compile_for.with_first_batch(SdxlFlags(gpu="h100", num_images="auto"), 1).num_images == 1
    assert compile_for.with_first_batch(first, 2) is first


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
    assert "\nfits: 4 per GPU need " in done.stdout
    assert {"convolution", "matmul", "reduction", "element-wise"} < kernels.keys()
    least = sum(row["least_seconds"] for row in kernels.values())
    assert report["step_seconds"] == pytest.approx(least)
    assert report["estimated_seconds"] > 1.2 * least
    # The backward pass of XLA's attention and the padding of convolutions make small differences.
    flops = sum(row["flops"] for row in kernels.values())
    assert flops == pytest.approx(report["flops"], rel=0.35)
    assert re.search(r"^  convolution +\d+ ", done.stdout, re.MULTILINE)


@pytest.mark.slow
@needs_gpu_compiler
def test_a_program_that_does_not_fit(model, tmp_path):
    """Its verdict is one line, and no error."""
    command = ["unet", "--gpu", "rtx4090x2", "--pretrained_model_name_or_path", model]
    command += ["--resolution", 512, "--batch_size", 10_000, "--output", tmp_path / "report.json"]
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^does not fit: 10000 per GPU need \d+\.\d\d of 22\.07 GiB; .*try --batch_size auto$",
        done.stdout,
        re.M,
    )


@pytest.mark.parametrize(
    ("flags", "memory", "batch", "said"),
    [
        (
            TrainFlags(gpu="l4"),
            {"parameters": 3, "optimizer": 6, "temporaries": 20},
            16,
            "the largest part is temporaries, 20.00 GiB; try --gradient_checkpointing or "
            "--gradient_accumulation_steps 2 or --train_batch_size auto",
        ),
        (
            TrainFlags(gpu="l4", gradient_checkpointing=True),
            {"parameters": 10, "optimizer": 20, "temporaries": 5},
            1,
            "the largest part is optimizer, 20.00 GiB; try --lora_rank 16",
        ),
        (
            TrainFlags(gpu="l4", lora_rank=4),
            {"parameters": 1, "optimizer": 2, "frozen models": 40, "temporaries": 1},
            1,
            "the largest part is frozen models, 40.00 GiB; try --storage int8 or "
            "--cache_latents latents --no_random_crop",
        ),
        (
            SdxlFlags(gpu="l4", storage="int8"),
            {"parameters": 30, "temporaries": 5},
            1,
            "the largest part is parameters, 30.00 GiB; try a GPU with more memory",
        ),
        (
            SdxlFlags(gpu="l4", vae_tile=512),
            {"parameters": 7, "temporaries": 25},
            4,
            "the largest part is temporaries, 25.00 GiB; try --num_images auto",
        ),
    ],
)
def test_what_does_not_fit_has_no_times(capsys, flags, memory, batch, said):
    """Memory, one line with the verdict, what needs most, and flags that are not given yet."""
    unit = 2**30
    held = {name: jax.ShapeDtypeStruct((1, size * unit), jnp.int8) for name, size in memory.items()}
    temporaries = held.pop("temporaries").shape[1]
    program = Program(step=None, args=(), held=held, batch_per_chip=batch)
    row = {"kernels": 5.0, "bytes": 1e9, "flops": 1e12, "least_seconds": 0.1}
    step = {"padding": 0, "temporaries": temporaries, "outputs": 0, "code": 0}
    step |= {"compile_seconds": 1.0, "kernels": {"matmul": row}}
    step |= {"interconnect_bytes": 0, "host_bytes": 0}
    name = compile_for.subcommand_of(flags)
    report = make_report(
        flags, name, find_gpus("l4"), program, {"step": step}, {"step": (1e12, 0.0)}
    )
    print_report(report)
    lines = capsys.readouterr().out.splitlines()
    need, usable = sum(memory.values()), report["memory_usable"] / unit
    verdict = f"does not fit: {batch} per GPU need {need:.2f} of {usable:.2f} GiB"
    assert lines[-1] == f"{verdict}; {said}"
    assert len(lines) == 1 + len(report["memory"]) + 1
    assert report["kernels"]  # in the file


def test_compiler_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    error = mistake(capsys, "--tpu", "v5e-16")
    assert error.startswith("error: libtpu, the TPU's compiler, is not installed; get the one for")
    assert f'pip install "jax[tpu]=={jax.__version__}"' in error
