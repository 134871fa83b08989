"""Common to the Flax schedulers: options, files, outputs, the choice of timesteps.

FlaxSchedulerMixin is their base class; ddpm.py shows how to use them.
"""

import inspect
from enum import Enum
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from diffusers_flax.loading.configs import ConfigMixin, FrozenConfig
from diffusers_flax.loading.hub import take_hub_options
from diffusers_flax.outputs import ModelOutput
from diffusers_flax.schedulers.options import CHOICES, DEFAULTS, FIRST_ARGUMENTS, checked_option

CONFIG_NAME = "scheduler_config.json"


class FlaxKarrasDiffusionSchedulers(Enum):
    """The schedulers that can be built from one another's config."""

    FlaxDDIMScheduler = 1
    FlaxDDPMScheduler = 2
    FlaxPNDMScheduler = 3
    FlaxLMSDiscreteScheduler = 4
    FlaxDPMSolverMultistepScheduler = 5
    FlaxEulerDiscreteScheduler = 6
    FlaxEulerAncestralDiscreteScheduler = 7


@struct.dataclass
class FlaxSchedulerOutput(ModelOutput):
    """What step returns: the sample at the next timestep and the state for it."""

    prev_sample: jax.Array
    state: "SchedulerState | None" = None


class SchedulerState:
    """Base of the states: pytrees that keep their structure and dtypes from step to step."""

    @classmethod
    def create(cls, *args, **kwargs):
        """The state with the given fields; the others have their defaults."""
        return cls(*args, **kwargs)


# Noise schedules, timestep grids and the forward process


def to_device(array):
    """Any array as float32, int32 or bool, also where 64-bit types are switched on."""
    array = np.asarray(array)
    return jnp.asarray(array, {"f": jnp.float32, "i": jnp.int32, "b": jnp.bool_}[array.dtype.kind])


@struct.dataclass
class CommonSchedulerState:
    """The training noise schedule, float32 arrays of (num_train_timesteps,)."""

    alphas: jax.Array
    betas: jax.Array
    alphas_cumprod: jax.Array

    @classmethod
    def create(cls, scheduler):
        """The schedule that a scheduler's config describes."""
        return cls(*map(to_device, scheduler._noise_schedule()))


def training_betas(config):
    """Noise variance added by each training timestep, float32 (num_train_timesteps,).

    Source: linear, DDPM (arXiv 2006.11239) section 4; scaled_linear, latent diffusion
    (arXiv 2112.10752); squaredcos_cap_v2, cosine_betas.
    """
    num_steps = config.num_train_timesteps
    if config.trained_betas is not None:
        betas = np.asarray(config.trained_betas)
    elif config.beta_schedule == "linear":
        betas = np.linspace(config.beta_start, config.beta_end, num_steps)
    elif config.beta_schedule == "scaled_linear":
        betas = np.linspace(config.beta_start**0.5, config.beta_end**0.5, num_steps) ** 2
    else:
        betas = cosine_betas(num_steps)
    return betas.astype(np.float32)


def cosine_betas(num_steps, max_beta=0.999):
    """Betas of the cosine schedule, at most max_beta, float64 (num_steps,).

    Source: improved DDPM (arXiv 2102.09672), equation 17.
    """
    time = np.arange(num_steps + 1) / num_steps
    alpha_bar = np.cos((time + 0.008) / 1.008 * np.pi / 2) ** 2
    return np.minimum(1 - alpha_bar[1:] / alpha_bar[:-1], max_beta)


def zero_terminal_snr(alpha_bar):
    """Shift and scale alpha_bar, (num_train_timesteps,), so that its last value is 0.

    Source: arXiv 2305.08891, algorithm 1.
    """
    root = np.sqrt(alpha_bar)
    return ((root - root[-1]) * (root[0] / (root[0] - root[-1]))) ** 2


def noise_schedule(config, zero_snr=False):
    """The training schedule: float32 (alphas, betas, alphas_cumprod), each (num_train_timesteps,).

    Args:
        config: num_train_timesteps, beta_start, beta_end, beta_schedule, trained_betas.
        zero_snr: True rescales it to end without signal, see zero_terminal_snr.
    """
    # Betas round to float32 before the product, as they did for the published weights: where beta
    # nears 1, the rounding of 1 - beta is worth 3e-5.
    betas = training_betas(config)
    alphas = 1 - betas
    alpha_bar = np.cumprod(alphas, dtype=np.float64)
    if zero_snr:
        alpha_bar = zero_terminal_snr(alpha_bar)
        alphas = np.append(alpha_bar[:1], alpha_bar[1:] / alpha_bar[:-1])
        betas = 1 - alphas
    return tuple(table.astype(np.float32) for table in (alphas, betas, alpha_bar))


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


