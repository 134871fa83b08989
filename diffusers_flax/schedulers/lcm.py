"""FlaxLCMScheduler and FlaxTCDScheduler, for models distilled to 1 to 8 steps."""

import jax.numpy as jnp
import numpy as np
from flax import struct

from diffusers_flax.schedulers.base import CHOICES, DEFAULTS, FlaxSchedulerOutput
from diffusers_flax.schedulers.ddim import DDIMSchedulerState, FlaxDDIMScheduler
from diffusers_flax.schedulers.ddpm import AlphaScheduler, alpha_bar_at, as_index, next_timestep
from diffusers_flax.schedulers.noise_schedule import predict_x0_and_eps

SIGMA_DATA = 0.5  # standard deviation of the data in LCM's boundary conditions


def boundary_scalings(t, timestep_scaling):
    """(c_skip, c_out) of f(x, t) = c_skip x + c_out x_0, float32; f(x, 0) = x.

    Args:
        t: timesteps, integers of any shape.
        timestep_scaling: the scheduler's option.

    Source: Consistency Models (arXiv 2303.01469), equation 5 and appendix C.
    """
    scaled_t = t.astype(jnp.float32) * timestep_scaling
    c_skip = SIGMA_DATA**2 / (scaled_t**2 + SIGMA_DATA**2)
    return c_skip, scaled_t / jnp.sqrt(scaled_t**2 + SIGMA_DATA**2)


@struct.dataclass
class FlaxLCMSchedulerOutput(FlaxSchedulerOutput):
    """The output of FlaxLCMScheduler.step."""


@struct.dataclass
class FlaxTCDSchedulerOutput(FlaxSchedulerOutput):
    """The output of FlaxTCDScheduler.step."""


class ConsistencyScheduler(AlphaScheduler):
    """Base of LCM and TCD: options and timesteps."""

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
    arguments = ("original_inference_steps", *FlaxDDIMScheduler.arguments)
    choices = CHOICES | {"thresholding": (False,)}
    state_class = DDIMSchedulerState
    takes_timesteps = True

    def _even_grid(self, num_inference_steps):
        """A run's decreasing timesteps. Source: LCM (arXiv 2310.04378), section 4.3."""
        num_distilled = self.config.original_inference_steps
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

    output_class = FlaxLCMSchedulerOutput

    def _advance(self, state, timestep, x_t, model_output, draw):
        t = as_index(timestep)
        next_t = next_timestep(state, t)
        x_0, _ = self._predict(alpha_bar_at(state, t), x_t, model_output)
        c_skip, c_out = boundary_scalings(t, self.config.timestep_scaling)
        denoised = c_out * x_0 + c_skip * x_t
        alpha_bar = alpha_bar_at(state, next_t)  # 1 at the end
        noisy = jnp.sqrt(alpha_bar) * denoised
        noisy = noisy + jnp.sqrt(1 - alpha_bar) * draw()
        return noisy, {"step_index": state.step_index + 1}


class FlaxTCDScheduler(ConsistencyScheduler):
    """Strategic stochastic sampling: denoise beyond the next timestep, then add noise.

    clip_sample and thresholding have no effect, as in diffusers.

    Source: Trajectory Consistency Distillation (arXiv 2402.19159), algorithm 4.
    """

    choices = ConsistencyScheduler.choices | {"thresholding": (False, True)}
    output_class = FlaxTCDSchedulerOutput

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
            eta: gamma in the paper, 0 (deterministic) to 1; larger values suit more steps.

        The last step adds no noise.
        """
        return self._take_step(
            state, model_output, timestep, sample, return_dict, key, noise, eta=eta
        )

    def _advance(self, state, timestep, x_t, model_output, draw, eta):
        t = as_index(timestep)
        next_t = next_timestep(state, t)
        is_last = next_t < 0
        next_t = jnp.maximum(next_t, 0)
        s = jnp.floor((1 - eta) * next_t.astype(jnp.float32)).astype(jnp.int32)
        alpha_bar = alpha_bar_at(state, t)
        alpha_t, sigma_t = jnp.sqrt(alpha_bar), jnp.sqrt(1 - alpha_bar)
        prediction_type = self.config.prediction_type
        x_0, eps = predict_x0_and_eps(prediction_type, alpha_t, sigma_t, x_t, model_output)
        alpha_bar_s, alpha_bar_next = alpha_bar_at(state, s), alpha_bar_at(state, next_t)
        x_s = jnp.sqrt(alpha_bar_s) * x_0 + jnp.sqrt(1 - alpha_bar_s) * eps
        kept = jnp.where(is_last, 1.0, alpha_bar_next / alpha_bar_s)
        x_next = jnp.sqrt(kept) * x_s
        return x_next + jnp.sqrt(1 - kept) * draw(), {"step_index": state.step_index + 1}
