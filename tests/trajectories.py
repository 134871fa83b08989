"""Whole trajectories of schedulers, ours and PyTorch's, with the same denoiser and noise."""

import sys

import diffusers
import jax.numpy as jnp
import numpy as np
import torch

from diffusers_flax.schedulers.factory import SCHEDULERS, make_scheduler

SHAPE = (2, 3, 2, 2)
RNG = np.random.default_rng(0)
START = RNG.standard_normal(SHAPE, np.float32)
NOISE = RNG.standard_normal((64, *SHAPE), np.float32)
STABLE_DIFFUSION = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
BASE = {
    "ddpm": {"clip_sample": False},
    "ddim": {"clip_sample": False},
    "pndm": {"skip_prk_steps": True},
    "euler": {},
    "euler_ancestral": {},
    "lms": {},
    "dpmsolver++": {},
    "lcm": {},
    "tcd": {},
}


def torch_class(name):
    return getattr(diffusers, SCHEDULERS[name].__name__.removeprefix("Flax"))


def model(x, t, xp=np):
    """A made-up denoiser: smooth, nonlinear in the sample, moving with the timestep."""
    phase = np.sin(t / 130) if xp is np else jnp.sin(t / 130)
    return xp.tanh(0.7 * x + 0.3 * phase) + 0.2 * xp.cos(2 * x)


def torch_trajectory(name, config, num_steps, monkeypatch, eta=0.0, first_step=0, timesteps=None):
    """(timesteps, samples after each step) of PyTorch's scheduler, its noise taken from NOISE."""
    scheduler = torch_class(name).from_config(config)
    noise = iter(torch.from_numpy(NOISE))
    module = sys.modules[type(scheduler).__module__]
    monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: next(noise), raising=False)
    chosen = {"num_inference_steps": num_steps} if timesteps is None else {"timesteps": timesteps}
    scheduler.set_timesteps(**chosen)
    x = torch.from_numpy(START) * (1 if first_step else scheduler.init_noise_sigma)
    timesteps = scheduler.timesteps[first_step:]
    if first_step and hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(first_step)
    samples = []
    for t in timesteps:
        out = torch.from_numpy(
            np.float32(model(scheduler.scale_model_input(x, t).numpy(), float(t)))
        )
        x = scheduler.step(out, t, x, **({"eta": eta} if eta else {})).prev_sample
        samples.append(x.numpy())
    return timesteps.numpy(), np.array(samples)


def flax_trajectory(name, config, num_steps, eta=0.0, first_step=0, timesteps=None):
    """The same of ours."""
    scheduler, state = make_scheduler(name, config)
    state = scheduler.set_timesteps(state, num_steps, SHAPE, first_step, timesteps)
    timesteps = np.asarray(state.timesteps)
    x = jnp.asarray(START * (1 if first_step else np.asarray(state.init_noise_sigma)))
    samples = []
    assert len(timesteps) <= len(NOISE)
    for t, noise in zip(timesteps, NOISE):
        model_input = np.asarray(scheduler.scale_model_input(state, x, t))
        out = np.float32(model(model_input, float(t)))
        options = {"eta": eta} if eta else {}
        x, state = scheduler.step(
            state, jnp.asarray(out), t, x, noise=jnp.asarray(noise), return_dict=False, **options
        )
        samples.append(np.asarray(x))
    return timesteps, np.array(samples)


def assert_same_trajectory(actual, expected, what):
    """Timesteps equal, and every sample within 1e-5 of its own largest value."""
    np.testing.assert_allclose(actual[0], expected[0], rtol=0, atol=1e-3, err_msg=what)
    error = np.abs(actual[1] - expected[1]).max(axis=(1, 2, 3, 4))
    scale = np.abs(expected[1]).max(axis=(1, 2, 3, 4))
    worst = (error / scale).max()
    assert worst < 1e-5, f"{what}: {worst:.1e}"
