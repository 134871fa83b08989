"""EDM's scheduler against PyTorch diffusers', and the noise of training against closed forms."""

import diffusers
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import slow
from trajectories import NOISE, SHAPE, START, assert_same_trajectory, model

from diffusers_flax.published_configs import COSXL_SCHEDULER
from diffusers_flax.schedulers.dpmsolver import FlaxEDMDPMSolverMultistepScheduler
from diffusers_flax.schedulers.euler import FlaxEDMEulerScheduler
from diffusers_flax.schedulers.factory import (
    scheduler_from_config,
    scheduler_from_pretrained,
    training_scheduler,
)

COSXL = {name: value for name, value in COSXL_SCHEDULER.items() if name != "_class_name"}


def open_both(options, num_steps, cls=FlaxEDMEulerScheduler):
    """(PyTorch's scheduler, ours, our state) with timesteps set."""
    theirs = getattr(diffusers, cls.__name__.removeprefix("Flax"))(**options)
    theirs.set_timesteps(num_steps)
    ours = cls(**options)
    return theirs, ours, ours.set_timesteps(ours.create_state(), num_steps, SHAPE)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (FlaxEDMEulerScheduler, COSXL),
        *slow(
            (FlaxEDMEulerScheduler, {}),
            (
                FlaxEDMEulerScheduler,
                {"sigma_data": 0.7, "final_sigmas_type": "sigma_min", "rho": 5.0},
            ),
            (FlaxEDMDPMSolverMultistepScheduler, COSXL),
            (FlaxEDMDPMSolverMultistepScheduler, COSXL | {"solver_order": 3}),
            (FlaxEDMDPMSolverMultistepScheduler, {"solver_type": "heun"}),
            (FlaxEDMDPMSolverMultistepScheduler, {"final_sigmas_type": "sigma_min"}),
        ),
    ],
)
def test_whole_trajectories_match_pytorch(cls, options):
    for num_steps in (4, 20, 50):
        theirs, ours, state = open_both(options, num_steps, cls)
        np.testing.assert_allclose(state.timesteps, theirs.timesteps, atol=1e-6)
        np.testing.assert_allclose(state.sigmas, theirs.sigmas, rtol=1e-5)
        assert state.init_noise_sigma == pytest.approx(theirs.init_noise_sigma, rel=1e-6)
        x, x_t = jnp.asarray(START) * state.init_noise_sigma, torch.tensor(START)
        x_t = x_t * theirs.init_noise_sigma
        found, expected = [], []
        for t, t_t in zip(state.timesteps, theirs.timesteps):
            model_input = np.asarray(ours.scale_model_input(state, x, t))
            output = np.float32(model(model_input, 300 * float(t)))
            x, state = ours.step(state, jnp.asarray(output), t, x, return_dict=False)
            model_input = theirs.scale_model_input(x_t, t_t).numpy()
            output = torch.tensor(np.float32(model(model_input, 300 * float(t_t))))
            x_t = theirs.step(output, t_t, x_t).prev_sample
            found.append(np.asarray(x))
            expected.append(x_t.numpy())
        assert_same_trajectory(
            (state.timesteps, np.array(found)), (theirs.timesteps, np.array(expected)), num_steps
        )


@pytest.mark.parametrize("cls", [FlaxEDMEulerScheduler, FlaxEDMDPMSolverMultistepScheduler])
@pytest.mark.parametrize("schedule", ["karras", "exponential"])
def test_one_step_goes_from_sigma_max_to_the_end(cls, schedule):
    """Also where diffusers visits sigma_min (exponential), or stays at sigma_max (Euler)."""
    for final, end in (("zero", 0), ("sigma_min", 0.002)):
        options = {"sigma_schedule": schedule, "final_sigmas_type": final}
        theirs, _, state = open_both(options, 1, cls)
        np.testing.assert_allclose(state.sigmas, [80, end], rtol=1e-6)
        np.testing.assert_allclose(state.timesteps, [np.log(80) / 4], rtol=1e-6)
        if schedule == "karras" and (final == "zero" or cls is not FlaxEDMEulerScheduler):
            np.testing.assert_allclose(state.sigmas, theirs.sigmas, rtol=1e-6)


