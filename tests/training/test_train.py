"""The trainer against PyTorch, closed forms and its own command line, on four forced devices."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusionInstructPix2PixPipeline, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel, compute_snr
from flax.traverse_util import flatten_dict
from helpers import (
    PROMPTS,
    RUN,
    SIZE,
    config_of,
    edit_json,
    edit_with_torch,
    encoded,
    flags_of,
    psnr,
    random_normal,
    read_metrics,
    run_main,
    slow,
    write_shard,
)
from hub_upload_server import UploadHub
from PIL import ExifTags, Image, ImageOps
from tiny_models import make_tiny_pipeline, make_tiny_xl
from torch_training import (
    NUM_DEVICES,
    Parallel,
    compare_losses,
    compare_runs,
    draws_by_hand,
    make_batch,
    train_with_torch,
)
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

import flax_train_instruct_pix2pix as trainer
from diffusers_flax.images import to_pil
from diffusers_flax.models.clip import FlaxCLIPTextModel, FlaxCLIPTextModelWithProjection
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.pipelines.instruct_pix2pix import (
    FlaxStableDiffusionInstructPix2PixPipeline,
)
from diffusers_flax.schedulers.ddpm import FlaxDDPMScheduler
from parquet_processing import ParquetImagePairs
from training.ema import ema_flags, ema_plan, ema_start, ema_update, explain_no_average
from training.flags import LORA_FILE
from training.models import Models, encode_text
from training.optimizer import lr_schedule
from training.sharding import (
    REPLICATED,
    Split,
    gather,
    global_norm,
    reduce_scatter_stages,
    replicate,
    shard_axes,
    shard_batch,
    start_state,
    state_shapes,
    to_host,
)

SCRIPT = Path(trainer.__file__)

pytestmark = pytest.mark.usefixtures("lenient_optimizer")


def params_of(folder, subfolder=None):
    params = FlaxUNet2DConditionModel.from_pretrained(folder, subfolder=subfolder)[1]
    return flatten_dict(params, sep="/")


# conditioning_dropout


@pytest.mark.parametrize("rate", [0, 0.05, 0.2, 1 / 3])
def test_dropout_follows_the_table(rate):
    B = 20000
    keys = jax.random.split(jax.random.key(5), B)
    rng = np.random.default_rng(0)
    text = rng.standard_normal((B, 2, 3), np.float32)
    null_text = rng.standard_normal((1, 2, 3), np.float32)
    latents = rng.standard_normal((B, 4, 1, 2), np.float32)
    latents[:, 0] = np.inf  # multiplied by 0 instead of dropped, it would give NaN
    pooled, ids = text[:, 0], np.arange(B)
    new_text, new_latents = trainer.conditioning_dropout(
        keys,
        {"states": text, "pooled": pooled, "ids": ids},
        {"states": null_text, "pooled": null_text[:, 0]},
        latents,
        rate,
    )
    np.testing.assert_array_equal(new_text["ids"], ids)  # the null text has no such leaf
    np.testing.assert_array_equal(new_text["pooled"], new_text["states"][:, 0])
    new_text = new_text["states"]

    u = np.asarray(jax.vmap(jax.random.uniform)(keys))
    q = [np.float32(k * rate) for k in range(4)]
    cases = {  # name: (samples, text is null, latents are zero)
        "text": (u < q[1], True, False),
        "both": ((u >= q[1]) & (u < q[2]), True, True),
        "image": ((u >= q[2]) & (u < q[3]), False, True),
        "none": (u >= q[3], False, False),
    }
    assert sum(where.sum() for where, _, _ in cases.values()) == B
    for name, (where, text_is_null, image_is_zero) in cases.items():
        expected = 1 - 3 * rate if name == "none" else rate
        error = 4 * np.sqrt(rate * (1 - rate) / B)
        assert where.mean() == pytest.approx(expected, abs=3 * error if name == "none" else error)
        wanted = np.broadcast_to(null_text, text.shape) if text_is_null else text
        np.testing.assert_array_equal(new_text[where], wanted[where])
        wanted = np.zeros_like(latents) if image_is_zero else latents
        assert np.asarray(new_latents[where]).tobytes() == wanted[where].tobytes()


def test_what_is_dropped_gets_no_gradient():
    rate, B = 0.25, 64
    keys = jax.random.split(jax.random.key(1), B)
    rng = np.random.default_rng(0)
    text, null_text, latents = (
        jnp.asarray(rng.standard_normal(shape, np.float32))
        for shape in ((B, 2, 3), (1, 2, 3), (B, 4, 2, 2))
    )

    def total(text, latents):
        new_text, new_latents = trainer.conditioning_dropout(
            keys, {"states": text}, {"states": null_text}, latents, rate
        )
        return new_text["states"].sum() + new_latents.sum()

    text_grad, latents_grad = jax.grad(total, (0, 1))(text, latents)
    u = np.asarray(jax.vmap(jax.random.uniform)(keys))
    kept = {"text": u >= 0.5, "image": (u < 0.25) | (u >= 0.75)}
    assert all(0 < where.sum() < B for where in kept.values())
    np.testing.assert_array_equal(text_grad[:, 0, 0], kept["text"])
    np.testing.assert_array_equal(text_grad, text_grad[:, :1, :1] * np.ones((2, 3)))
    np.testing.assert_array_equal(latents_grad[:, 0, 0, 0], kept["image"])
    np.testing.assert_array_equal(latents_grad, latents_grad[:, :1, :1, :1] * np.ones((4, 2, 2)))


# diffusion_loss


@pytest.mark.parametrize("prediction_type", ["epsilon", *slow("v_prediction")])
def test_loss_and_gradients_are_pytorchs(model, prediction_type):
    text, condition = {"states": random_normal(3, 7, 24, seed=3)}, random_normal(3, 4, 8, 6, seed=2)
    compare_losses(model, prediction_type, (text, condition), (text, condition))


# The optimizer


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_learning_rates_are_diffusers(name, warmup):
    num_steps, peak = 12, 3e-4
    schedule = lr_schedule(name, peak, warmup, num_steps)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    reference = get_scheduler(
        "constant_with_warmup" if name == "constant" else name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=num_steps,
    )
    for step in range(num_steps):
        assert float(schedule(step)) == pytest.approx(reference.get_last_lr()[0], abs=1e-7 * peak)
        optimizer.step()
        reference.step()
    assert float(schedule(0)) == (0 if warmup else pytest.approx(peak))
    assert float(schedule(warmup)) == pytest.approx(peak)
    end = float(schedule(num_steps))
    assert end == pytest.approx(peak if name == "constant" else 0, abs=1e-7 * peak)


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


def test_optimizer_is_pytorchs_adamw_with_clipping():
    """Hugging Face's settings, with gradient norms above and below the clipping threshold."""
    rng = np.random.default_rng(0)
    shapes = {"kernel": (5, 3), "bias": (3,), "scale": (1,)}
    params = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    betas, epsilon, weight_decay, max_norm, peak, num_steps = (0.9, 0.999), 1e-8, 1e-2, 1.0, 0.05, 6
    config = trainer.Config("", "", learning_rate=peak, lr_scheduler="linear", lr_warmup_steps=2)
    assert betas == (config.adam_beta1, config.adam_beta2)
    assert (epsilon, weight_decay) == (config.adam_epsilon, config.adam_weight_decay)
    tx, _ = trainer.make_optimizer(config, num_steps)
    opt_state = tx.init(params)
    theirs = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in params.items()}
    reference = torch.optim.AdamW(
        theirs.values(), lr=peak, betas=betas, eps=epsilon, weight_decay=weight_decay
    )
    lr_scheduler = get_scheduler(
        "linear", reference, num_warmup_steps=2, num_training_steps=num_steps
    )

    norms = []
    for step in range(num_steps):
        size = 10.0 ** (step % 3 - 2)
        grads = {
            name: rng.normal(0, size, x.shape).astype(np.float32) for name, x in params.items()
        }
        for name, p in theirs.items():
            p.grad = torch.tensor(grads[name])
        norms.append(torch.nn.utils.clip_grad_norm_(theirs.values(), max_norm).item())
        reference.step()
        lr_scheduler.step()
        norm = float(global_norm(grads, shard_axes(grads, 1)))
        np.testing.assert_allclose(norm, norms[-1], rtol=1e-6)
        grads = {name: g * min(1, max_norm / norm) for name, g in grads.items()}
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        for name, p in theirs.items():
            np.testing.assert_allclose(params[name], p.detach().numpy(), rtol=1e-6, atol=1e-6)
    assert min(norms) < max_norm < max(norms)


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


