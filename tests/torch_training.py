"""The trainer's computation in PyTorch, and the comparison of both."""

import functools
from functools import partial

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from flax.traverse_util import flatten_dict
from helpers import random_normal
from trainer_runs import RUN
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

import flax_train_instruct_pix2pix as trainer
from diffusers_flax.loading.weights import flax_to_torch
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.schedulers.ddpm import FlaxDDPMScheduler
from diffusers_flax.training.models import cast_frozen, load_models, mixed_precision_dtype
from diffusers_flax.training.sharding import replicate, shard_axes, start_state, to_host


def compare_losses(model, prediction_type, ours, theirs):
    """Loss and gradients of this repository and of PyTorch for the same noise and timesteps.

    Args:
        model: pipeline directory.
        prediction_type: "epsilon" or "v_prediction".
        ours, theirs: (text, latents of the image to edit, or of it and of a reference), after
            dropout.
    """
    (text, condition), (torch_text, torch_condition) = ours, theirs
    shape = len(condition), 4, *condition.shape[2:]
    x_0, noise = (random_normal(*shape, seed=seed) for seed in range(2))
    timesteps = np.resize([999, 0, 417], len(x_0))

    torch_unet = UNet2DConditionModel.from_pretrained(model / "unet")
    torch_scheduler = diffusers.DDPMScheduler.from_pretrained(
        model / "scheduler", prediction_type=prediction_type
    )
    x_0_t, noise_t, timesteps_t = map(torch.tensor, (x_0, noise, timesteps))
    added = {"text_embeds": torch_text.get("pooled"), "time_ids": torch_text.get("time_ids")}
    added = {name: torch.tensor(x) for name, x in added.items() if x is not None}
    x_t = torch_scheduler.add_noise(x_0_t, noise_t, timesteps_t)
    target = noise_t
    if prediction_type == "v_prediction":
        target = torch_scheduler.get_velocity(x_0_t, noise_t, timesteps_t)
    x_in = torch.cat((x_t, torch.tensor(torch_condition)), 1)
    prediction = torch_unet(
        x_in, timesteps_t, torch.tensor(torch_text["states"]), added_cond_kwargs=added or None
    ).sample
    expected = torch.nn.functional.mse_loss(prediction, target)
    expected.backward()

    unet, params = FlaxUNet2DConditionModel.from_pretrained(model, subfolder="unet")
    scheduler, state = FlaxDDPMScheduler.from_pretrained(
        model, subfolder="scheduler", prediction_type=prediction_type
    )
    loss = functools.partial(trainer.diffusion_loss, unet=unet, scheduler=scheduler)
    value, grads = jax.jit(jax.value_and_grad(loss))(
        params,
        scheduler_state=state,
        x_0=x_0,
        condition=condition,
        text=text,
        noise=noise,
        timesteps=jnp.asarray(timesteps, jnp.int32),
    )
    assert value.dtype == jnp.float32
    assert float(value) == pytest.approx(expected.item(), rel=1e-5)
    theirs = {name: p.grad.numpy() for name, p in torch_unet.named_parameters()}
    ours = dict(flax_to_torch(k, np.asarray(x)) for k, x in flatten_dict(grads, sep="/").items())
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        assert np.linalg.norm(ours[name] - wanted) <= 1e-3 * np.linalg.norm(wanted), name


NUM_DEVICES = 4  # conftest.py's


def make_batch(seed, references=False):
    """A global batch of noise images and random tokens; every third row lacks the reference."""
    rng = np.random.default_rng(seed)
    shape = (RUN["train_batch_size"], RUN["resolution"], RUN["resolution"], 3)
    batch = {
        "original_pixel_values": rng.integers(0, 256, shape, np.uint8),
        "edited_pixel_values": rng.integers(0, 256, shape, np.uint8),
        "input_ids": rng.integers(0, 500, (shape[0], 77), np.int32),
    }
    if references:
        batch["reference_image"] = rng.integers(0, 256, shape, np.uint8)
        batch["has_reference"] = np.arange(shape[0]) % 3 != 0
    return batch


