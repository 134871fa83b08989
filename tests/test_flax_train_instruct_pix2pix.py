"""The trainer against PyTorch, closed forms and its own command line, on four forced devices."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusionInstructPix2PixPipeline, UNet2DConditionModel
from diffusers.training_utils import compute_snr
from flax.traverse_util import flatten_dict
from helpers import PROMPTS, psnr, random_normal, slow
from hub_upload_server import UploadHub
from known_sets import SCHEMAS, write_known
from PIL import Image, ImageOps
from references import edit_with_torch
from tiny_models import make_tiny_pipeline
from torch_training import (
    Parallel,
    compare_losses,
    compare_runs,
    draws_by_hand,
    make_batch,
    train_with_torch,
)
from trainer_runs import RUN, SIZE, config_of, flags_of, read_metrics, run_trainer
from transformers import CLIPTextModel, CLIPTokenizer

import flax_train_instruct_pix2pix as trainer
from diffusers_flax.data.options import Transform
from diffusers_flax.images import to_pil
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.pipelines.instruct_pix2pix import FlaxStableDiffusionInstructPix2PixPipeline
from diffusers_flax.schedulers.ddpm import FlaxDDPMScheduler
from diffusers_flax.training.models import Models
from diffusers_flax.training.sharding import replicate, shard_axes, start_state
from parquet_processing import ParquetImagePairs

SCRIPT = Path(trainer.__file__)
pytestmark = pytest.mark.usefixtures("lenient_optimizer")


def params_of(folder, subfolder=None):
    params = FlaxUNet2DConditionModel.from_pretrained(folder, subfolder=subfolder)[1]
    return flatten_dict(params, sep="/")


# conditioning_dropout


@pytest.mark.parametrize("num_images", [1, 2])
@pytest.mark.parametrize("rate", [0, 0.05, 0.25])
def test_dropout_follows_the_table(rate, num_images):
    B = 20000
    keys = jax.random.split(jax.random.key(5), B)
    rng = np.random.default_rng(0)
    text = rng.standard_normal((B, 2, 3), np.float32)
    null_text = rng.standard_normal((1, 2, 3), np.float32)
    latents = rng.standard_normal((B, 4 * num_images, 1, 2), np.float32)
    latents[:, 0] = np.inf  # multiplied by 0 instead of dropped, it would give NaN
    pooled, ids = text[:, 0], np.arange(B)
    new_text, new_latents = trainer.conditioning_dropout(
        keys,
        {"states": text, "pooled": pooled, "ids": ids},
        {"states": null_text, "pooled": null_text[:, 0]},
        latents,
        rate,
        num_images,
    )
    np.testing.assert_array_equal(new_text["ids"], ids)  # the null text has no such leaf
    np.testing.assert_array_equal(new_text["pooled"], new_text["states"][:, 0])
    new_text = new_text["states"]

    u = np.asarray(jax.vmap(jax.random.uniform)(keys))
    q = [np.float32(k * rate) for k in range(5)]
    cases = {  # name: (samples, text is null, first channel of zeros)
        "text": (u < q[1], True, None),
        "both": ((u >= q[1]) & (u < q[2]), True, 0),
        "image": ((u >= q[2]) & (u < q[3]), False, 0),
        "reference": ((u >= q[3]) & (u < q[4]), False, 4),  # without one nothing is dropped
        "none": (u >= q[4], False, None),
    }
    assert sum(where.sum() for where, _, _ in cases.values()) == B
    for name, (where, text_is_null, first_zero) in cases.items():
        expected = 1 - 4 * rate if name == "none" else rate
        error = 4 * np.sqrt(rate * (1 - rate) / B)
        assert where.mean() == pytest.approx(expected, abs=3 * error if name == "none" else error)
        wanted = np.broadcast_to(null_text, text.shape) if text_is_null else text
        np.testing.assert_array_equal(new_text[where], wanted[where])
        wanted = latents[where].copy()
        if first_zero is not None:
            wanted[:, first_zero:] = 0
        assert np.asarray(new_latents[where]).tobytes() == wanted.tobytes()


# diffusion_loss


@pytest.mark.parametrize(
    ("prediction_type", "num_images"), [("epsilon", 1), ("epsilon", 2), *slow(("v_prediction", 1))]
)
def test_loss_and_gradients_are_pytorchs(tmp_path, prediction_type, num_images):
    model = make_tiny_pipeline(tmp_path, in_channels=4 + 4 * num_images, **SIZE)
    condition = random_normal(3, 4 * num_images, 8, 6, seed=2)
    text = {"states": random_normal(3, 7, 24, seed=3)}
    compare_losses(model, prediction_type, (text, condition), (text, condition))


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_min_snr(prediction_type):
    """The weights of each sample's error in Hugging Face's trainer."""
    scheduler = FlaxDDPMScheduler.from_config(
        {"prediction_type": prediction_type, "beta_schedule": "scaled_linear"}
    )
    state = scheduler.create_state()
    rng = np.random.default_rng(0)
    shape = (6, 4, 2, 2)
    x_0, noise, condition = (rng.standard_normal(shape, np.float32) for _ in range(3))
    timesteps = np.array([0, 10, 200, 500, 900, 999])

    class Unet:
        def apply(self, variables, x_in, timesteps, text):
            return SimpleNamespace(sample=x_in[:, :4] * variables["params"])

    text = {"states": None}
    loss = trainer.diffusion_loss(
        0.5, Unet(), scheduler, state, x_0, condition, text, noise, timesteps, snr_gamma=5.0
    )
    reference = diffusers.DDPMScheduler(
        prediction_type=prediction_type, beta_schedule="scaled_linear"
    )
    t, x, n = (torch.tensor(array) for array in (timesteps, x_0, noise))
    target = n if prediction_type == "epsilon" else reference.get_velocity(x, n, t)
    error = (reference.add_noise(x, n, t) * 0.5 - target).square().mean((1, 2, 3))
    snr = compute_snr(reference, t)
    weights = snr.clamp(max=5.0) / (snr if prediction_type == "epsilon" else snr + 1)
    np.testing.assert_allclose(loss, (error * weights).mean(), rtol=1e-5)


# train_step


@pytest.fixture(scope="module")
def parallel(model, data, lenient_optimizer):
    return Parallel(config_of(model, data, "unused"))


def test_four_devices_are_pytorch_on_one(model, parallel):
    """From pixels to weights: latents, random numbers, dropout, loss, mean over devices, AdamW."""
    num_steps, seed = 4, 3
    batches = [make_batch(i) for i in range(num_steps)]
    draws = [draws_by_hand(seed, step) for step in range(num_steps)]

    # Samples and steps have different random numbers, and every case of dropout occurs.
    for name in ("posterior", "noise", "u"):
        drawn = {x.tobytes() for d in draws for x in d[name]}
        assert len(drawn) == num_steps * RUN["train_batch_size"]
    rows = np.floor(np.concatenate([d["u"] for d in draws]) / RUN["conditioning_dropout_prob"])
    assert set(rows) == {0, 1, 2, 3, 4}

    torch_run = train_with_torch(model, batches, draws)
    compare_runs(parallel, list(parallel.run(batches, seed)), *torch_run)
    assert min(torch_run[2]) > RUN["max_grad_norm"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_micro_batches": 2}, marks=pytest.mark.slow),
        pytest.param({"num_devices": 2}, marks=pytest.mark.slow),
        {"num_devices": 1, "num_micro_batches": 4},
    ],
    ids=str,
)
def test_devices_and_micro_batches_change_nothing(parallel, options):
    batches = [make_batch(seed) for seed in range(3)]
    other = Parallel(parallel.config, **options)
    for (a, metrics_a), (b, metrics_b) in zip(parallel.run(batches, 0), other.run(batches, 0)):
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(metrics_a[name][0], metrics_b[name][0], rtol=1e-5)
        b = other.whole(b)
        for name, x in parallel.whole(a).items():
            np.testing.assert_allclose(x, b[name], atol=2e-5, err_msg=name)


def test_one_device_copies_no_parameters(optimized):
    """The step's temporaries are no larger than the gradients."""
    params = {"a": np.ones((512, 1024), np.float32), "b": np.ones((1024, 512), np.float32)}
    axes, devices = shard_axes(params, 1), jax.devices()[:1]
    config = trainer.Config("", "")
    tx, _ = trainer.make_optimizer(config, 10)

    class Unet:
        dtype = jnp.float32

        def apply(self, variables, x_in, timesteps, text):
            a, b = variables["params"].values()
            y = (x_in.reshape(-1, 512) @ a) @ b
            return SimpleNamespace(sample=y[:, :256].reshape(-1, 4, 8, 8))

    models = Models(
        Unet(),
        SimpleNamespace(config=SimpleNamespace(scaling_factor=1.0)),
        lambda ids, params: (jnp.zeros((*ids.shape, 1)),),
        FlaxDDPMScheduler(),
    )
    frozen = {
        "text_encoder": {},
        "null_text": {"states": np.zeros((1, 7, 1), np.float32)},
        "scheduler": models.scheduler.create_state(),
    }
    batch = {
        "input_ids": np.zeros((1, 2, 7), np.int32),
        "original_latents": np.zeros((1, 2, 8, 8, 4), np.float16),
        "edited_latents": np.ones((1, 2, 8, 8, 8), np.float16),
    }
    step = partial(trainer.train_step, models=models, tx=tx, axes=axes, dropout_rate=0.0)
    p_step = jax.pmap(step, axis_name="batch", donate_argnums=0, devices=devices)
    args = start_state(params, tx, axes, devices), *replicate((frozen,), devices)
    memory = p_step.lower(*args, batch, jnp.zeros((1, 2), jnp.uint32)).compile().memory_analysis()
    size = sum(x.nbytes for x in params.values())
    assert memory.alias_size_in_bytes >= 3 * size
    assert memory.temp_size_in_bytes < 1.2 * size