def betas_for_alpha_bar(num_diffusion_timesteps, max_beta=0.999, dtype=jnp.float32):
    """cosine_betas as a JAX array of the given dtype."""
    return jnp.asarray(cosine_betas(num_diffusion_timesteps, max_beta), dtype)


def broadcast_to_shape_from_left(x, shape):
    """Broadcast x over new last axes to shape, whose first axes are x's."""
    return jnp.broadcast_to(x.reshape(x.shape + (1,) * (len(shape) - x.ndim)), shape)


def get_sqrt_alpha_prod(state, original_samples, noise, timesteps):
    """sqrt(alpha_bar) and sqrt(1 - alpha_bar) at the timesteps, shaped to multiply a sample.

    Args:
        state: CommonSchedulerState.
        original_samples: (B, ...).
        noise: not used; part of the published signature.
        timesteps: (B,) or scalar integers.

    Returns:
        Two float32 arrays of shape (B, 1, ...), or (1, ...) for a scalar.
    """
    alpha_bar = state.alphas_cumprod[jnp.asarray(timesteps)]
    alpha_bar = alpha_bar.reshape(-1, *(1,) * (original_samples.ndim - 1))
    return jnp.sqrt(alpha_bar), jnp.sqrt(1 - alpha_bar)


def add_noise_common(state, original_samples, noise, timesteps):
    """sqrt(alpha_bar) x0 + sqrt(1 - alpha_bar) eps, in original_samples' dtype.

    Args as in get_sqrt_alpha_prod; noise: standard normal, like original_samples.

    Source: DDPM (arXiv 2006.11239) equation 4.
    """
    alpha_t, sigma_t = get_sqrt_alpha_prod(state, original_samples, noise, timesteps)
    return mix(alpha_t, original_samples, sigma_t, noise).astype(original_samples.dtype)


def get_velocity_common(state, sample, noise, timesteps):
    """sqrt(alpha_bar) eps - sqrt(1 - alpha_bar) x0, in sample's dtype; args as in add_noise_common.

    Source: progressive distillation (arXiv 2202.00512) appendix D.
    """
    alpha_t, sigma_t = get_sqrt_alpha_prod(state, sample, noise, timesteps)
    return mix(alpha_t, noise, -sigma_t, sample).astype(sample.dtype)


def mix(weight, x, other_weight, other):
    """weight x + other_weight other in float32."""
    return weight * x.astype(jnp.float32) + other_weight * other.astype(jnp.float32)


