"""Euler's schedulers, and SigmaScheduler, the base of schedulers that step in sigma.

sigma is noise over signal, sigma_t / alpha_t. A step finds its index by its timestep. The index is
state.step_index if that entry of state.timesteps equals the timestep, or if no entry does (a
rounded timestep).
"""

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
    edm_levels,
    mix,
    predict_x0_and_eps,
    to_device,
)

# Replaces the last alpha_bar of a zero-SNR schedule: with 0, sigma would be infinite.
SMALLEST_ALPHA_BAR = 2.0**-24


def karras_sigmas(sigma_max, sigma_min, num_steps, rho=7.0):
    """Decreasing noise levels, denser at low noise, (num_steps,).

    Source: arXiv 2206.00364, equation 5.
    """
    ramp = np.linspace(0, 1, num_steps)
    return (sigma_max ** (1 / rho) * (1 - ramp) + sigma_min ** (1 / rho) * ramp) ** rho


def weighted_sum(weights, newest_last):
    """Weighted sum of arrays; weights[0] is the last array's.

    Not a dot product, which TPUs compute in bfloat16.
    """
    return sum(weight * term for weight, term in zip(weights, newest_last[::-1]))


def vp_scales(sigma):
    """alpha_t and sigma_t with alpha_t^2 + sigma_t^2 = 1 and sigma_t / alpha_t = sigma."""
    alpha_t = 1 / jnp.sqrt(sigma**2 + 1)
    return alpha_t, sigma * alpha_t


class SigmaScheduler(FlaxSchedulerMixin):
    """Base of Euler, LMS and DPM-Solver: noise levels, and a step's index in its run."""

    def _training_sigmas(self):
        alpha_bar = self._noise_schedule()[2].astype(np.float64)
        if self._option("rescale_betas_zero_snr"):
            alpha_bar[-1] = SMALLEST_ALPHA_BAR
        return np.sqrt((1 - alpha_bar) / alpha_bar)

    def _falling_sigmas(self):
        return to_device(np.append(self._training_sigmas()[::-1], 0))

    def _karras(self, highest, lowest, num_inference_steps):
        """Karras sigmas and the fractional timesteps of these noise levels in training.

        The options sigma_max and sigma_min win over highest and lowest.
        """
        sigma_max, sigma_min = self._option("sigma_max"), self._option("sigma_min")
        sigma_max = highest if sigma_max is None else sigma_max
        sigma_min = lowest if sigma_min is None else sigma_min
        sigmas = karras_sigmas(sigma_max, sigma_min, num_inference_steps)
        training_log_sigmas = np.log(self._training_sigmas())
        return sigmas, np.interp(np.log(sigmas), training_log_sigmas, np.arange(len(self)))

    def _with_final_sigma(self, sigmas):
        is_noisy = self._option("final_sigmas_type") == "sigma_min"
        sigmas = np.append(sigmas, self._training_sigmas()[0] if is_noisy else 0)
        # Rounded to float32, so that equal levels of the state are equal here.
        return sigmas.astype(np.float32).astype(np.float64)

    def _position(self, state, timestep):
        """A timestep's index in the run."""
        timestep = jnp.asarray(timestep).astype(state.timesteps.dtype)
        found, current = state.timesteps == timestep, state.timesteps[state.step_index]
        truncated = current.astype(jnp.int32).astype(current.dtype)
        # Several steps may share a rounded timestep; step_index tells them apart.
        is_current = (current == timestep) | (truncated == timestep) | ~found.any()
        return jnp.where(is_current, state.step_index, jnp.argmax(found).astype(jnp.int32))

    def _predict(self, sigma, x_t, model_output):
        """(x0, eps) where x_t = alpha_t (x0 + sigma eps)."""
        return predict_x0_and_eps(self.config.prediction_type, *vp_scales(sigma), x_t, model_output)

    def scales(self, state, sample, timesteps):
        sigma = self._sigma_at(state, timesteps)
        return vp_scales(sigma.reshape(sigma.shape + (1,) * (sample.ndim - sigma.ndim)))

    def _sigma_at(self, state, timesteps):
        # Interpolated between the run's noise levels, as Karras sigmas are not training's levels.
        # Steps with the same rounded timestep differ in sigma, so the current step comes first.
        timesteps = jnp.asarray(timesteps).astype(jnp.float32)
        run_timesteps, run_sigmas = state.timesteps.astype(jnp.float32), state.sigmas[:-1]
        return jnp.where(
            timesteps == run_timesteps[state.step_index],
            run_sigmas[state.step_index],
            jnp.interp(timesteps, run_timesteps[::-1], run_sigmas[::-1]),
        )


