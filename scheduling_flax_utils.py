"""What the Flax schedulers share: noise schedule, timestep grids, options, files, state, a step.

Scheduler is the class they derive from; scheduling_flax.py says how they are used.
"""

import math
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from modeling_flax_utils import FrozenConfig, fetch_file, read_json, write_json

CONFIG_NAME = "scheduler_config.json"

# Options every scheduler has, and the values that some of them may take.
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
# Options are of their default's type; those without a default are numbers.
TYPES = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
SMALLEST_SIGMA = 1e-6
RANGES = {
    "num_train_timesteps": (1, math.inf),
    "beta_start": (0, 1),
    "beta_end": (0, 1),
    "sigma_min": (SMALLEST_SIGMA, math.inf),
    "sigma_max": (SMALLEST_SIGMA, math.inf),
}


@struct.dataclass
class CommonSchedulerState:
    """The training noise schedule, float32 arrays of (num_train_timesteps,)."""

    betas: jax.Array
    alphas: jax.Array
    alphas_cumprod: jax.Array


@struct.dataclass
class SchedulerState:
    """All arrays of a scheduler: a pytree that keeps its structure and dtypes from step to step."""

    common: CommonSchedulerState
    init_noise_sigma: jax.Array  # standard deviation of the noise to start from
    timesteps: jax.Array  # in the order they are visited, int32 (Euler: float32)
    sigmas: jax.Array | None  # noise over signal at each timestep and at the end; Euler, DPM-Solver
    step_index: jax.Array  # steps taken so far, int32
    tables: dict[str, jax.Array]  # the numbers of every step, each (steps, ...)
    memory: dict[str, jax.Array]  # what multistep methods remember, each (..., *sample.shape)
    num_inference_steps: int | None = struct.field(pytree_node=False, default=None)


class FlaxSchedulerOutput(NamedTuple):
    """What step returns; unpacks as (prev_sample, state)."""

    prev_sample: jax.Array
    state: SchedulerState

    def to_tuple(self):
        """The plain tuple (prev_sample, state)."""
        return tuple(self)


def training_betas(config):
    """Noise variance added by each training timestep, float32 (num_train_timesteps,).

    Source: linear, DDPM (arXiv 2006.11239) section 4; scaled_linear, latent diffusion
    (arXiv 2112.10752); squaredcos_cap_v2, improved DDPM (arXiv 2102.09672) equation 17.
    """
    num_steps = config.num_train_timesteps
    if config.trained_betas is not None:
        betas = np.asarray(config.trained_betas)
        if not ((betas >= 0) & (betas <= 1)).all():
            raise ValueError("trained_betas has values outside 0 to 1; give variances")
        if betas.shape != (num_steps,):
            raise ValueError(
                f"trained_betas has shape {betas.shape} but num_train_timesteps={num_steps}; "
                "give one beta per training timestep"
            )
    elif config.beta_schedule == "linear":
        betas = np.linspace(config.beta_start, config.beta_end, num_steps)
    elif config.beta_schedule == "scaled_linear":
        betas = np.linspace(config.beta_start**0.5, config.beta_end**0.5, num_steps) ** 2
    else:
        time = np.arange(num_steps + 1) / num_steps
        alpha_bar = np.cos((time + 0.008) / 1.008 * np.pi / 2) ** 2
        betas = np.minimum(1 - alpha_bar[1:] / alpha_bar[:-1], 0.999)
    return betas.astype(np.float32)


def zero_terminal_snr(alpha_bar):
    """Shift and scale alpha_bar, (num_train_timesteps,), so that its last value is 0.

    Source: arXiv 2305.08891, algorithm 1.
    """
    root = np.sqrt(alpha_bar)
    return ((root - root[-1]) * (root[0] / (root[0] - root[-1]))) ** 2


