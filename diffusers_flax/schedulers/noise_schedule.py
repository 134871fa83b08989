"""The noise schedule of training: the noise level of each timestep, and adding noise to samples.

schedule = CommonSchedulerState.create(scheduler)  # alphas, betas, alphas_cumprod
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


def to_device(array):
    """Any array as float32, int32 or bool, also where 64-bit types are switched on."""
    array = np.asarray(array)
    return jnp.asarray(array, {"f": jnp.float32, "i": jnp.int32, "b": jnp.bool_}[array.dtype.kind])


@struct.dataclass
class CommonSchedulerState:
    """The training noise schedule, float32 arrays of (num_train_timesteps,)."""

    alphas: jax.Array
    betas: jax.Array
    alphas_cumprod: jax.Array

    @classmethod
    def create(cls, scheduler):
        """The schedule of a scheduler's config."""
        return cls(*map(to_device, scheduler._noise_schedule()))


def noise_schedule(config, zero_snr=False):
    """The training schedule: float32 (alphas, betas, alphas_cumprod), each (num_train_timesteps,).

    Args:
        config: num_train_timesteps, beta_start, beta_end, beta_schedule, trained_betas.
        zero_snr: True shifts and scales sqrt(alpha_bar) so that the last is 0, without signal.

    Source: linear, DDPM (arXiv 2006.11239) section 4; scaled_linear, latent diffusion
    (arXiv 2112.10752); squaredcos_cap_v2, improved DDPM (arXiv 2102.09672) equation 17; zero_snr,
    arXiv 2305.08891, algorithm 1.
    """
    num_steps = config.num_train_timesteps
    if config.trained_betas is not None:
        betas = np.asarray(config.trained_betas)
    elif config.beta_schedule == "linear":
        betas = np.linspace(config.beta_start, config.beta_end, num_steps)
    elif config.beta_schedule == "scaled_linear":
        betas = np.linspace(config.beta_start**0.5, config.beta_end**0.5, num_steps) ** 2
    else:
        time = np.arange(num_steps + 1) / num_steps
        alpha_bar = np.cos((time + 0.008) / 1.008 * np.pi / 2) ** 2
        betas = np.minimum(1 - alpha_bar[1:] / alpha_bar[:-1], 0.999)
    # Betas round to float32 before the product, as they did for the published weights: where beta
    # nears 1, the rounding of 1 - beta is worth 3e-5.
    betas = betas.astype(np.float32)
    alphas = 1 - betas
    alpha_bar = np.cumprod(alphas, dtype=np.float64)
    if zero_snr:
        root = np.sqrt(alpha_bar)
        alpha_bar = ((root - root[-1]) * (root[0] / (root[0] - root[-1]))) ** 2
        alphas = np.append(alpha_bar[:1], alpha_bar[1:] / alpha_bar[:-1])
        betas = 1 - alphas
    return tuple(table.astype(np.float32) for table in (alphas, betas, alpha_bar))


def get_sqrt_alpha_prod(state, original_samples, noise, timesteps):
    """sqrt(alpha_bar) and sqrt(1 - alpha_bar) at timesteps, shaped to multiply a sample.

    Args:
        state: CommonSchedulerState.
        original_samples: (B, ...).
        noise: without effect.
        timesteps: (B,) or scalar integers.

    Returns:
        Two float32 arrays of shape (B, 1, ...), or (1, ...) for a scalar.
    """
    alpha_bar = state.alphas_cumprod[jnp.asarray(timesteps)]
    alpha_bar = alpha_bar.reshape(-1, *(1,) * (original_samples.ndim - 1))
    return jnp.sqrt(alpha_bar), jnp.sqrt(1 - alpha_bar)


def mix(weight, x, other_weight, other):
    """weight x + other_weight other in float32."""
    return weight * x.astype(jnp.float32) + other_weight * other.astype(jnp.float32)


def predict_x0_and_eps(prediction_type, alpha_t, sigma_t, x_t, model_output):
    """The clean sample and the noise in x_t = alpha_t x0 + sigma_t eps, from a model's output.

    Args:
        prediction_type: model_output's kind, epsilon, v_prediction, sample or flow.
        alpha_t: sqrt(alpha_bar_t), scalar in [0, 1]; above 0 where model_output is epsilon. Of a
            flow 1 - t.
        sigma_t: sqrt(1 - alpha_bar_t), scalar in (0, 1]. Of a flow t.
        x_t: noisy sample, any shape.
        model_output: same shape.

    Returns:
        (x0, eps), same shape.

    Source: DDPM (arXiv 2006.11239) equation 15; for v, arXiv 2202.00512 appendix D; for flow,
    eps - x_0, arXiv 2403.03206, equation 13.
    """
    if prediction_type == "flow":
        return x_t - sigma_t * model_output, x_t + alpha_t * model_output
    if prediction_type == "epsilon":
        return (x_t - sigma_t * model_output) / alpha_t, model_output
    if prediction_type == "v_prediction":
        return alpha_t * x_t - sigma_t * model_output, alpha_t * model_output + sigma_t * x_t
    return model_output, (x_t - alpha_t * model_output) / sigma_t


def output_of_x0(prediction_type, alpha_t, sigma_t, x_t, x_0):
    """The model's output that predicts x_0; arguments as for predict_x0_and_eps."""
    eps = (x_t - alpha_t * x_0) / jnp.maximum(sigma_t, 1e-12)  # a flow may end at time 0
    outputs = {
        "epsilon": eps,
        "v_prediction": alpha_t * eps - sigma_t * x_0,
        "sample": x_0,
        "flow": eps - x_0,
    }
    return outputs[prediction_type]


def edm_levels(config):
    """Noise levels of an EDM model's training, increasing, float64 (num_train_timesteps,).

    They are equally probable: sigma = sigma_data tan(pi u / 2) with uniform u, the cosine schedule
    in continuous time, between sigma_min and sigma_max.

    Args:
        config: num_train_timesteps, sigma_min, sigma_max, sigma_data.

    Source: progressive distillation (arXiv 2202.00512), section 4 (alpha = cos, sigma = sin);
    "Cosine-Continuous EDM VPred schedule" of CosXL's model card.
    """
    lowest, highest = np.arctan(np.array([config.sigma_min, config.sigma_max]) / config.sigma_data)
    fractions = (np.arange(config.num_train_timesteps) + 0.5) / config.num_train_timesteps
    return config.sigma_data * np.tan(lowest + fractions * (highest - lowest))


def noise_scales(scheduler, state):
    """Each step's alpha and sigma in model inputs alpha x_0 + sigma eps, alpha^2 + sigma^2 = 1.

    For EDM x_0 is in units of sigma_data; for a flow they are 1 - t and t.

    Args:
        scheduler: the state's scheduler.
        state: from set_timesteps, concrete arrays.

    Returns:
        (alpha, sigma), NumPy float32 (steps,).
    """
    timesteps = np.asarray(state.timesteps)
    if scheduler.is_flow:
        times = np.asarray(state.sigmas)[:-1]
        return 1 - times, times
    if hasattr(state, "sigmas"):  # sigma / alpha
        ratio = np.asarray(state.sigmas, np.float64)[: len(timesteps)]
        ratio /= scheduler._option("sigma_data") or 1.0
        alpha = 1 / np.sqrt(1 + ratio**2)
    else:
        alpha = np.sqrt(np.asarray(state.common.alphas_cumprod, np.float64)[timesteps])
    return alpha.astype(np.float32), np.sqrt(1 - alpha**2).astype(np.float32)
