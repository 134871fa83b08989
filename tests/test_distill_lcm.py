"""LCM-LoRA distillation: PyTorch and NumPy references, devices, the command line, bad input."""

import itertools
import json
import os
import shlex
import signal
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    LCMScheduler,
    StableDiffusionInstructPix2PixPipeline,
    UNet2DConditionModel,
)
from flax.traverse_util import flatten_dict, unflatten_dict
from helpers import random_normal, slow
from peft import LoraConfig
from PIL import Image
from safetensors.numpy import load_file
from shards import write_random_shard
from tiny_models import make_tiny_pipeline, make_tiny_xl
from trainer_runs import read_metrics

import distill_lcm
import edit_cli
from diffusers_flax.loading.weights import flax_to_torch
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.training.checkpoints import newest_checkpoint, read_arrays
from diffusers_flax.training.flags import LORA_FILE
from diffusers_flax.training.lora import add_lora
from diffusers_flax.training.models import Models
from diffusers_flax.training.sharding import replicate, shard_axes, start_state, to_host

# of torch.Tensor.__array__, called by diffusers' schedulers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
SCALES = 3.0, 1.4
TARGETS = ("to_q", "to_out.0", "proj_in", "ff.net.0.proj", "conv1", "time_emb_proj")
RANK, ALPHA, NUM_STEPS = 4, 6.0, 50
SIZE = dict(vae_channels=(16, 32), unet_channels=(16,))  # latents are half as wide as images


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    flow = make_tiny_pipeline(folder / "flow", **SIZE)
    FlowMatchEulerDiscreteScheduler(shift=2.0).save_pretrained(flow / "scheduler")
    return {
        "flow": flow,
        "epsilon": make_tiny_pipeline(folder / "epsilon", **SIZE),
        "v": make_tiny_pipeline(folder / "v", prediction_type="v_prediction", **SIZE),
        "xl": make_tiny_xl(folder / "xl", edits=True),
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_random_shard(folder / "a.parquet", 16, seed=1)
    return folder


def flags(model, data, out, *more):
    """A command line; later flags replace earlier ones."""
    given = {
        "pretrained_model_name_or_path": model,
        "train_data_dir": data,
        "output_dir": out,
        "resolution": 16,
        "train_batch_size": 8,
        "max_train_steps": 4,
        "learning_rate": 1e-2,
        "lora_rank": RANK,
        "logging_steps": 1,
        "guidance_scale": SCALES[0],
        "image_guidance_scale": SCALES[1],
    }
    given = {f"--{name}": str(value) for name, value in given.items() if f"--{name}" not in more}
    return [*itertools.chain.from_iterable(given.items()), *map(str, more)]


def lcm_scheduler(model):
    """(scheduler, state of the distillation) of a model directory."""
    flow, other = distill_lcm.FlaxFlowMatchLCMScheduler, distill_lcm.FlaxLCMScheduler
    cls = flow if model.name == "flow" else other
    scheduler, state = cls.from_pretrained(model, subfolder="scheduler")
    return scheduler, scheduler.set_timesteps(state, NUM_STEPS)


def torch_loss(model, lora, x_0, condition, text, null_text, noise, timesteps):
    """Loss of PyTorch's UNet with PEFT's LoRA: {name: parameter}, and the loss.

    lora: {PyTorch's name: array}, the values of the LoRA.
    """
    unet = UNet2DConditionModel.from_pretrained(model / "unet")
    unet.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS)))
    trained = {
        name.replace(".default.", "."): parameter
        for name, parameter in unet.named_parameters()
        if parameter.requires_grad
    }
    assert trained.keys() == lora.keys()
    for name, parameter in trained.items():
        parameter.data = torch.tensor(lora[name])
    schedule = DDIMScheduler.from_pretrained(
        model / "scheduler",
        timestep_spacing="trailing",
        set_alpha_to_one=False,
        steps_offset=0,
        clip_sample=False,
    )
    schedule.set_timesteps(NUM_STEPS)
    lcm = LCMScheduler.from_pretrained(model / "scheduler")
    t = torch.tensor(timesteps)
    next_t = (t - schedule.config.num_train_timesteps // NUM_STEPS).clamp(min=0)
    is_flow = model.name == "flow"

    def run(x, t, condition, text):
        names = {"text_embeds": "pooled", "time_ids": "time_ids"}
        added = {name: text[key] for name, key in names.items() if key in text}
        x_in = torch.cat((x, condition), 1)
        return unet(x_in, t, text["states"], added_cond_kwargs=added or None).sample

    def f(x, t):
        output = run(x, t, condition, text)
        if is_flow:
            return x - t.view(-1, 1, 1, 1) / 1000 * output
        alpha_bar = lcm.alphas_cumprod[t].view(-1, 1, 1, 1)
        clean = (x - (1 - alpha_bar).sqrt() * output) / alpha_bar.sqrt()
        if lcm.config.prediction_type == "v_prediction":
            clean = alpha_bar.sqrt() * x - (1 - alpha_bar).sqrt() * output
        scalings = lcm.get_scalings_for_boundary_condition_discrete(t.float())
        c_skip, c_out = (scaling.view(-1, 1, 1, 1) for scaling in scalings)
        return c_skip * x + c_out * clean

    if is_flow:
        flow = FlowMatchEulerDiscreteScheduler.from_pretrained(model / "scheduler")
        flow.set_timesteps(NUM_STEPS)
        places = (flow.timesteps - t[:, None]).abs().argmin(1)
        x_t = flow.scale_noise(x_0, flow.timesteps[places], noise)
        next_t = 1000 * flow.sigmas[places + 1]
    else:
        x_t = schedule.add_noise(x_0, noise, t)
    null = {name: null_text.get(name, x).expand_as(x) for name, x in text.items()}
    with torch.no_grad():
        unet.disable_adapters()
        both = run(x_t, t, condition, text)
        image = run(x_t, t, condition, null)
        neither = run(x_t, t, torch.zeros_like(condition), null)
        unet.enable_adapters()
        guided = neither + SCALES[1] * (image - neither) + SCALES[0] * (both - image)
        if is_flow:
            earlier = x_t + (next_t - t).view(-1, 1, 1, 1) / 1000 * guided
        else:
            rows = [schedule.step(guided[i, None], int(t[i]), x_t[i, None]) for i in range(len(t))]
            earlier = torch.cat([row.prev_sample for row in rows])
        target = f(earlier, next_t)
    loss = ((f(x_t, t) - target).square() + 0.001**2).sqrt().mean() - 0.001
    loss.backward()
    return trained, loss.item()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["epsilon", *slow("v", "xl", "flow")])