def noise_schedule(config):
    """The training schedule: float32 (betas, alphas, alphas_cumprod) of each timestep."""
    # Betas round to float32 before the product, as they did for the published weights: where beta
    # nears 1, the rounding of 1 - beta is worth 3e-5.
    betas = training_betas(config)
    alphas = 1 - betas
    alpha_bar = np.cumprod(alphas, dtype=np.float64)
    if config.get("rescale_betas_zero_snr"):
        alpha_bar = zero_terminal_snr(alpha_bar)
        alphas = np.append(alpha_bar[:1], alpha_bar[1:] / alpha_bar[:-1])
        betas = 1 - alphas
    return tuple(table.astype(np.float32) for table in (betas, alphas, alpha_bar))


def timestep_grid(config, num_steps, last=None):
    """Choose the timesteps to visit.

    Args:
        config: timestep_spacing, num_train_timesteps, steps_offset.
        num_steps: how many, 1 to num_train_timesteps.
        last: number of training timesteps to spread them over; None takes all.

    Returns:
        Timesteps, falling, float64 (num_steps,); whole numbers unless the spacing is linspace.

    Source: arXiv 2305.08891, table 2.
    """
    last = last or config.num_train_timesteps
    if config.timestep_spacing == "linspace":
        return np.linspace(0, last - 1, num_steps)[::-1]
    if config.timestep_spacing == "leading":
        return (np.arange(num_steps) * (last // num_steps) + config.steps_offset)[::-1] * 1.0
    # The slice drops an extra entry that rounding adds for some counts (61, 103, ...).
    return np.round(np.arange(last, 0, -config.num_train_timesteps / num_steps)[:num_steps]) - 1


def predict_x0_and_eps(prediction_type, alpha_t, sigma_t, x_t, model_output):
    """Read a model's output as the clean sample and as the noise in x_t = alpha_t x0 + sigma_t eps.

    Args:
        prediction_type: epsilon, v_prediction or sample: what model_output is.
        alpha_t: sqrt(alpha_bar_t), scalar in [0, 1]; above 0 where model_output is epsilon.
        sigma_t: sqrt(1 - alpha_bar_t), scalar in (0, 1].
        x_t: noisy sample, any shape.
        model_output: same shape.

    Returns:
        (x0, eps), same shape.

    Source: DDPM (arXiv 2006.11239) equation 15; for v, arXiv 2202.00512 appendix D.
    """
    if prediction_type == "epsilon":
        return (x_t - sigma_t * model_output) / alpha_t, model_output
    if prediction_type == "v_prediction":
        return alpha_t * x_t - sigma_t * model_output, alpha_t * model_output + sigma_t * x_t
    return model_output, (x_t - alpha_t * model_output) / sigma_t


def load_config(pretrained_model_name_or_path, subfolder=None, revision=None):
    """Read scheduler_config.json.

    Args:
        pretrained_model_name_or_path: folder or Hub id.
        subfolder: folder inside it, "scheduler" in a pipeline.
        revision: branch, tag or commit on the Hub.

    Returns:
        The options, a dict.

    Raises:
        ValueError: there is no such file, or it is no JSON object.
    """
    file = fetch_file(pretrained_model_name_or_path, CONFIG_NAME, subfolder, revision)
    if file is None:
        where = "/".join(map(str, filter(None, (pretrained_model_name_or_path, subfolder))))
        raise ValueError(f"{where} has no {CONFIG_NAME}; give a model's scheduler folder")
    return read_json(file)


def checked_option(name, value, default):
    """The value as its default's type; a ValueError if it is not of that type or out of range.

    An integer may be written as 1.0, and true or false as 1 or 0.
    """
    if name == "trained_betas":
        is_list = isinstance(value, list | tuple | np.ndarray)
        if not is_list or not all(isinstance(beta, Real) for beta in value):
            raise ValueError("trained_betas must be a list of numbers, one per training timestep")
        return value
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


def to_device(array):
    """Any array as float32, int32 or bool, also where 64-bit types are switched on."""
    array = np.asarray(array)
    return jnp.asarray(array, {"f": jnp.float32, "i": jnp.int32, "b": jnp.bool_}[array.dtype.kind])


@dataclass(frozen=True, init=False)
class Scheduler:
    """What the schedulers share: options, files, state, forward noising, the frame of a step.

    A subclass gives `defaults` (its options), `choices` (the values they may take; also of options
    it supports only one value of), `_plan` and, unless the one here will do, `_advance`.
    """

    config: FrozenConfig
    defaults = DEFAULTS
    choices = CHOICES

    def __init__(self, **options):
        options.pop("dtype", None)  # of the published signature; the state is always float32
        unknown = sorted(options.keys() - self.defaults.keys() - self.choices.keys())
        if unknown:
            raise ValueError(
                f"{type(self).__name__} has no option {', '.join(unknown)}; "
                f"it has {', '.join(sorted(self.defaults))}"
            )
        given = {name: value for name, value in options.items() if value is not None}
        for name, supported in self.choices.items():
            if given.get(name, supported[0]) not in supported:
                raise ValueError(
                    f"{name}={given[name]!r} is not supported by {type(self).__name__}; "
                    f"use {' or '.join(map(repr, supported))}, or another scheduler"
                )
        values = dict(self.defaults)
        for name in values.keys() & given.keys():
            values[name] = checked_option(name, given[name], values[name])
        lowest, highest = values.get("sigma_min"), values.get("sigma_max")
        if None not in (lowest, highest) and lowest >= highest:
            raise ValueError(f"sigma_min={lowest} must be below sigma_max={highest}")
        if values["trained_betas"] is not None:
            values["trained_betas"] = tuple(map(float, values["trained_betas"]))
        # As in diffusers: another class takes over what was chosen here, not what was left open.
        values["_use_default_values"] = tuple(sorted(self.defaults.keys() - given.keys()))
        self.__dict__["config"] = FrozenConfig(values)

    def __hash__(self):
        return hash(frozenset(self.config.items()))

    def __len__(self):
        return self.config.num_train_timesteps

    @classmethod
    def from_config(cls, config, **overrides):
        """Build from the options of this or another class; options this class lacks are dropped.

        Args:
            config: mapping, such as another scheduler's `config`.
            overrides: options to replace.

        Returns:
            (scheduler, state).

        Raises:
            ValueError: an option has a value that is not supported, or an override is unknown.
        """
        known = cls.defaults.keys() | cls.choices.keys()
        known -= set(config.get("_use_default_values", ()))
        scheduler = cls(**{k: v for k, v in config.items() if k in known} | overrides)
        return scheduler, scheduler.create_state()

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path, subfolder=None, revision=None, **overrides
    ):
        """Read scheduler_config.json, of this or another class; see from_config and load_config."""
        config = load_config(pretrained_model_name_or_path, subfolder, revision)
        return cls.from_file_content(config, pretrained_model_name_or_path, **overrides)

    @classmethod
    def from_file_content(cls, config, source, **overrides):
        """from_config of a scheduler_config.json's content; errors name source, its folder."""
        # diffusers sets _use_default_values on configs in memory and never writes it to a file.
        config = {name: value for name, value in config.items() if name != "_use_default_values"}
        try:
            return cls.from_config(config, **overrides)
        except ValueError as error:
            raise ValueError(f"{CONFIG_NAME} of {source}: {error}") from error

    def save_pretrained(self, save_directory):
        """Write scheduler_config.json as PyTorch diffusers reads it."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        options = {name: self.config[name] for name in self.defaults}
        options["_class_name"] = type(self).__name__.removeprefix("Flax")
        write_json(folder / CONFIG_NAME, options)

    def create_state(self):
        """The state before set_timesteps: enough for add_noise and get_velocity in training."""
        return SchedulerState(
            common=CommonSchedulerState(*map(to_device, noise_schedule(self.config))),
            init_noise_sigma=to_device(1.0),
            timesteps=to_device(np.arange(len(self))[::-1]),
            sigmas=None,
            step_index=to_device(0),
            tables={},
            memory={},
        )

    def set_timesteps(self, state, num_inference_steps, shape=(), first_step=0):
        """Choose the timesteps of a sampling run and work out every step's weights.

        Args:
            state: from create_state or an earlier run.
            num_inference_steps: Python int, 1 to num_train_timesteps.
            shape: shape of the samples; PNDM and DPM-Solver need it for their memory.
            first_step: Python int, how many steps at the noisy end are left out, for a run that
                begins with a noised picture; multistep methods start anew there.

        Returns:
            The state at its first step. state.timesteps has an entry per step that is left (PNDM:
            one more, or nine).

        Raises:
            ValueError: num_inference_steps is out of range or leads to timesteps that are.
        """
        if not isinstance(num_inference_steps, int) or not 1 <= num_inference_steps <= len(self):
            raise ValueError(
                f"num_inference_steps={num_inference_steps} must be a whole number from 1 to "
                f"{len(self)}"
            )
        if not isinstance(first_step, int) or not 0 <= first_step < num_inference_steps:
            raise ValueError(
                f"first_step={first_step} must be a whole number from 0 to "
                f"{num_inference_steps - 1}, the last step"
            )
        plan = self._plan(num_inference_steps, first_step)
        first, final = plan["timesteps"].max(), plan["timesteps"].min()
        if first >= len(self) or final < 0:
            raise ValueError(
                f"num_inference_steps={num_inference_steps} with steps_offset="
                f"{self.config.steps_offset} visits timesteps {final:g} to {first:g}, outside 0 to "
                f"{len(self) - 1}; take fewer steps or steps_offset=0"
            )
        memory = {k: jnp.zeros((*lead, *shape), jnp.float32) for k, lead in self._memory().items()}
        return state.replace(
            step_index=to_device(0),
            memory=memory,
            num_inference_steps=num_inference_steps,
            **jax.tree.map(to_device, plan),
        )

    def scale_model_input(self, state, sample, timestep=None):
        """The sample as the model expects it at this step: itself, except for Euler."""
        return sample

    def step(
        self,
        state,
        model_output,
        timestep,
        sample,
        key=None,
        return_dict=True,
        *,
        noise=None,
        **options,
    ):
        """Step from the current timestep to the next one, in float32.

        Args:
            state: from set_timesteps or the step before; it counts the steps.
            model_output: of scale_model_input(state, sample), as prediction_type says; same shape.
            timestep: state.timesteps[state.step_index]; the count decides, not this value.
            sample: the noisy sample, any shape and float dtype.
            key: PRNG key of this step's noise; DDPM, Euler-ancestral, DDIM with eta.
            return_dict: False returns a plain tuple.
            noise: standard normal noise of the same shape, to use in place of key.
            options: eta (DDIM only), 0 to 1, the share of DDPM's noise; 0 is deterministic.

        Returns:
            FlaxSchedulerOutput: prev_sample in sample's dtype, and the next state.

        Raises:
            ValueError: set_timesteps was not called or with another shape, or noise is needed and
                neither key nor noise given.
        """
        if state.num_inference_steps is None:
            raise ValueError("the state has no timesteps; call set_timesteps before step")
        for array in state.memory.values():
            if array.shape[array.ndim - sample.ndim :] != sample.shape:
                raise ValueError(
                    f"sample has shape {sample.shape}, which set_timesteps was not told; "
                    f"call set_timesteps(state, {state.num_inference_steps}, sample.shape)"
                )

        def draw_noise():
            if noise is not None:
                return noise.astype(jnp.float32)
            if key is None:
                raise ValueError(
                    f"key=None but {type(self).__name__} draws noise in every step; "
                    "pass key=jax.random.fold_in(key, i), or noise="
                )
            return jax.random.normal(key, sample.shape, jnp.float32)

        now = {name: table[state.step_index] for name, table in state.tables.items()}
        x_t, model_output = sample.astype(jnp.float32), model_output.astype(jnp.float32)
        x_prev, memory = self._advance(now, state.memory, x_t, model_output, draw_noise, **options)
        state = state.replace(step_index=state.step_index + 1, memory=memory)
        output = FlaxSchedulerOutput(x_prev.astype(sample.dtype), state)
        return output if return_dict else output.to_tuple()

    def add_noise(self, state, original_samples, noise, timesteps):
        """Noise clean samples to given timesteps (the forward process).

        Args:
            state: from create_state or set_timesteps.
            original_samples: clean samples, (B, ...).
            noise: standard normal, same shape.
            timesteps: (B,) or scalar; for Euler and DPM-Solver after set_timesteps, of the run.

        Returns:
            Noisy samples in original_samples' dtype; for Euler before scale_model_input.

        Source: DDPM (arXiv 2006.11239) equation 4.
        """
        alpha_t, sigma_t = self._alpha_sigma(state, original_samples, timesteps)
        x_0, eps = original_samples.astype(jnp.float32), noise.astype(jnp.float32)
        return (alpha_t * x_0 + sigma_t * eps).astype(original_samples.dtype)

    def get_velocity(self, state, sample, noise, timesteps):
        """What a v-prediction model learns: alpha_t eps - sigma_t x0; arguments as in add_noise.

        Source: progressive distillation (arXiv 2202.00512) appendix D.
        """
        alpha_t, sigma_t = self._alpha_sigma(state, sample, timesteps)
        x_0, eps = sample.astype(jnp.float32), noise.astype(jnp.float32)
        return (alpha_t * eps - sigma_t * x_0).astype(sample.dtype)

    def _alpha_sigma(self, state, sample, timesteps):
        """sqrt(alpha_bar) and sqrt(1 - alpha_bar) at the timesteps, shaped to multiply a sample."""
        alpha_bar = state.common.alphas_cumprod[jnp.asarray(timesteps)]
        alpha_bar = alpha_bar.reshape(alpha_bar.shape + (1,) * (sample.ndim - alpha_bar.ndim))
        return jnp.sqrt(alpha_bar), jnp.sqrt(1 - alpha_bar)

    def _plan(self, num_inference_steps, first_step):
        """What a run replaces in the state, NumPy: timesteps, tables, sigmas, init_noise_sigma."""
        raise NotImplementedError

    def _memory(self):
        """Leading axes of each array that the steps remember."""
        return {}

    def _advance(self, now, memory, x_t, model_output, draw_noise):
        """(next sample, next memory): weighted x_t, x0, eps and noise, as far as `now` has them."""
        x_0, eps = self._predict(now, x_t, model_output)
        x_prev = now["x0_weight"] * x_0
        if "x_t_weight" in now:
            x_prev = x_prev + now["x_t_weight"] * x_t
        if "eps_weight" in now:
            x_prev = x_prev + now["eps_weight"] * eps
        if "std" in now:
            x_prev = x_prev + now["std"] * draw_noise()
        return x_prev, memory

    def _predict(self, now, x_t, model_output):
        x_0, eps = predict_x0_and_eps(
            self.config.prediction_type, now["alpha"], now["sigma"], x_t, model_output
        )
        if self.config.get("clip_sample"):
            x_0 = jnp.clip(x_0, -self.config.clip_sample_range, self.config.clip_sample_range)
        return x_0, eps

    def _whole_timesteps(self, num_inference_steps):
        return np.round(timestep_grid(self.config, num_inference_steps)).astype(int)

    def _alpha_bars(self, start, end):
        """float64 alpha_bar where steps start and where they end; timestep < 0 is the clean end."""
        alpha_bar = noise_schedule(self.config)[2].astype(np.float64)
        clean = 1.0 if self.config.get("set_alpha_to_one", True) else alpha_bar[0]
        start, end = np.minimum(start, len(self) - 1), np.minimum(end, len(self) - 1)
        if self.config.prediction_type == "epsilon" and (alpha_bar[start] == 0).any():
            raise ValueError(
                "prediction_type='epsilon' tells nothing at the last training timestep, which "
                "rescale_betas_zero_snr=True leaves without signal; "
                "use v_prediction or timestep_spacing='leading'"
            )
        return alpha_bar[start], np.where(end < 0, clean, alpha_bar[end])
