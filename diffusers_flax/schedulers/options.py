"""Options of the schedulers: names, defaults, supported values."""

import math
from numbers import Real

import numpy as np

# Options of every scheduler, and the supported values of some.
DEFAULTS = {
    "num_train_timesteps": 1000,
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "trained_betas": None,
    "prediction_type": "epsilon",
    "timestep_spacing": "leading",
    "steps_offset": 0,
}
CHOICES = {
    "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2"),
    "prediction_type": ("epsilon", "v_prediction", "sample"),
    "timestep_spacing": ("leading", "linspace", "trailing"),
}
# The first arguments of all constructors; a class's own arguments follow.
FIRST_ARGUMENTS = (
    "num_train_timesteps",
    "beta_start",
    "beta_end",
    "beta_schedule",
    "trained_betas",
)
# An option has its default's type; options without a default are numbers.
TYPES = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
SMALLEST_SIGMA = 1e-6
RANGES = {
    "num_train_timesteps": (1, math.inf),
    "beta_start": (0, 1),
    "beta_end": (0, 2),  # above 1 only the timesteps before beta reaches 1 are usable
    "sigma_min": (SMALLEST_SIGMA, math.inf),
    "sigma_max": (SMALLEST_SIGMA, math.inf),
    "original_inference_steps": (1, math.inf),
}


def checked_option(name, value, default):
    """The value in its default's type; a ValueError for another type or a value out of range.

    1.0 passes as an integer, 1 and 0 as true and false.
    """
    if name == "trained_betas":
        is_array = isinstance(value, list | tuple) or np.ndim(value) > 0
        if not is_array or not all(isinstance(beta, Real) for beta in np.asarray(value).tolist()):
            raise ValueError("trained_betas must be a list of numbers, one per training timestep")
        betas = np.asarray(value)
        if not ((betas >= 0) & (betas <= 1)).all():
            raise ValueError("trained_betas has values outside 0 to 1; give variances")
        return tuple(map(float, betas))
    kind = float if default is None else type(default)
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if kind is bool and is_number and value in (0, 1):
        return bool(value)
    if kind is int and is_number and math.isfinite(value) and value == int(value):
        value = int(value)
    elif kind is int or not (is_number if kind is float else isinstance(value, kind)):
        raise ValueError(f"{name}={value!r} has the wrong type, it must be {TYPES[kind]}")
    lowest, highest = RANGES.get(name, (-math.inf, math.inf))
    if kind in (int, float) and not lowest <= value <= highest:
        limits = f"at least {lowest}" if highest == math.inf else f"from {lowest} to {highest}"
        raise ValueError(f"{name}={value!r} must be {limits}")
    return value
