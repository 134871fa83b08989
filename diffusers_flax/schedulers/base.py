"""The schedulers' base class: options, files, states, forward noising.

A scheduler is a hashable set of options, so it may be a static argument of jit; all arrays are in
its state. Names and call signatures are the removed Flax schedulers', numbers PyTorch diffusers':

    scheduler, state = scheduler_from_pretrained("my_model")  # factory.py
    state = scheduler.set_timesteps(state, 20, latents.shape)
    latents = latents * state.init_noise_sigma

    def body(i, carry):
        latents, state = carry
        t = state.timesteps[i]
        eps_pred = unet(scheduler.scale_model_input(state, latents, t), t)
        step_key = jax.random.fold_in(key, i)  # schedulers that draw no noise do not use it
        return scheduler.step(state, eps_pred, t, latents, key=step_key, return_dict=False)

    latents, state = jax.lax.fori_loop(0, len(state.timesteps), body, (latents, state))
"""

import inspect
from enum import Enum
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

import diffusers_flax
from diffusers_flax.loading.configs import ConfigMixin, FrozenConfig
from diffusers_flax.loading.hub import take_hub_options
from diffusers_flax.outputs import ModelOutput
from diffusers_flax.schedulers.noise_schedule import (
    get_sqrt_alpha_prod,
    mix,
    noise_schedule,
    to_device,
)

CONFIG_NAME = "scheduler_config.json"

# Options of every scheduler, and the supported values of some, the default first.
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
FIRST_ARGUMENTS = tuple(DEFAULTS)[:5]


class FlaxKarrasDiffusionSchedulers(Enum):
    """The published schedulers, each of which can be built from another's config."""

    FlaxDDIMScheduler = 1
    FlaxDDPMScheduler = 2
    FlaxPNDMScheduler = 3
    FlaxLMSDiscreteScheduler = 4
    FlaxDPMSolverMultistepScheduler = 5
    FlaxEulerDiscreteScheduler = 6
    FlaxEulerAncestralDiscreteScheduler = 7


@struct.dataclass
class FlaxSchedulerOutput(ModelOutput):
    """The output of step: the sample at the next timestep, and the next state."""

    prev_sample: jax.Array
    state: "SchedulerState | None" = None


class SchedulerState:
    """Base of the states: pytrees that keep their structure and dtypes from step to step."""

    @classmethod
    def create(cls, *args, **kwargs):
        """A state of these fields; the other fields have their defaults."""
        return cls(*args, **kwargs)


