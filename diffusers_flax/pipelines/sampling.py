"""Sampling as pure functions: noise per image, guidance, steps, the denoising loop, the VAE.

They run inside a compiled program and do not depend on the pipelines:

    keys = keys_per_image(key, B)
    schedule = make_schedule(scheduler, (B, 4, h, w), num_inference_steps=20)
    x_t = starting_noise(None, keys, (B, 4, h, w)) * schedule.state.init_noise_sigma

    def predict(i, x_in, t, memory):
        eps_pred = unet.apply({"params": params}, jnp.tile(x_in, (2, 1, 1, 1)), t, text).sample
        return guide(eps_pred, ("text", "null"), guidance_scale=7.5, guidance_rescale=0.0), memory

    images = decode(vae, vae_params, denoise(schedule, x_t, keys, predict))

The noise of an image depends only on its key, not on the batch or the devices.
"""

import inspect
import math
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffusers_flax.devices.parallelism import map_rows
from diffusers_flax.schedulers.noise_schedule import noise_scales

# Numbers folded into an image's key: 0 for the initial noise, i + 1 for the noise of step i.
POSTERIOR_NOISE = 2**31 - 1  # for the sample of the VAE's posterior
SEQUEL = 2**31 - 2  # for a pipeline that continues from the image (refiner, image to image)

# Pixels that the VAE decodes at once. More are not faster; a million take 3 GiB in float32.
DECODED_PIXELS = 1024 * 1024
# The branches of guidance of a text-to-image model.
TEXT_BRANCHES = ("text", "null")
# The text of each branch, also for edits, see instruct_pix2pix.
TEXT_OF_BRANCH = {"text": "text", "image": "null", "null": "null"}
# Align-Your-Steps (arXiv 2404.14507): timesteps to visit in 10 steps, of Stable Diffusion and SDXL.
AYS_SD = (999, 850, 736, 645, 545, 455, 343, 233, 124, 24)
AYS_SDXL = (999, 845, 730, 587, 443, 310, 193, 116, 53, 13)


def text_branches(guidance_scale):
    """The branches to compute: as in PyTorch, both for a number above 1.

    An array needs both; its values from 0 to 1 interpolate between the null text and the text.
    """
    if isinstance(guidance_scale, jax.Array) or np.ndim(guidance_scale):
        return TEXT_BRANCHES
    if not (isinstance(guidance_scale, Real) and 0 <= guidance_scale < math.inf):
        raise ValueError(f"guidance_scale={guidance_scale!r} must be a number >= 0, or an array")
    return TEXT_BRANCHES if guidance_scale > 1 else ("text",)


def guide(eps_pred, branches, guidance_scale, guidance_rescale):
    """Combine the predictions of the branches by classifier-free guidance.

    Args:
        eps_pred: float32 (branches * B, C, h, w).
        branches: of the rows, of text_branches.
        guidance_scale: scalar or one per image, (B,).
        guidance_rescale: phi, scalar in [0, 1]; 0: off.

    Returns:
        (B, C, h, w).

    Source: classifier-free guidance (arXiv 2207.12598), equation 6.
    """
    if len(branches) == 1:
        return eps_pred
    text, null = jnp.split(eps_pred, 2)
    scale = jnp.asarray(guidance_scale, jnp.float32).reshape(-1, 1, 1, 1)
    return rescale_guidance(null + scale * (text - null), text, guidance_rescale)


def rescale_guidance(guided, text, guidance_rescale):
    """Bring the standard deviation of guided predictions closer to the text prediction's.

    Args:
        guided, text: guided prediction, and the text's prediction, (B, C, h, w).
        guidance_rescale: phi, scalar in [0, 1]; 0: off.

    Returns:
        (B, C, h, w).

    Source: arXiv 2305.08891, equations 15 and 16.
    """
    phi = jnp.asarray(guidance_rescale, jnp.float32)
    std_text, std_guided = (x.std((1, 2, 3), keepdims=True, ddof=1) for x in (text, guided))
    return guided * jnp.where(phi > 0, 1 - phi + phi * std_text / std_guided, 1)


def rows_of_branches(tree, branches, active):
    """Select the rows of the branches `active` from arrays (len(branches) * B, ...) of a tree.

    Arrays hold all rows of one branch, then all rows of the next.
    """
    if active == branches:
        return tree

    def rows(x):
        of_branch = dict(zip(branches, jnp.split(x, len(branches))))
        return jnp.concatenate([of_branch[branch] for branch in active])

    return jax.tree.map(rows, tree)


