"""Train a ControlNet on images and their conditions, as train_controlnet_flax.py does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import RESOLUTION, first, read_images, run, token_ids
from diffusers import (
    FlaxAutoencoderKL,
    FlaxControlNetModel,
    FlaxDDPMScheduler,
    FlaxStableDiffusionControlNetPipeline,
    FlaxUNet2DConditionModel,
)
from flax.core.frozen_dict import unfreeze
from flax.jax_utils import replicate, unreplicate
from flax.training.common_utils import shard
from flax.training.train_state import TrainState
from PIL import Image
from transformers import CLIPTokenizer, FlaxCLIPTextModel

# Entries of the UNet's config that the new ControlNet has.
ENTRIES = (
    *("in_channels", "down_block_types", "only_cross_attention", "block_out_channels"),
    *("layers_per_block", "attention_head_dim", "cross_attention_dim", "use_linear_projection"),
    *("flip_sin_to_cos", "freq_shift"),
)


def main(model, images, controlnet, output, num_steps, prompt):
    """Train and save the ControlNet, then make an image on each device with it.

    controlnet: folder of a ControlNet to start from; None: the UNet's parameters are copied.
    Returns {"losses", "images": the mean of each device's image}.
    """
    tokenizer = CLIPTokenizer.from_pretrained(model, subfolder="tokenizer", variant=None)
    source = {"revision": None, "variant": None, "from_pt": False, "dtype": jnp.float32}
    text_encoder = FlaxCLIPTextModel.from_pretrained(model, subfolder="text_encoder", **source)
    vae, vae_params = FlaxAutoencoderKL.from_pretrained(model, subfolder="vae", **source)
    unet, unet_params = FlaxUNet2DConditionModel.from_pretrained(model, subfolder="unet", **source)
    rng = jax.random.PRNGKey(0)
    if controlnet:
        net, params = FlaxControlNetModel.from_pretrained(
            controlnet, revision=None, from_pt=True, dtype=jnp.float32
        )
    else:
        net = FlaxControlNetModel(
            **{name: getattr(unet.config, name) for name in ENTRIES},
            conditioning_embedding_out_channels=(8, 16),
        )
        params = unfreeze(net.init_weights(rng=rng))
        for key in ("conv_in", "time_embedding", "down_blocks_0", "down_blocks_1", "mid_block"):
            params[key] = unet_params[key]
    pipeline, pipeline_params = FlaxStableDiffusionControlNetPipeline.from_pretrained(
        model, tokenizer=tokenizer, controlnet=net, safety_checker=None, **source
    )
    pipeline_params = replicate(pipeline_params)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = TrainState.create(apply_fn=net.__call__, params=params, tx=tx)
    scheduler, scheduler_state = FlaxDDPMScheduler.from_pretrained(model, subfolder="scheduler")

    def train_step(state, unet_params, text_params, vae_params, batch, rng):
        def loss_fn(params):
            posterior = vae.apply(
                {"params": vae_params}, batch["pixels"], deterministic=True, method=vae.encode
            )
            latents = posterior.latent_dist.sample(rng)
            latents = jnp.transpose(latents, (0, 3, 1, 2)) * vae.config.scaling_factor
            noise_rng, time_rng = jax.random.split(rng)
            noise = jax.random.normal(noise_rng, latents.shape)
            last = scheduler.config.num_train_timesteps
            timesteps = jax.random.randint(time_rng, (len(latents),), 0, last)
            noisy = scheduler.add_noise(scheduler_state, latents, noise, timesteps)
            states = text_encoder(batch["input_ids"], params=text_params, train=False)[0]
            inputs = noisy, timesteps, states
            down, middle = net.apply(
                {"params": params}, *inputs, batch["conditions"], train=True, return_dict=False
            )
            output = unet.apply(
                {"params": unet_params},
                *inputs,
                down_block_additional_residuals=down,
                mid_block_additional_residual=middle,
            ).sample
            return ((noise - output) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        loss, grads = jax.lax.pmean((loss, grads), "batch")
        return state.apply_gradients(grads=grads), loss

    step = jax.pmap(train_step, "batch", donate_argnums=(0,))
    state, unet_params, vae_params = map(replicate, (state, unet_params, vae_params))
    text_params = replicate(text_encoder.params)
    num_devices = jax.local_device_count()
    pixels = read_images(images, num_devices)
    batch = {
        "pixels": pixels,
        "conditions": (pixels + 1) / 2,
        "input_ids": token_ids(tokenizer, [prompt] * num_devices),
    }
    losses = []
    for rngs in jax.random.split(rng, (num_steps, num_devices)):
        state, loss = step(state, unet_params, text_params, vae_params, shard(batch), rngs)
        losses.append(float(unreplicate(loss)))
    net.save_pretrained(output, params=first(state.params))

    pipeline_params = pipeline_params.copy()
    pipeline_params["controlnet"] = state.params
    condition = Image.new("RGB", (RESOLUTION, RESOLUTION), "red")
    made = pipeline(
        prompt_ids=shard(pipeline.prepare_text_inputs(num_devices * [prompt])),
        image=shard(pipeline.prepare_image_inputs(num_devices * [condition])),
        params=pipeline_params,
        prng_seed=jax.random.split(rng, num_devices),
        num_inference_steps=3,
        jit=True,
    ).images
    made = made.reshape(-1, *made.shape[-3:])
    return {
        "losses": losses,
        "images": [float(np.asarray(image).mean()) for image in pipeline.numpy_to_pil(made)],
    }


if __name__ == "__main__":
    run(main)
