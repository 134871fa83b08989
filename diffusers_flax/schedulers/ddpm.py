"""FlaxDDPMScheduler, and AlphaScheduler, the base of schedulers that step in alpha_bar."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from diffusers_flax.schedulers.base import (
    CHOICES,
    DEFAULTS,
    FlaxSchedulerMixin,
    FlaxSchedulerOutput,
    SchedulerState,
    timestep_grid,
)
from diffusers_flax.schedulers.noise_schedule import (
    CommonSchedulerState,
    predict_x0_and_eps,
    to_device,
)

LEARNED_VARIANCES = ("learned", "learned_range")


class AlphaScheduler(FlaxSchedulerMixin):
    """Base of DDPM, DDIM, PNDM, LCM and TCD, which look alpha_bar up by timestep."""

    state_class = None
    counter = "step_index"  # the state's field that counts steps

    def create_state(self, common=None):
        """The state before set_timesteps, for add_noise and get_velocity in training.

        Args:
            common: CommonSchedulerState.create(self), to share it between schedulers.
        """
        common = CommonSchedulerState.create(self) if common is None else common
        fields = {self.counter: to_device(0)}
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
        if timesteps is None:
            timesteps = self._even_grid(num_inference_steps)
        timesteps = timesteps[first_step:]
        is_undefined = self.config.prediction_type == "epsilon" and timesteps[0] == len(self) - 1
        if is_undefined and self._option("rescale_betas_zero_snr"):
            raise ValueError(
                "prediction_type='epsilon' does not determine the clean sample at the last "
                "timestep of rescale_betas_zero_snr=True, which has no signal; use v_prediction"
            )
        return {"timesteps": timesteps, self.counter: 0}

    def _even_grid(self, num_inference_steps):
        """The scheduler's own choice of timesteps, decreasing integers."""
        return np.round(timestep_grid(self.config, num_inference_steps)).astype(int)

    def _predict(self, alpha_bar, x_t, model_output):
        """(x0, eps); with clip_sample x0 is within clip_sample_range."""
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
    """An integer timestep as int32."""
    return jnp.asarray(timestep).astype(jnp.int32)


def alpha_bar_at(state, timestep, final=1.0):
    """alpha_bar at a timestep, `final` below timestep 0."""
    return jnp.where(timestep < 0, final, state.common.alphas_cumprod[timestep])


def next_timestep(state, timestep):
    """The run's next timestep, -1 at its end."""
    return jnp.max(jnp.where(state.timesteps < timestep, state.timesteps, -1))


@struct.dataclass
class DDPMSchedulerState(SchedulerState):
    """State of FlaxDDPMScheduler."""

    common: CommonSchedulerState
    init_noise_sigma: jax.Array  # standard deviation of the initial noise
    timesteps: jax.Array  # in the order of the run, int32
    num_inference_steps: int | None = struct.field(pytree_node=False, default=None)
    step_index: jax.Array = np.int32(0)  # steps taken so far


@struct.dataclass
class FlaxDDPMSchedulerOutput(FlaxSchedulerOutput):
    """The output of FlaxDDPMScheduler.step."""


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
    output_class = FlaxDDPMSchedulerOutput
    needs_run = False
    takes_timesteps = True

    def previous_timestep(self, state, timestep):
        """The next timestep of the run, -1 at its end; without set_timesteps, timestep - 1."""
        return next_timestep(state, timestep)

    def _get_variance(self, state, t, predicted_variance=None, variance_type=None):
        """Variance of a step's noise, or the variance type's equivalent.

        predicted_variance: the second half of the model's output, for learned variances. The result
        is the standard deviation for fixed_small_log, the logarithm of the variance for
        fixed_large_log and learned_range, otherwise the variance.

        Source: learned_range, improved DDPM (arXiv 2102.09672) equation 15.
        """
        variance_type = variance_type or self.config.variance_type
        t = as_index(t)
        alpha_bar = alpha_bar_at(state, t)
        alpha_bar_prev = alpha_bar_at(state, self.previous_timestep(state, t))
        beta = (alpha_bar_prev - alpha_bar) / alpha_bar_prev
        # Positive, for the logarithm.
        posterior = jnp.maximum((1 - alpha_bar_prev) / (1 - alpha_bar) * beta, 1e-20)
        if variance_type == "learned":
            return predicted_variance
        if variance_type == "learned_range":
            weight = (predicted_variance + 1) / 2
            return weight * jnp.log(beta) + (1 - weight) * jnp.log(posterior)
        if variance_type == "fixed_small_log":
            return jnp.sqrt(posterior)
        if variance_type == "fixed_large_log":
            return jnp.log(beta)
        return beta if variance_type == "fixed_large" else posterior

    def step(
        self, state, model_output, timestep, sample, key=None, return_dict=True, *, noise=None
    ):
        """Step from a timestep to the next one, in float32.

        Args:
            state: from set_timesteps or an earlier step; or from create_state, then the next
                timestep is timestep - 1.
            model_output: for scale_model_input(state, sample, timestep), of prediction_type's kind;
                same shape, with learned variances (B, 2 C, ...).
            timestep: integer, traced or not, one of state.timesteps.
            sample: the noisy sample, any shape and float dtype.
            key: PRNG key of this step's noise.
            return_dict: False returns a plain tuple.
            noise: standard normal noise of the sample's shape, in place of key.

        Returns:
            An output, or the tuple, of prev_sample in sample's dtype and the next state.

        Raises:
            ValueError: key and noise are missing.
        """
        return self._take_step(state, model_output, timestep, sample, return_dict, key, noise)

    def _advance(self, state, timestep, x_t, model_output, draw):
        t = as_index(timestep)
        predicted_variance = None
        if self.config.variance_type in LEARNED_VARIANCES:
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
        x_prev = x_prev + jnp.where(t > 0, std, 0.0) * draw()
        return x_prev, {"step_index": state.step_index + 1}
