"""The published Flax schedulers' API: configs, states, steps by timestep."""

import inspect
import json

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import trajectories
from trajectories import (
    BASE,
    NOISE,
    SHAPE,
    STABLE_DIFFUSION,
    START,
    assert_same_trajectory,
    flax_trajectory,
    model,
    torch_class,
    torch_trajectory,
)

from diffusers_flax.schedulers.base import FlaxSchedulerMixin
from diffusers_flax.schedulers.ddim import FlaxDDIMScheduler
from diffusers_flax.schedulers.ddpm import FlaxDDPMScheduler
from diffusers_flax.schedulers.factory import SCHEDULERS, make_scheduler

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def run_state(scheduler, num_steps=6):
    return scheduler.set_timesteps(scheduler.create_state(), num_steps, SHAPE)


def test_constructors_take_positional_arguments_and_arrays():
    betas = np.linspace(0.001, 0.02, 4)
    for given in (betas, jnp.asarray(betas, jnp.float32), betas.tolist()):
        scheduler = FlaxDDPMScheduler(4, 0.1, 0.2, "linear", given, "fixed_large", False)
        assert scheduler.config.variance_type == "fixed_large" and not scheduler.config.clip_sample
        np.testing.assert_allclose(scheduler.create_state().common.betas, betas, rtol=1e-6)
    assert FlaxDDIMScheduler(1000, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert "dtype" not in FlaxDDIMScheduler(dtype=jnp.bfloat16).config
    assert FlaxDDIMScheduler(**FlaxDDIMScheduler(beta_end=0.5).config).config.beta_end == 0.5
    with pytest.raises(TypeError, match="multiple values for argument 'beta_start'"):
        FlaxDDPMScheduler(1000, 0.1, beta_start=0.1)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_what_every_scheduler_has(name, tmp_path):
    cls = SCHEDULERS[name]
    scheduler = cls(beta_end=0.013)
    assert scheduler.has_state and scheduler.order == 1 and len(scheduler) == 1000
    published = {cls for name, cls in SCHEDULERS.items() if name not in ("lcm", "tcd")}
    assert set(scheduler.compatibles) == published
    assert not scheduler._deprecated_kwargs and "kwargs" not in inspect.signature(cls).parameters
    expected = float(torch_class(name)(beta_end=0.013).init_noise_sigma)
    assert scheduler.init_noise_sigma == pytest.approx(expected, rel=1e-5)
    scheduler.save_config(tmp_path / "a")
    scheduler.save_pretrained(tmp_path / "b")
    content = (tmp_path / "a" / scheduler.config_name).read_text()
    assert content == (tmp_path / "b" / scheduler.config_name).read_text()
    scheduler.to_json_file(tmp_path / "c.json")
    assert content == scheduler.to_json_string() == (tmp_path / "c.json").read_text()
    assert cls.load_config(tmp_path / "a") == json.loads(content)
    assert cls.load_config(tmp_path, True, subfolder="a", x=1) == (json.loads(content), {"x": 1})
    back, state = cls.from_pretrained(tmp_path, subfolder="a", cache_dir=None)
    assert back == cls.from_config(scheduler.config) == cls.from_config(tmp_path / "a")
    assert isinstance(back, FlaxSchedulerMixin) and state.num_inference_steps is None
    with pytest.raises(ValueError, match="hf upload"):
        scheduler.save_config(tmp_path / "c", push_to_hub=True)
    assert run_state(scheduler, np.int64(5)).num_inference_steps == 5


@pytest.mark.parametrize("name", ["ddpm", "ddim", "euler", "euler_ancestral"])
def test_steps_follow_the_timestep_and_can_be_repeated(name):
    """Scripts drop the returned state, go back, or begin in the middle."""
    scheduler, start = make_scheduler(name, STABLE_DIFFUSION | BASE[name] | {"steps_offset": 1})
    start = scheduler.set_timesteps(start, 10, SHAPE)
    _, expected = flax_trajectory(name, STABLE_DIFFUSION | BASE[name] | {"steps_offset": 1}, 10)
    step = jax.jit(lambda *args, noise: scheduler.step(*args, noise=noise).prev_sample)
    for i in (7, 3, 9):
        x, t = jnp.asarray(expected[i - 1]), start.timesteps[i]
        out = np.float32(model(np.asarray(scheduler.scale_model_input(start, x, t)), float(t)))
        args = start, jnp.asarray(out), t, x
        for _ in range(2):
            actual = step(*args, noise=jnp.asarray(NOISE[i]))
            np.testing.assert_allclose(actual, expected[i], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["euler", "lms", "dpmsolver++"])
def test_rounded_timesteps_are_told_apart_by_step_index(name):
    """Published pipelines cut Euler's fractional timesteps to integers."""
    config = STABLE_DIFFUSION | {"use_karras_sigmas": True}
    scheduler, state = make_scheduler(name, config)
    state = scheduler.set_timesteps(state, 50, SHAPE)
    timesteps, expected = flax_trajectory(name, config, 50)
    assert len(set(timesteps.astype(int))) < 50
    x, samples = jnp.asarray(START) * state.init_noise_sigma, []
    for t in timesteps:
        scaled = np.asarray(scheduler.scale_model_input(state, x, int(t)))
        out = jnp.asarray(np.float32(model(scaled, float(t))))
        x, state = scheduler.step(state, out, int(t), x, return_dict=False)
        samples.append(x)
    assert_same_trajectory((timesteps, np.array(samples)), (timesteps, expected), name)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_lms_of_lower_order_matches_pytorch(order):
    scheduler, state = make_scheduler("lms", STABLE_DIFFUSION)
    reference = diffusers.LMSDiscreteScheduler(**STABLE_DIFFUSION)
    reference.set_timesteps(12)
    state = scheduler.set_timesteps(state, 12, SHAPE)
    assert scheduler.get_lms_coefficient(state, 3, 5, 1) == pytest.approx(
        reference.get_lms_coefficient(3, 5, 1), rel=1e-5
    )
    x = torch.from_numpy(START) * reference.init_noise_sigma
    y = jnp.asarray(START) * state.init_noise_sigma
    for t in reference.timesteps:
        out = np.float32(model(reference.scale_model_input(x, t).numpy(), float(t)))
        x = reference.step(torch.from_numpy(out), t, x, order).prev_sample
        y, state = scheduler.step(state, jnp.asarray(out), float(t), y, order, False)
        assert np.abs(y - x.numpy()).max() < 1e-5 * x.abs().max()
    for wrong in (0, 5, 2.5):
        with pytest.raises(ValueError, match=f"order={wrong} must be"):
            scheduler.step(state, y, 0, y, wrong)


def test_pndm_steps_of_both_kinds_match_pytorch():
    """The published loops call step_prk and step_plms; a full run by step is the same."""
    config = STABLE_DIFFUSION | {"steps_offset": 1}
    scheduler, start = make_scheduler("pndm", config)
    reference = diffusers.PNDMScheduler(**config)
    reference.set_timesteps(10)
    start = state = scheduler.set_timesteps(start, 10, SHAPE)
    np.testing.assert_array_equal(state.prk_timesteps, reference.prk_timesteps)
    np.testing.assert_array_equal(state.plms_timesteps, reference.plms_timesteps)
    assert scheduler.pndm_order == len(state.ets) == 4
    x, y = torch.from_numpy(START), jnp.asarray(START)
    kinds = ["step_prk"] * len(state.prk_timesteps) + ["step_plms"] * len(state.plms_timesteps)
    for i, (kind, t) in enumerate(zip(kinds, reference.timesteps)):
        out = np.float32(model(x.numpy(), float(t)))
        x = getattr(reference, kind)(torch.from_numpy(out), t, x).prev_sample
        y, state = getattr(scheduler, kind)(state, jnp.asarray(out), int(t), y)
        assert np.abs(y - x.numpy()).max() < 1e-5 * x.abs().max()
        assert state.counter == state.step_index == i + 1
    np.testing.assert_allclose(state.ets[-1], out, rtol=1e-6)
    newest = jnp.asarray(NOISE[:4])
    replaced = start.replace(ets=newest, counter=jnp.int32(14))
    y, _ = scheduler.step_plms(replaced, newest[0], 500, jnp.asarray(START))
    reference.ets, reference.counter = list(torch.from_numpy(NOISE[:4])), 14
    x = reference.step_plms(torch.from_numpy(NOISE[0]), 500, torch.from_numpy(START)).prev_sample
    np.testing.assert_allclose(y, x.numpy(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="call set_timesteps before step"):
        scheduler.step_plms(scheduler.create_state(), newest[0], 1, newest[0])


VARIANCES = ("fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log", "learned_range")


@pytest.mark.parametrize("num_steps", [None, 10])
def test_ddpm_variances_match_pytorch(num_steps):
    scheduler, state = make_scheduler("ddpm", STABLE_DIFFUSION)
    reference = diffusers.DDPMScheduler(**STABLE_DIFFUSION)
    if num_steps:
        state = scheduler.set_timesteps(state, num_steps)
        reference.set_timesteps(num_steps)
    predicted = NOISE[0] / 3
    for t in (0, 100, 400, 900):
        assert scheduler.previous_timestep(state, t) == int(reference.previous_timestep(t))
        for kind in VARIANCES:
            actual = scheduler._get_variance(state, t, jnp.asarray(predicted), kind)
            expected = reference._get_variance(t, torch.from_numpy(predicted), kind)
            # Neighbours' alpha_bar differ in their last digits only, of which a logarithm takes
            # the relative error.
            is_log = kind in ("fixed_large_log", "learned_range")
            error = np.abs(np.asarray(actual) - np.asarray(expected)).max()
            assert error < (1e-4 if is_log and num_steps is None else 1e-5), kind


def test_ddpm_without_set_timesteps_matches_pytorch(monkeypatch):
    """The next timestep is t - 1."""
    scheduler, state = make_scheduler("ddpm", STABLE_DIFFUSION)
    reference = diffusers.DDPMScheduler(**STABLE_DIFFUSION)
    module = diffusers.schedulers.scheduling_ddpm
    monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: torch.from_numpy(NOISE[1]))
    out = 0.3 * NOISE[0]
    for t in (999, 500, 20, 1, 0):
        x = reference.step(torch.from_numpy(out), t, torch.from_numpy(START)).prev_sample
        y = scheduler.step(
            state, jnp.asarray(out), t, jnp.asarray(START), noise=jnp.asarray(NOISE[1])
        ).prev_sample
        np.testing.assert_allclose(y, x.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["learned", "learned_range"])
def test_ddpm_with_learned_variance_matches_pytorch(kind, monkeypatch):
    config = STABLE_DIFFUSION | {"variance_type": kind, "clip_sample": False}
    shift = 0.0 if kind == "learned_range" else 1.0  # a variance is positive

    def both(x, t):
        return np.concatenate([model(x, t), 0.3 * np.sin(x) + shift], axis=1)

    monkeypatch.setattr(trajectories, "model", both)
    for num_steps in (5, 20):
        assert_same_trajectory(
            flax_trajectory("ddpm", config, num_steps),
            torch_trajectory("ddpm", config, num_steps, monkeypatch),
            kind,
        )


def test_ddim_variance_matches_pytorch():
    scheduler, state = make_scheduler("ddim", STABLE_DIFFUSION)
    reference = diffusers.DDIMScheduler(**STABLE_DIFFUSION)
    for t, prev in ((999, 998), (980, 960), (420, 400), (20, 0), (10, -10)):
        expected = float(reference._get_variance(t, prev))
        assert float(scheduler._get_variance(state, t, prev)) == pytest.approx(expected, rel=1e-4)
    # The published argument order: eta is the fifth, and needs noise that published steps left out.
    state = run_state(scheduler)
    args = state, jnp.asarray(NOISE[0]), 500, jnp.asarray(START)
    with pytest.raises(ValueError, match="key=None"):
        scheduler.step(*args, 0.5)
    assert isinstance(scheduler.step(*args, 0.0, False), tuple)
    traced = jax.jit(lambda eta, key: scheduler.step(*args, eta, key=key).prev_sample)
    key = jax.random.key(0)
    expected = scheduler.step(*args, 0.5, key=key).prev_sample
    np.testing.assert_allclose(traced(0.5, key), expected, rtol=1e-5, atol=1e-5)
