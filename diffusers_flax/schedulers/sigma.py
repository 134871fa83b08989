"""Euler, Euler-ancestral, LMS and DPM-Solver++: schedulers that step in sigma, noise over signal.

ddpm.py shows their use. A step finds its index by its timestep: it is state.step_index
if that entry of state.timesteps equals the timestep, or if no entry does (a rounded timestep).
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
    mix,
    predict_x0_and_eps,
    timestep_grid,
    to_device,
)
from diffusers_flax.schedulers.options import CHOICES, DEFAULTS

# Replaces the last alpha_bar of a zero-SNR schedule, 0, where sigma would be infinite.
SMALLEST_ALPHA_BAR = 2.0**-24
KARRAS_CHOOSES = "timesteps cannot be chosen with use_karras_sigmas=True; leave one out"
LMS_ORDER = 4  # outputs that LMS remembers


@struct.dataclass
class EulerDiscreteSchedulerState(SchedulerState):
    """State of the Euler schedulers; timesteps are float32, sigmas one longer."""

    common: CommonSchedulerState
    init_noise_sigma: jax.Array  # standard deviation of the noise to start from
    timesteps: jax.Array  # in the order they are visited
    sigmas: jax.Array  # noise over signal at each timestep and at the end
    num_inference_steps: int | None = struct.field(pytree_node=False, default=None)
    step_index: jax.Array = struct.field(default=np.int32(0), kw_only=True)  # steps taken so far


@struct.dataclass
class LMSDiscreteSchedulerState(EulerDiscreteSchedulerState):
    """State of FlaxLMSDiscreteScheduler: Euler's, and the derivatives of the latest steps."""

    derivatives: jax.Array | None = None  # (4, *sample.shape), the newest last
    num_derivatives: jax.Array | None = None  # how many of them are known, int32
    coefficients: jax.Array | None = None  # (steps, order - 1, derivative, the newest first)


@struct.dataclass
class DPMSolverMultistepSchedulerState(SchedulerState):
    """State of FlaxDPMSolverMultistepScheduler."""

    common: CommonSchedulerState
    alpha_t: jax.Array  # sqrt(alpha_bar) of every training timestep
    sigma_t: jax.Array  # sqrt(1 - alpha_bar)
    lambda_t: jax.Array  # log(alpha_t / sigma_t)
    init_noise_sigma: jax.Array
    timesteps: jax.Array  # in the order they are visited, int32
    num_inference_steps: int | None = struct.field(pytree_node=False, default=None)
    model_outputs: jax.Array | None = None  # clean samples predicted, (order, ...), newest last
    lower_order_nums: jax.Array | None = None  # how many of them are known, int32
    sigmas: jax.Array | None = None  # sigma_t / alpha_t at each timestep of the run and at the end
    step_index: jax.Array = np.int32(0)  # steps taken so far
    x0_weights: jax.Array | None = None  # (steps, outputs known before, output, the newest first)


@struct.dataclass
class FlaxEulerDiscreteSchedulerOutput(FlaxSchedulerOutput):
    """What FlaxEulerDiscreteScheduler.step returns."""


@struct.dataclass
class FlaxLMSSchedulerOutput(FlaxSchedulerOutput):
    """What FlaxLMSDiscreteScheduler.step returns."""


@struct.dataclass
class FlaxDPMSolverMultistepSchedulerOutput(FlaxSchedulerOutput):
    """What FlaxDPMSolverMultistepScheduler.step returns."""


def karras_sigmas(sigma_max, sigma_min, num_steps, rho=7.0):
    """Decreasing noise levels that are denser at low noise, (num_steps,).

    Source: arXiv 2206.00364, equation 5.
    """
    ramp = np.linspace(0, 1, num_steps)
    return (sigma_max ** (1 / rho) * (1 - ramp) + sigma_min ** (1 / rho) * ramp) ** rho


def weighted_sum(weights, newest_last):
    """Weighted sum of arrays, weights[0] for the last.

    Not a dot product, which TPUs compute in bfloat16.
    """
    return sum(weight * term for weight, term in zip(weights, newest_last[::-1]))


def vp_scales(sigma):
    """alpha_t and sigma_t, whose squares sum to 1, where sigma is sigma_t / alpha_t."""
    alpha_t = 1 / jnp.sqrt(sigma**2 + 1)
    return alpha_t, sigma * alpha_t


def append(arrays, newest):
    """Drop the first array, the oldest, and append the newest."""
    return jnp.concatenate([arrays[1:], newest[None]])


