"""Averages of the weights over training (EMA): plan, decays, updates.

    ema = ema_start(params)
    for n in range(1, num_steps + 1):
        params = ...
        ema = ema_update(ema, params, power_decay(n, gamma))

An exponential average has a constant decay (with warm-up, smaller at first). The decay of EDM2's
power-function averages (arXiv 2312.02696) grows with the step, so their length is a fixed fraction
of the run. Snapshots of two of them give averages of other lengths after training
(`posthoc_weights`, ema_posthoc.py).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffusers_flax.training.sharding import compile_pmapped, in_place

SIGMA_RELS = (0.05, 0.1)  # lengths of the two tracked averages, fractions of the run
HORIZONS = 5  # window times (1 - decay): the initial weights keep a share of e^-5 = 0.7%


def ema_start(params):
    """Start an average: a copy of the parameters."""
    return jax.tree.map(jnp.copy, params)


def ema_update(ema_params, params, decay):
    """Move the average towards the parameters: decay * ema_params + (1 - decay) * params."""
    return jax.tree.map(lambda ema, p: ema + (1 - decay) * (p - ema), ema_params, params)


def window_decay(window):
    """Default decay for a window of steps: 1 - 5 / window, at least 0.

    Source: MosaicML's Stable Diffusion 2: 0.9999 over the last 50k of 1.4M steps.
    """
    return max(0.0, 1 - HORIZONS / window)


def warmup_decay(num_updates, decay):
    """Decay of update num_updates, from 1, with warm-up.

    It is (1 + s) / (10 + s), at most decay, with s = num_updates - 1. The first update copies the
    weights.

    Source: diffusers' EMAModel.
    """
    s = num_updates - 1
    return 0.0 if s <= 0 else min(decay, (1 + s) / (10 + s))


def power_decay(num_updates, gamma):
    """Decay of update num_updates, from 1, of a power-function average.

    Source: EDM2 (arXiv 2312.02696), equation 3 and its discrete form: (1 - 1/n)^(gamma + 1).
    """
    return (1 - 1 / num_updates) ** (gamma + 1)


def sigma_rel_to_gamma(sigma_rel):
    """Exponent of the power-function average with relative standard deviation sigma_rel.

    Args:
        sigma_rel: above 0 and below 0.28 (at gamma = 0, the mean of all steps, it is 0.289).

    Raises:
        ValueError: sigma_rel is out of range.

    Source: EDM2 (arXiv 2312.02696): sigma_rel^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)).
    """
    gamma = np.polynomial.Polynomial([0, 1])
    cubic = sigma_rel**2 * (gamma + 2) ** 2 * (gamma + 3) - (gamma + 1)
    return float(cubic.roots().real.max())  # the other roots are negative


class EmaPlan(NamedTuple):
    """Which steps update the averages, with which decays."""

    first_step: int | None  # first averaged step; None: no average
    every: int  # steps between updates
    num_averages: int
    decays: Callable[[int], list[float]]  # number of an update, from 1 -> decay of each average

    def averages_after(self, step):
        """Number of averages after a step: 0, later num_averages."""
        has_begun = self.first_step is not None and step > self.first_step
        return self.num_averages if has_begun else 0

    def num_updates(self, step):
        """Number of updates up to a step."""
        return (step - self.first_step) // self.every if self.averages_after(step) else 0


NO_AVERAGE = EmaPlan(None, 1, 0, lambda num_updates: [])


def ema_plan(config, num_steps):
    """Plan the averages of a run: none, one, or the two of "power".

    The default decay is 1 - 5 / window: for any length of the run, the initial weights keep a share
    of e^-5 = 0.7%. With a window of 5 steps or fewer the decay would be 0, and there is no average.

    Args:
        config: with the flags of averages, of which ema is "none", "late" (in the final stage),
            "full" (from the first step) or "power" (two power-function averages from the first
            step, of the lengths SIGMA_RELS).
        num_steps: length of the run.

    Returns:
        EmaPlan.

    Raises:
        ValueError: the flags do not fit the run or each other.

    Source: MosaicML's Stable Diffusion 2: decay 0.9999 over the last 50k of 1.4M steps.
    """
    ema, start_step, decay, every = (
        getattr(config, name) for name in ("ema", "ema_start_step", "ema_decay", "ema_every")
    )
    if ema != "late" and start_step is not None:
        raise ValueError(f"--ema_start_step {start_step} goes with --ema late, not {ema}")
    if ema in ("none", "power") and (decay is not None or config.ema_warmup):
        raise ValueError(f"--ema_decay and --ema_warmup go with --ema late or full, not {ema}")
    if ema == "none":
        return NO_AVERAGE
    start = 0
    if ema == "late":
        start = num_steps - max(1, round(num_steps * config.ema_fraction))
        start = start if start_step is None else start_step
    window = num_steps - start
    if not 1 <= every <= window:
        raise ValueError(
            f"--ema_start_step {start} and --ema_every {every} must leave an update in the run of "
            f"{num_steps} steps; or use --ema none"
        )
    if ema == "power":
        gammas = [sigma_rel_to_gamma(sigma_rel) for sigma_rel in SIGMA_RELS]
        return EmaPlan(
            start, every, len(gammas), lambda n: [power_decay(n, gamma) for gamma in gammas]
        )
    if decay is None and (decay := window_decay(window)) == 0:
        return NO_AVERAGE
    decay **= every
    if config.ema_warmup:
        return EmaPlan(start, every, 1, lambda n: [warmup_decay(n, decay)])
    return EmaPlan(start, every, 1, lambda n: [decay])


def compile_averages(plan, shapes):
    """Compile the programs of update_ema, before the state takes memory.

    Args:
        plan: EmaPlan.
        shapes: of the sharded parameters, state_shapes(...).params.

    Returns:
        (p_start, p_update): weights -> average, and (average, weights, decay) -> average; None and
        None without average.
    """
    if plan.first_step is None:
        return None, None
    number = jax.tree.leaves(shapes)[0].shape[:1]
    decay = jax.ShapeDtypeStruct(number, jnp.float32)
    p_start = compile_pmapped(jax.pmap(ema_start, axis_name="batch"), shapes)
    return p_start, compile_pmapped(make_update_average(), shapes, shapes, decay)


def make_update_average(devices=None):
    """Make the pmapped update of a sharded average: (average, params, decay) -> average."""
    update_array = jax.jit(in_place(ema_update))  # traced once for each shape

    def update(average, params, decay):
        return jax.tree.map(lambda ema, p: update_array(ema, p, decay), average, params)

    return jax.pmap(update, axis_name="batch", donate_argnums=0, devices=devices)


def profile_products(t_a, gamma_a, t_b, gamma_b):
    """Inner products of the profiles of averages at times t with exponents gamma.

    The profile of an average over (0, t] is p(x) = (gamma + 1) x^gamma / t^(gamma + 1); with the
    discrete decay of power_decay, step n has the weight of p on (n - 1, n].

    Args:
        t_a, gamma_a, t_b, gamma_b: floats or arrays that broadcast.

    Source: EDM2 (arXiv 2312.02696), appendix C.
    """
    shorter = np.minimum(t_a, t_b)
    # Ratios, because powers of step numbers overflow.
    ratio = (shorter / t_a) ** gamma_a * (shorter / t_b) ** gamma_b * shorter / (t_a * t_b)
    return ratio * (gamma_a + 1) * (gamma_b + 1) / (gamma_a + gamma_b + 1)


def posthoc_weights(times, gammas, target_time, target_gamma):
    """Weights of the snapshots for an average that was not tracked, and their error.

    The weighted sum of the snapshots' profiles is as close as possible to the target's profile.

    Args:
        times, gammas: step number and exponent of each snapshot, (K,) each.
        target_time: step number of the target, at most max(times).
        target_gamma: its exponent.

    Returns:
        (weights, error): float64 (K,), of sum about 1; the L2 norm of the difference to the
        target's profile, divided by the profile's norm, 0 to 1.

    Source: EDM2 (arXiv 2312.02696), appendix C: least squares by the normal equations.
    """
    times, gammas = (
        np.append(x, target).astype(np.float64)
        for x, target in ((times, target_time), (gammas, target_gamma))
    )
    A = profile_products(times[:, None], gammas[:, None], times, gammas)  # the target is last
    weights = np.linalg.lstsq(A[:-1, :-1], A[:-1, -1], rcond=None)[0]
    difference = np.append(weights, -1.0)
    return weights, float(np.sqrt(max(0.0, difference @ A @ difference) / A[-1, -1]))
