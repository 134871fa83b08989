"""FlaxDPMSolverMultistepScheduler: DPM-Solver++ of order 1, 2 or 3, also for EDM models."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from diffusers_flax.schedulers.base import (
    CHOICES,
    DEFAULTS,
    FlaxSchedulerOutput,
    SchedulerState,
    append,
    timestep_grid,
)
from diffusers_flax.schedulers.euler import (
    EDM_DEFAULTS,
    EDMScheduler,
    SigmaScheduler,
    vp_scales,
    weighted_sum,
)
from diffusers_flax.schedulers.noise_schedule import CommonSchedulerState, to_device

# The solver's options and supported values, also for EDM models.
SOLVER_DEFAULTS = {
    "solver_order": 2,
    "thresholding": False,
    "dynamic_thresholding_ratio": 0.995,
    "sample_max_value": 1.0,
    "algorithm_type": "dpmsolver++",
    "solver_type": "midpoint",
    "lower_order_final": True,
    "euler_at_final": False,
}
SOLVER_CHOICES = {
    "solver_order": (1, 2, 3),
    "solver_type": ("midpoint", "heun"),
    "algorithm_type": ("dpmsolver++",),
    "thresholding": (False,),
}


@struct.dataclass
class DPMSolverMultistepSchedulerState(SchedulerState):
    """State of FlaxDPMSolverMultistepScheduler."""

    common: CommonSchedulerState
    alpha_t: jax.Array  # sqrt(alpha_bar) of every training timestep
    sigma_t: jax.Array  # sqrt(1 - alpha_bar)
    lambda_t: jax.Array  # log(alpha_t / sigma_t)
    init_noise_sigma: jax.Array
    timesteps: jax.Array  # in the order of the run, int32
    num_inference_steps: int | None = struct.field(pytree_node=False, default=None)
    model_outputs: jax.Array | None = None  # predicted clean samples, (order, ...), newest last
    lower_order_nums: jax.Array | None = None  # number of known model_outputs, int32
    sigmas: jax.Array | None = None  # sigma_t / alpha_t at each timestep of the run and at the end
    step_index: jax.Array = np.int32(0)  # steps taken so far
    x0_weights: jax.Array | None = None  # (steps, number known before, output, newest first)


@struct.dataclass
class FlaxDPMSolverMultistepSchedulerOutput(FlaxSchedulerOutput):
    """The output of FlaxDPMSolverMultistepScheduler.step."""


class FlaxDPMSolverMultistepScheduler(SigmaScheduler):
    """DPM-Solver++ multistep of order 1, 2 or 3 in the predicted clean sample.

    Source: DPM-Solver++ (arXiv 2211.01095), algorithm 2; heun and the third order, DPM-Solver
    (arXiv 2206.00927), appendix B.
    """

    defaults = DEFAULTS | {
        "timestep_spacing": "linspace",
        **SOLVER_DEFAULTS,
        "use_karras_sigmas": False,
        "sigma_min": None,  # not an option of diffusers' class, which reads it from the config
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
        **SOLVER_CHOICES,
        "final_sigmas_type": ("zero", "sigma_min"),
        "lambda_min_clipped": (-float("inf"),),
        # DDPM's values have no effect here; a learned one would double the model's channels.
        "variance_type": ("fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log"),
        "use_beta_sigmas": (False,),
        "use_dynamic_shifting": (False,),
        "use_exponential_sigmas": (False,),
        "use_flow_sigmas": (False,),
        "use_lu_lambdas": (False,),
    }
    takes_timesteps = True
    output_class = FlaxDPMSolverMultistepSchedulerOutput

    def create_state(self, common=None):
        """See AlphaScheduler.create_state."""
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
            highest, lowest = training_sigmas[-1], training_sigmas[0]
            sigmas, timesteps = self._karras(highest, lowest, num_inference_steps)
            if self.config.beta_schedule != "squaredcos_cap_v2":  # as in diffusers
                timesteps = np.round(timesteps)
            timesteps = timesteps.astype(int)
        else:
            if timesteps is None:
                timesteps = self._timesteps(num_inference_steps)
            sigmas = training_sigmas[np.minimum(timesteps, len(self) - 1)]
        sigmas = self._with_final_sigma(sigmas)
        alpha_t = 1 / np.sqrt(sigmas**2 + 1)
        return self._steps(timesteps, sigmas, alpha_t, num_inference_steps, first_step)

    def _steps(self, timesteps, sigmas, alpha_t, num_inference_steps, first_step):
        """The run's plan; sigmas and alpha_t: each timestep's, x_t = alpha_t (x0 + sigma eps)."""
        timesteps = timesteps[first_step:]
        sigmas, alpha_t = sigmas[first_step:], alpha_t[first_step:]
        is_short_run = self.config.lower_order_final and num_inference_steps < 15
        weights = [
            [
                self._x0_weights(sigmas, i, known, is_short_run)
                for known in range(self.config.solver_order)
            ]
            for i in range(len(timesteps))
        ]
        return {
            "timesteps": timesteps,
            "sigmas": sigmas,
            "x0_weights": alpha_t[1:, None, None] * np.array(weights),
            "lower_order_nums": 0,
            "step_index": 0,
        }

    def _timesteps(self, num_inference_steps):
        if self.config.timestep_spacing == "trailing":
            return timestep_grid(self.config, num_inference_steps).astype(int)
        # The lowest point of these grids is the clean end, not a timestep of the run.
        return np.round(timestep_grid(self.config, num_inference_steps + 1)[:-1]).astype(int)

    def _x0_weights(self, sigmas, i, known, is_short_run):
        """Step i's weights of the clean samples predicted in steps i, i - 1, ...: (solver_order,);
        known: number of predictions before it.
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
        if h == 0:  # from sigma_min to sigma_min, nothing changes
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

    history = "model_outputs"

    @property
    def history_length(self):
        """Number of predictions in the state."""
        return self.config.solver_order

    def _noise_kept(self, sigma, next_sigma):
        _, sigma_t = vp_scales(sigma)
        _, next_sigma_t = vp_scales(next_sigma)
        return next_sigma_t / sigma_t

    def convert_model_output(self, state, model_output, timestep, sample):
        """The clean sample that the model predicts at a timestep of the run, float32."""
        sigma = state.sigmas[self._position(state, timestep)]
        x_t, model_output = sample.astype(jnp.float32), model_output.astype(jnp.float32)
        return self._predict(sigma, x_t, model_output)[0]

    def _advance(self, state, timestep, x_t, model_output, draw):
        i = self._position(state, timestep)
        x_0, _ = self._predict(state.sigmas[i], x_t, model_output)
        model_outputs, order = append(state.model_outputs, x_0), self.config.solver_order
        weights = state.x0_weights[i, jnp.minimum(state.lower_order_nums, order - 1)]
        noise_kept = self._noise_kept(state.sigmas[i], state.sigmas[i + 1])
        x_prev = noise_kept * x_t + weighted_sum(weights, model_outputs)
        return x_prev, {
            "model_outputs": model_outputs,
            "lower_order_nums": jnp.minimum(state.lower_order_nums + 1, order),
            "step_index": i + 1,
        }


class FlaxEDMDPMSolverMultistepScheduler(EDMScheduler, FlaxDPMSolverMultistepScheduler):
    """DPM-Solver++ for models with EDM's preconditioning."""

    defaults = EDM_DEFAULTS | {
        **SOLVER_DEFAULTS,
        "final_sigmas_type": "zero",
    }
    arguments = tuple(defaults)
    choices = EDMScheduler.choices | SOLVER_CHOICES

    def _plan(self, num_inference_steps, first_step, timesteps):
        timesteps, sigmas = self._run(num_inference_steps)
        alpha_t = np.ones_like(sigmas)
        plan = self._steps(timesteps, sigmas, alpha_t, num_inference_steps, first_step)
        return plan | {"init_noise_sigma": self.init_noise_sigma}

    def _noise_kept(self, sigma, next_sigma):
        return next_sigma / sigma
