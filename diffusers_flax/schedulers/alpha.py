"""LCM and TCD, and the base class of all schedulers that step in alpha_bar.

LCM and TCD are for models that are distilled to 1 to 8 steps. ddpm.py shows how to use
schedulers, and has DDPM, DDIM and PNDM, which step in alpha_bar too.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from diffusers_flax.schedulers.base import (
    CommonSchedulerState,
    FlaxSchedulerMixin,
    FlaxSchedulerOutput,
    SchedulerState,
    predict_x0_and_eps,
    timestep_grid,
    to_device,
)
from diffusers_flax.schedulers.options import CHOICES, DEFAULTS

SIGMA_DATA = 0.5  # standard deviation of the data in the boundary conditions of LCM


@struct.dataclass
class DDIMSchedulerState(SchedulerState):
    """State of DDIM, LCM and TCD; fields as in DDPMSchedulerState."""

    common: CommonSchedulerState
    final_alpha_cumprod: jax.Array  # alpha_bar at the end of a run, after the last timestep
    init_noise_sigma: jax.Array
    timesteps: jax.Array
    num_inference_steps: int | None = struct.field(pytree_node=False, default=None)
    step_index: jax.Array = np.int32(0)


class AlphaScheduler(FlaxSchedulerMixin):
    """Base of DDPM, DDIM and PNDM: steps between values of alpha_bar, looked up by timestep."""

    state_class = None
    count = "step_index"  # the state's field that counts steps

    def create_state(self, common=None):
        """The state before set_timesteps: enough for add_noise and get_velocity in training.

        Args:
            common: CommonSchedulerState.create(self), to share it between schedulers.
        """
        common = CommonSchedulerState.create(self) if common is None else common
        fields = {self.count: to_device(0)}
        if "set_alpha_to_one" in self.defaults:
            clean = self.config.set_alpha_to_one
            fields["final_alpha_cumprod"] = to_device(1.0) if clean else common.alphas_cumprod[0]
        return self.state_class(
            common=common,
            init_noise_sigma=to_device(1.0),
            timesteps=to_device(np.arange(len(self))[::-1]),
            **fields,
        )

    def _plan(self, num_inference_steps, first_step, timesteps):
        grid = self._grid(num_inference_steps, first_step, timesteps)
        return {"timesteps": grid, self.count: 0}

    def _even_grid(self, num_inference_steps):
        """The scheduler's own choice of timesteps, integers, decreasing."""
        return np.round(timestep_grid(self.config, num_inference_steps)).astype(int)

    def _grid(self, num_inference_steps, first_step, timesteps=None):
        """Integer timesteps, decreasing, from the step first_step on."""
        if timesteps is None:
            timesteps = self._even_grid(num_inference_steps)
        timesteps = timesteps[first_step:]
        is_undefined = self.config.prediction_type == "epsilon" and timesteps[0] == len(self) - 1
        if is_undefined and self._option("rescale_betas_zero_snr"):
            raise ValueError(
                "prediction_type='epsilon' does not determine the clean sample at the last "
                "training timestep, which rescale_betas_zero_snr=True leaves without signal; "
                "use v_prediction or timestep_spacing='leading'"
            )
        return timesteps

    def _predict(self, alpha_bar, x_t, model_output):
        """(x0, eps), x0 within clip_sample_range if the options say so."""
        x_0, eps = predict_x0_and_eps(
            self.config.prediction_type,
            jnp.sqrt(alpha_bar),
            jnp.sqrt(1 - alpha_bar),
            x_t,
            model_output,
        )
        if self.config.clip_sample:
            x_0 = jnp.clip(x_0, -self.config.clip_sample_range, self.config.clip_sample_range)
        return x_0, eps


def as_index(timestep):
    """A timestep of any integer type as int32."""
    return jnp.asarray(timestep).astype(jnp.int32)


def alpha_bar_at(state, timestep, final=1.0):
    """alpha_bar at a timestep; `final` below the first."""
    return jnp.where(timestep < 0, final, state.common.alphas_cumprod[timestep])


def next_timestep(state, timestep):
    """The timestep that a run visits after this one; -1 at its end."""
    return jnp.max(jnp.where(state.timesteps < timestep, state.timesteps, -1))


def boundary_scalings(t, timestep_scaling):
    """(c_skip, c_out) of f(x, t) = c_skip x + c_out x_0, float32; f(x, 0) = x.

    Args:
        t: timesteps, integers of any shape.
        timestep_scaling: of the scheduler's config.

    Source: Consistency Models (arXiv 2303.01469), equation 5 and appendix C.
    """
    scaled_t = t.astype(jnp.float32) * timestep_scaling
    c_skip = SIGMA_DATA**2 / (scaled_t**2 + SIGMA_DATA**2)
    return c_skip, scaled_t / jnp.sqrt(scaled_t**2 + SIGMA_DATA**2)


