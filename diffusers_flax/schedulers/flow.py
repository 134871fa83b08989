"""The scheduler of models that were trained with a rectified flow.

x_t = (1 - t) x_0 + t noise, with t from 0 (image) to 1 (noise); the model predicts noise - x_0, the
velocity along this line. Its timestep is 1000 t.

Source: rectified flow (arXiv 2209.03003), equation 1; Stable Diffusion 3 (arXiv 2403.03206),
sections 3.1 and 5.3.2. Names, defaults and the steps of a run: PyTorch diffusers.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from diffusers_flax.schedulers.base import FlaxSchedulerOutput
from diffusers_flax.schedulers.euler import EulerDiscreteSchedulerState, SigmaScheduler
from diffusers_flax.schedulers.noise_schedule import CommonSchedulerState, mix, to_device


def shift_times(t, shift):
    """Times from 0 to 1 moved towards the noise, which large images need; shift 1: unchanged.

    Source: arXiv 2403.03206, equation 23.
    """
    return shift * t / (1 + (shift - 1) * t)


def shift_of_size(width, height):
    """The shift for images of this many pixels: 3 for 1024 x 1024, as in Stable Diffusion 3.

    It grows with the side, as noise averages out over more pixels, and is at least 1.

    Source: arXiv 2403.03206, section 5.3.2.
    """
    return max(1.0, 3 * (width * height) ** 0.5 / 1024)


@struct.dataclass
class FlaxFlowMatchEulerDiscreteSchedulerOutput(FlaxSchedulerOutput):
    """The output of FlaxFlowMatchEulerDiscreteScheduler.step."""


class FlaxFlowMatchEulerDiscreteScheduler(SigmaScheduler):
    """Euler steps along a rectified flow, for sampling and for training.

    A state's sigmas are the times t of its steps, decreasing, and 0.
    """

    defaults = {"num_train_timesteps": 1000, "shift": 1.0}  # noqa: RUF012 - see the base class
    first_arguments = ()
    arguments = tuple(defaults)
    choices = dict.fromkeys(
        (
            *("use_dynamic_shifting", "use_karras_sigmas", "use_exponential_sigmas"),
            *("use_beta_sigmas", "invert_sigmas", "stochastic_sampling"),
        ),
        (False,),
    ) | {"shift_terminal": (None,), "scale_factors": (None,)}
    state_class = EulerDiscreteSchedulerState
    output_class = FlaxFlowMatchEulerDiscreteSchedulerOutput
    takes_timesteps = True
    takes_denoising_range = False
    is_flow = True
    vp_prediction_type = "flow"
    _compatibles = ()

    def _training_times(self):
        times = np.arange(1, len(self) + 1) / len(self)
        return shift_times(times, self.config.shift)

    def _noise_schedule(self):
        """alpha_bar where x_t is scaled to alpha^2 + sigma^2 = 1."""
        times = self._training_times()
        alpha_bar = (1 - times) ** 2 / ((1 - times) ** 2 + times**2)
        alphas = np.append(alpha_bar[:1], alpha_bar[1:] / alpha_bar[:-1])
        return tuple(table.astype(np.float32) for table in (alphas, 1 - alphas, alpha_bar))

    def create_state(self, common=None):
        """The state before set_timesteps, with the timesteps and sigmas of training."""
        times = self._training_times()[::-1]
        return self.state_class(
            common=CommonSchedulerState.create(self) if common is None else common,
            init_noise_sigma=to_device(self.init_noise_sigma),
            timesteps=to_device(times * len(self)),
            sigmas=to_device(np.append(times, 0)),
            step_index=to_device(0),
        )

    def _plan(self, num_inference_steps, first_step, timesteps):
        ends = self._training_times()
        # PyTorch shifts the ends, then all times once more. Given timesteps are used as they are.
        times = shift_times(np.linspace(ends[-1], ends[0], num_inference_steps), self.config.shift)
        if timesteps is not None:
            times = timesteps / len(self)
        times = times.astype(np.float32)[first_step:]
        return {
            "timesteps": times * np.float32(len(self)),
            "sigmas": np.append(times, 0),
            "init_noise_sigma": self.init_noise_sigma,
            "step_index": 0,
        }

    def draw_timesteps(self, keys):
        """Timesteps of training, float32 (B,) in (0, num_train_timesteps), one key per sample.

        logit(t) is standard normal before the shift.

        Source: arXiv 2403.03206, section 3.1, with m = 0 and s = 1.
        """
        t = jax.nn.sigmoid(jax.vmap(jax.random.normal)(keys))
        return len(self) * shift_times(t, self.config.shift)

    def scales(self, state, sample, timesteps):
        t = jnp.asarray(timesteps, jnp.float32) / len(self)
        t = t.reshape(t.shape + (1,) * (sample.ndim - t.ndim))
        return 1 - t, t

    def get_velocity(self, state, sample, noise, timesteps):
        """The target of the model, noise - x_0; see FlaxSchedulerMixin.get_velocity."""
        return mix(-1.0, sample, 1.0, noise).astype(sample.dtype)

    def _advance(self, state, timestep, x_t, model_output, draw):
        i = self._position(state, timestep)
        x_next = x_t + (state.sigmas[i + 1] - state.sigmas[i]) * model_output
        return x_next, {"step_index": i + 1}


@struct.dataclass
class FlaxFlowMatchLCMSchedulerOutput(FlaxSchedulerOutput):
    """The output of FlaxFlowMatchLCMScheduler.step."""


class FlaxFlowMatchLCMScheduler(FlaxFlowMatchEulerDiscreteScheduler):
    """Multistep consistency sampling of a distilled flow: predict the clean sample, add new noise.

    Source: Latent Consistency Models (arXiv 2310.04378), algorithm 3.
    """

    output_class = FlaxFlowMatchLCMSchedulerOutput

    def _advance(self, state, timestep, x_t, model_output, draw):
        i = self._position(state, timestep)
        x_0, next_t = x_t - state.sigmas[i] * model_output, state.sigmas[i + 1]
        return (1 - next_t) * x_0 + next_t * draw(), {"step_index": i + 1}
