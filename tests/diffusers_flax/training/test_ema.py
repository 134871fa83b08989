"""Averages of the weights against closed forms, brute force and diffusers."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.training_utils import EMAModel

import flax_train_instruct_pix2pix as trainer
from diffusers_flax.training.ema import (
    NO_AVERAGE,
    SIGMA_RELS,
    ema_plan,
    ema_start,
    ema_update,
    posthoc_weights,
    power_decay,
    sigma_rel_to_gamma,
    warmup_decay,
    window_decay,
)

# Decays


def weights_of_steps(decays):
    """The weight of each step's parameters in an average with these decays, by ema_update."""
    steps = np.eye(len(decays), dtype=np.float32)
    ema = ema_start({"w": jnp.full(len(decays), 7, jnp.float32)})  # forgotten: the first decay is 0
    for step, decay in zip(steps, decays):
        ema = ema_update(ema, {"w": jnp.asarray(step)}, decay)
    return np.asarray(ema["w"])


@pytest.mark.parametrize("gamma", [0.5, 6.94, 16.97])
def test_power_decay_gives_each_step_its_share_of_the_profile(gamma):
    num_steps = 50
    edges = (np.arange(num_steps + 1) / num_steps) ** (gamma + 1)
    weights = weights_of_steps([power_decay(n, gamma) for n in range(1, num_steps + 1)])
    np.testing.assert_allclose(weights, np.diff(edges), rtol=1e-4, atol=1e-7)


def test_warmup_decay_is_that_of_diffusers():
    for decay in (0.5, 0.999):
        reference = EMAModel([torch.nn.Parameter(torch.zeros(1))], decay=decay)
        for n in (1, 2, 3, 10, 1000, 9000, 100000):
            assert warmup_decay(n, decay) == pytest.approx(reference.get_decay(n))


def test_window_decay_leaves_the_start_as_little_as_mosaicml_does():
    assert window_decay(50_000) == pytest.approx(0.9999)
    for window in (100, 10_000):
        assert window_decay(window) ** window == pytest.approx(math.exp(-5), rel=0.2)
    assert window_decay(5) == window_decay(2) == 0


# Profiles


def sampled_profile(t, gamma, end=1.0, num=200_000):
    """(x, p(x)) of an average's profile at midpoints of (0, end]."""
    x = (np.arange(num) + 0.5) * end / num
    return x, np.where(x <= t, (gamma + 1) * (x / t) ** gamma / t, 0)


@pytest.mark.parametrize("sigma_rel", [0.005, 0.05, 0.1, 0.2, 0.279])
def test_sigma_rel_is_the_profiles_standard_deviation(sigma_rel):
    gamma = sigma_rel_to_gamma(sigma_rel)
    assert gamma > 0
    x, p = sampled_profile(1.0, gamma)
    mean = np.mean(x * p)
    assert math.sqrt(np.mean((x - mean) ** 2 * p)) == pytest.approx(sigma_rel, rel=1e-3)


@pytest.mark.parametrize("sigma_rel", [0.03, 0.08, 0.2])
def test_posthoc_weights_are_the_least_squares_of_sampled_profiles(sigma_rel):
    times = np.repeat([20, 40, 60, 80, 100], 2)
    gammas = np.tile([sigma_rel_to_gamma(s) for s in SIGMA_RELS], 5)
    target = sigma_rel_to_gamma(sigma_rel)
    columns = [sampled_profile(t, g, 100, 50_000)[1] for t, g in zip(times, gammas)]
    wanted = sampled_profile(100, target, 100, 50_000)[1]
    expected, (squares,), *_ = np.linalg.lstsq(np.stack(columns, 1), wanted, rcond=None)
    weights, error = posthoc_weights(times, gammas, 100, target)
    np.testing.assert_allclose(weights, expected, rtol=5e-3, atol=5e-3)
    assert error == pytest.approx(math.sqrt(squares / np.sum(wanted**2)), rel=1e-2)


# The average of the weights


def test_ema_plan():
    def plan(ema="late", steps=1000, **options):
        options = {"ema": ema} | {f"ema_{names[key]}": x for key, x in options.items()}
        average = ema_plan(trainer.Config("", "", **options), steps)
        return average.first_step, *average.decays(1000)

    names = dict(fraction="fraction", start="start_step", decay="decay", every="every")

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

    average = ema_plan(trainer.Config("", "", ema_start_step=10, ema_every=3), 20)
    assert [average.num_updates(step) for step in (9, 12, 13, 15, 16, 20)] == [0, 0, 1, 1, 2, 3]
    assert not any(map(NO_AVERAGE.num_updates, range(21)))


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