def timestep_grid(config, num_steps):
    """Timesteps of a run, as timestep_spacing says.

    Args:
        config: timestep_spacing, num_train_timesteps, steps_offset.
        num_steps: number of steps, 1 to num_train_timesteps.

    Returns:
        Decreasing timesteps, float64 (num_steps,); whole numbers unless the spacing is linspace.

    Raises:
        ValueError: steps_offset moves a timestep beyond training's.

    Source: arXiv 2305.08891, table 2.
    """
    last = config.num_train_timesteps
    if config.timestep_spacing == "linspace":
        return np.linspace(0, last - 1, num_steps)[::-1]
    if config.timestep_spacing == "trailing":
        # The slice drops the extra entry that rounding adds for some counts (61, 103, ...).
        grid = np.arange(last, 0, -last / num_steps)[:num_steps]
        return np.round(grid) - 1
    grid = (np.arange(num_steps) * (last // num_steps) + config.steps_offset)[::-1] * 1.0
    if grid[0] >= last or grid[-1] < 0:
        raise ValueError(
            f"num_inference_steps={num_steps} with steps_offset={config.steps_offset} visits "
            f"timesteps {grid[-1]:g} to {grid[0]:g}, outside 0 to {last - 1}"
        )
    return grid


def append(arrays, newest):
    """Drop the first array, the oldest, and append the newest."""
    return jnp.concatenate([arrays[1:], newest[None]])


class FlaxSchedulerMixin(ConfigMixin):
    """Base class of the schedulers; schedulers of one class with equal options are equal.

    A subclass defines `defaults` (its options), `arguments` (positional arguments of the
    constructor after first_arguments), `choices` (an option's supported values, the default first,
    also where there is one), `output_class`, `create_state`, `_plan` and `_advance`; if it needs
    them, the attributes below. A scheduler with several evaluations in a step repeats or adds
    timesteps, as PNDM does: the loop evaluates the UNet once for each of state.timesteps.
    """

    defaults = DEFAULTS
    first_arguments = FIRST_ARGUMENTS
    arguments = ()
    choices = CHOICES
    output_class = FlaxSchedulerOutput
    history = None  # the state's field with arrays of earlier steps, samples along the last axes
    history_length = 1
    needs_run = True  # whether step needs set_timesteps
    takes_timesteps = False  # True: set_timesteps takes timesteps, as in PyTorch diffusers
    takes_denoising_range = True  # whether a run may begin or end at a fraction of the denoising
    is_flow = False  # whether the model predicts the velocity of a rectified flow

    config_name = CONFIG_NAME
    ignore_for_config = ("dtype",)
    has_compatibles = True
    has_state = True
    order = 1  # PyTorch's attribute: timesteps per step
    _compatibles = tuple(FlaxKarrasDiffusionSchedulers.__members__)

    def __init_subclass__(cls):
        defaults = cls.defaults | {"dtype": jnp.float32}
        names = dict.fromkeys((*cls.first_arguments, *cls.arguments, "dtype", *defaults))
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        cls.__signature__ = inspect.Signature(
            [inspect.Parameter(name, kind, default=defaults[name]) for name in names]
        )

    def __init__(self, *args, **options):
        # Keys that begin with an underscore describe a config, not the scheduler.
        options = {k: v for k, v in options.items() if not k.startswith("_")}
        parameters = self.__signature__.parameters
        named = {name: value for name, value in options.items() if name in parameters}
        options |= self.__signature__.bind(*args, **named).arguments
        self.dtype = options.pop("dtype", None) or jnp.float32  # without effect: steps are float32
        if unknown := sorted(options.keys() - self.defaults.keys() - self.choices.keys()):
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
        values = self.defaults | given
        if "trained_betas" in given:
            values["trained_betas"] = tuple(map(float, np.asarray(given["trained_betas"], float)))
        betas = values.get("trained_betas")
        if betas is not None and len(betas) != values["num_train_timesteps"]:
            raise ValueError("trained_betas needs num_train_timesteps values")
        # As in diffusers, another class's config takes over these options' values, not defaults.
        values["_use_default_values"] = tuple(sorted(self.defaults.keys() - given.keys()))
        self._config = FrozenConfig(values)

    @property
    def config(self):
        """The options, read-only, and options carried over from another class's config."""
        return self._config

    @property
    def init_noise_sigma(self):
        """Standard deviation of the initial noise; a run's own is state.init_noise_sigma."""
        return 1.0

    @property
    def compatibles(self):
        """The scheduler classes that can be built from this one's config."""
        return [getattr(diffusers_flax, name) for name in self._compatibles]

    def __eq__(self, other):
        return type(self) is type(other) and self._file_content() == other._file_content()

    def __hash__(self):
        return hash(self.to_json_string())

    def __len__(self):
        return self.config.num_train_timesteps

    def __repr__(self):
        return f"{type(self).__name__} {self.to_json_string()}"

    # ----------------------------------------------------------------- config files

    @classmethod
    def from_config(cls, config=None, return_unused_kwargs=False, **overrides):
        """Build from the options of this or another class.

        The config carries over options that this class lacks, without effect.

        Args:
            config: mapping, such as another scheduler's `config`, or a path as for from_pretrained.
            return_unused_kwargs: True also returns unknown options, and accepts unknown overrides.
            **overrides: options to replace.

        Returns:
            The scheduler, or (scheduler, dict).

        Raises:
            ValueError: an option has a value that is not supported, or an override is unknown.
        """
        if isinstance(config, str | Path):
            config = cls._read_config(config)
        known = {*cls.defaults, *cls.choices}
        skipped = {"dtype", *config.get("_use_default_values", ())}
        config = {k: v for k, v in config.items() if k not in skipped and k[0] != "_"}
        options = {name: value for name, value in config.items() if name in known}
        carried = {name: value for name, value in config.items() if name not in known}
        unused = {k: v for k, v in overrides.items() if k not in known | {"dtype"}}
        if return_unused_kwargs:
            overrides = {k: v for k, v in overrides.items() if k not in unused}
        scheduler = cls(**options | overrides)
        scheduler._config = FrozenConfig({**carried, **scheduler.config})
        return (scheduler, carried | unused) if return_unused_kwargs else scheduler

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path=None,
        subfolder=None,
        return_unused_kwargs=False,
        *,
        revision=None,
        **kwargs,
    ):
        """Read scheduler_config.json, of this or another class.

        Args:
            pretrained_model_name_or_path, subfolder, revision: as in load_config.
            return_unused_kwargs: as in from_config.
            **kwargs: options to replace, and cache_dir, force_download, local_files_only, token.

        Returns:
            (scheduler, state), or (scheduler, state, dict).

        Raises:
            ValueError: there is no such file, or as in from_config.
        """
        hub = take_hub_options(kwargs)
        source = pretrained_model_name_or_path
        config = cls._read_config(source, subfolder, revision, **hub)
        result = cls.from_file_content(config, source, return_unused_kwargs, **kwargs)
        scheduler, *unused = result if return_unused_kwargs else (result,)
        return scheduler, scheduler.create_state(), *unused

    @classmethod
    def from_file_content(cls, config, source, return_unused_kwargs=False, **overrides):
        """from_config of a scheduler_config.json's content; source: its directory, for errors."""
        # diffusers sets _use_default_values in memory only; in a file it means nothing.
        config = {name: value for name, value in config.items() if name != "_use_default_values"}
        try:
            return cls.from_config(config, return_unused_kwargs, **overrides)
        except ValueError as error:
            raise ValueError(f"{CONFIG_NAME} of {source}: {error}") from error

    def save_pretrained(self, save_directory, push_to_hub=False):
        """Write scheduler_config.json as PyTorch diffusers reads it."""
        self.save_config(save_directory, push_to_hub)

    def _file_content(self):
        options = {k: v for k, v in self.config.items() if not k.startswith("_")}
        return options | {"_class_name": type(self).__name__.removeprefix("Flax")}

    # ----------------------------------------------------------------- states

    def set_timesteps(self, state, num_inference_steps, shape=(), first_step=0, timesteps=None):
        """Choose the timesteps of a sampling run.

        Args:
            state: from create_state or an earlier run.
            num_inference_steps: Python or NumPy integer, 1 to num_train_timesteps.
            shape: shape of the samples; PNDM, LMS and DPM-Solver need it for their history.
            first_step: Python int, number of steps to leave out at the noisy end, for a run that
                begins with a noised image; multistep methods start there without history.
            timesteps: num_inference_steps decreasing integers; None: the scheduler's own choice.
                Only for classes with takes_timesteps.

        Returns:
            The state before its first step. state.timesteps has an entry per remaining step (PNDM:
            one more, or nine).

        Raises:
            ValueError: num_inference_steps or a timestep is out of range, or timesteps do not fit.
        """
        if num_inference_steps not in range(1, len(self) + 1):
            raise ValueError(
                f"num_inference_steps={num_inference_steps} must be a whole number from 1 to "
                f"{len(self)}"
            )
        if timesteps is not None:
            timesteps = self._checked_timesteps(timesteps, num_inference_steps)
        plan = self._plan(int(num_inference_steps), first_step, timesteps)
        return state.replace(
            num_inference_steps=int(num_inference_steps),
            **jax.tree.map(to_device, plan),
            **self._empty_history(tuple(shape)),
        )

    def _checked_timesteps(self, timesteps, num_inference_steps):
        """The caller's timesteps as an array, int (num_inference_steps,)."""
        if not self.takes_timesteps or self._option("use_karras_sigmas"):
            raise ValueError(
                f"timesteps={timesteps} cannot be chosen with {type(self).__name__}, nor with "
                "use_karras_sigmas=True; take ddpm, euler, dpmsolver++, lcm or tcd"
            )
        values = np.asarray(timesteps)
        decrease = (np.diff(values, prepend=len(self), append=-1) < 0).all()
        if values.shape != (num_inference_steps,) or values.dtype.kind != "i" or not decrease:
            raise ValueError(
                f"timesteps={timesteps} must be num_inference_steps={num_inference_steps} integers "
                f"that decrease and are from {len(self) - 1} to 0"
            )
        return values

    def _plan(self, num_inference_steps, first_step, timesteps):
        """A run's fields of the state, NumPy arrays: timesteps, step counter, sigmas, ...

        timesteps: the caller's own timesteps, or None.
        """
        raise NotImplementedError

    def _empty_history(self, shape):
        """The state's fields for past model outputs, zeros, for samples of this shape."""
        if self.history is None:
            return {}
        return {self.history: jnp.zeros((self.history_length, *shape), jnp.float32)}

    def _option(self, name):
        """An option's value; None for an option that the config carries for another class."""
        return self.config[name] if name in self.defaults else None

    def _noise_schedule(self):
        return noise_schedule(self.config, self._option("rescale_betas_zero_snr"))

    # ----------------------------------------------------------------- steps

    @property
    def vp_prediction_type(self):
        """The prediction_type for model inputs alpha x_0 + sigma eps, see noise_scales."""
        return self.config.prediction_type

    def model_timesteps(self, state, timesteps):
        """The model's timesteps in training: the timesteps, but log(sigma) / 4 for EDM.

        Args:
            state: from create_state.
            timesteps: (B,) integers in [0, num_train_timesteps).
        """
        return timesteps

    def draw_timesteps(self, keys):
        """Timesteps of training, one per key, integers (B,), uniform; of a flow see flow.py."""
        return jax.vmap(lambda key: jax.random.randint(key, (), 0, len(self)))(keys)

    def scale_model_input(self, state, sample, timestep=None):
        """The model's input at a timestep: the sample, scaled by Euler and LMS."""
        return sample

    def add_noise(self, state, original_samples, noise, timesteps):
        """Add the noise of timesteps to clean samples (the forward process).

        Args:
            state: from create_state or set_timesteps.
            original_samples: clean samples, (B, ...).
            noise: standard normal, same shape.
            timesteps: (B,) or scalar; after set_timesteps, Euler, LMS and DPM-Solver take the
                run's.

        Returns:
            Noisy samples in original_samples' dtype; for Euler and LMS before scale_model_input.

        Source: DDPM (arXiv 2006.11239) equation 4.
        """
        alpha_t, sigma_t = self.scales(state, original_samples, timesteps)
        return mix(alpha_t, original_samples, sigma_t, noise).astype(original_samples.dtype)

    def get_velocity(self, state, sample, noise, timesteps):
        """The target of a v-prediction model, alpha_t eps - sigma_t x0; arguments as in add_noise.

        Source: progressive distillation (arXiv 2202.00512) appendix D.
        """
        alpha_t, sigma_t = self.scales(state, sample, timesteps)
        return mix(alpha_t, noise, -sigma_t, sample).astype(sample.dtype)

    def scales(self, state, sample, timesteps):
        """alpha_t and sigma_t at timesteps, shaped to multiply the sample."""
        return get_sqrt_alpha_prod(state.common, sample, None, timesteps)

    def step(
        self, state, model_output, timestep, sample, return_dict=True, *, key=None, noise=None
    ):
        """Step from a timestep to the next one of the run; arguments as in FlaxDDPMScheduler.step.

        key and noise are for schedulers that draw noise.
        """
        return self._take_step(state, model_output, timestep, sample, return_dict, key, noise)

    def _take_step(self, state, model_output, timestep, sample, return_dict, key, noise, **options):
        """step by _advance; options: further arguments of the class's step."""
        if self.needs_run:
            self._check_run(state, sample)

        def draw():
            """The step's noise, float32: given, or drawn as the published DDPM scheduler did."""
            if noise is not None:
                return noise.astype(jnp.float32)
            if key is None:
                raise ValueError(
                    f"key=None but {type(self).__name__} draws noise in every step; "
                    "pass key=jax.random.fold_in(key, i), or noise="
                )
            return jax.random.normal(jax.random.split(key, 1)[0], sample.shape, jnp.float32)

        x_t, model_output = sample.astype(jnp.float32), model_output.astype(jnp.float32)
        x_prev, changes = self._advance(state, timestep, x_t, model_output, draw, **options)
        output = self.output_class(x_prev.astype(sample.dtype), state.replace(**changes))
        return output if return_dict else output.to_tuple()

    def _advance(self, state, timestep, x_t, model_output, draw):
        """(x at the next timestep, {field: value} of the next state).

        x_t and model_output are float32; draw() is the step's noise.
        """
        raise NotImplementedError

    def _check_run(self, state, sample):
        """Raise a ValueError if set_timesteps was not called, or not with the sample's shape."""
        if state.num_inference_steps is None:
            raise ValueError("the state has no timesteps; call set_timesteps before step")
        if self.history and getattr(state, self.history).shape[1:] != sample.shape:
            raise ValueError(
                f"sample has shape {sample.shape}, which set_timesteps was not told; "
                f"call set_timesteps(state, {state.num_inference_steps}, sample.shape)"
            )