@struct.dataclass
class EulerDiscreteSchedulerState(SchedulerState):
    """State of the Euler schedulers; timesteps are float32, sigmas one longer."""

    common: CommonSchedulerState
    init_noise_sigma: jax.Array  # standard deviation of the initial noise
    timesteps: jax.Array  # in the order of the run
    sigmas: jax.Array  # noise over signal at each timestep and at the end
    num_inference_steps: int | None = struct.field(pytree_node=False, default=None)
    step_index: jax.Array = struct.field(default=np.int32(0), kw_only=True)  # steps taken so far


@struct.dataclass
class FlaxEulerDiscreteSchedulerOutput(FlaxSchedulerOutput):
    """The output of FlaxEulerDiscreteScheduler.step."""


class FlaxEulerDiscreteScheduler(SigmaScheduler):
    """Euler steps along the probability-flow ODE of x_t / alpha_t.

    Source: Karras et al. (arXiv 2206.00364), algorithm 1 without its second-order correction.
    """

    defaults = DEFAULTS | {
        "timestep_spacing": "linspace",
        "use_karras_sigmas": False,
        "sigma_min": None,
        "sigma_max": None,
        "final_sigmas_type": "zero",
        "rescale_betas_zero_snr": False,
    }
    arguments = ("prediction_type", "timestep_spacing")
    choices = CHOICES | {
        "final_sigmas_type": ("zero", "sigma_min"),
        "interpolation_type": ("linear",),
        "timestep_type": ("discrete",),
        "use_beta_sigmas": (False,),
        "use_exponential_sigmas": (False,),
    }
    state_class = EulerDiscreteSchedulerState
    output_class = FlaxEulerDiscreteSchedulerOutput
    takes_timesteps = True

    @property
    def init_noise_sigma(self):
        """Standard deviation of the initial noise; a run's own is state.init_noise_sigma."""
        return self._init_noise_sigma(self._training_sigmas())

    def _init_noise_sigma(self, sigmas):
        # "leading" starts at a timestep that has some signal, of variance 1.
        signal = 1.0 if self.config.timestep_spacing == "leading" else 0.0
        return float(np.hypot(np.max(sigmas), signal))

    def create_state(self, common=None):
        """The state before set_timesteps, also for scale_model_input; see AlphaScheduler."""
        return self.state_class(
            common=CommonSchedulerState.create(self) if common is None else common,
            init_noise_sigma=to_device(self.init_noise_sigma),
            timesteps=to_device(np.arange(len(self))[::-1] * 1.0),
            sigmas=self._falling_sigmas(),
            step_index=to_device(0),
        )

    def _plan(self, num_inference_steps, first_step, timesteps):
        if timesteps is None:
            timesteps = timestep_grid(self.config, num_inference_steps)
        timesteps = timesteps.astype(np.float32)
        sigmas = np.interp(timesteps, np.arange(len(self)), self._training_sigmas())
        if self._option("use_karras_sigmas"):
            sigmas, timesteps = self._karras(sigmas[0], sigmas[-1], num_inference_steps)
        sigmas = self._with_final_sigma(sigmas)[first_step:]
        return {
            "timesteps": timesteps[first_step:],
            "sigmas": sigmas,
            "init_noise_sigma": self._init_noise_sigma(sigmas),
            "step_index": 0,
        }

    def scale_model_input(self, state, sample, timestep=None):
        """The model's input: the sample times alpha_t, in its dtype.

        Args:
            state: from create_state, set_timesteps or step.
            sample: x_t / alpha_t, any shape and float dtype.
            timestep: a timestep of the run; None: the timestep at state.step_index.
        """
        i = state.step_index if timestep is None else self._position(state, timestep)
        scale = jnp.sqrt(state.sigmas[i] ** 2 + 1)
        return (sample.astype(jnp.float32) / scale).astype(sample.dtype)

    def add_noise(self, state, original_samples, noise, timesteps):
        """Noisy samples x0 + sigma eps; see FlaxSchedulerMixin.add_noise."""
        alpha_t, sigma_t = self.scales(state, original_samples, timesteps)
        noisy = mix(1.0, original_samples, sigma_t / alpha_t, noise)
        return noisy.astype(original_samples.dtype)

    def _advance(self, state, timestep, x_t, model_output, draw):
        i = self._position(state, timestep)
        sigma, next_sigma = state.sigmas[i], state.sigmas[i + 1]
        x_0, eps = self._predict(sigma, x_t, model_output)
        return self._move(x_0, eps, sigma, next_sigma, draw), {"step_index": i + 1}

    def _predict(self, sigma, x_t, model_output):
        scaled = x_t / jnp.sqrt(sigma**2 + 1)
        return super()._predict(sigma, scaled, model_output)

    def _move(self, x_0, eps, sigma, next_sigma, draw):
        return x_0 + next_sigma * eps