def as_keys(prng_seed):
    """Typed PRNG keys; uint32 keys (..., 2) are converted."""
    if np.ndim(prng_seed) == 0 and not isinstance(prng_seed, jax.Array):
        raise ValueError(f"prng_seed={prng_seed} is not a PRNG key; make one: jax.random.key(0)")
    if jnp.issubdtype(prng_seed.dtype, jax.dtypes.prng_key):
        return prng_seed
    return jax.random.wrap_key_data(prng_seed)


def keys_per_image(prng_seed, num_images):
    """Keys (num_images,): the given keys, or fold_in(key, 0), fold_in(key, 1), ... of one key."""
    keys = as_keys(prng_seed)
    if keys.ndim:
        return keys
    return jax.vmap(jax.random.fold_in, (None, 0))(keys, jnp.arange(num_images))


def keys_of_sequel(keys):
    """Keys for a pipeline that continues from images; the same noise again would be visible."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys, SEQUEL)


def are_plain(inputs, length):
    """Whether a run's prompts have one chunk of `length` tokens and no weights, see prompts.py."""
    ids = (inputs[name] for name in ("prompt_ids", "neg_prompt_ids"))
    are_short = all(x is None or x.shape[-1] <= length for x in ids)
    return are_short and inputs.get("prompt_weights") is None


def normal(keys, number, shape):
    """Standard normal noise, float32 (len(keys), *shape), one key per image.

    number: 0 for the initial noise, i + 1 for step i, or POSTERIOR_NOISE.
    """
    return jax.vmap(
        lambda key: jax.random.normal(jax.random.fold_in(key, number), shape, jnp.float32)
    )(keys)


def starting_noise(latents, keys, shape):
    """The initial noise, float32: latents if given, else standard normal."""
    if latents is None:
        return normal(keys, 0, shape[1:])
    if latents.shape != shape:
        raise ValueError(f"latents have shape {latents.shape}, need {shape}")
    return latents.astype(jnp.float32)


class Schedule(NamedTuple):
    """The steps of a run.

    Fields:
        scheduler: a scheduler of diffusers_flax/schedulers/.
        state: of set_timesteps, float32; it may have more timesteps than the steps to make.
        scales: (alphas, sigmas) of the steps to make, see noise_scales.
        eta: noise in a step of DDIM (default 0) and TCD (default 0.3), from 0 to 1; None: default.
    """

    scheduler: Any
    state: Any
    scales: tuple
    eta: float | None = None

    @property
    def num_steps(self):
        """Number of steps to make, PNDM's repeated ones included."""
        return len(self.scales[0])

    def step(self, state, i, t, x_t, guided, keys):
        """(x_t, state) after step i, from x_t (B, C, h, w), float32, and the guided prediction.

        keys: one per image, for schedulers that draw noise in each step.
        """
        noise = normal(keys, i + 1, x_t.shape[1:])
        options = {} if self.eta is None else {"eta": self.eta}
        options |= {"noise": noise, "return_dict": False}
        return self.scheduler.step(state, guided, t, x_t, **options)


def make_schedule(
    scheduler,
    shape,
    num_inference_steps,
    timesteps=None,
    eta=None,
    first_step=0,
    denoising_start=None,
    denoising_end=None,
):
    """The Schedule of a run; computed while a program is traced, so it is constant in the program.

    Args:
        scheduler: a scheduler of diffusers_flax/schedulers/.
        shape, num_inference_steps, timesteps, first_step: as in set_timesteps.
        eta: see Schedule.
        denoising_start: fraction of the denoising that is done already; wins over first_step.
        denoising_end: fraction of the denoising; the steps after it are not made.

    Raises:
        ValueError: a fraction is not between 0 and 1, leaves no step, or is not for this scheduler;
            or the scheduler does not take this eta.
    """
    check_eta(scheduler, eta)
    given = [x for x in (denoising_start, denoising_end) if x is not None]
    takes = scheduler.takes_denoising_range and not scheduler._option("sigma_data")
    if given and not (takes and all(0 < x < 1 for x in given) and given == sorted({*given})):
        raise ValueError(
            f"denoising_start={denoising_start}, denoising_end={denoising_end} must be fractions "
            "between 0 and 1, the start below the end, and not for a model of EDM or the "
            f"Runge-Kutta steps of PNDM ({type(scheduler).__name__})"
        )
    with jax.ensure_compile_time_eval():
        plan = partial(
            scheduler.set_timesteps, scheduler.create_state(), num_inference_steps, shape
        )
        if denoising_start is not None:
            state = plan(timesteps=timesteps)
            num_done = num_steps_before(scheduler, state, denoising_start)
            # PNDM repeats its second timestep.
            num_repeated = len(state.timesteps) - state.num_inference_steps
            first_step = num_done - min(num_repeated, max(num_done - 1, 0))
        constants = jax.tree.map(np.asarray, plan(first_step, timesteps))
    num_steps = len(constants.timesteps)
    if denoising_end is not None:
        num_steps = num_steps_before(scheduler, constants, denoising_end)
    if not num_steps:
        raise ValueError(
            f"denoising_start={denoising_start} and denoising_end={denoising_end} leave no step of "
            f"num_inference_steps={num_inference_steps} to do; take more steps"
        )
    scales = tuple(scale[:num_steps] for scale in noise_scales(scheduler, constants))
    return Schedule(scheduler, jax.tree.map(jnp.asarray, constants), scales, eta)


