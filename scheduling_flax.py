"""DDPM, DDIM, PNDM, Euler, Euler-ancestral and DPM-Solver++ as pure functions of a state.

The names and call signatures are those of the removed Flax schedulers, the numbers are PyTorch
diffusers'. A scheduler object holds options only and hashes, so it may be a static argument; every
array lives in its state. The weights of each step are worked out in NumPy float64 when the steps
are set, so a compiled loop only multiplies and adds:

    scheduler, state = scheduler_from_pretrained("my_model")
    state = scheduler.set_timesteps(state, 20, latents.shape)
    latents = latents * state.init_noise_sigma

    def body(i, carry):
        latents, state = carry
        t = state.timesteps[i]
        eps_pred = unet(scheduler.scale_model_input(state, latents, t), t)
        return scheduler.step(state, eps_pred, t, latents, jax.random.fold_in(key, i)).to_tuple()

    latents, state = jax.lax.fori_loop(0, len(state.timesteps), body, (latents, state))
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from scheduling_flax_utils import (
    CHOICES,
    CONFIG_NAME,
    DEFAULTS,
    Scheduler,
    load_config,
    noise_schedule,
    timestep_grid,
    to_device,
)

# A zero-SNR schedule ends at sigma = infinity; the schedulers in sigma end at this alpha_bar.
SMALLEST_ALPHA_BAR = 2.0**-24


def karras_sigmas(sigma_max, sigma_min, num_steps, rho=7.0):
    """Noise levels that crowd where noise is low, falling, (num_steps,).

    Source: arXiv 2206.00364, equation 5.
    """
    ramp = np.linspace(0, 1, num_steps)
    return (sigma_max ** (1 / rho) * (1 - ramp) + sigma_min ** (1 / rho) * ramp) ** rho


def weighted_sum(weights, terms):
    """sum_k weights[k] terms[k]; not a dot product, which accelerators compute in bfloat16."""
    return sum(weight * term for weight, term in zip(weights, terms))


class FlaxDDPMScheduler(Scheduler):
    """Ancestral sampling of the reverse diffusion.

    Source: DDPM (arXiv 2006.11239), equation 7.
    """

    defaults = DEFAULTS | {
        "variance_type": "fixed_small",
        "clip_sample": True,
        "clip_sample_range": 1.0,
        "rescale_betas_zero_snr": False,
    }
    choices = CHOICES | {
        # fixed_small_log is fixed_small with the logarithm taken and undone.
        "variance_type": ("fixed_small", "fixed_small_log", "fixed_large"),
        "thresholding": (False,),
    }

    def _plan(self, num_inference_steps, first_step):
        timesteps = self._whole_timesteps(num_inference_steps)[first_step:]
        alpha_bar, alpha_bar_prev = self._alpha_bars(timesteps, np.append(timesteps[1:], -1))
        alpha = alpha_bar / alpha_bar_prev
        posterior = (1 - alpha_bar_prev) / (1 - alpha_bar)
        variance = (1 - alpha) * (1 if self.config.variance_type == "fixed_large" else posterior)
        tables = {
            "alpha": np.sqrt(alpha_bar),
            "sigma": np.sqrt(1 - alpha_bar),
            "x0_weight": np.sqrt(alpha_bar_prev) * (1 - alpha) / (1 - alpha_bar),
            "x_t_weight": np.sqrt(alpha) * posterior,
            "std": np.sqrt(variance) * (timesteps > 0),
        }
        return {"timesteps": timesteps, "tables": tables}


class FlaxDDIMScheduler(Scheduler):
    """Few steps, deterministic (eta=0) to as noisy as DDPM (eta=1).

    Source: DDIM (arXiv 2010.02502), equations 12 and 16.
    """

    defaults = DEFAULTS | {
        "set_alpha_to_one": True,
        "clip_sample": True,
        "clip_sample_range": 1.0,
        "rescale_betas_zero_snr": False,
    }
    choices = CHOICES | {"thresholding": (False,)}

    def _plan(self, num_inference_steps, first_step):
        timesteps = self._whole_timesteps(num_inference_steps)[first_step:]
        # As in diffusers, a step is this long even where the grid is spaced otherwise.
        stride = len(self) // num_inference_steps
        alpha_bar, alpha_bar_prev = self._alpha_bars(timesteps, timesteps - stride)
        ddpm_variance = (1 - alpha_bar_prev) / (1 - alpha_bar) * (1 - alpha_bar / alpha_bar_prev)
        tables = {
            "alpha": np.sqrt(alpha_bar),
            "sigma": np.sqrt(1 - alpha_bar),
            "x0_weight": np.sqrt(alpha_bar_prev),
            "noise_variance": 1 - alpha_bar_prev,
            "ddpm_variance": ddpm_variance,
        }
        return {"timesteps": timesteps, "tables": tables}

    def _advance(self, now, memory, x_t, model_output, draw_noise, eta=0.0):
        fresh_variance = eta**2 * now["ddpm_variance"]
        # The two are equal at the first timestep with eta=1, up to rounding.
        now = now | {"eps_weight": jnp.sqrt(jnp.maximum(now["noise_variance"] - fresh_variance, 0))}
        if isinstance(eta, jax.Array) or eta != 0:
            now["std"] = jnp.sqrt(fresh_variance)
        return super()._advance(now, memory, x_t, model_output, draw_noise)


class FlaxPNDMScheduler(Scheduler):
    """DDIM steps along a linear multistep mean of the latest model outputs.

    It starts with Runge-Kutta steps (n + 9 timesteps for n steps) or, with skip_prk_steps, by
    taking the first step twice (n + 1 timesteps; 1 for n = 1).

    Source: PNDM (arXiv 2202.09778), equations 9, 12, 13 and algorithm 2.
    """

    defaults = DEFAULTS | {"skip_prk_steps": False, "set_alpha_to_one": False}
    choices = CHOICES | {
        "prediction_type": ("epsilon", "v_prediction"),
        "rescale_betas_zero_snr": (False,),
    }

    def _plan(self, num_inference_steps, first_step):
        grid = self._whole_timesteps(num_inference_steps)[first_step:]
        stride = len(self) // num_inference_steps
        plan = self._plan_second_try if self.config.skip_prk_steps else self._plan_runge_kutta
        timesteps, start, end, tables = plan(grid, stride)

        alpha_bar, alpha_bar_prev = self._alpha_bars(start, end)
        # DDIM's step written in x_t and eps, which is equation 9.
        x_t_weight = np.sqrt(alpha_bar_prev / alpha_bar)
        slope_weight = np.sqrt(1 - alpha_bar_prev) - x_t_weight * np.sqrt(1 - alpha_bar)
        if self.config.prediction_type == "v_prediction":  # eps = alpha v + sigma x_t
            x_t_weight = x_t_weight + slope_weight * np.sqrt(1 - alpha_bar)
            slope_weight = slope_weight * np.sqrt(alpha_bar)
        tables |= {"x_t_weight": x_t_weight, "slope_weight": slope_weight}
        return {"timesteps": timesteps, "tables": tables}

    # "slopes" weighs [this output, sum, and the three kept before it]; "sum" weighs [sum, this
    # output]; "keep" says whether to keep this output, and the sample that the step starts from.

    def _plan_second_try(self, grid, stride):
        """Evaluation 1, at the end of step 0, repeats that step with the mean of both slopes."""
        timesteps = np.concatenate([grid[:2], grid[1:]])
        start, end = timesteps.copy(), timesteps - stride
        start[1:2], end[1:2] = timesteps[1:2] + stride, timesteps[1:2]
        slopes = np.tile(np.array([55, 0, -59, 37, -9]) / 24, (max(len(timesteps), 4), 1))
        slopes[:3] = [1, 0, 0, 0, 0], [1 / 2, 0, 1 / 2, 0, 0], [3 / 2, 0, -1 / 2, 0, 0]
        slopes[3] = np.array([23, 0, -16, 5, 0]) / 12
        keep = np.arange(len(timesteps)) != 1
        tables = {"slopes": slopes[: len(keep)], "sum": np.zeros((len(keep), 2)), "keep": keep}
        return timesteps, start, end, tables

    def _plan_runge_kutta(self, grid, stride):
        """Three steps of four evaluations each: at the start, twice in the middle, at the end."""
        if len(grid) < 4:
            raise ValueError(
                f"num_inference_steps={len(grid)} is too few for PNDM's Runge-Kutta start; "
                "take 4 or more, or skip_prk_steps=True"
            )
        half = stride // 2
        timesteps, end = [], []
        for here, there in pairwise(grid[:4]):
            middle = there + half
            timesteps += [here, middle, middle, there]
            end += [here - half, middle, middle - half, there]
        timesteps, end = np.append(timesteps, grid[3:]), np.append(end, grid[3:] - stride)
        start = np.append(np.repeat(grid[:3], 4), grid[3:])

        def table(evaluations, multistep):
            return np.array(evaluations * 3 + [multistep] * len(grid[3:]))

        slope, mean = [1, 0, 0, 0, 0], [1 / 6, 1, 0, 0, 0]
        tables = {
            "slopes": table([slope] * 3 + [mean], [55 / 24, 0, -59 / 24, 37 / 24, -9 / 24]),
            "sum": table([[0, 1 / 6], [1, 1 / 3], [1, 1 / 3], [0, 0]], [0, 0]),
            "keep": table([True, False, False, False], True),
        }
        return timesteps, start, end, tables

    def _memory(self):
        return {"outputs": (3,), "sum": (), "start": ()}

    def _advance(self, now, memory, x_t, model_output, draw_noise):
        kept = jnp.concatenate([model_output[None], memory["outputs"][:-1]])
        start = jnp.where(now["keep"], x_t, memory["start"])
        slope = weighted_sum(now["slopes"], [model_output, memory["sum"], *memory["outputs"]])
        memory = {
            "outputs": jnp.where(now["keep"], kept, memory["outputs"]),
            "sum": weighted_sum(now["sum"], [memory["sum"], model_output]),
            "start": start,
        }
        return now["x_t_weight"] * start + now["slope_weight"] * slope, memory


class SigmaScheduler(Scheduler):
    """What Euler and DPM-Solver share: steps in sigma, the ratio of noise to signal."""

    def create_state(self):
        """The state before set_timesteps: enough for add_noise and get_velocity in training."""
        sigmas = np.append(self._training_sigmas()[::-1], 0)
        return super().create_state().replace(sigmas=to_device(sigmas))

    def _training_sigmas(self):
        alpha_bar = noise_schedule(self.config)[2].astype(np.float64)
        if self.config.rescale_betas_zero_snr:
            alpha_bar[-1] = SMALLEST_ALPHA_BAR
        return np.sqrt((1 - alpha_bar) / alpha_bar)

    def _karras(self, highest, lowest, num_inference_steps):
        """Karras sigmas and the fractional timesteps at which training had these noise levels.

        The options sigma_max and sigma_min win over highest and lowest.
        """
        sigma_max, sigma_min = self.config.sigma_max, self.config.sigma_min
        sigma_max = highest if sigma_max is None else sigma_max
        sigma_min = lowest if sigma_min is None else sigma_min
        sigmas = karras_sigmas(sigma_max, sigma_min, num_inference_steps)
        training_log_sigmas = np.log(self._training_sigmas())
        return sigmas, np.interp(np.log(sigmas), training_log_sigmas, np.arange(len(self)))

    def _with_final_sigma(self, sigmas):
        is_clean = self.config.get("final_sigmas_type", "zero") == "zero"
        sigmas = np.append(sigmas, 0 if is_clean else self._training_sigmas()[0])
        # Rounded, so that levels which are equal in the state are equal here.
        return sigmas.astype(np.float32).astype(np.float64)

    def _alpha_sigma(self, state, sample, timesteps):
        # Over the run's own levels, which (Karras) need not be those of training. Steps whose
        # timesteps round to the same one differ in sigma, so the step that the state is at comes
        # first.
        timesteps = jnp.asarray(timesteps).astype(jnp.float32)
        run_timesteps, run_sigmas = state.timesteps.astype(jnp.float32), state.sigmas[:-1]
        sigma = jnp.where(
            timesteps == run_timesteps[state.step_index],
            run_sigmas[state.step_index],
            jnp.interp(timesteps, run_timesteps[::-1], run_sigmas[::-1]),
        )
        sigma = sigma.reshape(sigma.shape + (1,) * (sample.ndim - sigma.ndim))
        alpha_t = 1 / jnp.sqrt(sigma**2 + 1)
        return alpha_t, sigma * alpha_t


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
    choices = CHOICES | {
        "final_sigmas_type": ("zero", "sigma_min"),
        "interpolation_type": ("linear",),
        "timestep_type": ("discrete",),
        "use_beta_sigmas": (False,),
        "use_exponential_sigmas": (False,),
    }

    def create_state(self):
        """The state before set_timesteps: enough for add_noise and get_velocity in training."""
        state = super().create_state()
        return state.replace(init_noise_sigma=to_device(self._init_noise_sigma(state.sigmas)))

    def _init_noise_sigma(self, sigmas):
        # "leading" starts where there still is some signal, of variance 1.
        signal = 1.0 if self.config.timestep_spacing == "leading" else 0.0
        return float(np.hypot(np.max(sigmas), signal))

    def _plan(self, num_inference_steps, first_step):
        timesteps = timestep_grid(self.config, num_inference_steps).astype(np.float32)
        sigmas = np.interp(timesteps, np.arange(len(self)), self._training_sigmas())
        if self.config.get("use_karras_sigmas"):
            sigmas, timesteps = self._karras(sigmas[0], sigmas[-1], num_inference_steps)
        timesteps, sigmas = timesteps[first_step:], self._with_final_sigma(sigmas)[first_step:]
        alpha = 1 / np.sqrt(sigmas[:-1] ** 2 + 1)
        tables = {"alpha": alpha, "sigma": sigmas[:-1] * alpha, "x0_weight": np.ones_like(alpha)}
        return {
            "timesteps": timesteps,
            "tables": tables | self._noise_weights(sigmas[:-1], sigmas[1:]),
            "sigmas": sigmas,
            "init_noise_sigma": self._init_noise_sigma(sigmas),
        }

    def _noise_weights(self, here, there):
        return {"eps_weight": there}

    def scale_model_input(self, state, sample, timestep=None):
        """The sample times alpha_t, in its dtype: what the model was trained on."""
        if state.num_inference_steps is None:
            raise ValueError("the state has no timesteps; call set_timesteps first")
        alpha_t = state.tables["alpha"][state.step_index]
        return (alpha_t * sample.astype(jnp.float32)).astype(sample.dtype)

    def add_noise(self, state, original_samples, noise, timesteps):
        """Noise clean samples to given timesteps, x0 + sigma eps; see Scheduler.add_noise."""
        alpha_t, sigma_t = self._alpha_sigma(state, original_samples, timesteps)
        x_0, eps = original_samples.astype(jnp.float32), noise.astype(jnp.float32)
        return (x_0 + sigma_t / alpha_t * eps).astype(original_samples.dtype)

    def _predict(self, now, x_t, model_output):
        return super()._predict(now, now["alpha"] * x_t, model_output)


class FlaxEulerAncestralDiscreteScheduler(FlaxEulerDiscreteScheduler):
    """Euler steps that remove too much noise and add fresh noise back.

    Source: ancestral sampling, Song et al. (arXiv 2011.13456), appendix F, of x_t / alpha_t.
    """

    defaults = DEFAULTS | {"timestep_spacing": "linspace", "rescale_betas_zero_snr": False}
    choices = CHOICES | {"prediction_type": ("epsilon", "v_prediction")}

    def _noise_weights(self, here, there):
        return {"eps_weight": there**2 / here, "std": there * np.sqrt(1 - (there / here) ** 2)}


class FlaxDPMSolverMultistepScheduler(SigmaScheduler):
    """DPM-Solver++ multistep of order 1, 2 or 3 in the predicted clean sample.

    Source: DPM-Solver++ (arXiv 2211.01095), algorithm 2; heun and the third order, DPM-Solver
    (arXiv 2206.00927), appendix B.
    """

    defaults = DEFAULTS | {
        "timestep_spacing": "linspace",
        "solver_order": 2,
        "solver_type": "midpoint",
        "algorithm_type": "dpmsolver++",
        "lower_order_final": True,
        "euler_at_final": False,
        "use_karras_sigmas": False,
        "sigma_min": None,  # diffusers has no such options here, but uses Euler's from a config
        "sigma_max": None,
        "final_sigmas_type": "zero",
        "lambda_min_clipped": -float("inf"),
        "rescale_betas_zero_snr": False,
    }
    choices = CHOICES | {
        "solver_order": (1, 2, 3),
        "solver_type": ("midpoint", "heun"),
        "algorithm_type": ("dpmsolver++",),
        "final_sigmas_type": ("zero", "sigma_min"),
        # DDPM's, which mean nothing here; a learned variance would double the model's output.
        "variance_type": ("fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log"),
        "thresholding": (False,),
        "use_beta_sigmas": (False,),
        "use_dynamic_shifting": (False,),
        "use_exponential_sigmas": (False,),
        "use_flow_sigmas": (False,),
        "use_lu_lambdas": (False,),
    }

    def _plan(self, num_inference_steps, first_step):
        training_sigmas = self._training_sigmas()
        if self.config.use_karras_sigmas:
            highest, lowest = training_sigmas[-1], training_sigmas[0]
            sigmas, timesteps = self._karras(highest, lowest, num_inference_steps)
            if self.config.beta_schedule != "squaredcos_cap_v2":  # as in diffusers
                timesteps = np.round(timesteps)
            timesteps = timesteps.astype(int)
        else:
            timesteps = self._timesteps(num_inference_steps, training_sigmas)
            sigmas = training_sigmas[np.minimum(timesteps, len(self) - 1)]
        sigmas = self._with_final_sigma(sigmas)
        if (np.diff(sigmas[:-1]) >= 0).any():
            raise ValueError(
                f"num_inference_steps={num_inference_steps} visits a timestep twice; take fewer"
            )
        timesteps, sigmas = timesteps[first_step:], sigmas[first_step:]
        alpha_t = 1 / np.sqrt(sigmas**2 + 1)
        sigma_t = sigmas * alpha_t
        is_short_run = self.config.lower_order_final and num_inference_steps < 15
        x0_weights = [self._x0_weights(sigmas, i, is_short_run) for i in range(len(timesteps))]
        tables = {
            "alpha": alpha_t[:-1],
            "sigma": sigma_t[:-1],
            "x_t_weight": sigma_t[1:] / sigma_t[:-1],
            "x0_weights": alpha_t[1:, None] * np.array(x0_weights),  # (steps, solver_order)
        }
        return {"timesteps": timesteps, "tables": tables, "sigmas": sigmas}

    def _timesteps(self, num_inference_steps, training_sigmas):
        last = int((-np.log(training_sigmas) >= self.config.lambda_min_clipped).sum())
        if self.config.timestep_spacing == "trailing":
            return timestep_grid(self.config, num_inference_steps, last).astype(int)
        # The lowest point of these grids is the clean end, not a timestep to visit.
        grid = timestep_grid(self.config, num_inference_steps + 1, last)[:-1]
        return np.round(grid).astype(int)

    def _x0_weights(self, sigmas, i, is_short_run):
        """Weights in step i of the clean samples predicted at i, i - 1, ...: (solver_order,)."""
        with np.errstate(divide="ignore"):
            log_snr = -np.log(sigmas)  # lambda in the papers
        h = log_snr[i + 1] - log_snr[i]
        steps_left = len(sigmas) - 1 - i
        order = min(self.config.solver_order, i + 1)
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

    def _memory(self):
        return {"x0": (self.config.solver_order - 1,)}

    def _advance(self, now, memory, x_t, model_output, draw_noise):
        x_0, _ = self._predict(now, x_t, model_output)
        predictions = jnp.concatenate([x_0[None], memory["x0"]])
        x_prev = now["x_t_weight"] * x_t + weighted_sum(now["x0_weights"], predictions)
        return x_prev, {"x0": predictions[:-1]}


SCHEDULERS = {
    "ddpm": FlaxDDPMScheduler,
    "ddim": FlaxDDIMScheduler,
    "pndm": FlaxPNDMScheduler,
    "euler": FlaxEulerDiscreteScheduler,
    "euler_ancestral": FlaxEulerAncestralDiscreteScheduler,
    "dpmsolver++": FlaxDPMSolverMultistepScheduler,
}


def make_scheduler(name, config):
    """Build (scheduler, state) by its short name, a key of SCHEDULERS, from any one's options."""
    if name not in SCHEDULERS:
        raise ValueError(f"scheduler {name!r} is unknown; choose from {', '.join(SCHEDULERS)}")
    return SCHEDULERS[name].from_config(config)


def scheduler_from_pretrained(pretrained_model_name_or_path, subfolder="scheduler", revision=None):
    """Build (scheduler, state) of the class that scheduler_config.json names; see load_config."""
    config = load_config(pretrained_model_name_or_path, subfolder, revision)
    return scheduler_from_config(config, pretrained_model_name_or_path)


def scheduler_from_config(config, source):
    """Build (scheduler, state) of a scheduler_config.json's content; source is named in errors."""
    by_class_name = {cls.__name__.removeprefix("Flax"): cls for cls in SCHEDULERS.values()}
    name = str(config.get("_class_name")).removeprefix("Flax")
    if name not in by_class_name:
        raise ValueError(
            f"{CONFIG_NAME} of {source} names _class_name={name}, which is not supported; "
            f"supported are {', '.join(by_class_name)}"
        )
    return by_class_name[name].from_file_content(config, source)