def test_seeds_decide(parallel):
    batches = [make_batch(i) for i in range(3)]
    *_, (state, metrics) = parallel.run(batches, seed=7)
    assert np.asarray(state.step).tolist() == [3] * NUM_DEVICES
    expected = {**parallel.whole(state), "loss": np.asarray(metrics["loss"])}

    def outcome(seed):
        *_, (state, metrics) = parallel.run(batches, seed)
        return {**parallel.whole(state), "loss": np.asarray(metrics["loss"])}

    again, other = outcome(7), outcome(8)
    assert all(again[k].tobytes() == x.tobytes() for k, x in expected.items())
    assert (again["loss"] != other["loss"]).all()


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


def test_every_device_holds_its_shard(parallel):
    (state, _), *_ = parallel.run([make_batch(0)], 0)
    sizes, whole = {}, parallel.whole(state)
    for name, tree in (("params", state.params), ("moments", state.opt_state[0].mu)):
        for key, x in flatten_dict(tree, sep="/").items():
            shape = list(whole[key].shape)
            split = flatten_dict(parallel.axes, sep="/")[key]
            shape[split.axis] //= split.parts
            assert x.shape == (NUM_DEVICES, *shape)
        sizes[name] = sum(x.nbytes for x in jax.tree.leaves(tree)) / NUM_DEVICES
    total = sum(x.nbytes for x in whole.values())
    assert sizes["params"] == sizes["moments"] < 0.26 * total  # a few small arrays do not divide


def test_a_batch_is_divided_over_the_devices():
    batch = {"x": np.arange(24).reshape(8, 3), "y": np.zeros((8, 0))}
    for name, x in shard_batch(batch).items():
        np.testing.assert_array_equal(x, batch[name].reshape(4, 2, -1))
    with pytest.raises(
        ValueError, match="of 6 rows cannot be divided over 4 devices; give it 4 or 8"
    ):
        shard_batch({"x": np.zeros((6, 2))})
    with pytest.raises(
        ValueError, match="of 3 rows cannot be divided over 4 devices; give it 4 rows"
    ):
        shard_batch({"x": np.zeros((3, 4))})
    with pytest.raises(ValueError, match=r"as many rows in every array; .*'x': 8, 'y': 4"):
        shard_batch({"x": np.zeros((8, 2)), "y": np.zeros(4)})