class FlaxEulerAncestralDiscreteScheduler(FlaxEulerDiscreteScheduler):
    """Euler steps that remove more noise, then add fresh noise.

    Source: ancestral sampling, Song et al. (arXiv 2011.13456), appendix F, of x_t / alpha_t.
    """

    defaults = DEFAULTS | {"timestep_spacing": "linspace", "rescale_betas_zero_snr": False}
    choices = CHOICES | {"prediction_type": ("epsilon", "v_prediction")}
    takes_timesteps = False

    def _move(self, x_0, eps, sigma, next_sigma, draw):
        fresh = jnp.sqrt((sigma - next_sigma) * (sigma + next_sigma)) / sigma * next_sigma
        return x_0 + next_sigma**2 / sigma * eps + fresh * draw()


# Options of EDM's schedulers.
EDM_DEFAULTS = {
    "sigma_min": 0.002,
    "sigma_max": 80.0,
    "sigma_data": 0.5,  # standard deviation of x_0
    "sigma_schedule": "karras",
    "num_train_timesteps": 1000,  # noise levels in training
    "prediction_type": "epsilon",
    "rho": 7.0,
}


class EDMScheduler(SigmaScheduler):
    """Base of schedulers for models with EDM's preconditioning, such as CosXL.

    The model takes c_in x_t and the timestep log(sigma) / 4; x_0 is c_skip x_t + c_out F, where F
    is its output and x_t = x_0 + sigma eps. With prediction_type epsilon c_out has the paper's
    sign; with v_prediction the opposite, which makes F the velocity of x_0 / sigma_data.

    A run of one step goes from sigma_max to 0, with final_sigmas_type sigma_min to sigma_min, where
    diffusers may leave noise in the image.

    Source: Karras et al. (arXiv 2206.00364), table 1. Names, defaults and the start at
    sqrt(sigma_max^2 + 1): PyTorch diffusers.
    """

    first_arguments = ()
    choices = {  # noqa: RUF012 - see FlaxSchedulerMixin
        "sigma_schedule": ("karras", "exponential"),
        "prediction_type": ("epsilon", "v_prediction"),
        "final_sigmas_type": ("zero", "sigma_min"),
    }
    takes_timesteps = False
    _compatibles = ()

    @property
    def init_noise_sigma(self):
        """Standard deviation of the initial noise."""
        return float(np.hypot(self.config.sigma_max, 1))

    @property
    def vp_prediction_type(self):
        """See FlaxSchedulerMixin; a ValueError unless the options are CosXL's."""
        if (self.config.prediction_type, self.config.sigma_data) != ("v_prediction", 1):
            raise ValueError(
                "previews and acceleration need prediction_type='v_prediction' and sigma_data=1"
            )
        return "v_prediction"

    def _training_sigmas(self):
        return edm_levels(self.config)

    def _noise_schedule(self):
        alpha_bar = 1 / (1 + (self._training_sigmas() / self.config.sigma_data) ** 2)
        alphas = np.append(alpha_bar[:1], alpha_bar[1:] / alpha_bar[:-1])
        return tuple(table.astype(np.float32) for table in (alphas, 1 - alphas, alpha_bar))

    def _run(self, num_inference_steps):
        """A run's decreasing timesteps and sigmas; the last sigma is the level after the run."""
        highest, lowest = self.config.sigma_max, self.config.sigma_min
        if self.config.sigma_schedule == "karras":
            sigmas = karras_sigmas(highest, lowest, num_inference_steps, self.config.rho)
        else:
            sigmas = np.geomspace(highest, lowest, num_inference_steps)
        # With the last sigma's rounding, so that the last step changes nothing. A run of one step
        # ends at sigma_min, as in PyTorch's DPM-Solver.
        final = sigmas[-1] if num_inference_steps > 1 else lowest
        final = final if self.config.final_sigmas_type == "sigma_min" else 0
        return np.log(sigmas) / 4, np.append(sigmas, final)

    def create_state(self, common=None):
        """The state before set_timesteps; timesteps and sigmas are the longest run's.

        common has training's noise levels, see noise_schedule.edm_levels.
        """
        timesteps, sigmas = map(to_device, self._run(len(self)))
        start = to_device(self.init_noise_sigma)
        state = super().create_state(common)
        return state.replace(timesteps=timesteps, sigmas=sigmas, init_noise_sigma=start)

    def _sigma_at(self, state, timesteps):
        return jnp.exp(4 * jnp.asarray(timesteps, jnp.float32)) / self.config.sigma_data

    def scale_model_input(self, state, sample, timestep=None):
        """c_in times the sample; arguments as in FlaxEulerDiscreteScheduler.scale_model_input."""
        i = state.step_index if timestep is None else self._position(state, timestep)
        scale = jnp.sqrt(state.sigmas[i] ** 2 + self.config.sigma_data**2)
        return (sample.astype(jnp.float32) / scale).astype(sample.dtype)

    def add_noise(self, state, original_samples, noise, timesteps):
        """Noisy samples x0 + sigma eps; see FlaxSchedulerMixin.add_noise."""
        alpha_t, sigma_t = self.scales(state, original_samples, timesteps)
        sigma = self.config.sigma_data * sigma_t / alpha_t
        return mix(1.0, original_samples, sigma, noise).astype(original_samples.dtype)

    def get_velocity(self, state, sample, noise, timesteps):
        """The target of a v-prediction model: F in x_0 = c_skip x_t + c_out F."""
        scaled = sample.astype(jnp.float32) / self.config.sigma_data
        return super().get_velocity(state, scaled, noise, timesteps).astype(sample.dtype)

    def _predict(self, sigma, x_t, model_output):
        sigma_data = self.config.sigma_data
        variance = sigma**2 + sigma_data**2
        c_skip, c_out = sigma_data**2 / variance, sigma * sigma_data / jnp.sqrt(variance)
        sign = -1 if self.config.prediction_type == "v_prediction" else 1
        x_0 = c_skip * x_t + sign * c_out * model_output
        return x_0, (x_t - x_0) / sigma