# The loop


@pytest.mark.slow
def test_a_run_with_late_ema(model, data, parallel, tmp_path, monkeypatch, capsys):
    """Against the same run by hand: the same batches, step and closed form of the average."""
    start, decay, out = 2, 0.6, tmp_path / "out"
    config = config_of(model, data, out, ema_start_step=start, ema_decay=decay, save_raw_unet=True)
    compiled = []

    def listen(event, seconds, fun_name="", **details):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run_trainer(config, monkeypatch)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    # Under pmap: moments, step, start and update of the average, each compiled once.
    assert compiled.count("jit(_fun)") == 4, compiled

    monkeypatch.undo()
    dataset = ParquetImagePairs(
        str(data),
        batch_size=config.train_batch_size,
        transform=Transform(config.resolution),
        seed=config.seed,
    )
    tokenizer = CLIPTokenizer.from_pretrained(model / "tokenizer")
    batches, num_bad = [], []
    for _ in range(3):
        for batch in dataset:
            prompts = batch.pop("edit_prompt")
            ids = tokenizer(prompts, padding="max_length", return_tensors="np").input_ids
            batches.append({"input_ids": ids.astype(np.int32), **batch})
            num_bad.append(dataset.num_bad)
    assert num_bad[3] == 2  # the broken image occurs in both epochs
    by_hand, losses, norms = [], [], []
    for state, metrics in parallel.run(batches[: config.max_train_steps], config.seed):
        by_hand.append(parallel.whole(state))
        losses.append(float(metrics["loss"][0]))
        norms.append(float(metrics["grad_norm"][0]))

    raw, averaged = params_of(out / "unet_raw"), params_of(out, "unet")
    for name, final in by_hand[-1].items():
        assert raw[name].tobytes() == final.tobytes()  # runs with the same seed are bit-identical
        history = [params[name].astype(np.float64) for params in by_hand[start - 1 :]]
        weights = [decay**3, (1 - decay) * decay**2, (1 - decay) * decay, 1 - decay]
        expected = sum(w * params for w, params in zip(weights, history))
        np.testing.assert_allclose(averaged[name], expected, rtol=1e-6, atol=1e-7)
        assert np.abs(averaged[name] - final).max() > 1e-6, name

    rows = read_metrics(out)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["loss"] for row in rows] == losses
    assert [row["grad_norm"] for row in rows] == norms
    cosine = [(1 + np.cos(np.pi * k / 3)) / 2 for k in range(3)]
    lr = [0.03 * x for x in (0, 0.5, *cosine)]
    assert [row["lr"] for row in rows] == pytest.approx(lr, abs=1e-8)
    assert [row["ema_decay"] for row in rows] == [None, None, decay, decay, decay]
    assert [row["num_bad"] for row in rows] == num_bad[:5]
    # The first step includes compiling, so it has no speed.
    assert rows[0]["pairs_per_second"] is None
    assert all(row["pairs_per_second"] > 0 for row in rows[1:])
    assert all(0 <= row["data_wait"] < 1 for row in rows[1:])
    assert all(0.1 < row["memory_gb"] < 100 for row in rows)
    assert json.loads((out / "config.json").read_text()) == json.loads(json.dumps(asdict(config)))
    assert set(os.listdir(out)) == {
        *("unet", "unet_raw", "vae", "text_encoder", "tokenizer", "scheduler"),
        *("model_index.json", "config.json", "metrics.jsonl", "README.md", "checkpoints"),
        *("loss.png", "sampling_defaults.json"),
    }
    output = capsys.readouterr().out
    num_params = sum(x.size for x in raw.values())
    assert f"training {num_params:,} parameters on " in output
    assert "8 pairs per step on 4 device(s)" in output
    assert "averaging the weights from step 2 with decay 0.6" in output