class Parallel:
    """train_step compiled as in the trainer; `run` starts from the initial state."""

    def __init__(self, config, num_devices=NUM_DEVICES, **options):
        self.config = config
        self.models, _, frozen, self.params = load_models(config, mixed_precision_dtype(config))
        self.frozen = cast_frozen(frozen, self.models)
        self.tx, _ = trainer.make_optimizer(config, config.max_train_steps)
        self.axes = shard_axes(self.params, num_devices)
        self.devices = jax.devices()[:num_devices]
        step = partial(
            trainer.train_step,
            models=self.models,
            tx=self.tx,
            axes=self.axes,
            **trainer.train_step_options(config) | options,
        )
        self.step = jax.pmap(step, axis_name="batch", donate_argnums=0, devices=self.devices)

    def run(self, batches, seed):
        """Yield (state, metrics) after each batch."""
        n = len(self.devices)
        state = start_state(self.params, self.tx, self.axes, self.devices)
        frozen, base_rng = replicate(
            (self.frozen, np.asarray(jax.random.PRNGKey(seed))), self.devices
        )
        for batch in batches:
            batch = {name: x.reshape(n, -1, *x.shape[1:]) for name, x in batch.items()}
            state, metrics = self.step(state, frozen, batch, base_rng)
            yield state, metrics

    def whole(self, state):
        """The parameters of a state, flat, on the host."""
        return flatten_dict(to_host(state.params, self.axes), sep="/")


def draws_by_hand(seed, step, side=RUN["resolution"] // 2):
    """The random numbers of a step for the rows of a global batch, from seed, step and row."""
    rows = []
    for row in range(RUN["train_batch_size"]):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.PRNGKey(seed), step), row)
        keys = jax.random.split(key, 4)
        rows.append(
            {
                "posterior": jax.random.normal(keys[0], (side, side, 4)),
                "noise": jax.random.normal(keys[1], (side, side, 4)).transpose(2, 0, 1),
                "timesteps": jax.random.randint(keys[2], (), 0, 1000),
                "u": jax.random.uniform(keys[3]),
            }
        )
    return jax.tree.map(lambda *x: np.stack(x), *rows)


def torch_text_encoder(model):
    """PyTorch's text of a batch, and of an empty prompt: token ids -> {"states"}."""
    text_encoder = CLIPTextModel.from_pretrained(model / "text_encoder")
    tokenizer = CLIPTokenizer.from_pretrained(model / "tokenizer")
    null_ids = tokenizer([""], padding="max_length", return_tensors="pt").input_ids

    def encode(batch):
        return {"states": text_encoder(torch.tensor(batch["input_ids"]).long()).last_hidden_state}

    with torch.no_grad():
        return encode, {"states": text_encoder(null_ids).last_hidden_state}