def test_loss_and_gradients_are_pytorchs(models, family):
    """For a first, a last and a middle timestep of the grid; the first one's target is at 0."""
    model, B = models[family], 3
    x_0, condition, noise = (random_normal(B, 4, 8, 8, seed=seed) for seed in range(3))
    timesteps = np.array([19, 999, 459], np.int32)
    width = 48 if family == "xl" else 24
    text, null_text = (
        {"states": random_normal(B, 7, width)},
        {"states": random_normal(1, 7, width, seed=5)},
    )
    if family == "xl":
        text |= {"pooled": random_normal(B, 20), "time_ids": 50 * np.abs(random_normal(B, 6))}
        null_text["pooled"] = np.zeros((1, 20), np.float32)

    unet, params = FlaxUNet2DConditionModel.from_pretrained(model / "unet")
    lora, frozen = add_lora(params, RANK, ALPHA, TARGETS, fully_trained=())
    lora = {
        name: x if "lora_A" in name else 0.1 * random_normal(*x.shape, seed=i)
        for i, (name, x) in enumerate(flatten_dict(lora, sep="/").items())
    }
    names = dict(flax_to_torch(name, x) for name, x in lora.items())
    lora = unflatten_dict(lora, sep="/")
    scheduler, state = lcm_scheduler(model)
    frozen = {"unet": frozen, "null_text": null_text, "scheduler": state}
    teacher = distill_lcm.Teacher(Models(unet, None, None, scheduler), *SCALES)
    if family == "flow":
        timesteps = np.asarray(state.timesteps)[[-1, 0, 27]]

    def loss(lora, *arrays):
        return distill_lcm.consistency_loss(lora, frozen, teacher, *arrays)

    arrays = (x_0, condition, text, noise, timesteps)
    value, grads = jax.jit(jax.value_and_grad(loss))(lora, *arrays)

    tensors = jax.tree.map(torch.tensor, (x_0, condition, text, null_text, noise))
    theirs, expected = torch_loss(model, names, *tensors, timesteps)
    assert value.dtype == jnp.float32
    assert float(value) == pytest.approx(expected, rel=1e-3)
    for name, grad in flatten_dict(grads, sep="/").items():
        name, grad = flax_to_torch(name, np.asarray(grad))
        wanted = theirs[name].grad.numpy()
        assert np.linalg.norm(wanted) > 0
        assert np.linalg.norm(grad - wanted) <= 1e-3 * np.linalg.norm(wanted), name