class SigmaScheduler(FlaxSchedulerMixin):
    """Common to Euler, LMS and DPM-Solver: noise levels, and the index of a step in its run."""

    def _training_sigmas(self):
        alpha_bar = self._noise_schedule()[2].astype(np.float64)
        if self._option("rescale_betas_zero_snr"):
            alpha_bar[-1] = SMALLEST_ALPHA_BAR
        if (alpha_bar <= 0).any():
            raise ValueError(
                f"beta_end={self.config.beta_end} leaves no signal at some timesteps; "
                "take betas below 1"
            )
        return np.sqrt((1 - alpha_bar) / alpha_bar)

    def _falling_sigmas(self):
        return to_device(np.append(self._training_sigmas()[::-1], 0))

    def _karras(self, highest, lowest, num_inference_steps):
        """Karras sigmas and the fractional timesteps at which training had these noise levels.

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
        # Rounded to the state's float32, so that levels that are equal there are equal here.
        return sigmas.astype(np.float32).astype(np.float64)

    def _position(self, state, timestep):
        """Index of a timestep in the run."""
        timestep = jnp.asarray(timestep).astype(state.timesteps.dtype)
        found, current = state.timesteps == timestep, state.timesteps[state.step_index]
        truncated = current.astype(jnp.int32).astype(current.dtype)
        # Several steps may have the same rounded timestep; step_index tells them apart.
        is_current = (current == timestep) | (truncated == timestep) | ~found.any()
        return jnp.where(is_current, state.step_index, jnp.argmax(found).astype(jnp.int32))

    def _predict(self, sigma, x_t, model_output):
        """(x0, eps) where x_t = alpha_t (x0 + sigma eps)."""
        return predict_x0_and_eps(self.config.prediction_type, *vp_scales(sigma), x_t, model_output)

    def add_noise(self, state, original_samples, noise, timesteps):
        """Noise clean samples to given timesteps; see FlaxSchedulerMixin.add_noise."""
        alpha_t, sigma_t = self._alpha_sigma(state, original_samples, timesteps)
        return mix(alpha_t, original_samples, sigma_t, noise).astype(original_samples.dtype)

    def get_velocity(self, state, sample, noise, timesteps):
        """What a v-prediction model learns; see FlaxSchedulerMixin.get_velocity."""
        alpha_t, sigma_t = self._alpha_sigma(state, sample, timesteps)
        return mix(alpha_t, noise, -sigma_t, sample).astype(sample.dtype)

    def _alpha_sigma(self, state, sample, timesteps):
        # Interpolates between the run's noise levels, which Karras sigmas choose independently of
        # training's. Steps with the same rounded timestep differ in sigma, so the current step is
        # tested first.
        timesteps = jnp.asarray(timesteps).astype(jnp.float32)
        run_timesteps, run_sigmas = state.timesteps.astype(jnp.float32), state.sigmas[:-1]
        sigma = jnp.where(
            timesteps == run_timesteps[state.step_index],
            run_sigmas[state.step_index],
            jnp.interp(timesteps, run_timesteps[::-1], run_sigmas[::-1]),
        )
        sigma = sigma.reshape(sigma.shape + (1,) * (sample.ndim - sigma.ndim))
        return vp_scales(sigma)


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
    takes_timesteps = True

    @property
    def init_noise_sigma(self):
        """Standard deviation of the noise to start from; a run's own is state.init_noise_sigma."""
        return self._init_noise_sigma(self._training_sigmas())

    def _init_noise_sigma(self, sigmas):
        # "leading" starts at a timestep with some signal left, of variance 1.
        signal = 1.0 if self.config.timestep_spacing == "leading" else 0.0
        return float(np.hypot(np.max(sigmas), signal))

    def create_state(self, common=None):
        """The state before set_timesteps: enough for scale_model_input, add_noise, get_velocity.

        Args:
            common: CommonSchedulerState.create(self), to share it between schedulers.
        """
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
        elif self._option("use_karras_sigmas"):
            raise ValueError(KARRAS_CHOOSES)
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
        """The sample times alpha_t, in its dtype: what the model was trained on.

        Args:
            state: from create_state, set_timesteps or step.
            sample: x_t / alpha_t, any shape and float dtype.
            timestep: of the run; None takes that of state.step_index.
        """
        i = state.step_index if timestep is None else self._position(state, timestep)
        scale = jnp.sqrt(state.sigmas[i] ** 2 + 1)
        return (sample.astype(jnp.float32) / scale).astype(sample.dtype)

    def add_noise(self, state, original_samples, noise, timesteps):
        """Noise clean samples to given timesteps, x0 + sigma eps; see FlaxSchedulerMixin."""
        alpha_t, sigma_t = self._alpha_sigma(state, original_samples, timesteps)
        noisy = mix(1.0, original_samples, sigma_t / alpha_t, noise)
        return noisy.astype(original_samples.dtype)

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

        Only Euler-ancestral uses key or noise.
        """
        self._check_run(state, sample)
        i = self._position(state, timestep)
        sigma, next_sigma = state.sigmas[i], state.sigmas[i + 1]
        x_0, eps = self._predict(sigma, sample.astype(jnp.float32), model_output)
        x_prev = self._move(x_0, eps, sigma, next_sigma, lambda: self._noise(key, noise, sample))
        state = state.replace(step_index=i + 1)
        output = FlaxEulerDiscreteSchedulerOutput(x_prev.astype(sample.dtype), state)
        return output if return_dict else output.to_tuple()

    def _predict(self, sigma, x_t, model_output):
        scaled = x_t / jnp.sqrt(sigma**2 + 1)
        return super()._predict(sigma, scaled, model_output.astype(jnp.float32))

    def _move(self, x_0, eps, sigma, next_sigma, draw_noise):
        return x_0 + next_sigma * eps


class FlaxEulerAncestralDiscreteScheduler(FlaxEulerDiscreteScheduler):
    """Euler steps that remove too much noise and add fresh noise back.

    Source: ancestral sampling, Song et al. (arXiv 2011.13456), appendix F, of x_t / alpha_t.
    """

    defaults = DEFAULTS | {"timestep_spacing": "linspace", "rescale_betas_zero_snr": False}
    choices = CHOICES | {"prediction_type": ("epsilon", "v_prediction")}
    takes_timesteps = False

    def _move(self, x_0, eps, sigma, next_sigma, draw_noise):
        fresh = jnp.sqrt((sigma - next_sigma) * (sigma + next_sigma)) / sigma * next_sigma
        return x_0 + next_sigma**2 / sigma * eps + fresh * draw_noise()


class FlaxLMSDiscreteScheduler(FlaxEulerDiscreteScheduler):
    """Linear multistep (Adams-Bashforth) in sigma: Euler along a polynomial through past slopes.

    Source: Hairer, Norsett, Wanner, Solving Ordinary Differential Equations I, section III.5.
    """

    defaults = DEFAULTS | {"timestep_spacing": "linspace", "use_karras_sigmas": False}
    arguments = ("prediction_type",)
    choices = CHOICES | {
        "rescale_betas_zero_snr": (False,),
        "use_beta_sigmas": (False,),
        "use_exponential_sigmas": (False,),
    }
    state_class = LMSDiscreteSchedulerState
    takes_timesteps = False

    def _plan(self, num_inference_steps, first_step, timesteps):
        plan = super()._plan(num_inference_steps, first_step, timesteps)
        coefficients = np.zeros((len(plan["timesteps"]), LMS_ORDER, LMS_ORDER))
        for i in range(len(coefficients)):
            for order in range(1, min(LMS_ORDER, i + 1) + 1):
                coefficients[i, order - 1, :order] = lms_coefficients(plan["sigmas"], i, order)
        return plan | {"coefficients": coefficients, "num_derivatives": 0}

    def _memory(self, shape):
        return {"derivatives": jnp.zeros((LMS_ORDER, *shape), jnp.float32)}

    def get_lms_coefficient(self, state, order, t, current_order):
        """Weight of the slope of `current_order` steps ago in the step number t of this order."""
        return state.coefficients[t, order - 1, current_order]

    def step(
        self,
        state,
        model_output,
        timestep,
        sample,
        order=LMS_ORDER,
        return_dict=True,
        *,
        key=None,
        noise=None,
    ):
        """Step from a timestep to the next one of the run; arguments as in FlaxDDPMScheduler.step.

        Args:
            order: Python int, 1 to 4, the number of slopes used; fewer while fewer are known.
            key, noise: not used.
        """
        if order not in range(1, LMS_ORDER + 1):
            raise ValueError(f"order={order} must be a whole number from 1 to {LMS_ORDER}")
        self._check_run(state, sample, state.derivatives)
        i = self._position(state, timestep)
        x_t = sample.astype(jnp.float32)
        _, slope = self._predict(state.sigmas[i], x_t, model_output)
        derivatives = append(state.derivatives, slope)
        num_derivatives = jnp.minimum(state.num_derivatives + 1, LMS_ORDER)
        order = jnp.minimum(jnp.minimum(num_derivatives, i + 1), order)
        x_prev = x_t + weighted_sum(state.coefficients[i, order - 1], derivatives)
        state = state.replace(
            step_index=i + 1, derivatives=derivatives, num_derivatives=num_derivatives
        )
        output = FlaxLMSSchedulerOutput(x_prev.astype(sample.dtype), state)
        return output if return_dict else output.to_tuple()


def lms_coefficients(sigmas, i, order):
    """Weights of the slopes at sigmas[i], sigmas[i - 1], ... in the step to sigmas[i + 1].

    Each is the integral over the step of the Lagrange polynomial that is 1 at its own sigma and 0
    at the others: float64 (order,).
    """
    nodes = sigmas[i - order + 1 : i + 1][::-1] - sigmas[i]
    weights = []
    for k, node in enumerate(nodes):
        others = np.delete(nodes, k)
        integral = np.poly1d(others, r=True).integ()
        weights.append(integral(sigmas[i + 1] - sigmas[i]) / np.prod(node - others))
    return np.array(weights)


class FlaxDPMSolverMultistepScheduler(SigmaScheduler):
    """DPM-Solver++ multistep of order 1, 2 or 3 in the predicted clean sample.

    Source: DPM-Solver++ (arXiv 2211.01095), algorithm 2; heun and the third order, DPM-Solver
    (arXiv 2206.00927), appendix B.
    """

    defaults = DEFAULTS | {
        "timestep_spacing": "linspace",
        "solver_order": 2,
        "thresholding": False,
        "dynamic_thresholding_ratio": 0.995,
        "sample_max_value": 1.0,
        "algorithm_type": "dpmsolver++",
        "solver_type": "midpoint",
        "lower_order_final": True,
        "euler_at_final": False,
        "use_karras_sigmas": False,
        "sigma_min": None,  # diffusers' class lacks this option but reads it from the config
        "sigma_max": None,
        "final_sigmas_type": "zero",
        "lambda_min_clipped": -float("inf"),
        "rescale_betas_zero_snr": False,
    }
    arguments = (
        "solver_order",
        "prediction_type",
        "thresholding",
        "dynamic_thresholding_ratio",
        "sample_max_value",
        "algorithm_type",
        "solver_type",
        "lower_order_final",
        "timestep_spacing",
    )
    choices = CHOICES | {
        "solver_order": (1, 2, 3),
        "solver_type": ("midpoint", "heun"),
        "algorithm_type": ("dpmsolver++",),
        "final_sigmas_type": ("zero", "sigma_min"),
        # DDPM's values have no effect here; a learned one would double the model's channels.
        "variance_type": ("fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log"),
        "thresholding": (False,),
        "use_beta_sigmas": (False,),
        "use_dynamic_shifting": (False,),
        "use_exponential_sigmas": (False,),
        "use_flow_sigmas": (False,),
        "use_lu_lambdas": (False,),
    }
    # Values of UniPC and DEIS, which diffusers' class takes for its own.
    synonyms = {  # noqa: RUF012 - see FlaxSchedulerMixin
        **{("solver_type", name): "midpoint" for name in ("bh1", "bh2", "logrho")},
        ("algorithm_type", "deis"): "dpmsolver++",
    }
    takes_timesteps = True

    def create_state(self, common=None):
        """The state before set_timesteps: enough for add_noise and get_velocity in training.

        Args:
            common: CommonSchedulerState.create(self), to share it between schedulers.
        """
        common = CommonSchedulerState.create(self) if common is None else common
        alpha_t, sigma_t = jnp.sqrt(common.alphas_cumprod), jnp.sqrt(1 - common.alphas_cumprod)
        return DPMSolverMultistepSchedulerState(
            common=common,
            alpha_t=alpha_t,
            sigma_t=sigma_t,
            lambda_t=jnp.log(alpha_t) - jnp.log(sigma_t),
            init_noise_sigma=to_device(1.0),
            timesteps=to_device(np.arange(len(self))[::-1]),
            sigmas=self._falling_sigmas(),
            step_index=to_device(0),
        )

    def _plan(self, num_inference_steps, first_step, timesteps):
        training_sigmas = self._training_sigmas()
        if self.config.use_karras_sigmas:
            if timesteps is not None:
                raise ValueError(KARRAS_CHOOSES)
            highest, lowest = training_sigmas[-1], training_sigmas[0]
            sigmas, timesteps = self._karras(highest, lowest, num_inference_steps)
            if self.config.beta_schedule != "squaredcos_cap_v2":  # as in diffusers
                timesteps = np.round(timesteps)
            timesteps = timesteps.astype(int)
        else:
            if timesteps is None:
                timesteps = self._timesteps(num_inference_steps, training_sigmas)
            sigmas = training_sigmas[np.minimum(timesteps, len(self) - 1)]
        sigmas = self._with_final_sigma(sigmas)
        if (np.diff(sigmas[:-1]) >= 0).any():
            raise ValueError(
                f"num_inference_steps={num_inference_steps} visits a timestep twice; take fewer"
            )
        timesteps, sigmas = timesteps[first_step:], sigmas[first_step:]
        is_short_run = self.config.lower_order_final and num_inference_steps < 15
        weights = [
            [
                self._x0_weights(sigmas, i, known, is_short_run)
                for known in range(self.config.solver_order)
            ]
            for i in range(len(timesteps))
        ]
        alpha_t = 1 / np.sqrt(sigmas**2 + 1)
        return {
            "timesteps": timesteps,
            "sigmas": sigmas,
            "x0_weights": alpha_t[1:, None, None] * np.array(weights),
            "lower_order_nums": 0,
            "step_index": 0,
        }

    def _timesteps(self, num_inference_steps, training_sigmas):
        last = int((-np.log(training_sigmas) >= self.config.lambda_min_clipped).sum())
        if self.config.timestep_spacing == "trailing":
            return timestep_grid(self.config, num_inference_steps, last).astype(int)
        # The lowest point of these grids is the clean end, not a timestep to visit.
        grid = timestep_grid(self.config, num_inference_steps + 1, last)[:-1]
        return np.round(grid).astype(int)

    def _x0_weights(self, sigmas, i, known, is_short_run):
        """Weights in step i of the clean samples predicted at i, i - 1, ...: (solver_order,).

        known: number of predictions from steps before i.
        """
        with np.errstate(divide="ignore"):
            log_snr = -np.log(sigmas)  # lambda in the papers
        h = log_snr[i + 1] - log_snr[i]
        steps_left = len(sigmas) - 1 - i
        order = min(self.config.solver_order, i + 1, known + 1)
        if is_short_run:
            order = min(order, steps_left)
        if steps_left == 1 and (self.config.euler_at_final or sigmas[-1] == 0):
            order = 1
        if h == 0:  # from sigma_min to sigma_min: nothing is left to do
            order = 1

        # x_t / alpha_t gains phi_1 D0 + phi_2 D1 + phi_3 D2, where Dn is h^n times the n-th
        # derivative of x0 in lambda, by finite differences of the predictions m0, m1, m2.
        m0, m1, m2 = np.eye(3)
        phi_1 = -np.expm1(-h)
        weights = phi_1 * m0
        if order > 1:
            phi_2 = 1 - phi_1 / h
            r0 = (log_snr[i] - log_snr[i - 1]) / h
            d1 = (m0 - m1) / r0
        if order == 2:
            weights = weights + (phi_2 if self.config.solver_type == "heun" else phi_1 / 2) * d1
        if order == 3:
            r1 = (log_snr[i - 1] - log_snr[i - 2]) / h
            d2 = (d1 - (m1 - m2) / r1) / (r0 + r1)
            weights = weights + phi_2 * (d1 + r0 * d2) + (1 / 2 - phi_2 / h) * d2
        return weights[: self.config.solver_order]

    def _memory(self, shape):
        return {"model_outputs": jnp.zeros((self.config.solver_order, *shape), jnp.float32)}

    def convert_model_output(self, state, model_output, timestep, sample):
        """The clean sample that the model predicts at a timestep of the run, float32."""
        sigma = state.sigmas[self._position(state, timestep)]
        x_t, model_output = sample.astype(jnp.float32), model_output.astype(jnp.float32)
        return self._predict(sigma, x_t, model_output)[0]

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

        key and noise are not used.
        """
        self._check_run(state, sample, state.model_outputs)
        i = self._position(state, timestep)
        x_t, model_output = sample.astype(jnp.float32), model_output.astype(jnp.float32)
        x_0, _ = self._predict(state.sigmas[i], x_t, model_output)
        model_outputs = append(state.model_outputs, x_0)
        weights = state.x0_weights[
            i, jnp.minimum(state.lower_order_nums, self.config.solver_order - 1)
        ]
        _, sigma_t = vp_scales(state.sigmas[i])
        _, next_sigma_t = vp_scales(state.sigmas[i + 1])
        x_prev = next_sigma_t / sigma_t * x_t + weighted_sum(weights, model_outputs)
        state = state.replace(
            model_outputs=model_outputs,
            lower_order_nums=jnp.minimum(state.lower_order_nums + 1, self.config.solver_order),
            step_index=i + 1,
        )
        output = FlaxDPMSolverMultistepSchedulerOutput(x_prev.astype(sample.dtype), state)
        return output if return_dict else output.to_tuple()