class FlaxEDMEulerScheduler(EDMScheduler, FlaxEulerDiscreteScheduler):
    """Euler steps for models with EDM's preconditioning.

    Source: Karras et al. (arXiv 2206.00364), algorithm 1 without its second-order correction.
    """

    defaults = EDM_DEFAULTS | {"final_sigmas_type": "zero"}
    arguments = tuple(defaults)

    def _plan(self, num_inference_steps, first_step, timesteps):
        timesteps, sigmas = self._run(num_inference_steps)
        return {
            "timesteps": timesteps[first_step:],
            "sigmas": sigmas[first_step:],
            "init_noise_sigma": self.init_noise_sigma,
            "step_index": 0,
        }


class FlaxEDMTrainingScheduler(FlaxEDMEulerScheduler):
    """The noise of an EDM model's training; timesteps are indices of noise_schedule.edm_levels.

    The model predicts v. The velocity's plain mean squared error weights x_0 by 1 / c_out^2, as in
    the paper.

    Source: Karras et al. (arXiv 2206.00364), equation 8.
    """

    def create_state(self, common=None):
        """The state; sigmas are the levels of all timesteps, increasing."""
        return super().create_state(common).replace(sigmas=to_device(self._training_sigmas()))

    def _sigma_at(self, state, timesteps):
        return state.sigmas[timesteps] / self.config.sigma_data

    def model_timesteps(self, state, timesteps):
        """The model's timesteps, log(sigma) / 4."""
        return jnp.log(state.sigmas[timesteps]) / 4

    def add_noise(self, state, original_samples, noise, timesteps):
        """The model's input: c_in (x0 + sigma eps); arguments as in FlaxSchedulerMixin."""
        scaled = original_samples.astype(jnp.float32) / self.config.sigma_data
        noisy = SigmaScheduler.add_noise(self, state, scaled, noise, timesteps)
        return noisy.astype(original_samples.dtype)
