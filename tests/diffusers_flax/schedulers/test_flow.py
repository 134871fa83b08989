"""The rectified flow's scheduler against PyTorch's, and the distribution of training's times."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchLCMScheduler

from diffusers_flax.schedulers.flow import (
    FlaxFlowMatchEulerDiscreteScheduler,
    FlaxFlowMatchLCMScheduler,
)

CLASSES = [
    (FlaxFlowMatchEulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler),
    (FlaxFlowMatchLCMScheduler, FlowMatchLCMScheduler),
]


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("num_steps", [1, 4, 27])
@pytest.mark.parametrize(("cls", "torch_class"), CLASSES)
def test_a_run_is_pytorchs(cls, torch_class, shift, num_steps):
    theirs = torch_class(shift=shift)
    theirs.set_timesteps(num_steps)
    ours = cls(shift=shift)
    state = ours.set_timesteps(ours.create_state(), num_steps)
    np.testing.assert_allclose(state.timesteps, theirs.timesteps, rtol=2e-7)
    np.testing.assert_allclose(state.sigmas, theirs.sigmas, rtol=2e-7)
    rng = np.random.default_rng(0)
    x, x_torch = (rng.standard_normal((2, 4, 8, 8), np.float32),) * 2
    x_torch = torch.from_numpy(x_torch)
    for i, t in enumerate(theirs.timesteps):
        output, draw = torch.from_numpy(rng.standard_normal(x.shape, np.float32)), torch.Generator()
        x_torch = theirs.step(output, t, x_torch, generator=draw.manual_seed(i)).prev_sample
        noise = torch.randn(x.shape, generator=draw.manual_seed(i))
        arguments = jnp.asarray(output), state.timesteps[i], x
        x, state = ours.step(state, *arguments, return_dict=False, noise=jnp.asarray(noise))
    np.testing.assert_allclose(x, x_torch, atol=1e-5)


def test_a_run_may_have_other_timesteps():
    theirs = FlowMatchEulerDiscreteScheduler()
    theirs.set_timesteps(sigmas=[0.999, 0.5, 0.02])
    ours = FlaxFlowMatchEulerDiscreteScheduler(shift=3.0)
    state = ours.set_timesteps(ours.create_state(), 3, timesteps=(999, 500, 20))
    np.testing.assert_allclose(state.timesteps, theirs.timesteps, rtol=2e-7)
    np.testing.assert_allclose(state.sigmas, theirs.sigmas, rtol=2e-7)


def test_noise_is_pytorchs():
    theirs = FlowMatchEulerDiscreteScheduler(shift=2.0)
    ours = FlaxFlowMatchEulerDiscreteScheduler(shift=2.0)
    rng = np.random.default_rng(0)
    x, noise = rng.standard_normal((2, 3, 4, 8, 8), np.float32)
    t = theirs.timesteps[[3, 500, 998]]
    expected = theirs.scale_noise(torch.from_numpy(x), t, torch.from_numpy(noise))
    state = ours.create_state()
    np.testing.assert_allclose(ours.add_noise(state, x, noise, t.numpy()), expected, atol=1e-6)
    np.testing.assert_array_equal(ours.get_velocity(state, x, noise, t.numpy()), noise - x)


def test_times_of_training():
    """Their logit is normal with mean log(shift) and deviation 1."""
    scheduler = FlaxFlowMatchEulerDiscreteScheduler(shift=3.0)
    t = scheduler.draw_timesteps(jax.random.split(jax.random.key(0), 20_000)) / 1000
    logit = np.log(t / (1 - t))
    assert abs(logit.mean() - np.log(3)) < 0.03 and abs(logit.std() - 1) < 0.02
