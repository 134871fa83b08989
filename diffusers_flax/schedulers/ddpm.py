"""DDPM, DDIM, PNDM, Euler, LMS, DPM-Solver++, LCM and TCD as pure functions of a state.

The names and call signatures are those of the removed Flax schedulers, the numbers are PyTorch
diffusers'. A scheduler object holds options only and hashes, so it may be a static argument; every
array lives in its state:

    scheduler, state = scheduler_from_pretrained("my_model")
    state = scheduler.set_timesteps(state, 20, latents.shape)
    latents = latents * state.init_noise_sigma

    def body(i, carry):
        latents, state = carry
        t = state.timesteps[i]
        eps_pred = unet(scheduler.scale_model_input(state, latents, t), t)
        step_key = jax.random.fold_in(key, i)  # schedulers that draw no noise do not use it
        return scheduler.step(state, eps_pred, t, latents, key=step_key, return_dict=False)

    latents, state = jax.lax.fori_loop(0, len(state.timesteps), body, (latents, state))

DDPM, DDIM and PNDM are here, those that step in sigma in sigma.py, those of
distilled models in alpha.py, shared parts in base.py.
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from diffusers_flax.schedulers.alpha import (
    AlphaScheduler,
    DDIMSchedulerState,
    FlaxLCMScheduler,
    FlaxLCMSchedulerOutput,
    FlaxTCDScheduler,
    FlaxTCDSchedulerOutput,
    alpha_bar_at,
    as_index,
    next_timestep,
)
from diffusers_flax.schedulers.base import (
    CONFIG_NAME,
    CommonSchedulerState,
    FlaxKarrasDiffusionSchedulers,
    FlaxSchedulerMixin,
    FlaxSchedulerOutput,
    Scheduler,
    SchedulerState,
    add_noise_common,
    betas_for_alpha_bar,
    broadcast_to_shape_from_left,
    get_sqrt_alpha_prod,
    get_velocity_common,
)
from diffusers_flax.schedulers.options import CHOICES, DEFAULTS, FIRST_ARGUMENTS
from diffusers_flax.schedulers.sigma import (
    DPMSolverMultistepSchedulerState,
    EulerDiscreteSchedulerState,
    FlaxDPMSolverMultistepScheduler,
    FlaxDPMSolverMultistepSchedulerOutput,
    FlaxEulerAncestralDiscreteScheduler,
    FlaxEulerDiscreteScheduler,
    FlaxEulerDiscreteSchedulerOutput,
    FlaxLMSDiscreteScheduler,
    FlaxLMSSchedulerOutput,
    LMSDiscreteSchedulerState,
    append,
)

# All that scripts import; users of diffusers' Flax schedulers find every name here.
__all__ = [
    "CONFIG_NAME",
    "SCHEDULERS",
    "CommonSchedulerState",
    "DDIMSchedulerState",
    "DDPMSchedulerState",
    "DPMSolverMultistepSchedulerState",
    "EulerDiscreteSchedulerState",
    "FlaxDDIMScheduler",
    "FlaxDDIMSchedulerOutput",
    "FlaxDDPMScheduler",
    "FlaxDDPMSchedulerOutput",
    "FlaxDPMSolverMultistepScheduler",
    "FlaxDPMSolverMultistepSchedulerOutput",
    "FlaxEulerAncestralDiscreteScheduler",
    "FlaxEulerDiscreteScheduler",
    "FlaxEulerDiscreteSchedulerOutput",
    "FlaxKarrasDiffusionSchedulers",
    "FlaxLCMScheduler",
    "FlaxLCMSchedulerOutput",
    "FlaxLMSDiscreteScheduler",
    "FlaxLMSSchedulerOutput",
    "FlaxPNDMScheduler",
    "FlaxPNDMSchedulerOutput",
    "FlaxSchedulerMixin",
    "FlaxSchedulerOutput",
    "FlaxTCDScheduler",
    "FlaxTCDSchedulerOutput",
    "LMSDiscreteSchedulerState",
    "PNDMSchedulerState",
    "Scheduler",
    "add_noise_common",
    "betas_for_alpha_bar",
    "broadcast_to_shape_from_left",
    "get_sqrt_alpha_prod",
    "get_velocity_common",
    "make_scheduler",
    "scheduler_from_config",
    "scheduler_from_pretrained",
    "training_scheduler",
]

LEARNED_VARIANCES = ("learned", "learned_range")

# Weights of PNDM's linear multistep method. Row i is for step i, the last row for all later steps;
# columns are the current model output, then the stored ones, the newest first. Step 1 repeats step
# 0 and stores no output.
MULTISTEP_WEIGHTS = np.array(
    [
        [1, 0, 0, 0, 0],
        [1 / 2, 1 / 2, 0, 0, 0],
        [0, 3 / 2, -1 / 2, 0, 0],
        [0, 23 / 12, -16 / 12, 5 / 12, 0],
        [0, 55 / 24, -59 / 24, 37 / 24, -9 / 24],
    ],
    np.float32,
)


@struct.dataclass
class DDPMSchedulerState(SchedulerState):
    """State of FlaxDDPMScheduler."""

    common: CommonSchedulerState
    init_noise_sigma: jax.Array  # standard deviation of the noise to start from
    timesteps: jax.Array  # in the order they are visited, int32
    num_inference_steps: int | None = struct.field(pytree_node=False, default=None)
    step_index: jax.Array = np.int32(0)  # steps taken so far


@struct.dataclass
class PNDMSchedulerState(SchedulerState):
    """State of FlaxPNDMScheduler; fields as in DDIMSchedulerState. None before set_timesteps."""

    common: CommonSchedulerState
    final_alpha_cumprod: jax.Array
    init_noise_sigma: jax.Array
    timesteps: jax.Array
    num_inference_steps: int | None = struct.field(pytree_node=False, default=None)
    prk_timesteps: jax.Array | None = None  # of the Runge-Kutta start, int32, may be empty
    plms_timesteps: jax.Array | None = None  # of the multistep method
    cur_model_output: jax.Array | None = None  # weighted sum over the current Runge-Kutta step
    counter: jax.Array | None = None  # steps taken so far, int32
    cur_sample: jax.Array | None = None  # where the current Runge-Kutta or repeated step began
    ets: jax.Array | None = None  # model outputs, float32 (4, *sample.shape), the newest last

    @property
    def step_index(self):
        """Steps taken so far, as in the other states."""
        return self.counter


@struct.dataclass
class FlaxDDPMSchedulerOutput(FlaxSchedulerOutput):
    """What FlaxDDPMScheduler.step returns."""


@struct.dataclass
class FlaxDDIMSchedulerOutput(FlaxSchedulerOutput):
    """What FlaxDDIMScheduler.step returns."""


@struct.dataclass
class FlaxPNDMSchedulerOutput(FlaxSchedulerOutput):
    """What FlaxPNDMScheduler.step returns."""


class FlaxDDPMScheduler(AlphaScheduler):
    """Ancestral sampling of the reverse diffusion.

    Source: DDPM (arXiv 2006.11239), equation 7.
    """

    defaults = DEFAULTS | {
        "variance_type": "fixed_small",
        "clip_sample": True,
        "clip_sample_range": 1.0,
        "rescale_betas_zero_snr": False,
    }
    arguments = ("variance_type", "clip_sample", "prediction_type")
    choices = CHOICES | {
        "variance_type": (
            "fixed_small",
            "fixed_small_log",
            "fixed_large",
            "fixed_large_log",
            *LEARNED_VARIANCES,
            "other",  # the same variance as fixed_small
        ),
        "thresholding": (False,),
    }
    state_class = DDPMSchedulerState
    takes_timesteps = True

    def previous_timestep(self, state, timestep):
        """The next timestep of the run, -1 at its end; without set_timesteps, timestep - 1."""
        return next_timestep(state, timestep)

    def _get_variance(self, state, t, predicted_variance=None, variance_type=None):
        """Variance of the noise that a step adds, or what the variance type has in its place.

        Args:
            state: from create_state or set_timesteps.
            t: timestep, an integer.
            predicted_variance: the second half of the model's output, for learned variances.
            variance_type: None takes the option.

        Returns:
            float32: the standard deviation for fixed_small_log, the logarithm of the variance for
            fixed_large_log and learned_range, otherwise the variance.

        Source: learned_range, improved DDPM (arXiv 2102.09672) equation 15.
        """
        variance_type = variance_type or self.config.variance_type
        t = as_index(t)
        alpha_bar = alpha_bar_at(state, t)
        alpha_bar_prev = alpha_bar_at(state, self.previous_timestep(state, t))
        beta = (alpha_bar_prev - alpha_bar) / alpha_bar_prev
        # Above 0, for the logarithm.
        posterior = jnp.maximum((1 - alpha_bar_prev) / (1 - alpha_bar) * beta, 1e-20)
        if variance_type in LEARNED_VARIANCES and predicted_variance is None:
            raise ValueError(f"variance_type={variance_type!r} needs predicted_variance")
        if variance_type == "learned":
            return predicted_variance
        if variance_type == "learned_range":
            share = (predicted_variance + 1) / 2
            return share * jnp.log(beta) + (1 - share) * jnp.log(posterior)
        if variance_type == "fixed_small_log":
            return jnp.sqrt(posterior)
        if variance_type == "fixed_large_log":
            return jnp.log(beta)
        return beta if variance_type == "fixed_large" else posterior

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
    ):
        """Step from a timestep to the next one, in float32.

        Args:
            state: from set_timesteps or an earlier step; from create_state, where the next timestep
                is timestep - 1.
            model_output: of scale_model_input(state, sample, timestep), as prediction_type says;
                same shape, with learned variances (B, 2 C, ...).
            timestep: integer, traced or not, one of state.timesteps.
            sample: the noisy sample, any shape and float dtype.
            key: PRNG key of this step's noise.
            return_dict: False returns a plain tuple.
            noise: standard normal noise of the sample's shape, to use in place of key.

        Returns:
            An output, or the tuple, of prev_sample in sample's dtype and the next state.

        Raises:
            ValueError: neither key nor noise is given, or model_output lacks the variance.
        """
        t = as_index(timestep)
        x_t, model_output = sample.astype(jnp.float32), model_output.astype(jnp.float32)
        predicted_variance = None
        if self.config.variance_type in LEARNED_VARIANCES:
            if model_output.shape[1:2] != (2 * sample.shape[1],):
                raise ValueError(
                    f"model_output has shape {model_output.shape}; "
                    f"variance_type={self.config.variance_type!r} needs {2 * sample.shape[1]} "
                    "channels on axis 1, the sample's and as many for the variance"
                )
            model_output, predicted_variance = jnp.split(model_output, 2, axis=1)

        alpha_bar = alpha_bar_at(state, t)
        alpha_bar_prev = alpha_bar_at(state, self.previous_timestep(state, t))
        beta = (alpha_bar_prev - alpha_bar) / alpha_bar_prev
        x_0, _ = self._predict(alpha_bar, x_t, model_output)
        x_0_weight = jnp.sqrt(alpha_bar_prev) * beta / (1 - alpha_bar)
        x_t_weight = jnp.sqrt(alpha_bar / alpha_bar_prev) * (1 - alpha_bar_prev) / (1 - alpha_bar)

        std = self._get_variance(state, t, predicted_variance)
        if self.config.variance_type in ("fixed_large_log", "learned_range"):
            std = jnp.exp(std / 2)
        elif self.config.variance_type != "fixed_small_log":
            std = jnp.sqrt(std)
        x_prev = x_0_weight * x_0 + x_t_weight * x_t
        x_prev = x_prev + jnp.where(t > 0, std, 0.0) * self._noise(key, noise, sample)

        state = state.replace(step_index=state.step_index + 1)
        output = FlaxDDPMSchedulerOutput(x_prev.astype(sample.dtype), state)
        return output if return_dict else output.to_tuple()


class FlaxDDIMScheduler(AlphaScheduler):
    """Few steps, deterministic (eta=0) to as noisy as DDPM (eta=1).

    Source: DDIM (arXiv 2010.02502), equations 12 and 16.
    """

    defaults = DEFAULTS | {
        "set_alpha_to_one": True,
        "clip_sample": True,
        "clip_sample_range": 1.0,
        "rescale_betas_zero_snr": False,
    }
    arguments = (
        "clip_sample",
        "clip_sample_range",
        "set_alpha_to_one",
        "steps_offset",
        "prediction_type",
    )
    choices = CHOICES | {"thresholding": (False,)}
    state_class = DDIMSchedulerState

    def _get_variance(self, state, timestep, prev_timestep):
        """Variance of DDPM's noise in a step between two timesteps; below 0 is the clean end."""
        alpha_bar = alpha_bar_at(state, as_index(timestep))
        alpha_bar_prev = alpha_bar_at(state, as_index(prev_timestep), state.final_alpha_cumprod)
        return (1 - alpha_bar_prev) / (1 - alpha_bar) * (1 - alpha_bar / alpha_bar_prev)

    def step(
        self,
        state,
        model_output,
        timestep,
        sample,
        eta=0.0,
        return_dict=True,
        *,
        key=None,
        noise=None,
    ):
        """Step num_train_timesteps // num_inference_steps timesteps down, in float32.

        Args:
            state, model_output, timestep, sample, return_dict, key, noise: as in
                FlaxDDPMScheduler.step; timestep may be any integer; noise is added where
                eta is not 0.
            eta: 0 to 1, the share of DDPM's noise.

        Raises:
            ValueError: set_timesteps was not called, or eta needs key or noise.
        """
        self._check_run(state, sample)
        t = as_index(timestep)
        # As in diffusers, a step is this long even where the grid is spaced otherwise.
        prev_t = t - len(self) // state.num_inference_steps
        alpha_bar = alpha_bar_at(state, t)
        alpha_bar_prev = alpha_bar_at(state, prev_t, state.final_alpha_cumprod)
        x_t, model_output = sample.astype(jnp.float32), model_output.astype(jnp.float32)
        x_0, eps = self._predict(alpha_bar, x_t, model_output)
        variance = eta**2 * self._get_variance(state, t, prev_t)
        # Up to rounding, the difference is 0 at the first timestep with eta=1.
        eps_weight = jnp.sqrt(jnp.maximum(1 - alpha_bar_prev - variance, 0))
        x_prev = jnp.sqrt(alpha_bar_prev) * x_0 + eps_weight * eps
        if isinstance(eta, jax.Array) or eta != 0:
            x_prev = x_prev + jnp.sqrt(variance) * self._noise(key, noise, sample)
        state = state.replace(step_index=state.step_index + 1)
        output = FlaxDDIMSchedulerOutput(x_prev.astype(sample.dtype), state)
        return output if return_dict else output.to_tuple()


