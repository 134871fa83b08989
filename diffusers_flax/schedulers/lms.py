"""FlaxLMSDiscreteScheduler: a linear multistep method in sigma."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from diffusers_flax.schedulers.base import CHOICES, DEFAULTS, FlaxSchedulerOutput, append
from diffusers_flax.schedulers.euler import (
    EulerDiscreteSchedulerState,
    FlaxEulerDiscreteScheduler,
    weighted_sum,
)

LMS_ORDER = 4  # number of slopes in the state


@struct.dataclass
class LMSDiscreteSchedulerState(EulerDiscreteSchedulerState):
    """State of FlaxLMSDiscreteScheduler: Euler's, and the slopes of the latest steps."""

    derivatives: jax.Array | None = None  # slopes, (4, *sample.shape), newest last
    num_derivatives: jax.Array | None = None  # number of known slopes, int32
    coefficients: jax.Array | None = None  # (steps, order - 1, slope, newest first)


@struct.dataclass
class FlaxLMSSchedulerOutput(FlaxSchedulerOutput):
    """The output of FlaxLMSDiscreteScheduler.step."""


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
    output_class = FlaxLMSSchedulerOutput
    history = "derivatives"
    history_length = LMS_ORDER
    takes_timesteps = False

    def _plan(self, num_inference_steps, first_step, timesteps):
        plan = super()._plan(num_inference_steps, first_step, timesteps)
        coefficients = np.zeros((len(plan["timesteps"]), LMS_ORDER, LMS_ORDER))
        for i in range(len(coefficients)):
            for order in range(1, min(LMS_ORDER, i + 1) + 1):
                coefficients[i, order - 1, :order] = lms_coefficients(plan["sigmas"], i, order)
        return plan | {"coefficients": coefficients, "num_derivatives": 0}

    def get_lms_coefficient(self, state, order, t, current_order):
        """Weight of the slope of `current_order` steps ago, in step t with this order."""
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
            order: Python int, 1 to 4, the number of slopes; fewer while fewer are known.
            key, noise: without effect.
        """
        if order not in range(1, LMS_ORDER + 1):
            raise ValueError(f"order={order} must be a whole number from 1 to {LMS_ORDER}")
        return self._take_step(
            state, model_output, timestep, sample, return_dict, key, noise, order=order
        )

    def _advance(self, state, timestep, x_t, model_output, draw, order):
        i = self._position(state, timestep)
        _, slope = self._predict(state.sigmas[i], x_t, model_output)
        derivatives = append(state.derivatives, slope)
        num_derivatives = jnp.minimum(state.num_derivatives + 1, LMS_ORDER)
        order = jnp.minimum(jnp.minimum(num_derivatives, i + 1), order)
        x_prev = x_t + weighted_sum(state.coefficients[i, order - 1], derivatives)
        changes = {"derivatives": derivatives, "num_derivatives": num_derivatives}
        return x_prev, changes | {"step_index": i + 1}


def lms_coefficients(sigmas, i, order):
    """Weights of the slopes at sigmas[i], sigmas[i - 1], ... in the step to sigmas[i + 1].

    A weight is the integral over the step of the slope's Lagrange polynomial, which is 1 at its own
    sigma and 0 at the others: float64 (order,).
    """
    nodes = sigmas[i - order + 1 : i + 1][::-1] - sigmas[i]
    weights = []
    for k, node in enumerate(nodes):
        others = np.delete(nodes, k)
        integral = np.poly1d(others, r=True).integ()
        weights.append(integral(sigmas[i + 1] - sigmas[i]) / np.prod(node - others))
    return np.array(weights)