def test_shard_axes():
    shapes = [(3, 3, 320, 640), (3, 3, 320, 4), (3, 3, 4, 4), (8,), ()]
    trees = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    assert shard_axes(trees, 8) == [
        *(Split(3, 8), Split(2, 8), Split(2, 4), Split(0, 8), REPLICATED)
    ]
    assert shard_axes(trees, 1) == [REPLICATED] * 5
    # Of 256 devices every 64th has the same part; vectors stay whole.
    shapes = [(3, 3, 320, 320), (1920, 640), (320,), (0, 256), (0, 0), (5, 7)]
    trees = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    assert shard_axes(trees, 256) == [
        *(Split(2, 64), Split(0, 128), REPLICATED, Split(1, 256), REPLICATED, REPLICATED)
    ]


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_the_gradient_of_gather_is_the_mean_in_float32(num_devices):
    """Also for a gather in bfloat16, in which a sum over devices would lose small gradients."""
    rng = np.random.default_rng(0)
    params = {"a": rng.standard_normal((8, 4), np.float32), "b": rng.standard_normal(3, np.float32)}
    weights = {k: 2.0 ** rng.integers(-12, 1, (num_devices, *x.shape)) for k, x in params.items()}
    weights = jax.tree.map(lambda x: x.astype(np.float32), weights)  # exact in bfloat16
    axes, devices = shard_axes(params, num_devices), jax.devices()[:num_devices]
    state = start_state(params, optax.identity(), axes, devices)

    def grads_of(shards, weights, dtype):
        def loss(shards):
            whole = gather(shards, axes, dtype)
            return sum((whole[k].astype(jnp.float32) * weights[k]).sum() for k in whole)

        return jax.grad(loss)(shards)

    for dtype in (jnp.float32, jnp.bfloat16):
        p_grads = jax.pmap(partial(grads_of, dtype=dtype), axis_name="batch", devices=devices)
        grads = to_host(p_grads(state.params, weights), axes)
        for name, x in grads.items():
            assert x.dtype == np.float32
            np.testing.assert_allclose(x, weights[name].mean(axis=0), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_parameters_in_half_precision_are_refused(dtype):
    """Updates of float16 parameters overflow to NaN after a few steps of README's loop."""
    params = {"conv_in": {"kernel": np.zeros((2, 2), dtype), "bias": np.zeros(2, np.float32)}}
    axes = shard_axes(params, 1)
    for start in (start_state, partial(state_shapes, num_devices=1)):
        name = jnp.dtype(dtype).name
        match = rf"1 of 2 parameters are not float32, conv_in/kernel is {name}; .*param_dtype="
        with pytest.raises(ValueError, match=match):
            start(params, optax.adam(1e-4), axes)


def test_shards_on_sixteen_devices():
    """With the branch of TPUs and the other: parameters, gradient and norm of closed forms.

    No axis of "b" is a multiple of 16: four devices share it, four times.
    """
    program = """
import jax, jax.numpy as jnp, numpy as np, optax
from training.sharding import Split, gather, global_norm, shard_axes, start_state, to_host

rng, n = np.random.default_rng(0), 16
shapes = {"a": (3, 32, 6), "b": (20, 12), "bias": (20,), "scale": (32,)}
params = {name: rng.integers(-9, 9, shape).astype(np.float32) for name, shape in shapes.items()}
weights = {k: rng.integers(-9, 9, (n, *x.shape)).astype(np.float32) for k, x in params.items()}
mean = {k: x.mean(axis=0) for k, x in weights.items()}
axes = shard_axes(params, n)
assert axes["b"] == Split(0, 4)
state = start_state(params, optax.identity(), axes)
assert state.params["b"].shape == (16, 5, 12)
for k, x in to_host(state.params, axes).items():
    np.testing.assert_array_equal(x, params[k])

def step(shards, weights):
    def loss(shards):
        whole = gather(shards, axes, jnp.bfloat16)
        return sum((x.astype(jnp.float32) * weights[k]).sum() for k, x in whole.items()), whole
    grads, whole = jax.grad(loss, has_aux=True)(shards)
    return grads, whole, global_norm(grads, axes)

def on_tpu(*args, tpu, default):
    return tpu(*args)

for choose in (jax.lax.platform_dependent, on_tpu):
    jax.lax.platform_dependent = choose
    grads, whole, norm = jax.pmap(step, axis_name="batch")(state.params, weights)
    for k, x in to_host(grads, axes).items():
        np.testing.assert_array_equal(x, mean[k])
        for copy in np.asarray(whole[k]).astype(np.float32):
            np.testing.assert_array_equal(copy, params[k])
    squares = sum(np.square(x).sum() for x in mean.values())
    np.testing.assert_allclose(norm, np.sqrt(squares), rtol=1e-6)
    jax.clear_caches()
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=16"}
    folder = SCRIPT.parent
    subprocess.run([sys.executable, "-c", program], env=os.environ | flags, cwd=folder, check=True)


@pytest.mark.parametrize(
    ("parts", "num_devices", "sizes"),
    [(1, 1, [1]), (8, 8, [8]), (9, 9, [9]), (12, 12, [4, 3]), (64, 256, [4, 4, 4])],
)
def test_stages_of_a_reduce_scatter(parts, num_devices, sizes):
    """The first groups are hosts of four chips."""
    stages = reduce_scatter_stages(parts, num_devices)
    assert [len(groups[0]) for groups in stages] == sizes
    assert all(sorted(np.ravel(groups)) == list(range(num_devices)) for groups in stages)
    assert stages[0][0] == list(range(sizes[0]))


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


# The average of the weights


def test_ema_plan():
    def plan(ema="late", steps=1000, fraction=0.036, start=None, decay=None, **options):
        average = ema_plan(ema, steps, fraction, start, decay, **options)
        return average.first_step, *average.decays(1000)

    assert plan() == (964, pytest.approx(1 - 5 / 36))
    assert plan(steps=15000) == (14460, pytest.approx(1 - 5 / 540))
    # The rule reproduces MosaicML's published decay.
    assert plan(steps=1_400_000, fraction=50 / 1400) == (1_350_000, pytest.approx(0.9999))
    assert plan(start=400) == (400, pytest.approx(1 - 5 / 600))
    assert plan(start=0, decay=0.0) == (0, 0.0)
    assert plan("full", fraction=0.5) == (0, pytest.approx(0.995))
    assert plan("full", decay=0.9) == (0, 0.9)
    assert plan("full", decay=0.9, every=3) == (0, pytest.approx(0.729))
    assert plan("none", fraction=-1) == (None,)
    assert plan("power") == (
        0,
        pytest.approx((1 - 1e-3) ** 17.97, abs=1e-4),
        pytest.approx((1 - 1e-3) ** 7.94, abs=1e-4),
    )
    # A window of five steps or fewer would be the last step alone.
    assert plan(steps=30) == plan("full", steps=5) == plan(start=995) == (None,)
    assert plan(start=994) == (994, pytest.approx(1 / 6))
    # With a decay of the user's, there is always a step to average.
    assert plan(steps=10, decay=0.5) == plan(steps=10, fraction=1e-9, decay=0.5) == (9, 0.5)
    assert plan(fraction=1.0) == (0, pytest.approx(0.995))

    average = ema_plan("late", 20, start_step=10, every=3)
    assert [step for step in range(21) if average.update_of(step)] == [13, 16, 19]
    assert [average.update_of(step) for step in (12, 13, 16)] == [0, 1, 2]
    assert not any(map(ema_plan("none", 20).update_of, range(21)))


@pytest.mark.variants
@pytest.mark.parametrize("num_steps", [2, 5, 6, 7, 30, 41, 100, 152, 1000])
@pytest.mark.parametrize(
    "options",
    [{}, {"ema_fraction": 1e-3}, {"ema": "full"}, {"ema_start_step": 1}, {"ema_start_step": "END"}],
)
def test_without_average_the_named_flag_gives_one(options, num_steps):
    """With the flag there is an average, over 6 steps or, of a fraction, little more."""
    if options.get("ema_start_step") == "END":
        options = {"ema_start_step": num_steps - 1}
    config = trainer.Config("", "", **options)
    if ema_plan(*ema_flags(config, num_steps)).first_step is not None:
        return
    message = explain_no_average(config, num_steps)
    assert message.startswith("no average of the weights: ") and "an average needs 6; " in message
    _, remedy = message.split("; ")
    if num_steps < 6 or config.ema == "full":
        assert remedy == "give more steps, or an --ema_decay"
        return
    name, value = re.fullmatch(r"give --(\w+) ([\d.]+)( or less)?", remedy).group(1, 2)
    assert name in options or (name == "ema_fraction" and not options)
    value = float(value) if name == "ema_fraction" else int(value)
    plan = ema_plan(*ema_flags(replace(config, **{name: value}), num_steps))
    assert 6 <= num_steps - plan.first_step <= max(7, 0.015 * num_steps)


@pytest.mark.parametrize(
    ("options", "window"),
    [
        ({}, "the last 3.6% of 30 steps are 1 step"),
        ({"ema_fraction": 0.1}, "the last 10% of 30 steps are 3 steps"),
        ({"ema_start_step": 27}, "from --ema_start_step 27 on the run has 3 steps"),
    ],
)
def test_without_average_the_window_is_named(options, window):
    message = explain_no_average(trainer.Config("", "", **options), 30)
    assert message.startswith(f"no average of the weights: {window}, an average needs 6; give --")


@pytest.mark.parametrize(
    ("options", "is_same"),
    [
        (dict(ema="full", decay=0.999), True),
        (dict(ema="full", decay=0.999, every=7, warmup=True), True),
        (dict(ema="late", start_step=14000, decay=0.999), True),
        (dict(ema="power"), True),
        (dict(ema="late", fraction=0.01), True),  # the longer run's starts after the checkpoint
        (dict(ema="late", decay=0.999), False),
        (dict(ema="late", start_step=14000), False),
        (dict(ema="full"), False),
    ],
)
def test_a_longer_run_has_the_average_of_its_whole_length(options, is_same):
    """As docs/runs.md says: of 15000 steps, then 15300. The weight after step s is s."""
    before, after = (ema_plan(max_train_steps=n, **options) for n in (15000, 15300))

    def average(first_step, plans):
        value = first_step
        for step in range(first_step + 1, 15301):
            plan = plans(step)._replace(first_step=first_step)
            if num_updates := plan.update_of(step):
                decay = plan.decays(num_updates)[0]
                value = decay * value + (1 - decay) * step
        return value

    whole = average(after.first_step, lambda step: after)
    goes_on = after.first_step < 15000
    continued = whole
    if goes_on:
        continued = average(before.first_step, lambda step: before if step <= 15000 else after)
    assert (continued == whole) == is_same
    if not options.get("every") and after.decays(1) == after.decays(2):
        decay, window = after.decays(1)[0], 15300 - after.first_step
        expected = 15300 - decay * (1 - decay**window) / (1 - decay)
        assert whole == pytest.approx(expected, rel=1e-9)


def test_ema_is_the_closed_form_and_diffusers():
    rng = np.random.default_rng(0)
    decay, num_steps = 0.9, 40
    steps = rng.standard_normal((num_steps + 1, 5), np.float32)
    ema = ema_start({"w": jnp.asarray(steps[0])})
    parameter = torch.nn.Parameter(torch.tensor(steps[0]))
    # With both ends equal its decay is constant, after a first call that only copies.
    reference = EMAModel([parameter], decay=decay, min_decay=decay)
    reference.step([parameter])
    for w in steps[1:]:
        ema = ema_update(ema, {"w": jnp.asarray(w)}, decay)
        parameter.data = torch.tensor(w)
        reference.step([parameter])
    age = np.arange(num_steps)[::-1]
    expected = decay**num_steps * steps[0] + ((1 - decay) * decay**age) @ steps[1:]
    np.testing.assert_allclose(ema["w"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ema["w"], reference.shadow_params[0].numpy(), rtol=1e-5, atol=1e-6)


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
        run_main(config, monkeypatch)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    # Under pmap: moments, step, start and update of the average, each compiled once.
    assert compiled.count("jit(_fun)") == 4

    monkeypatch.undo()
    dataset = ParquetImagePairs(
        str(data),
        batch_size=config.train_batch_size,
        resolution=config.resolution,
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
    assert all(len(row) == 9 for row in rows)
    assert json.loads((out / "config.json").read_text()) == json.loads(json.dumps(asdict(config)))
    assert set(os.listdir(out)) == {
        *("unet", "unet_raw", "vae", "text_encoder", "tokenizer", "scheduler"),
        *("model_index.json", "config.json", "metrics.jsonl", "README.md", "checkpoints"),
        "loss.png",
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
    run_main(config, monkeypatch)
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
    ("options", "first_length", "decays", "start", "message"),
    [
        # Both lengths from the first step: the average goes on with the new decay.
        (
            {"ema": "full"},
            10,
            [0.5] * 10 + [0.75] * 10,
            0,
            "from step 0 with decay 0.75, until step 10 with decay 0.5\n",
        ),
        # The first from step 4, the second from 8, which is past: it goes on, too.
        (
            {"ema_fraction": 0.6},
            10,
            [1 / 6] * 6 + [7 / 12] * 10,
            4,
            "from step 8 with decay 0.583333, until step 10 with decay 0.166667\n",
        ),
        # The second from step 12: it starts again.
        (
            {"ema_fraction": 0.4, "ema_decay": 0.5},
            8,
            [0.5] * 8,
            12,
            "from step 12 with decay 0.5\n",
        ),
    ],
)
def test_a_longer_run_averages(
    model, data, tmp_path, capsys, options, first_length, decays, start, message
):
    """A finished run goes on to step 20; its average is the closed form."""
    run_counting(model, data, tmp_path, max_train_steps=first_length, **options)
    capsys.readouterr()
    run_counting(model, data, tmp_path, max_train_steps=20, **options)
    output = capsys.readouterr().out
    resuming = f"resuming after step {first_length}; the run had {first_length} steps and has 20"
    assert resuming in output and message in output
    assert ("is dropped" in output) == (start == 12)
    average = start
    for step, decay in enumerate(decays, start + 1):
        average = decay * average + (1 - decay) * step
    before = params_of(model, "unet")
    for name, p in params_of(tmp_path, "unet").items():
        np.testing.assert_allclose(p, before[name] + average, rtol=1e-5)
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, 21))


@pytest.mark.slow
def test_a_shorter_run_averages_from_its_checkpoint(model, data, tmp_path, capsys):
    """The average would have begun at step 2, before the checkpoint of step 4, which has none."""
    options = dict(ema="late", ema_fraction=0.8, checkpoints_total_limit=None)
    run_counting(model, data, tmp_path / "long", max_train_steps=20, **options)
    capsys.readouterr()
    checkpoint = str(tmp_path / "long" / "checkpoints" / "4")
    short = dict(max_train_steps=8, resume_from_checkpoint=checkpoint)
    run_counting(model, data, tmp_path / "short", **options | short)
    output = capsys.readouterr().out
    assert "the run had 20 steps and has 8" in output
    assert "averaging the weights from step 4 with decay 0.166667\n" in output
    average = 4
    for step in range(5, 9):
        average += 5 / 6 * (step - average)
    before = params_of(model, "unet")
    for name, p in params_of(tmp_path / "short", "unet").items():
        np.testing.assert_allclose(p, before[name] + average, rtol=1e-5)


@pytest.mark.slow
def test_a_short_run_says_what_it_leaves_out_and_shows_its_losses(model, data, tmp_path, capsys):
    run_counting(model, data, tmp_path, max_train_steps=41)
    assert (
        "no average of the weights: the last 3.6% of 41 steps are 1 step, an average needs 6; give "
        "--ema_fraction 0.15\n"
    ) in capsys.readouterr().out
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, *range(2, 41, 2), 41]
    assert all(row["ema_decay"] is None for row in rows)
    before = params_of(model, "unet")
    for name, p in params_of(tmp_path, "unet").items():
        np.testing.assert_allclose(p, before[name] + 41, rtol=1e-5)


@pytest.mark.slow
def test_power_averages_and_their_snapshots(model, data, tmp_path, monkeypatch, capsys):
    """Against the averages by hand; seven epochs of one batch; an earlier run's snapshot goes.

    The last of the seven steps is in no average, as updates are every other step.
    """
    monkeypatch.setattr(trainer, "train_step", count_up)
    out = tmp_path / "out"
    (out / "ema_snapshots" / "00000099-0.050").mkdir(parents=True)
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
    run_main(config, monkeypatch)
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
    """A grid shows the original and the pipeline's result with the average of that step.

    The second image's file holds it turned, and says so.
    """
    monkeypatch.setattr(trainer, "train_step", count_up)
    out = tmp_path / "out"
    sizes, input_images = [(16, 16), (32, 24)], []
    for k, size in enumerate(sizes):
        pixels = np.random.default_rng(k).integers(0, 256, (size[1], size[0], 3), np.uint8)
        turned, exif = np.rot90(pixels, k), Image.Exif()
        exif[ExifTags.Base.Orientation] = 6 if k else 1  # 6: turn it clockwise to look at it
        Image.fromarray(turned).save(tmp_path / f"{k}.png", exif=exif)
        input_images.append(Image.fromarray(pixels))
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
    run_main(config, monkeypatch)
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
        run_main(config, monkeypatch)
    assert stop.value.code == 1
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith(
        "error: the loss or gradient is not finite at step 7 (2 of the last 4 steps)"
    )
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 4]
    assert set(os.listdir(tmp_path)) == {"config.json", "metrics.jsonl", "checkpoints"}
    assert not list((tmp_path / "checkpoints").iterdir())


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


# flags, {relative path: damage}, message
BAD_FLAGS = [
    ({"train_batch_size": 6}, "--train_batch_size 6 is not divisible by 4 devices; try 4 or 8"),
    ({"train_batch_size": 3}, "--train_batch_size 3 is not divisible by 4 devices; try 4\n"),
    ({"train_batch_size": 0}, "--train_batch_size 0 must be at least 1"),
    ({"train_batch_size": -8}, "--train_batch_size -8 must be at least 1"),
    ({"max_train_steps": 0}, "--max_train_steps 0 must be at least 1"),
    ({"logging_steps": 0}, "--logging_steps 0 must be at least 1"),
    ({"learning_rate": 0.0}, "--learning_rate 0.0 must be above 0"),
    ({"learning_rate": -1e-4}, "--learning_rate -0.0001 must be above 0"),
    ({"learning_rate": float("nan")}, "--learning_rate nan must be above 0"),
    ({"max_grad_norm": 0.0}, "--max_grad_norm 0.0 must be above 0"),
    ({"adam_beta1": 1.0}, "--adam_beta1 1.0 must be at least 0 and below 1"),
    ({"adam_beta2": -0.1}, "--adam_beta2 -0.1 must be at least 0 and below 1"),
    ({"adam_epsilon": 0.0}, "--adam_epsilon 0.0 must be above 0"),
    ({"adam_weight_decay": -0.1}, "--adam_weight_decay -0.1 must be at least 0"),
    ({"conditioning_dropout_prob": 0.34}, "--conditioning_dropout_prob 0.34 must be from 0 to 1/3"),
    ({"conditioning_dropout_prob": -0.1}, "dropout_prob -0.1 must be from 0 to 1/3"),
    ({"lr_warmup_steps": -1}, "--lr_warmup_steps -1 must be at least 0"),
    (
        {"lr_warmup_steps": 5},
        "steps 5 must be at least 0 and below --max_train_steps 5",
    ),
    ({"ema_fraction": 0.0}, "--ema_fraction 0.0 must be above 0 and at most 1"),
    ({"ema_fraction": 1.5}, "--ema_fraction 1.5 must be above 0 and at most 1"),
    ({"ema": "full", "ema_start_step": 3}, "--ema_start_step 3 goes with --ema late, not full"),
    ({"ema": "none", "ema_start_step": 3}, "--ema_start_step 3 goes with --ema late, not none"),
    ({"ema": "none", "ema_decay": 0.9}, "--ema_decay 0.9 goes with --ema late or full, not none"),
    ({"num_train_epochs": 2}, "--num_train_epochs 2 and --max_train_steps 5 both set the length"),
    ({"max_train_samples": 0}, "--max_train_samples 0 must be at least 1"),
    ({"checkpointing_steps": -1}, "--checkpointing_steps -1 must be at least 0"),
    ({"checkpoints_total_limit": 0}, "--checkpoints_total_limit 0 must be at least 1"),
    ({"ema_snapshot_steps": 2}, "--ema_snapshot_steps 2 goes with --ema power, not late"),
    ({"ema": "power", "ema_decay": 0.9}, "--ema_decay 0.9 goes with --ema late or full, not power"),
    (
        {"validation_image": ("a.png", "b.png"), "validation_prompt": ("x", "y", "z")},
        "2 --validation_image and 3 --validation_prompt do not match",
    ),
    ({"validation_prompt": ("x",)}, "0 --validation_image and 1 --validation_prompt do not match"),
    (
        {"validation_image": ("file",)},
        "1 --validation_image and 0 --validation_prompt do not match",
    ),
    (
        {"validation_image": ("a.png",), "validation_prompt": ("x",)},
        "--validation_image a.png does not exist",
    ),
    (
        {"validation_image": ("file",), "validation_prompt": ("x",)},
        "--validation_image file is not an image",
    ),
    (
        {"validation_image": ("cut.png",), "validation_prompt": ("x",)},
        "--validation_image cut.png cannot be read as an image",
    ),
    ({"validation_steps": 0}, "--validation_steps 0 must be at least 1"),
    ({"profile_steps": "3"}, "--profile_steps 3 must be FIRST:LAST"),
    (
        {"output_dir": "own"},
        "--output_dir own is not empty (README.md); name another directory, or replace",
    ),
    ({"validation_guidance_scale": 2.0}, "scale 2.0 goes with --validation_image; name an image"),
    ({"validation_image_guidance_scale": -1.0}, "scale -1.0 must be at least 0 and finite"),
    ({"output_dir": "file/out"}, "--output_dir file/out cannot be written: "),
    (
        {"ema": "power", "ema_every": 2, "ema_snapshot_steps": 3},
        "3 must be a multiple",
    ),
    ({"profile_steps": "5:3"}, "--profile_steps 5:3 must be FIRST:LAST"),
    ({"hub_model_id": "me/model"}, "--hub_model_id me/model goes with --push_to_hub"),
    ({"num_processes": 2}, "--num_processes 2, --process_id None: give all three"),
    (
        {"coordinator_address": "localhost:1", "num_processes": 2, "process_id": 2},
        "--process_id 2: give all three, process_id from 0 to num_processes-1",
    ),
    ({"seed": -1}, "--seed -1 must be from 0 to 4294967295"),
    ({"seed": 2**32}, "--seed 4294967296 must be from 0 to 4294967295"),
    ({"gradient_accumulation_steps": 3}, "steps 3 must divide the 2 pairs per device"),
    ({"snr_gamma": 0.0}, "--snr_gamma 0.0 must be above 0 and finite"),
    ({"ema_every": 0}, "--ema_every 0 must be from 1 to the averaged steps"),
    ({"ema_fraction": 1.5}, "--ema_fraction 1.5 must be above 0 and at most 1, a window as long"),
    ({"ema": "none", "ema_warmup": True}, "--ema_warmup True goes with --ema late or full"),
    ({"ema_start_step": -1}, "--ema_start_step -1 must be from 0 to --max_train_steps - 1, 4"),
    ({"ema_start_step": 5}, "--ema_start_step 5 must be from 0 to --max_train_steps - 1, 4"),
    ({"ema_decay": 1.0}, "--ema_decay 1.0 must be at least 0 and below 1"),
    ({"ema_decay": -0.5, "ema": "full"}, "--ema_decay -0.5 must be at least 0 and below 1"),
    ({"output_dir": "file"}, "--output_dir file is a file; name a directory"),
    ({"output_dir": ""}, "--output_dir is empty; name a directory"),
    (
        {"output_dir": "nowhere"},
        "--output_dir nowhere is or contains --pretrained_model",
    ),
    ({"output_dir": "finished"}, "--output_dir finished contains a model; name another"),
    ({"output_dir": "finished", "lora_rank": 4}, "--output_dir finished contains a model"),
    ({"output_dir": "lora"}, "--output_dir lora contains a model; name another"),
    (
        {"output_dir": "file", "pretrained_vae_model_name_or_path": "file/vae"},
        "--output_dir file is a file",
    ),
    (
        {"output_dir": "out", "pretrained_vae_model_name_or_path": "out/vae"},
        "--output_dir out is or contains --pretrained_vae_model_name_or_path out/vae; name another",
    ),
    ({"output_dir": "."}, "--output_dir . is or contains --pretrained_model_name_or_path"),
    ({"output_dir": "d", "train_data_dir": ("./d",)}, "--output_dir d is --train_data_dir too"),
    ({"learning_rate": float("inf")}, "--learning_rate inf must be above 0 and finite"),
]


def run_badly(config, monkeypatch, capsys):
    """The standard error of main(), checked as for all bad input."""
    files = sorted(Path().rglob("*"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run_main(config, monkeypatch)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert sorted(Path().rglob("*")) == files
    return captured.err


@pytest.mark.variants
@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS)
def test_bad_flags_are_refused_before_anything_is_read(
    tmp_path, monkeypatch, capsys, flags, message
):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("cut.png").write_bytes(encoded(0)[:-100])
    Path("finished").mkdir()
    Path("finished/model_index.json").touch()
    Path("lora").mkdir()
    Path("lora", LORA_FILE).touch()
    Path("own").mkdir()
    Path("own/README.md").touch()
    config = config_of("nowhere", "nowhere", "out", **flags)
    assert message in run_badly(config, monkeypatch, capsys)


def test_an_unknown_schedule_is_refused_by_name(monkeypatch, capsys):
    args = flags_of(config_of("nowhere", "nowhere", "out", lr_scheduler="polynomial"))
    monkeypatch.setattr(sys, "argv", ["train", *args])
    with pytest.raises(SystemExit) as stop:
        trainer.main(sys.argv[1:])
    assert stop.value.code == 2
    assert "polynomial" in capsys.readouterr().err


@pytest.fixture(scope="module")
def unet_of(tmp_path_factory):
    """UNet directories that do not fit the model: name -> directory."""
    folder = tmp_path_factory.mktemp("unets")
    make_tiny_pipeline(folder / "narrow", in_channels=4, **SIZE)
    wider = {"cross_attention_dim": 40}
    config = json.loads((folder / "narrow" / "unet" / "config.json").read_text())
    torch_unet = UNet2DConditionModel.from_config(config | wider | {"in_channels": 8})
    torch_unet.save_pretrained(folder / "other" / "unet")
    return {name: str(folder / name / "unet") for name in ("narrow", "other")}


def without(path):
    return lambda: shutil.rmtree(path)


def damaged(file, content=b""):
    return lambda: Path(file).write_bytes(content)


def changed(file, **values):
    return lambda: edit_json(Path(file), **values)


def columns_named(*names):
    return lambda: write_shard("data/a.parquet", 2, columns=names)


NOWHERE = "nowhere/model"
BAD_FOLDERS = [
    ({"unet_model_name_or_path": NOWHERE}, None, f"no config.json in {NOWHERE}"),
    (
        {"unet_model_name_or_path": "model"},
        None,
        "--unet_model_name_or_path model is a pipeline; give the output of create_modified_unet.py",
    ),
    (
        {"unet_model_name_or_path": "model"},
        lambda: Path("model/config.json").write_text('{"push_to_hub": false}'),  # of a trained one
        "--unet_model_name_or_path model is a pipeline; give the output of create_modified_unet.py",
    ),
    ({"unet_model_name_or_path": "model/vae"}, None, "is the config of AutoencoderKL"),
    ({"unet_model_name_or_path": "narrow"}, None, "create_modified_unet.py"),
    (
        {"unet_model_name_or_path": "other"},
        None,
        "has cross_attention_dim 40, but the text of",
    ),
    ({"pretrained_model_name_or_path": NOWHERE}, None, f"{NOWHERE} has no model_index.json"),
    ({}, without("model/vae"), "no config.json in model/vae"),
    ({}, without("model/text_encoder"), "no config.json in model/text_encoder"),
    ({}, without("model/scheduler"), "no scheduler_config.json in"),
    ({}, without("model/tokenizer"), "the tokenizer of model"),
    ({}, damaged("model/tokenizer/vocab.json", b"{"), "the tokenizer of model"),
    ({}, damaged("model/unet/diffusion_pytorch_model.safetensors"), "diffusion_pytorch_model"),
    (
        {},
        changed("model/scheduler/scheduler_config.json", _class_name="UnknownScheduler"),
        "_class_name=UnknownScheduler, which is not supported",
    ),
    (
        {},
        changed("model/scheduler/scheduler_config.json", prediction_type="sample"),
        "has prediction_type sample",
    ),
    ({"resolution": 17}, None, "--resolution 17 is not a multiple of 2; try 16 or 18"),
    ({"resolution": 1}, None, "--resolution 1 is too small: this model's VAE and UNet reduce"),
    ({"resolution": -6}, None, "--resolution -6 must be at least 1"),
    ({"resolution": 0}, None, "--resolution 0 must be at least 1"),
    ({"dataloader_num_workers": -1}, None, "workers -1 must be at least 0"),
    ({"train_data_dir": (NOWHERE,)}, None, f"--train_data_dir {NOWHERE} is not a dir"),
    ({"train_data_dir": ("model",)}, None, "--train_data_dir model contains no *.parquet file"),
    (
        {"original_image_column": "a"},
        columns_named("a", "b", "c"),
        "a.parquet has no column that is known to have the edited image and the instruction; it "
        "has a, b, c: choose with --edited_image_column and --edit_prompt_column\n",
    ),
    ({"edit_prompt_column": "caption"}, None, "a.parquet has no column caption"),
    ({}, damaged("data/b.parquet"), "1 of 2 shards in data cannot be read as parquet: b.parquet"),
    (
        {"unet_model_name_or_path": "xl/unet"},
        lambda: make_tiny_xl("xl"),
        "but the UNet in xl/unet is SDXL; take both from",
    ),
    ({"train_batch_size": 20}, None, "use at most 16 pairs per process"),
    (
        {"ema": "power", "ema_snapshot_steps": 100},
        None,
        "--ema_snapshot_steps 100 is more than the run's 5 steps",
    ),
]


@pytest.mark.variants
@pytest.mark.parametrize(("flags", "spoil", "message"), BAD_FOLDERS)
def test_bad_folders_are_one_line(
    model, data, unet_of, tmp_path, monkeypatch, capsys, flags, spoil, message
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "model")
    shutil.copytree(data, "data")
    Path("file").touch()
    if spoil is not None:
        spoil()
    if (name := flags.get("unet_model_name_or_path")) in unet_of:
        flags = flags | {"unet_model_name_or_path": unet_of[name]}
    config = config_of("model", "data", "out", **flags)
    assert message in run_badly(config, monkeypatch, capsys)


def test_sdxl_text_equals_pytorch(tmp_path):
    """Penultimate states of both encoders, side by side, and the projected end of text."""
    folder = make_tiny_xl(tmp_path / "xl")
    ids = np.random.default_rng(0).integers(0, 500, (2, 2, 77)).astype(np.int32)
    encoders, params, expected = [], [], []
    for i, (ours, theirs) in enumerate(
        (
            (FlaxCLIPTextModel, CLIPTextModel),
            (FlaxCLIPTextModelWithProjection, CLIPTextModelWithProjection),
        )
    ):
        subfolder = f"text_encoder{'_2' if i else ''}"
        encoder, its_params = ours.from_pretrained(folder, subfolder=subfolder, _do_init=False)
        encoders.append(encoder)
        params.append(its_params)
        theirs = theirs.from_pretrained(folder, subfolder=subfolder)
        with torch.no_grad():
            expected.append(theirs(torch.from_numpy(ids[:, i]).long(), output_hidden_states=True))
    time_ids = np.ones((2, 6), np.float32)
    text = encode_text(tuple(encoders), tuple(params), ids, time_ids)
    states = torch.cat([output.hidden_states[-2] for output in expected], -1)
    np.testing.assert_allclose(text["states"], states.numpy(), atol=1e-5)
    np.testing.assert_allclose(text["pooled"], expected[1].text_embeds.numpy(), atol=1e-5)
    assert text["time_ids"] is time_ids