def run_on(num_devices, model, batch, num_steps=3):
    """(losses, gradient norms, LoRA) of train_step on some devices."""
    out = dict(output_dir="unused", resolution=16, lora_rank=RANK, train_batch_size=8)
    out |= dict(zip(("guidance_scale", "image_guidance_scale"), SCALES))
    config = distill_lcm.Config(str(model), **out)
    modules, pipeline, frozen, lora = distill_lcm.load_teacher(config)
    batch = {"input_ids": pipeline.prepare_text_inputs(["make it red"] * 8), **batch}
    devices, axes = jax.devices()[:num_devices], shard_axes(lora, num_devices)
    tx = optax.sgd(3.0)  # Adam would enlarge rounding errors of small gradients
    teacher = distill_lcm.Teacher(modules, *SCALES)
    step = partial(distill_lcm.distill_step, teacher=teacher, tx=tx, axes=axes)
    p_step = jax.pmap(step, axis_name="batch", donate_argnums=0, devices=devices)
    state, rng = start_state(lora, tx, axes, devices), np.asarray(jax.random.PRNGKey(3))
    frozen, rng = replicate((frozen, rng), devices)
    batch = jax.tree.map(lambda x: x.reshape(num_devices, -1, *x.shape[1:]), batch)
    metrics = []
    for _ in range(num_steps):
        state, row = p_step(state, frozen, batch, rng)
        metrics.append([float(row[name][0]) for name in ("loss", "grad_norm")])
    return np.array(metrics), flatten_dict(to_host(state.params, axes), sep="/"), lora


@pytest.mark.slow
def test_two_devices_are_one(models):
    """Random numbers, gradients and the sharded LoRA after three steps."""
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 16, 16, 3), np.uint8)
    batch = dict(zip(("original_pixel_values", "edited_pixel_values"), pixels))
    expected, one, start = run_on(1, models["epsilon"], batch)
    found, two, _ = run_on(2, models["epsilon"], batch)
    assert len(set(expected[:, 0])) == len(expected)  # every step draws new numbers
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    start = flatten_dict(start, sep="/")
    for name, x in one.items():
        change = np.linalg.norm(x - start[name])
        assert change > 0 and np.linalg.norm(two[name] - x) < 2e-3 * change, name
    assert "conv_in/kernel" not in one


@pytest.mark.parametrize("family", ["epsilon", *slow("flow")])
def test_command_line(models, data, tmp_path, lenient_optimizer, capsys, family):
    """The file edits with edit_cli.py, and PyTorch's pipeline loads it."""
    model, out = models[family], tmp_path / "lora"
    distill_lcm.main(flags(model, data, out))
    rows = read_metrics(out)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert {"step", "loss", "lr", "grad_norm", "pairs_per_second"} <= rows[0].keys()
    assert json.loads((out / "config.json").read_text())["lora_rank"] == RANK
    assert not list(out.glob(".unfinished*"))
    tensors = load_file(out / LORA_FILE)
    for name, x in tensors.items():
        assert "lora_A" in name or np.abs(x).max() > 0, name
    assert not any("conv_in" in name for name in tensors)

    theirs = StableDiffusionInstructPix2PixPipeline.from_pretrained(model, safety_checker=None)
    theirs.load_lora_weights(out)
    loaded = dict(theirs.unet.named_parameters())
    for name, x in tensors.items():
        name = name.removeprefix("unet.").replace(".weight", ".default_0.weight")
        np.testing.assert_array_equal(loaded[name].detach().numpy(), x)

    image = tmp_path / "in.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)).save(image)
    file = tmp_path / "out.png"
    edit = f"--model {model} --lora {out} --input {image} --edit red --output {file}"
    edit_cli.main([*edit.split(), "--resolution", "16"])
    assert file.exists()

    card = (out / "README.md").read_text()
    words = shlex.split(card.split("```sh\n")[1].split("```")[0])
    assert words[:6] == ["python", "edit_cli.py", "--model", str(model), "--lora", str(out)]
    assert "guidance scale 3 and image guidance scale 1.4" in card and "](loss.png)" in card

    capsys.readouterr()
    distill_lcm.main(flags(model, data, out))
    assert "which is finished" in capsys.readouterr().out


