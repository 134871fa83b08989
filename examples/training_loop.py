"""InstructPix2Pix's training loop with a late EMA, as a file of your own: copy and change it.

    python examples/training_loop.py demo/base_model demo/output/data trained

MODEL is a directory or hub id of Stable Diffusion, DATA a directory of parquet shards, OUTPUT_DIR
gets a model for edit_cli.py. With the demo's model and data (make demo) 500 steps take two minutes
on two CPU cores. It runs on all devices of this machine: JAX_NUM_CPU_DEVICES=2 makes two of a CPU.

flax_train_instruct_pix2pix.py is the same with flags, checkpoints, metrics and validation images.

Paper: InstructPix2Pix (arXiv 2211.09800).
"""

import sys
from functools import partial
from itertools import chain, repeat

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import trange
from transformers import CLIPTokenizer

from diffusers_flax import (
    FlaxAutoencoderKL,
    FlaxCLIPTextModel,
    FlaxDDPMScheduler,
    FlaxStableDiffusionInstructPix2PixPipeline,
    FlaxUNet2DConditionModel,
)
from diffusers_flax.data.dataset import ParquetImagePairs
from diffusers_flax.data.options import Transform
from diffusers_flax.training import sharding

RESOLUTION, BATCH_SIZE = 64, 8  # pixels; pairs per step over all devices
NUM_STEPS, LEARNING_RATE, MAX_GRAD_NORM = 500, 3e-3, 1.0
DROPOUT = 0.05  # probability of dropping the text, both, or the image; 0: never
EMA_START = 400  # first averaged step; NUM_STEPS: no average
EMA_DECAY = 1 - 5 / max(1, NUM_STEPS - EMA_START)  # the start keeps a share of e^-5


def conditioning_dropout(key, text, null_text, image_latents):
    """Drop text (B, T, D), image latents (B, C, h, w) or both; section 3.2.1 of the paper."""
    u = jax.random.uniform(key, (len(text), 1, 1))  # one for each sample
    text = jnp.where(u < 2 * DROPOUT, null_text, text)
    drop_image = (u >= DROPOUT) & (u < 3 * DROPOUT)
    return text, jnp.where(drop_image[..., None], 0, image_latents)


def diffusion_loss(params, frozen, batch, key, unet, vae, text_encoder, scheduler):
    """Mean squared error of the predicted noise, or of v (arXiv 2202.00512), on one device."""
    keys = jax.random.split(key, 4)

    def encode(images):  # uint8 (B, H, W, 3) -> posterior of latents (B, h, w, C)
        pixels = jnp.transpose(images, (0, 3, 1, 2)) / 127.5 - 1.0
        return vae.apply({"params": frozen["vae"]}, pixels, method=vae.encode).latent_dist

    x_0 = encode(batch["edited_pixel_values"]).sample(keys[0]) * vae.config.scaling_factor
    condition = encode(batch["original_pixel_values"]).mode()  # without the factor
    x_0, condition = (jnp.transpose(x, (0, 3, 1, 2)) for x in (x_0, condition))  # (B, C, h, w)
    text = text_encoder(batch["input_ids"], params=frozen["text_encoder"])[0]  # (B, T, D)
    text, condition = conditioning_dropout(keys[1], text, frozen["null_text"], condition)

    noise = jax.random.normal(keys[2], x_0.shape)
    timesteps = jax.random.randint(keys[3], (len(x_0),), 0, scheduler.config.num_train_timesteps)
    x_t = scheduler.add_noise(frozen["scheduler"], x_0, noise, timesteps)
    target = noise
    if scheduler.config.prediction_type == "v_prediction":
        target = scheduler.get_velocity(frozen["scheduler"], x_0, noise, timesteps)
    x_in = jnp.concatenate((x_t, condition), axis=1)  # (B, 2C, h, w)
    prediction = unet.apply({"params": params}, x_in, timesteps, text).sample
    return jnp.mean(jnp.square(prediction - target))