def count_up(state, frozen, batch, base_rng, *, loss=lambda step: step, **options):
    """Replaces train_step in tests of the loop: every weight grows by 1."""
    params = jax.tree.map(lambda p: p + 1, state.params)
    metrics = {"loss": loss(state.step.astype(jnp.float32)), "grad_norm": jnp.float32(0)}
    return state.replace(step=state.step + 1, params=params), metrics


@pytest.mark.parametrize(
    ("options", "start", "decay"),
    [
        *slow(({"ema": "none"}, None, None), ({"ema": "full"}, 0, 0.5)),
        ({"ema": "late", "ema_fraction": 0.6, "save_raw_unet": True}, 4, 1 / 6),
    ],
)
def test_what_the_loop_saves_and_logs(model, data, tmp_path, monkeypatch, options, start, decay):
    monkeypatch.setattr(trainer, "train_step", count_up)
    num_steps = 10
    config = config_of(model, data, tmp_path, max_train_steps=num_steps, logging_steps=4, **options)
    run_trainer(config, monkeypatch)
    growth = num_steps
    if start is not None:
        weights = decay ** np.arange(num_steps - start)[::-1] * (1 - decay)
        growth = start * decay ** (num_steps - start) + weights @ np.arange(
            start + 1, num_steps + 1
        )
    before, saved = params_of(model, "unet"), params_of(tmp_path, "unet")
    for name, p in before.items():
        np.testing.assert_allclose(saved[name], p + growth, rtol=1e-5)
    assert (tmp_path / "unet_raw").exists() == config.save_raw_unet
    if config.save_raw_unet:
        for name, p in params_of(tmp_path / "unet_raw").items():
            np.testing.assert_allclose(p, before[name] + num_steps, rtol=1e-5)

    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 4, 8, 10]
    assert [row["loss"] for row in rows] == [0, 2, 5.5, 8.5]  # means since the row before
    averaging = [start is not None and step > start for step in (1, 4, 8, 10)]
    assert [row["ema_decay"] for row in rows] == [
        pytest.approx(decay) if on else None for on in averaging
    ]