class FlaxPNDMScheduler(AlphaScheduler):
    """DDIM steps along a linear multistep mean of the latest model outputs.

    It starts with Runge-Kutta steps (n + 9 timesteps for n steps) or, with skip_prk_steps, by
    taking the first step twice (n + 1 timesteps; 1 for n = 1).

    Source: PNDM (arXiv 2202.09778), equations 9, 12, 13 and algorithm 2.
    """

    defaults = DEFAULTS | {"skip_prk_steps": False, "set_alpha_to_one": False}
    arguments = ("skip_prk_steps", "set_alpha_to_one", "steps_offset", "prediction_type")
    choices = CHOICES | {
        "prediction_type": ("epsilon", "v_prediction"),
        "rescale_betas_zero_snr": (False,),
    }
    state_class = PNDMSchedulerState
    count = "counter"
    pndm_order = 4

    def _plan(self, num_inference_steps, first_step, timesteps):
        grid = self._grid(num_inference_steps, first_step)
        if self.config.skip_prk_steps:
            prk, plms = np.array([], int), np.concatenate([grid[:2], grid[1:]])
        elif len(grid) < self.pndm_order:
            raise ValueError(
                f"num_inference_steps={len(grid)} is too few for PNDM's Runge-Kutta start; "
                "take 4 or more, or skip_prk_steps=True"
            )
        else:
            half = len(self) // num_inference_steps // 2
            # Three steps of four evaluations each: at the start, twice in the middle, at the end.
            evaluations = [(t, end + half, end + half, end) for t, end in pairwise(grid[:4])]
            prk, plms = np.concatenate(evaluations), grid[3:]
        return {
            "timesteps": np.concatenate([prk, plms]),
            "prk_timesteps": prk,
            "plms_timesteps": plms,
            self.count: 0,
        }

    def _memory(self, shape):
        zeros = jnp.zeros(shape, jnp.float32)
        ets = jnp.zeros((self.pndm_order, *shape), jnp.float32)
        return {"cur_model_output": zeros, "cur_sample": zeros, "ets": ets}

    def step(
        self,
        state,
        model_output,
        timestep,
        sample,
        return_dict=True,
        *,
        key=None,
        noise=None,
    ):
        """Take step_prk while state.counter is within prk_timesteps, then step_plms.

        Args and Returns as in FlaxDDPMScheduler.step; key and noise are not used.

        Raises:
            ValueError: set_timesteps was not called, or with another shape than the sample's.
        """
        prev_sample, next_state = self.step_plms(state, model_output, timestep, sample)
        if not self.config.skip_prk_steps:
            is_prk = state.counter < len(state.prk_timesteps)
            prev_sample, next_state = jax.tree.map(
                lambda prk, plms: jnp.where(is_prk, prk, plms),
                self.step_prk(state, model_output, timestep, sample),
                (prev_sample, next_state),
            )
        output = FlaxPNDMSchedulerOutput(prev_sample, next_state)
        return output if return_dict else output.to_tuple()

    def step_prk(self, state, model_output, timestep, sample):
        """One of the four model evaluations of a Runge-Kutta step; the fourth ends the step.

        Args and Raises as in step.

        Returns:
            (prev_sample, state).
        """
        self._check_run(state, sample, state.cur_sample)
        if self.config.skip_prk_steps:
            raise ValueError("skip_prk_steps=True leaves no Runge-Kutta steps; use step")
        x_t, output = sample.astype(jnp.float32), model_output.astype(jnp.float32)
        stage = state.counter % 4
        is_first, is_last = stage == 0, stage == 3
        half = len(self) // state.num_inference_steps // 2
        end = as_index(timestep) - jnp.where(stage % 2 == 0, half, 0)

        weight = jnp.where(is_first | is_last, 1 / 6, 1 / 3)
        mean = state.cur_model_output + weight * output
        x_start = jnp.where(is_first, x_t, state.cur_sample)
        x_prev = self._get_prev_sample(
            state,
            x_start,
            state.prk_timesteps[state.counter - stage],
            end,
            jnp.where(is_last, mean, output),
        )
        state = state.replace(
            cur_model_output=jnp.where(is_last, 0.0, mean),
            cur_sample=x_start,
            ets=jnp.where(is_first, append(state.ets, output), state.ets),
            counter=state.counter + 1,
        )
        return x_prev.astype(sample.dtype), state

    def step_plms(self, state, model_output, timestep, sample):
        """One linear multistep step; step 1 of a run repeats step 0 with the mean of both outputs.

        Args and Raises as in step.

        Returns:
            (prev_sample, state).
        """
        self._check_run(state, sample, state.cur_sample)
        x_t, output = sample.astype(jnp.float32), model_output.astype(jnp.float32)
        is_repeat = state.counter == 1
        stride = len(self) // state.num_inference_steps
        start = as_index(timestep) + jnp.where(is_repeat, stride, 0)
        x_start = jnp.where(is_repeat, state.cur_sample, x_t)
        ets = jnp.where(is_repeat, state.ets, append(state.ets, output))

        weights = jnp.asarray(MULTISTEP_WEIGHTS)[jnp.minimum(state.counter, 4)]
        slope = sum(w * term for w, term in zip(weights, (output, *ets[::-1])))
        x_prev = self._get_prev_sample(state, x_start, start, start - stride, slope)
        state = state.replace(cur_sample=x_start, ets=ets, counter=state.counter + 1)
        return x_prev.astype(sample.dtype), state

    def _get_prev_sample(self, state, sample, timestep, prev_timestep, model_output):
        """DDIM's step between two timesteps, equation 9; below 0 is final_alpha_cumprod."""
        alpha_bar = alpha_bar_at(state, timestep)
        alpha_bar_prev = alpha_bar_at(state, prev_timestep, state.final_alpha_cumprod)
        if self.config.prediction_type == "v_prediction":
            model_output = jnp.sqrt(alpha_bar) * model_output + jnp.sqrt(1 - alpha_bar) * sample
        divisor = alpha_bar * jnp.sqrt(1 - alpha_bar_prev)
        divisor = divisor + jnp.sqrt(alpha_bar * (1 - alpha_bar) * alpha_bar_prev)
        eps_weight = (alpha_bar - alpha_bar_prev) / divisor
        return jnp.sqrt(alpha_bar_prev / alpha_bar) * sample + eps_weight * model_output