def num_steps_before(scheduler, state, fraction):
    """Number of timesteps before a fraction of the denoising is done.

    scheduler: the fraction is of its num_train_timesteps, as in PyTorch.
    """
    reached = round(len(scheduler) - fraction * len(scheduler))
    return int((np.asarray(state.timesteps) >= reached).sum())


def timestep_options(num_inference_steps, timesteps, eta, ays=AYS_SD):
    """{"num_inference_steps", "timesteps", "eta"} of a call; timesteps win.

    timesteps: integers or "ays", or a tuple of them; ays: what "ays" stands for; (): nothing.
    """
    values = () if timesteps is None else np.ravel(timesteps).tolist()
    if values == ["ays"] and not ays:
        raise ValueError("timesteps=ays are of models of noise, not of a flow; leave them out")
    values = ays if values == ["ays"] else tuple(values)
    if any(isinstance(value, str) for value in values):
        raise ValueError(f"timesteps={timesteps!r} must be integers, or ays alone")
    num_inference_steps = len(values) or num_inference_steps
    return dict(num_inference_steps=num_inference_steps, timesteps=values or None, eta=eta)


def check_steps(scheduler, state, steps, accelerate, branches):
    """Raise a ValueError for steps that the scheduler or the Acceleration, or None, do not take.

    scheduler, state: of choose_scheduler; steps: of timestep_options; branches: of guidance.
    """
    state = scheduler.set_timesteps(
        state, steps["num_inference_steps"], timesteps=steps["timesteps"]
    )
    check_eta(scheduler, steps["eta"])
    if accelerate:
        from diffusers_flax.acceleration.plans import plan_steps  # not for a plain image

        plan_steps(accelerate, branches, noise_scales(scheduler, state))


def check_eta(scheduler, eta):
    """Raise a ValueError for an eta that a scheduler does not take; None is its default."""
    if eta is None:
        return
    if "eta" not in inspect.signature(scheduler.step).parameters or not 0 <= eta <= 1:
        raise ValueError(
            f"eta={eta} must be from 0 to 1, and is an option of DDIM and TCD, not of "
            f"{type(scheduler).__name__}"
        )


def denoise(schedule, x_t, keys, predict, watch=None, after_step=None, memory=()):
    """The denoising loop.

    Args:
        schedule: Schedule.
        x_t: noisy sample (B, C, h, w), float32.
        keys: one per image, for schedulers that draw noise in each step.
        predict: (i, model_input, t, memory) -> (guided prediction, float32; memory for the next
            step); i is the number of the step.
        watch: (i, model_input, guided) -> None, called in each step, for previews.
        after_step: (i, x_t, state) -> x_t, changes the result of step i, whose state is the next
            step's; see keep_outside.
        memory: of predict in the first step, a tree of arrays.

    Returns:
        x_0, like x_t; x_t of the next step if the schedule ends early.
    """

    def body(i, carry):
        x_t, state, memory = carry
        t = state.timesteps[i]
        model_input = schedule.scheduler.scale_model_input(state, x_t, t)
        guided, memory = predict(i, model_input, t, memory)
        if watch is not None:
            watch(i, model_input, guided)
        x_t, state = schedule.step(state, i, t, x_t, guided, keys)
        x_t = x_t if after_step is None else after_step(i, x_t, state)
        return x_t, state, memory

    return jax.lax.fori_loop(0, schedule.num_steps, body, (x_t, schedule.state, memory))[0]