@pytest.mark.slow
def test_add_noise_and_files_match_pytorch(tmp_path):
    theirs, ours, state = open_both(COSXL, 12)
    timesteps = theirs.timesteps[3:5]
    noisy = ours.add_noise(state, jnp.asarray(START), jnp.asarray(NOISE[0]), timesteps.numpy())
    expected = theirs.add_noise(torch.tensor(START), torch.tensor(NOISE[0]), timesteps)
    np.testing.assert_allclose(noisy, expected, rtol=1e-5, atol=1e-5)

    ours.save_pretrained(tmp_path / "ours")
    assert dict(diffusers.EDMEulerScheduler.from_pretrained(tmp_path / "ours").config).items() >= (
        COSXL.items()
    )
    theirs.save_pretrained(tmp_path / "theirs")
    back, _ = scheduler_from_pretrained(tmp_path / "theirs", subfolder=None)
    assert type(back) is FlaxEDMEulerScheduler and dict(back.config).items() >= COSXL.items()
    initial = ours.create_state()
    np.testing.assert_allclose(initial.common.alphas_cumprod[::999], [1, 0], atol=1e-3)
    assert initial.timesteps.shape == (1000,)


def test_training_targets_have_the_papers_loss():
    """The model's input is c_in x_t, its target the F whose c_skip x_t + c_out F is x_0."""
    for sigma_data in (1.0, 0.6):
        content = COSXL_SCHEDULER | {"sigma_data": sigma_data}
        scheduler, state = training_scheduler(content, "model")
        indices = np.array([0, 999])
        angles = np.arctan(np.array([0.002, 120]) / sigma_data)
        angles = angles[0] + (indices + 0.5) / 1000 * (angles[1] - angles[0])
        sigma = sigma_data * np.tan(angles).reshape(2, 1, 1, 1)
        x_0, noise = START.astype(np.float64), NOISE[0].astype(np.float64)
        x_t = x_0 + sigma * noise
        variance = sigma**2 + sigma_data**2
        c_skip, c_out = sigma_data**2 / variance, -sigma * sigma_data / np.sqrt(variance)

        arrays = jnp.asarray(START), jnp.asarray(NOISE[0]), jnp.asarray(indices)
        model_input = scheduler.add_noise(state, *arrays)
        np.testing.assert_allclose(model_input, x_t / np.sqrt(variance), rtol=1e-4, atol=1e-5)
        velocity = scheduler.get_velocity(state, *arrays)
        target = (x_0 - c_skip * x_t) / c_out
        np.testing.assert_allclose(velocity, target, rtol=1e-4, atol=1e-5)
        t = scheduler.model_timesteps(state, jnp.asarray(indices))
        np.testing.assert_allclose(t, np.log(sigma.ravel()) / 4, atol=1e-5)


def test_wrong_uses_are_one_line():
    _, ours, state = open_both(COSXL, 3)
    other = FlaxEDMDPMSolverMultistepScheduler
    content = COSXL_SCHEDULER | {"_class_name": other.__name__.removeprefix("Flax")}
    assert type(scheduler_from_config(content, "MODEL")[0]) is other
    assert type(scheduler_from_config(content, "MODEL", "euler")[0]) is FlaxEDMEulerScheduler
    scheduler, _ = scheduler_from_config(COSXL_SCHEDULER, "MODEL", "dpmsolver++")
    assert type(scheduler) is other and scheduler.config.sigma_max == 120
    for wrong, message in (
        (
            lambda: scheduler_from_config(COSXL_SCHEDULER, "MODEL", "ddim"),
            "scheduler=ddim has other",
        ),
        (
            lambda: ours.set_timesteps(state, 2, timesteps=(999, 499)),
            r"timesteps=\(999, 499\) cannot be chosen with FlaxEDMEulerScheduler",
        ),
        (lambda: FlaxEDMEulerScheduler().vp_prediction_type, "need prediction_type='v_pred"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