def train_with_torch(model, batches, draws, text_encoder=torch_text_encoder, prepare=None):
    """The same run in PyTorch on one device.

    Args:
        model: pipeline directory.
        batches: one global batch per step.
        draws: draws_by_hand of each step.
        text_encoder: model -> (batch -> text, null text), see torch_text_encoder.
        prepare: changes the UNet and which of its parameters are trained; None: all are.

    Returns:
        (UNet, losses, gradient norms).
    """
    unet = UNet2DConditionModel.from_pretrained(model / "unet")
    if prepare:
        prepare(unet)
    trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    vae = AutoencoderKL.from_pretrained(model / "vae")
    encode_text, null_text = text_encoder(model)
    scheduler = diffusers.DDPMScheduler.from_pretrained(model / "scheduler")
    optimizer = torch.optim.AdamW(
        trained,
        lr=RUN["learning_rate"],
        eps=RUN["adam_epsilon"],
        weight_decay=RUN["adam_weight_decay"],
    )
    lr_scheduler = get_scheduler(
        RUN["lr_scheduler"],
        optimizer,
        num_warmup_steps=RUN["lr_warmup_steps"],
        num_training_steps=RUN["max_train_steps"],
    )
    losses, norms = [], []
    for batch, drawn in zip(batches, draws):
        posterior, noise, timesteps, u = (
            torch.tensor(drawn[name]) for name in ("posterior", "noise", "timesteps", "u")
        )
        names = ("edited_pixel_values", "original_pixel_values", "reference_image")
        edited, original, *references = (
            torch.tensor(batch[name]).permute(0, 3, 1, 2) / 127.5 - 1
            for name in names
            if name in batch
        )
        with torch.no_grad():
            distribution = vae.encode(edited).latent_dist
            x_0 = distribution.mean + distribution.std * posterior.permute(0, 3, 1, 2)
            x_0 = x_0 * vae.config.scaling_factor
            condition = vae.encode(original).latent_dist.mode()
            references = [vae.encode(reference).latent_dist.mode() for reference in references]
            text = encode_text(batch)
        q = RUN["conditioning_dropout_prob"]
        for name, null in null_text.items():
            text[name][u < 2 * q] = null[0]
        condition[(q <= u) & (u < 3 * q)] = 0
        for reference in references:
            reference[(q <= u) & (u < 4 * q)] = 0
            reference[~torch.tensor(batch["has_reference"])] = 0

        x_t = scheduler.add_noise(x_0, noise, timesteps)
        x_in = torch.cat((x_t, condition, *references), 1)
        states = text.pop("states")
        prediction = unet(x_in, timesteps, states, added_cond_kwargs=text or None).sample
        target = noise
        if scheduler.config.prediction_type == "v_prediction":
            target = scheduler.get_velocity(x_0, noise, timesteps)
        loss = torch.nn.functional.mse_loss(prediction, target)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, RUN["max_grad_norm"]).item())
        optimizer.step()
        lr_scheduler.step()
        losses.append(loss.item())
    return unet, losses, norms


def compare_runs(parallel, steps, torch_unet, losses, norms):
    """Losses, gradient norms and the change of every parameter."""
    for name, expected in (("loss", losses), ("grad_norm", norms)):
        found = [np.asarray(metrics[name]) for _, metrics in steps]
        np.testing.assert_allclose([x[0] for x in found], expected, rtol=1e-4)
        assert all((x == x[0]).all() for x in found)
    start = flatten_dict(parallel.params, sep="/")
    theirs = {name.replace(".default.", "."): x for name, x in torch_unet.state_dict().items()}
    for key, trained in parallel.whole(steps[-1][0]).items():
        name, change = flax_to_torch(key, trained - start[key])
        expected = theirs[name].numpy() - flax_to_torch(key, start[key])[1]
        assert np.linalg.norm(expected) > 0
        assert np.linalg.norm(change - expected) <= 2e-3 * np.linalg.norm(expected), name


def make_xl_batch(seed):
    batch, rng = make_batch(seed), np.random.default_rng(seed)
    B = RUN["train_batch_size"]
    batch["input_ids"] = rng.integers(0, 500, (B, 2, 77), np.int32)
    batch["time_ids"] = rng.integers(0, 2000, (B, 6)).astype(np.float32)
    return batch


def torch_text_encoder_xl(model):
    """PyTorch's text of both encoders; the null text is zeros."""
    encoders = [
        CLIPTextModel.from_pretrained(model / "text_encoder"),
        CLIPTextModelWithProjection.from_pretrained(model / "text_encoder_2"),
    ]

    def encode(batch):
        ids = torch.tensor(batch["input_ids"]).long()
        outputs = [x(ids[:, i], output_hidden_states=True) for i, x in enumerate(encoders)]
        return {
            "states": torch.cat([x.hidden_states[-2] for x in outputs], -1),
            "text_embeds": outputs[1].text_embeds,
            "time_ids": torch.tensor(batch["time_ids"]),
        }

    sizes = [encoder.config.hidden_size for encoder in encoders]
    null_text = {"states": torch.zeros(1, 77, sum(sizes)), "text_embeds": torch.zeros(1, 20)}
    return encode, null_text