def run_counting(model, data, out, **options):
    """A run in this process in which every step adds 1 to all weights."""
    defaults = dict(
        lr_scheduler="constant", lr_warmup_steps=0, checkpointing_steps=4, logging_steps=None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", count_up)
        trainer.train(config_of(model, data, out, **defaults | options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "first_length", "average", "message"),  # average: its first step and its decays
    [
        # Both lengths from the first step: the average goes on with the new decay.
        (
            {"ema": "full"},
            10,
            (0, [0.5] * 10 + [0.75] * 10),
            "from step 0 with decay 0.75\n",
        ),
        # The second from step 12: it starts again.
        (
            {"ema_fraction": 0.4, "ema_decay": 0.5},
            8,
            (12, [0.5] * 8),
            "from step 12 with decay 0.5\n",
        ),
    ],
)
def test_a_longer_run_averages(
    model, data, tmp_path, capsys, options, first_length, average, message
):
    """A finished run goes on to step 20; its average is the closed form."""
    run_counting(model, data, tmp_path, max_train_steps=first_length, **options)
    capsys.readouterr()
    run_counting(model, data, tmp_path, max_train_steps=20, **options)
    output = capsys.readouterr().out
    resuming = f"resuming after step {first_length}; the run had {first_length} steps and has 20"
    assert resuming in output and message in output
    average, decays = average
    assert ("is dropped" in output) == (average == 12)
    for step, decay in enumerate(decays, average + 1):
        average = decay * average + (1 - decay) * step
    before = params_of(model, "unet")
    for name, p in params_of(tmp_path, "unet").items():
        np.testing.assert_allclose(p, before[name] + average, rtol=1e-5)
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, 21))


