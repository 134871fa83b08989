"""FlaxPNDMScheduler: a linear multistep method, Stable Diffusion's first scheduler."""

from itertools import pairwise

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
)
from diffusers_flax.schedulers.ddpm import AlphaScheduler, alpha_bar_at, as_index
from diffusers_flax.schedulers.noise_schedule import CommonSchedulerState

# Weights of PNDM's linear multistep method. Row i is for step i, the last row for all later steps;
# the columns are the current model output, then the stored outputs, newest first. Step 1 repeats
# step 0 and stores no output.
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
class PNDMSchedulerState(SchedulerState):
    """State of FlaxPNDMScheduler; other fields as in DDIMSchedulerState."""

    common: CommonSchedulerState
    final_alpha_cumprod: jax.Array
    init_noise_sigma: jax.Array
    timesteps: jax.Array
    num_inference_steps: int | None = struct.field(pytree_node=False, default=None)
    # Below, None is before set_timesteps.
    prk_timesteps: jax.Array | None = None  # of the Runge-Kutta start, int32, may be empty
    plms_timesteps: jax.Array | None = None  # of the multistep method, int32
    cur_model_output: jax.Array | None = None  # weighted sum over the current Runge-Kutta step
    counter: jax.Array | None = None  # steps taken so far, int32
    cur_sample: jax.Array | None = None  # start of the current Runge-Kutta or repeated step
    ets: jax.Array | None = None  # model outputs, float32 (4, *sample.shape), newest last

    @property
    def step_index(self):
        """Steps taken so far, as in the other states."""
        return self.counter


@struct.dataclass
class FlaxPNDMSchedulerOutput(FlaxSchedulerOutput):
    """The output of FlaxPNDMScheduler.step."""


class FlaxPNDMScheduler(AlphaScheduler):
    """DDIM steps along a weighted mean of the latest model outputs (linear multistep).

    A run starts with Runge-Kutta steps (n + 9 timesteps for n steps) or, with skip_prk_steps, takes
    the first step twice (n + 1 timesteps; 1 for n = 1).

    Source: PNDM (arXiv 2202.09778), equations 9, 12, 13 and algorithm 2.
    """

    defaults = DEFAULTS | {"skip_prk_steps": False, "set_alpha_to_one": False}
    arguments = ("skip_prk_steps", "set_alpha_to_one", "steps_offset", "prediction_type")

    @property
    def takes_denoising_range(self):
        """False with Runge-Kutta steps, whose timesteps are repeated."""
        return self.config.skip_prk_steps

    choices = CHOICES | {
        "prediction_type": ("epsilon", "v_prediction"),
        "rescale_betas_zero_snr": (False,),
    }
    state_class = PNDMSchedulerState
    counter = "counter"
    pndm_order = history_length = 4
    history = "ets"

    def _plan(self, num_inference_steps, first_step, timesteps):
        grid = self._even_grid(num_inference_steps)[first_step:]
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
            self.counter: 0,
        }

    def _empty_history(self, shape):
        zeros = jnp.zeros(shape, jnp.float32)
        return super()._empty_history(shape) | {"cur_model_output": zeros, "cur_sample": zeros}

    def step(
        self, state, model_output, timestep, sample, return_dict=True, *, key=None, noise=None
    ):
        """step_prk while state.counter is within prk_timesteps, then step_plms.

        Args and Returns as in FlaxDDPMScheduler.step; key and noise have no effect.

        Raises:
            ValueError: set_timesteps was not called, or not with the sample's shape.
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
        """One of a Runge-Kutta step's four model evaluations.

        Args and Raises as in step.

        Returns:
            (prev_sample, state).
        """
        self._check_run(state, sample)
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
        """One linear multistep step; step 1 repeats step 0 with the mean of both outputs.

        Args and Raises as in step.

        Returns:
            (prev_sample, state).
        """
        self._check_run(state, sample)
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
        """DDIM's step between two timesteps, equation 9; below 0 stands final_alpha_cumprod."""
        alpha_bar = alpha_bar_at(state, timestep)
        alpha_bar_prev = alpha_bar_at(state, prev_timestep, state.final_alpha_cumprod)
        if self.config.prediction_type == "v_prediction":
            model_output = jnp.sqrt(alpha_bar) * model_output + jnp.sqrt(1 - alpha_bar) * sample
        divisor = alpha_bar * jnp.sqrt(1 - alpha_bar_prev)
        divisor = divisor + jnp.sqrt(alpha_bar * (1 - alpha_bar) * alpha_bar_prev)
        eps_weight = (alpha_bar - alpha_bar_prev) / divisor
        return jnp.sqrt(alpha_bar_prev / alpha_bar) * sample + eps_weight * model_output