class FlaxSchedulerMixin(ConfigMixin):
    """Base class of the schedulers: options, files, states, forward noising.

    A scheduler holds options only: it equals every scheduler with the same options, hashes, and may
    be a static argument of jit. A subclass defines `defaults` (its options), `arguments` (those
    that the constructor takes by position, after FIRST_ARGUMENTS), `choices` (supported values, the
    default first; also of options with a single supported value), `create_state`, `_plan`, `step`.
    """

    defaults = DEFAULTS
    arguments = ()
    choices = CHOICES
    synonyms = {}  # noqa: RUF012 - (option, another class's value): this class's

    config_name = CONFIG_NAME
    ignore_for_config = ("dtype",)
    has_compatibles = True
    has_state = True
    takes_timesteps = False  # whether set_timesteps takes timesteps, as in PyTorch diffusers
    order = 1
    _compatibles = tuple(FlaxKarrasDiffusionSchedulers.__members__)

    def __init_subclass__(cls):
        defaults = cls.defaults | {"dtype": jnp.float32}
        names = dict.fromkeys((*FIRST_ARGUMENTS, *cls.arguments, "dtype", *defaults))
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        cls.__signature__ = inspect.Signature(
            [inspect.Parameter(name, kind, default=defaults[name]) for name in names]
        )

    def __init__(self, *args, **options):
        names = tuple(self.__signature__.parameters)
        if len(args) > len(names):
            raise TypeError(f"{type(self).__name__} takes {len(names)} arguments at most")
        if twice := options.keys() & set(names[: len(args)]):
            raise TypeError(f"{type(self).__name__} is given {', '.join(sorted(twice))} twice")
        # Keys that begin with an underscore describe a config, not the scheduler.
        options = {k: v for k, v in options.items() if not k.startswith("_")}
        options |= dict(zip(names, args))
        self.dtype = options.pop("dtype", None) or jnp.float32  # the arithmetic is float32's

        unknown = sorted(options.keys() - self.defaults.keys() - self.choices.keys())
        if unknown:
            raise ValueError(
                f"{type(self).__name__} has no option {', '.join(unknown)}; "
                f"it has {', '.join(sorted(self.defaults))}"
            )
        given = {
            name: self.synonyms.get((name, value), value) if isinstance(value, str) else value
            for name, value in options.items()
            if value is not None
        }
        for name, supported in self.choices.items():
            if given.get(name, supported[0]) not in supported:
                raise ValueError(
                    f"{name}={given[name]!r} is not supported by {type(self).__name__}; "
                    f"use {' or '.join(map(repr, supported))}, or another scheduler"
                )
        values = self.defaults | given
        for name in self.defaults.keys() & given.keys():
            values[name] = checked_option(name, given[name], self.defaults[name])
        num_steps, betas = values["num_train_timesteps"], values["trained_betas"]
        if betas is not None and len(betas) != num_steps:
            raise ValueError(
                f"trained_betas has {len(betas)} values but num_train_timesteps={num_steps}; "
                "give one beta per training timestep"
            )
        lowest, highest = values.get("sigma_min"), values.get("sigma_max")
        if None not in (lowest, highest) and lowest >= highest:
            raise ValueError(f"sigma_min={lowest} must be below sigma_max={highest}")
        # As in diffusers: another class takes over the options that were given, not the defaults.
        values["_use_default_values"] = tuple(sorted(self.defaults.keys() - given.keys()))
        self._config = FrozenConfig(values)

    @property
    def config(self):
        """The options, read-only, and those carried over from the config of another class."""
        return self._config

    @property
    def init_noise_sigma(self):
        """Standard deviation of the noise to start from; a run's own is state.init_noise_sigma."""
        return 1.0

    @property
    def compatibles(self):
        """The scheduler classes that can be built from this one's config."""
        classes = [FlaxSchedulerMixin]
        for cls in classes:  # grows
            classes += cls.__subclasses__()
        return [cls for cls in classes if cls.__name__ in self._compatibles]

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

        Options that this class lacks have no effect; its config carries them over.

        Args:
            config: mapping, such as another scheduler's `config`, or a path as for from_pretrained.
            return_unused_kwargs: True also returns the unknown arguments, instead of
                raising for an override.
            **overrides: options to replace.

        Returns:
            The scheduler, or (scheduler, dict).

        Raises:
            ValueError: an option has a value that is not supported, or an override is unknown.
        """
        if config is None:
            raise ValueError("config=None; give a mapping, such as another scheduler's config")
        if isinstance(config, str | Path):
            config = cls._read_config(config)
        known = {*cls.defaults, *cls.choices, "dtype"}
        left_open = config.get("_use_default_values", ())
        config = {k: v for k, v in config.items() if k not in left_open and not k.startswith("_")}
        carried = {name: value for name, value in config.items() if name not in known}
        unused = {name: value for name, value in overrides.items() if name not in known}
        taken = {name: value for name, value in config.items() if name in known - {"dtype"}}
        taken |= overrides
        if return_unused_kwargs:
            taken = {name: value for name, value in taken.items() if name not in unused}
        scheduler = cls(**taken)
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
        config = cls._read_config(pretrained_model_name_or_path, subfolder, revision, **hub)
        source = pretrained_model_name_or_path
        if return_unused_kwargs:
            scheduler, unused = cls.from_file_content(config, source, True, **kwargs)
            return scheduler, scheduler.create_state(), unused
        scheduler = cls.from_file_content(config, source, **kwargs)
        return scheduler, scheduler.create_state()

    @classmethod
    def from_file_content(cls, config, source, return_unused_kwargs=False, **overrides):
        """from_config of a scheduler_config.json's content; errors name source, its directory."""
        # diffusers sets _use_default_values on configs in memory and never writes it to a file.
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
            shape: shape of the samples; PNDM, LMS and DPM-Solver need it for their memory.
            first_step: Python int, how many steps at the noisy end are left out, for a run that
                begins with a noised image; multistep methods start there without history.
            timesteps: the timesteps to visit, num_inference_steps integers, decreasing; None: the
                scheduler's own choice. Only of classes with takes_timesteps.

        Returns:
            The state at its first step. state.timesteps has an entry per step that is left (PNDM:
            one more, or nine).

        Raises:
            ValueError: num_inference_steps is out of range or leads to timesteps that are, or
                timesteps do not fit.
        """
        is_integer = isinstance(num_inference_steps, int | np.integer)
        if not is_integer or not 1 <= num_inference_steps <= len(self):
            raise ValueError(
                f"num_inference_steps={num_inference_steps} must be a whole number from 1 to "
                f"{len(self)}"
            )
        if not isinstance(first_step, int) or not 0 <= first_step < num_inference_steps:
            raise ValueError(
                f"first_step={first_step} must be a whole number from 0 to "
                f"{num_inference_steps - 1}, the last step"
            )
        if timesteps is not None:
            timesteps = self._checked_timesteps(timesteps, num_inference_steps)
        plan = self._plan(int(num_inference_steps), first_step, timesteps)
        first, final = plan["timesteps"].max(), plan["timesteps"].min()
        if first >= len(self) or final < 0:
            raise ValueError(
                f"num_inference_steps={num_inference_steps} with steps_offset="
                f"{self.config.steps_offset} visits timesteps {final:g} to {first:g}, outside 0 to "
                f"{len(self) - 1}; take fewer steps or steps_offset=0"
            )
        return state.replace(
            num_inference_steps=int(num_inference_steps),
            **jax.tree.map(to_device, plan),
            **self._memory(tuple(shape)),
        )

    def _checked_timesteps(self, timesteps, num_inference_steps):
        """Given timesteps as an array, int (num_inference_steps,)."""
        name = type(self).__name__
        if not self.takes_timesteps:
            raise ValueError(
                f"timesteps={timesteps} cannot be chosen with {name}; use DDPM, Euler, "
                "DPM-Solver++, LCM or TCD, or leave them out"
            )
        values = np.asarray(timesteps)
        if values.shape != (num_inference_steps,) or values.dtype.kind != "i":
            raise ValueError(
                f"timesteps={timesteps} must be num_inference_steps={num_inference_steps} integers"
            )
        if (np.diff(values) >= 0).any() or values[0] >= len(self) or values[-1] < 0:
            raise ValueError(
                f"timesteps={timesteps} must decrease and be from {len(self) - 1} to 0"
            )
        return values

    def _plan(self, num_inference_steps, first_step, timesteps):
        """The state's fields that a run sets, NumPy arrays: timesteps, step counter, sigmas, ...

        timesteps: those given, or None.
        """
        raise NotImplementedError

    def _memory(self, shape):
        """The state's history arrays, empty, for samples of this shape."""
        return {}

    def _option(self, name):
        """An option of this class; None where its config merely carries it for another one."""
        return self.config[name] if name in self.defaults else None

    def _noise_schedule(self):
        return noise_schedule(self.config, self._option("rescale_betas_zero_snr"))

    # ----------------------------------------------------------------- steps

    def scale_model_input(self, state, sample, timestep=None):
        """The model's input at this timestep: the sample, which Euler and LMS scale."""
        return sample

    def add_noise(self, state, original_samples, noise, timesteps):
        """Noise clean samples to given timesteps (the forward process).

        Args:
            state: from create_state or set_timesteps.
            original_samples: clean samples, (B, ...).
            noise: standard normal, same shape.
            timesteps: (B,) or scalar; for Euler, LMS and DPM-Solver after set_timesteps, of the
                run.

        Returns:
            Noisy samples in original_samples' dtype; for Euler and LMS before scale_model_input.

        Source: DDPM (arXiv 2006.11239) equation 4.
        """
        return add_noise_common(state.common, original_samples, noise, timesteps)

    def get_velocity(self, state, sample, noise, timesteps):
        """What a v-prediction model learns: alpha_t eps - sigma_t x0; arguments as in add_noise.

        Source: progressive distillation (arXiv 2202.00512) appendix D.
        """
        return get_velocity_common(state.common, sample, noise, timesteps)

    def _check_run(self, state, sample, memory=None):
        """Raise if set_timesteps was not called, or for samples of another shape than memory's."""
        if state.num_inference_steps is None:
            raise ValueError("the state has no timesteps; call set_timesteps before step")
        if memory is not None and memory.shape[memory.ndim - sample.ndim :] != sample.shape:
            raise ValueError(
                f"sample has shape {sample.shape}, which set_timesteps was not told; "
                f"call set_timesteps(state, {state.num_inference_steps}, sample.shape)"
            )

    def _noise(self, key, noise, sample):
        """The noise of a step, float32: as given, or drawn as the published DDPM scheduler drew."""
        if noise is not None:
            return noise.astype(jnp.float32)
        if key is None:
            raise ValueError(
                f"key=None but {type(self).__name__} draws noise in every step; "
                "pass key=jax.random.fold_in(key, i), or noise="
            )
        return jax.random.normal(jax.random.split(key, 1)[0], sample.shape, jnp.float32)


Scheduler = FlaxSchedulerMixin