@pytest.mark.slow
def test_power_averages_and_their_snapshots(model, data, tmp_path, monkeypatch, capsys):
    """Against the averages by hand; seven epochs of one batch; an earlier run's snapshot goes.

    The last of the seven steps is in no average, as updates are every other step.
    """
    monkeypatch.setattr(trainer, "train_step", count_up)
    out = tmp_path / "out"
    (out / "ema_snapshots" / "00000099-0.050").mkdir(parents=True)
    (out / "metrics.jsonl").touch()
    config = config_of(
        model,
        data,
        out,
        max_train_steps=trainer.Config.max_train_steps,
        num_train_epochs=7,
        max_train_samples=9,
        max_bad_fraction=0.5,
        lr_warmup_steps=0,
        ema="power",
        ema_every=2,
        ema_snapshot_steps=4,
    )
    run_trainer(config, monkeypatch)
    assert "on 8 of 9 pairs per epoch: 8 pairs per step" in capsys.readouterr().out
    assert read_metrics(out)[-1]["step"] == 7

    before, saved = params_of(model, "unet"), params_of(out, "unet")
    expected = {}
    for sigma_rel, gamma in ((0.05, 16.97), (0.1, 6.94)):
        average = 0.0
        for step in (2, 4, 6):
            decay = (1 - 2 / step) ** (gamma + 1)
            average = decay * average + (1 - decay) * step
            expected[f"{step:08d}-{sigma_rel:.3f}"] = average
    folders = sorted(folder.name for folder in (out / "ema_snapshots").iterdir())
    assert folders == [f"{n:08d}-{sigma}" for n in (4, 6) for sigma in ("0.050", "0.100")]
    for name in folders:
        snapshot = params_of(out / "ema_snapshots" / name)
        for key, p in before.items():
            np.testing.assert_allclose(snapshot[key], p + expected[name], rtol=2e-3, atol=2e-3)
    for key, p in before.items():
        np.testing.assert_allclose(saved[key], p + expected["00000006-0.050"], rtol=1e-3)


@pytest.mark.slow
def test_images_profile_and_model_card(model, data, tmp_path, monkeypatch):
    """A grid shows the original and the pipeline's result with the average of that step."""
    monkeypatch.setattr(trainer, "train_step", count_up)
    out = tmp_path / "out"
    sizes, input_images = [(16, 16), (32, 24)], []
    for k, size in enumerate(sizes):
        pixels = np.random.default_rng(k).integers(0, 256, (size[1], size[0], 3), np.uint8)
        input_images.append(Image.fromarray(pixels))
        input_images[-1].save(tmp_path / f"{k}.png")
    config = config_of(
        model,
        data,
        out,
        ema="full",
        ema_decay=0.5,
        validation_image=tuple(str(tmp_path / f"{k}.png") for k in range(2)),
        validation_prompt=("make it red",),
        validation_steps=2,
        validation_guidance_scale=4.0,
        profile_steps="1:2",
    )
    (out / "validation").mkdir(parents=True)
    (out / "metrics.jsonl").touch()
    input_images[0].save(out / "validation" / "step-000003.png")  # of an earlier run
    run_trainer(config, monkeypatch)
    assert sorted(path.name for path in (out / "validation").iterdir()) == [
        "progress.gif",
        *(f"step-{step:06d}.png" for step in (2, 4, 5)),
    ]
    with Image.open(out / "validation" / "progress.gif") as animation:
        assert animation.n_frames == 3
    assert list(out.glob("profile/**/*.xplane.pb"))

    pipeline, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained(out)
    originals = [ImageOps.fit(x, (16, 16), Image.Resampling.LANCZOS) for x in input_images]
    inputs = pipeline.prepare_inputs(["make it red"] * 2, originals)
    scales = 4.0, 1.2  # the second is the one of short runs
    images = pipeline(*inputs, params, jax.random.key(config.seed), 20, *scales).images
    grid = np.asarray(Image.open(out / "validation" / "step-000005.png"))
    height = (len(grid) - 8) // 2
    for k, (original, image) in enumerate(zip(originals, images)):
        row = grid[8 + k * height :][:256, 8:]  # enlarged from 16 to 256 pixels, with margins of 8
        np.testing.assert_array_equal(row[:, :256], np.asarray(original.resize((256, 256))))
        (image,) = to_pil(image)
        # This model amplifies rounding, so single pixels may be 3 of 255 apart.
        assert np.abs(np.float32(row[:, 256:512]) - np.asarray(image.resize((256, 256)))).mean() < 1

    card = (out / "README.md").read_text()
    assert f"--output_dir={out}" in card and "make it red" in card
    assert "validation/step-000005.png" in card
    assert "--guidance_scale 4 --image_guidance_scale 1.2" in card