@struct.dataclass
class FlaxLCMSchedulerOutput(FlaxSchedulerOutput):
    """What FlaxLCMScheduler.step returns."""


@struct.dataclass
class FlaxTCDSchedulerOutput(FlaxSchedulerOutput):
    """What FlaxTCDScheduler.step returns."""


class ConsistencyScheduler(AlphaScheduler):
    """Common to LCM and TCD: options, the choice of timesteps."""

    defaults = DEFAULTS | {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "original_inference_steps": 50,
        "clip_sample": False,
        "clip_sample_range": 1.0,
        "set_alpha_to_one": True,
        "timestep_scaling": 10.0,
        "rescale_betas_zero_snr": False,
    }
    arguments = (
        "original_inference_steps",
        "clip_sample",
        "clip_sample_range",
        "set_alpha_to_one",
        "steps_offset",
        "prediction_type",
    )
    choices = CHOICES | {"thresholding": (False,)}
    state_class = DDIMSchedulerState
    takes_timesteps = True

    def _even_grid(self, num_inference_steps):
        """Timesteps of a run, decreasing; source: LCM (arXiv 2310.04378), section 4.3."""
        num_distilled = self.config.original_inference_steps
        if num_distilled > len(self):
            raise ValueError(
                f"original_inference_steps={num_distilled} must be at most "
                f"num_train_timesteps={len(self)}"
            )
        if num_inference_steps > num_distilled:
            raise ValueError(
                f"num_inference_steps={num_inference_steps} must be at most "
                f"original_inference_steps={num_distilled}, the timesteps that the model was "
                "distilled on"
            )
        distilled = np.arange(num_distilled, 0, -1) * (len(self) // num_distilled) - 1
        indices = np.linspace(0, num_distilled, num_inference_steps, endpoint=False)
        return distilled[np.floor(indices).astype(int)]


class FlaxLCMScheduler(ConsistencyScheduler):
    """Multistep consistency sampling: predict the clean sample, add noise again.

    Source: Latent Consistency Models (arXiv 2310.04378), algorithm 3; boundary conditions:
    Consistency Models (arXiv 2303.01469), appendix C.
    """

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
        """Step from a timestep to the next one of the run; arguments as in FlaxDDPMScheduler.step.

        The last step adds no noise.
        """
        self._check_run(state, sample)
        t = as_index(timestep)
        next_t = next_timestep(state, t)
        x_t, model_output = sample.astype(jnp.float32), model_output.astype(jnp.float32)
        x_0, _ = self._predict(alpha_bar_at(state, t), x_t, model_output)
        c_skip, c_out = boundary_scalings(t, self.config.timestep_scaling)
        denoised = c_out * x_0 + c_skip * x_t

        alpha_bar = alpha_bar_at(state, next_t)  # 1 at the end
        noisy = jnp.sqrt(alpha_bar) * denoised
        noisy = noisy + jnp.sqrt(1 - alpha_bar) * self._noise(key, noise, sample)
        state = state.replace(step_index=state.step_index + 1)
        output = FlaxLCMSchedulerOutput(noisy.astype(sample.dtype), state)
        return output if return_dict else output.to_tuple()


class FlaxTCDScheduler(ConsistencyScheduler):
    """Strategic stochastic sampling: denoise to an earlier timestep than the next, add noise.

    Source: Trajectory Consistency Distillation (arXiv 2402.19159), algorithm 4.
    """

    def step(
        self,
        state,
        model_output,
        timestep,
        sample,
        eta=0.3,
        return_dict=True,
        *,
        key=None,
        noise=None,
    ):
        """Step from a timestep to the next one of the run; arguments as in FlaxDDPMScheduler.step.

        Args:
            eta: gamma in the paper, 0 (deterministic) to 1; larger values suit more steps. The last
                step adds no noise.
        """
        self._check_run(state, sample)
        t = as_index(timestep)
        next_t = next_timestep(state, t)
        is_last = next_t < 0
        next_t = jnp.maximum(next_t, 0)
        s = jnp.floor((1 - eta) * next_t.astype(jnp.float32)).astype(jnp.int32)
        x_t, model_output = sample.astype(jnp.float32), model_output.astype(jnp.float32)
        x_0, eps = self._predict(alpha_bar_at(state, t), x_t, model_output)
        alpha_bar_s, alpha_bar_next = alpha_bar_at(state, s), alpha_bar_at(state, next_t)
        x_s = jnp.sqrt(alpha_bar_s) * x_0 + jnp.sqrt(1 - alpha_bar_s) * eps

        kept = jnp.where(is_last, 1.0, alpha_bar_next / alpha_bar_s)
        x_next = jnp.sqrt(kept) * x_s
        x_next = x_next + jnp.sqrt(1 - kept) * self._noise(key, noise, sample)
        state = state.replace(step_index=state.step_index + 1)
        output = FlaxTCDSchedulerOutput(x_next.astype(sample.dtype), state)
        return output if return_dict else output.to_tuple()
