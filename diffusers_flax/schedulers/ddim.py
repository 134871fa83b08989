"""FlaxDDIMScheduler: few steps, deterministic or with some of DDPM's noise."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from diffusers_flax.schedulers.base import CHOICES, DEFAULTS, FlaxSchedulerOutput, SchedulerState
from diffusers_flax.schedulers.ddpm import AlphaScheduler, alpha_bar_at, as_index
from diffusers_flax.schedulers.noise_schedule import CommonSchedulerState


@struct.dataclass
class DDIMSchedulerState(SchedulerState):
    """State of DDIM, LCM and TCD; fields as in DDPMSchedulerState."""

    common: CommonSchedulerState
    final_alpha_cumprod: jax.Array  # alpha_bar at the end of a run, after the last timestep
    init_noise_sigma: jax.Array
    timesteps: jax.Array
    num_inference_steps: int | None = struct.field(pytree_node=False, default=None)
    step_index: jax.Array = np.int32(0)


@struct.dataclass
class FlaxDDIMSchedulerOutput(FlaxSchedulerOutput):
    """The output of FlaxDDIMScheduler.step."""


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
    output_class = FlaxDDIMSchedulerOutput

    def _get_variance(self, state, timestep, prev_timestep):
        """Variance of DDPM's noise between two timesteps; a timestep below 0 is the clean end."""
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
                FlaxDDPMScheduler.step; timestep may be any integer, and noise is added unless
                eta is 0.
            eta: 0 (none of DDPM's noise) to 1.

        Raises:
            ValueError: set_timesteps was not called, or eta needs key or noise.
        """
        return self._take_step(
            state, model_output, timestep, sample, return_dict, key, noise, eta=eta
        )

    def _advance(self, state, timestep, x_t, model_output, draw, eta):
        t = as_index(timestep)
        # As in diffusers, a step has this length in grids with another spacing, too.
        prev_t = t - len(self) // state.num_inference_steps
        alpha_bar = alpha_bar_at(state, t)
        alpha_bar_prev = alpha_bar_at(state, prev_t, state.final_alpha_cumprod)
        x_0, eps = self._predict(alpha_bar, x_t, model_output)
        variance = eta**2 * self._get_variance(state, t, prev_t)
        # At the first timestep with eta=1 the difference is 0, up to rounding.
        eps_weight = jnp.sqrt(jnp.maximum(1 - alpha_bar_prev - variance, 0))
        x_prev = jnp.sqrt(alpha_bar_prev) * x_0 + eps_weight * eps
        if isinstance(eta, jax.Array) or eta != 0:
            x_prev = x_prev + jnp.sqrt(variance) * draw()
        return x_prev, {"step_index": state.step_index + 1}