def test_a_loss_that_is_not_finite_stops_the_run(model, data, tmp_path, monkeypatch, capsys):
    def loss(step):
        return jnp.where(step < 6, step, jnp.inf)

    monkeypatch.setattr(trainer, "train_step", partial(count_up, loss=loss))
    config = config_of(model, data, tmp_path, max_train_steps=20, logging_steps=4)
    with pytest.raises(SystemExit) as stop:
        run_trainer(config, monkeypatch)
    assert stop.value.code == 1
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith(
        "error: the loss or gradient is not finite at step 7 (2 of the last 4 steps)"
    )
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 4]
    assert set(os.listdir(tmp_path)) == {"config.json", "metrics.jsonl"}


# The command line


@pytest.mark.slow
def test_bf16_with_checkpointing_and_wandb_by_the_command_line(model, data, tmp_path):
    """Training on two devices, edits in PyTorch, wandb offline, upload to a local hub server."""
    out = tmp_path / "out"
    # Weights in half precision, as published ones are.
    source = shutil.copytree(model, tmp_path / "half")
    for part, cls in (("vae", AutoencoderKL), ("text_encoder", CLIPTextModel)):
        cls.from_pretrained(model / part).half().save_pretrained(source / part)
    config = config_of(
        source,
        data,
        out,
        mixed_precision="bf16",
        gradient_checkpointing=True,
        report_to="wandb",
        tracker_project_name="tiny",
        max_train_steps=3,
        push_to_hub=True,
        hub_model_id="tiny-edits",
    )
    folders = {
        f"WANDB_{name}": str(tmp_path) for name in ("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR")
    }
    flags = os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=2")
    with UploadHub({"hf_secret": "write"}) as hub:
        network = {
            "HF_HUB_OFFLINE": "0",
            "HF_ENDPOINT": hub.endpoint,
            "HF_TOKEN": "hf_secret",
            "HF_HUB_DISABLE_XET": "1",
        }
        done = subprocess.run(
            [sys.executable, SCRIPT, *flags_of(config)],
            env=os.environ | folders | network | {"XLA_FLAGS": flags},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert "8 pairs per step on 2 device(s)" in done.stdout
    assert "3/3" in done.stderr
    assert "a.parquet row 3" in done.stderr  # the broken image
    rows = read_metrics(out)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(0 < row["loss"] < 3 for row in rows)
    (log,) = out.glob("wandb/offline-run-*/*.wandb")
    assert all(name.encode() in log.read_bytes() for name in rows[0])
    uploaded = hub.repos["tester/tiny-edits"]
    for file in ("model_index.json", "README.md", "unet/diffusion_pytorch_model.safetensors"):
        assert uploaded[file] == (out / file).read_bytes()
    assert "--hub_model_id=tiny-edits" in uploaded["README.md"].decode()
    assert not any(name.startswith(("checkpoints", "wandb")) for name in uploaded)
    assert "hf_secret" not in done.stdout + done.stderr

    # Neither master weights nor frozen weights are rounded.
    pipeline = StableDiffusionInstructPix2PixPipeline.from_pretrained(out, safety_checker=None)
    trained, before = (
        pipeline.unet.state_dict(),
        UNet2DConditionModel.from_pretrained(model / "unet"),
    )
    for name, p in before.state_dict().items():
        assert trained[name].dtype == torch.float32
        assert (trained[name] != p).any()
    weight = trained["conv_in.weight"]
    assert (weight != weight.bfloat16()).any()
    for part in ("vae", "text_encoder"):
        kept = type(getattr(pipeline, part)).from_pretrained(source / part).state_dict()
        for name, p in getattr(pipeline, part).state_dict().items():
            assert p.dtype == torch.float32
            assert torch.equal(p, kept[name].float()), name

    # PyTorch and our pipeline make the same image with the trained model.
    rng = np.random.default_rng(0)
    images = rng.random((2, 16, 24, 3), np.float32)
    latents = rng.standard_normal((2, 4, 8, 12), np.float32)
    expected = edit_with_torch(out, PROMPTS[:2], images, latents)
    ours, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained(out)
    inputs = ours.prepare_inputs(PROMPTS[:2], images)
    key = jax.random.key(0)
    result = ours(*inputs, params, key, num_inference_steps=20, latents=latents).images
    assert psnr(result, expected) > 60


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_known_set_trains_without_flags(model, tmp_path, monkeypatch, name):
    data = write_known(tmp_path / "data", name)
    out = tmp_path / "out"
    run_trainer(config_of(model, data, out, max_train_steps=3), monkeypatch)
    rows = read_metrics(out)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(np.isfinite(row["loss"]) for row in rows)
    assert (out / "model_index.json").exists()