def assert_same_run(out, expected):
    """The LoRA, the last checkpoint's state and the losses are bit-identical."""
    (found, wanted) = (load_file(folder / LORA_FILE) for folder in (out, expected))
    assert found.keys() == wanted.keys()
    assert all(found[name].tobytes() == x.tobytes() for name, x in wanted.items())
    states, losses = [], []
    for folder in (out, expected):
        state = read_arrays(newest_checkpoint(folder))
        states.append({name: x.tobytes() for name, x in state.items()})
        rows = read_metrics(folder)
        losses.append([(row["step"], row["loss"], row["grad_norm"]) for row in rows])
    assert states[0] == states[1] and losses[0] == losses[1]
    assert {name.split("/")[0] for name in states[0]} == {"params", "opt_state"}


@pytest.mark.slow
def test_a_stopped_or_crashed_run_resumes_and_may_be_longer(
    models, data, tmp_path, lenient_optimizer, capsys
):
    """Ctrl-C after step 1, a crash after step 3, the end after step 5 instead of 4."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    options = ("--checkpointing_steps", 2, "--checkpoints_total_limit", 5)
    distill_lcm.main(flags(models["epsilon"], data, whole, *options, "--max_train_steps", 5))
    command = flags(models["epsilon"], data, out, *options)
    log = distill_lcm.Reports.log

    def log_and_end(reports, step, metrics):
        log(reports, step, metrics)
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        if step == 3:
            raise ValueError("a crash")

    def error_of(args):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            distill_lcm.main(args)
        return stop.value.code, "".join(capsys.readouterr())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill_lcm.Reports, "log", log_and_end)
        code, text = error_of(command)
        assert code == 130 and "stopped by SIGINT after step 1, which is saved" in text
        code, text = error_of(command)
        assert code == 2 and "resuming after step 1\n" in text and "a crash" in text
    assert not (out / LORA_FILE).exists() and not (out / ".lock").exists()
    code, text = error_of([*command, "--image_guidance_scale", "5"])
    assert code == 2 and "another run: image_guidance_scale was 1.4 and is 5.0. Change" in text
    distill_lcm.main(flags(models["epsilon"], data, out, *options, "--max_train_steps", 5))
    assert "resuming after step 2; the run had 4 steps and has 5\n" in capsys.readouterr().out
    assert_same_run(out, whole)


def test_bad_input_is_one_line(models, data, tmp_path, capsys):
    text_to_image = make_tiny_pipeline(tmp_path / "text", in_channels=4, **SIZE)
    (empty := tmp_path / "empty").mkdir()
    model = models["epsilon"]
    for more, message in (
        (["--model", text_to_image], "LCM distils InstructPix2Pix models"),
        (["--model", empty], "is not a pipeline directory with unet/"),
        (["--train_data_dir", empty], "contains no *.parquet file"),
        (["--guidance_scale", -1], "--guidance_scale -1.0 must be at least 0"),
        (["--train_batch_size", 6], "--train_batch_size 6 is not divisible by 4 devices"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            distill_lcm.main(flags(model, data, tmp_path / "out", *more))
        assert stop.value.code == 2
        error = capsys.readouterr().err.strip()
        assert error.startswith("error: ") and message in error and "\n" not in error
    assert not (tmp_path / "out").exists()