SCHEDULERS = {
    "ddpm": FlaxDDPMScheduler,
    "ddim": FlaxDDIMScheduler,
    "pndm": FlaxPNDMScheduler,
    "euler": FlaxEulerDiscreteScheduler,
    "euler_ancestral": FlaxEulerAncestralDiscreteScheduler,
    "lms": FlaxLMSDiscreteScheduler,
    "dpmsolver++": FlaxDPMSolverMultistepScheduler,
    "lcm": FlaxLCMScheduler,
    "tcd": FlaxTCDScheduler,
}


# PyTorch's classes without a Flax class, with the same noise schedule: others can take their place.
REPLACEABLE = (
    "DDIMParallelScheduler",
    "DDPMParallelScheduler",
    "DEISMultistepScheduler",
    "DPMSolverSDEScheduler",
    "DPMSolverSinglestepScheduler",
    "HeunDiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "UniPCMultistepScheduler",
)
# The options that training depends on.
NOISE_SCHEDULE = (*FIRST_ARGUMENTS, "prediction_type", "rescale_betas_zero_snr")


def make_scheduler(name, config):
    """Build (scheduler, state) of a name in SCHEDULERS from the config of any scheduler."""
    if name not in SCHEDULERS:
        raise ValueError(f"scheduler {name!r} is unknown; choose from {', '.join(SCHEDULERS)}")
    scheduler = SCHEDULERS[name].from_config(config)
    return scheduler, scheduler.create_state()


