"""Fine-tune UNet and text encoder with prior preservation, as scripts for diffusers 0.39 do."""

import jax
import numpy as np
import optax
from common import BETAS, diffusion_loss, first, read_images, run, save, token_ids
from diffusers import (
    FlaxAutoencoderKL,
    FlaxDDPMScheduler,
    FlaxPNDMScheduler,
    FlaxStableDiffusionPipeline,
    FlaxUNet2DConditionModel,
)
from flax.jax_utils import replicate, unreplicate
from flax.training.common_utils import shard
from flax.training.train_state import TrainState
from transformers import CLIPTokenizer, FlaxCLIPTextModel


def make_class_images(model, prompt, folder):
    """Write an image per device of a prompt, by the model before its training."""
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(
        model, safety_checker=None, revision=None
    )
    pipeline.set_progress_bar_config(disable=True)
    num_devices = jax.local_device_count()
    prompt_ids = shard(pipeline.prepare_inputs([prompt] * num_devices))
    rng = jax.random.split(jax.random.PRNGKey(0), num_devices)
    images = pipeline(
        prompt_ids, replicate(params), rng, num_inference_steps=2, jit=True
    ).images  # (devices, 1, H, W, 3)
    images = images.reshape(-1, *images.shape[-3:])
    for number, image in enumerate(pipeline.numpy_to_pil(np.array(images))):
        image.save(f"{folder}/{number}.png")


def main(model, images, class_images, safety_checker, scheduler_folder, output, num_steps):
    """Train on an image and a class image per device; save after each step; returns the losses."""
    make_class_images(model, "red", class_images)
    tokenizer = CLIPTokenizer.from_pretrained(model, subfolder="tokenizer", revision=None)
    text_encoder = FlaxCLIPTextModel.from_pretrained(model, subfolder="text_encoder")
    vae, vae_params = FlaxAutoencoderKL.from_pretrained(f"{model}/vae", from_pt=True)
    unet, unet_params = FlaxUNet2DConditionModel.from_pretrained(model, subfolder="unet")
    scheduler = FlaxDDPMScheduler(**BETAS, num_train_timesteps=1000)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    states = {
        "unet": TrainState.create(apply_fn=unet.__call__, params=unet_params, tx=tx),
        "text_encoder": TrainState.create(
            apply_fn=text_encoder.__call__, params=text_encoder.params, tx=tx
        ),
    }

    def train_step(states, vae_params, batch, rng):
        dropout_rng, rng, next_rng = jax.random.split(rng, 3)

        def loss_fn(params):
            text_states = states["text_encoder"].apply_fn(
                batch["input_ids"],
                params=params["text_encoder"],
                dropout_rng=dropout_rng,
                train=True,
            )[0]
            losses = diffusion_loss(
                vae,
                vae_params,
                unet,
                params["unet"],
                scheduler,
                batch["pixels"],
                text_states,
                rng,
                train=True,
            )
            instance, prior = losses.reshape(-1, 2).T  # one of each kind after the other
            return instance.mean() + 0.5 * prior.mean()

        params = {name: state.params for name, state in states.items()}
        loss, grads = jax.value_and_grad(loss_fn)(params)
        loss, grads = jax.lax.pmean((loss, grads), "batch")
        states = {n: state.apply_gradients(grads=grads[n]) for n, state in states.items()}
        return states, loss, next_rng

    def checkpoint(folder):
        pndm, _ = FlaxPNDMScheduler.from_pretrained(scheduler_folder, subfolder="scheduler")
        params = {name: first(state.params) for name, state in states.items()}
        save(
            folder,
            safety_checker,
            params | {"vae": first(vae_params)},
            text_encoder=text_encoder,
            vae=vae,
            unet=unet,
            tokenizer=tokenizer,
            scheduler=pndm,
        )

    step = jax.pmap(train_step, "batch", donate_argnums=(0,))
    states, vae_params = replicate(states), replicate(vae_params)
    num_devices = jax.local_device_count()
    rng = jax.random.split(jax.random.PRNGKey(0), num_devices)
    pairs = zip(read_images(images, num_devices), read_images(class_images, num_devices))
    batch = {
        "pixels": np.stack([image for pair in pairs for image in pair]),
        "input_ids": token_ids(tokenizer, ["make it red", "red"] * num_devices),
    }
    losses = []
    for number in range(1, num_steps + 1):
        states, loss, rng = step(states, vae_params, shard(batch), rng)
        losses.append(float(unreplicate(loss)))
        checkpoint(f"{output}/{number}")
    checkpoint(output)
    return losses


if __name__ == "__main__":
    run(main)