def train_step(state, frozen, batch, rng, *, loss, tx, axes):
    """One optimizer step on one device's rows; call it under pmap(axis_name="batch")."""
    key = jax.random.fold_in(jax.random.fold_in(rng, state.step), jax.lax.axis_index("batch"))

    def loss_fn(shards):  # each device holds a share of every array; the whole ones are gathered
        return loss(sharding.gather(shards, axes, jnp.float32), frozen, batch, key)

    value, grads = jax.value_and_grad(loss_fn)(state.params)
    return sharding.update_state(tx, state, value, grads, axes, MAX_GRAD_NORM)


def update_ema(ema, params):
    """Move the average towards the parameters."""
    return jax.tree.map(lambda a, p: EMA_DECAY * a + (1 - EMA_DECAY) * p, ema, params)


def main(model, data, output_dir):
    """Load, widen, train, save."""
    unet, params = FlaxUNet2DConditionModel.from_pretrained(
        model, subfolder="unet", param_dtype=jnp.float32
    )
    vae, vae_params = FlaxAutoencoderKL.from_pretrained(model, subfolder="vae")
    text_encoder = FlaxCLIPTextModel.from_pretrained(model, subfolder="text_encoder")
    tokenizer = CLIPTokenizer.from_pretrained(model, subfolder="tokenizer")
    scheduler, scheduler_state = FlaxDDPMScheduler.from_pretrained(model, subfolder="scheduler")
    tokenize = partial(tokenizer, padding="max_length", truncation=True, return_tensors="np")

    # Input channels for the original image, with weights of zero
    kernel = np.asarray(params["conv_in"]["kernel"])  # (3, 3, C, width)
    params["conv_in"]["kernel"] = np.pad(kernel, ((0, 0), (0, 0), (0, kernel.shape[2]), (0, 0)))
    unet = unet.clone(in_channels=2 * kernel.shape[2])

    null_text = text_encoder(tokenize([""]).input_ids)[0]  # (1, T, D)
    frozen = {"vae": vae_params, "text_encoder": text_encoder.params, "null_text": null_text}
    frozen = sharding.replicate(jax.tree.map(np.asarray, frozen | {"scheduler": scheduler_state}))
    tx = optax.adamw(LEARNING_RATE)  # element-wise, as state is sharded
    axes = sharding.shard_axes(params, jax.device_count())
    state = sharding.start_state(jax.tree.map(np.asarray, params), tx, axes)
    rng = sharding.replicate(np.asarray(jax.random.PRNGKey(0)))
    models = dict(unet=unet, vae=vae, text_encoder=text_encoder, scheduler=scheduler)
    step = partial(train_step, loss=partial(diffusion_loss, **models), tx=tx, axes=axes)
    p_train_step = jax.pmap(step, axis_name="batch", donate_argnums=0)
    p_update_ema = jax.pmap(update_ema, axis_name="batch", donate_argnums=0)
    p_copy = jax.pmap(partial(jax.tree.map, jnp.copy), axis_name="batch")

    dataset = ParquetImagePairs(data, batch_size=BATCH_SIZE, transform=Transform(RESOLUTION))
    batches = chain.from_iterable(repeat(dataset))  # epoch after epoch
    ema = None
    for i, batch in zip(bar := trange(NUM_STEPS), batches):
        batch["input_ids"] = tokenize(list(batch.pop("edit_prompt"))).input_ids
        if i == EMA_START:
            ema = p_copy(state.params)
        state, metrics = p_train_step(state, frozen, sharding.shard_batch(batch), rng)
        if ema is not None:
            ema = p_update_ema(ema, state.params)
        if i % 20 == 0:
            bar.set_postfix(loss=f"{sharding.first_replica(metrics['loss']):.4f}")

    trained = sharding.to_host(state.params if ema is None else ema, axes)
    pipeline = FlaxStableDiffusionInstructPix2PixPipeline(**models, tokenizer=tokenizer)
    params = {"unet": trained, "vae": vae_params, "text_encoder": text_encoder.params}
    pipeline.save_pretrained(output_dir, params)
    print(f"saved {output_dir}; edit with: python edit_cli.py --model {output_dir} --help")


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(*sys.argv[1:])