def keep_outside(schedule, mask, latents, noise):
    """A function for denoise that keeps an image outside a mask.

    Outside, the result of each step is the image's latents, noised to the next timestep; after the
    last step it is the latents themselves. The first step begins with x_T, noise everywhere.

    Args:
        schedule: Schedule.
        mask: (B, 1, h, w) from 0 (the image) to 1 (the result of the step).
        latents: scaled latents of the image, (B, C, h, w), float32.
        noise: standard normal, like latents.

    Returns:
        (i, x_t, state) -> x_t.

    Source: Blended Latent Diffusion (arXiv 2206.02779), algorithm 1.
    """

    def after_step(i, x_t, state):
        next_t = state.timesteps[jnp.minimum(i + 1, len(state.timesteps) - 1)]
        noisy = schedule.scheduler.add_noise(state, latents, noise, next_t)
        outside = jnp.where(i + 1 < schedule.num_steps, noisy, latents)
        return mask * x_t + (1 - mask) * outside

    return after_step


def latent_mask(mask, factor, margin=0):
    """A mask (B, 1, H, W) for latents, the largest value of their own and their neighbours' pixels.

    factor: pixels per latent along a side; margin: how far the neighbours are, in latents.
    """
    B, _, H, W = mask.shape
    mask = mask.reshape(B, 1, H // factor, factor, W // factor, factor).max((3, 5))
    window = (1, 1, 2 * margin + 1, 2 * margin + 1)
    return jax.lax.reduce_window(mask, 0.0, jax.lax.max, window, (1, 1, 1, 1), "SAME")


def paste(images, image, mask):
    """Images inside a mask, another image outside, float32 (B, H, W, 3) in [0, 1].

    Args:
        images: (B, H, W, 3) in [0, 1].
        image: (B, 3, H, W) in [-1, 1].
        mask: (B, 1, H, W), 1 for images, 0 for image.
    """
    image, mask = (jnp.transpose(x, (0, 2, 3, 1)) for x in (image / 2 + 0.5, mask))
    return mask * images + (1 - mask) * image


def posterior_of(vae, params, image, layout=None):
    """The VAE's posterior over the latents of images; arguments as for encode."""

    def posterior(vae, image):
        return vae.apply({"params": params}, image, method=vae.encode).latent_dist

    if layout is None or vae.tile:  # each device computes all tiles
        return posterior(vae, image)
    height = image.shape[2] // 2 ** (len(vae.block_out_channels) - 1)
    return map_rows(layout, posterior, vae, image, height, axis=2, out_axis=1)


def encode(vae, params, image, keys, layout=None):
    """Scaled latents of images, drawn from the VAE's posterior.

    Args:
        vae, params: FlaxAutoencoderKL and its parameters.
        image: (B, 3, H, W) in [-1, 1].
        keys: one per image.
        layout: Layout of the devices that share the work; None: one device.

    Returns:
        float32 (B, C, h, w).
    """
    posterior = posterior_of(vae, params, image, layout)
    noise = normal(keys, POSTERIOR_NOISE, posterior.mean.shape[1:])
    latents = (posterior.mean + posterior.std * noise) * vae.scaling_factor
    return jnp.transpose(latents, (0, 3, 1, 2))


def resize(image, shape):
    """Images (B, C, H, W) in [-1, 1] resized to a shape (height, width) by Lanczos."""
    if shape == image.shape[2:]:
        return image
    return jax.image.resize(image, (*image.shape[:2], *shape), "lanczos3").clip(-1, 1)


def decode(vae, params, latents, layout=None):
    """Images, float32 (B, H, W, 3) in [0, 1], of scaled latents (B, C, h, w).

    vae, params: FlaxAutoencoderKL or FlaxAutoencoderTiny; layout: as for encode.
    """

    def decode_some(vae, latents):
        latents = latents / vae.scaling_factor
        decoded = vae.apply({"params": params}, latents, method=vae.decode).sample  # (n, 3, H, W)
        images = jnp.transpose(decoded.astype(jnp.float32), (0, 2, 3, 1))
        return (images / 2 + 0.5).clip(0, 1)

    def decode_all(vae, latents):
        B, _, h, w = latents.shape
        factor = 2 ** (len(vae.block_out_channels) - 1)
        most = max(1, DECODED_PIXELS // (h * w * factor**2))
        n = max(n for n in range(1, B + 1) if B % n == 0 and n <= most)
        if n == B:
            return decode_some(vae, latents)
        images = jax.lax.map(partial(decode_some, vae), latents.reshape(-1, n, *latents.shape[1:]))
        return images.reshape(B, *images.shape[2:])

    if layout is None or getattr(vae, "tile", None):
        return decode_all(vae, latents)
    return map_rows(layout, decode_all, vae, latents, latents.shape[2], axis=2, out_axis=1)