def scheduler_from_pretrained(
    pretrained_model_name_or_path, subfolder="scheduler", revision=None, **hub_options
):
    """Build (scheduler, state) of the class that scheduler_config.json names; see load_config."""
    config = FlaxSchedulerMixin._read_config(
        pretrained_model_name_or_path, subfolder, revision, **hub_options
    )
    return scheduler_from_config(config, pretrained_model_name_or_path)


def scheduler_from_config(config, source, name=None, **changes):
    """Build (scheduler, state) of a scheduler_config.json's content.

    Args:
        config: mapping.
        source: its directory or hub id, for errors.
        name: of SCHEDULERS; None: the class that the config names.
        **changes: options to replace.

    Raises:
        ValueError: the config is of a class that is not supported, unless name replaces one of
            REPLACEABLE; or as in from_config.
    """
    by_class_name = {cls.__name__.removeprefix("Flax"): cls for cls in SCHEDULERS.values()}
    own = class_name(config)
    if own not in by_class_name and not (name and own in REPLACEABLE):
        remedy = "; choose one with --scheduler or scheduler=" if own in REPLACEABLE else ""
        raise ValueError(
            f"{CONFIG_NAME} of {source} names _class_name={own}, which is not supported; "
            f"supported are {', '.join(by_class_name)}{remedy}"
        )
    cls = SCHEDULERS[name] if name else by_class_name[own]
    scheduler = cls.from_file_content(config, source, **changes)
    return scheduler, scheduler.create_state()


def class_name(config):
    """The class of a scheduler_config.json's content, as PyTorch names it."""
    return str(config.get("_class_name")).removeprefix("Flax")


def training_scheduler(config, source):
    """Build (FlaxDDPMScheduler, state) with the noise schedule of a config, for training.

    Args:
        config, source: as for scheduler_from_config. Options of sampling may have any value.
    """
    noise = {name: value for name, value in config.items() if name in NOISE_SCHEDULE}
    named = {"_class_name": config.get("_class_name")}
    return scheduler_from_config(noise | named, source, "ddpm")
