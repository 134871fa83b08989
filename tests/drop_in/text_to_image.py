"""Fine-tune the UNet of a pipeline on captioned images, as scripts for diffusers 0.39 do."""

from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from common import BETAS, diffusion_loss, first, read_images, run, save, token_ids
from diffusers import (
    FlaxAutoencoderKL,
    FlaxDDPMScheduler,
    FlaxPNDMScheduler,
    FlaxUNet2DConditionModel,
)
from flax.jax_utils import replicate, unreplicate
from flax.training.common_utils import shard
from flax.training.train_state import TrainState
from transformers import CLIPTokenizer, FlaxCLIPTextModel


def main(model, images, safety_checker, output, num_steps, dtype, from_pt, prediction_type):
    """Train on one image per device, captioned by its file name, and save; returns the losses.

    Args:
        model: folder of a pipeline.
        images: folder of images.
        safety_checker: folder of PyTorch's safety checker.
        output: folder to write.
        num_steps: of training.
        dtype: name of the type that the models compute in.
        from_pt: read PyTorch's .bin files.
        prediction_type: of the UNet.
    """
    dtype = getattr(jnp, dtype)
    source = {"revision": None, "from_pt": from_pt}
    tokenizer = CLIPTokenizer.from_pretrained(model, subfolder="tokenizer", **source)
    text_encoder = FlaxCLIPTextModel.from_pretrained(
        model, subfolder="text_encoder", dtype=dtype, **source
    )
    vae, vae_params = FlaxAutoencoderKL.from_pretrained(
        model, subfolder="vae", dtype=dtype, **source
    )
    unet, unet_params = FlaxUNet2DConditionModel.from_pretrained(
        model, subfolder="unet", dtype=dtype, **source
    )
    scheduler = FlaxDDPMScheduler(
        **BETAS, num_train_timesteps=1000, prediction_type=prediction_type
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = TrainState.create(apply_fn=unet.__call__, params=unet_params, tx=tx)

    def train_step(state, text_params, vae_params, batch, rng):
        rng, next_rng = jax.random.split(rng)

        def loss_fn(params):
            states = text_encoder(batch["input_ids"], params=text_params, train=False)[0]
            return diffusion_loss(
                vae, vae_params, unet, params, scheduler, batch["pixels"], states, rng, train=True
            ).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        loss, grads = jax.lax.pmean((loss, grads), "batch")
        return state.apply_gradients(grads=grads), loss, next_rng

    step = jax.pmap(train_step, "batch", donate_argnums=(0,))
    state = replicate(state)
    text_params, vae_params = replicate(text_encoder.params), replicate(vae_params)
    num_devices = jax.local_device_count()
    rng = jax.random.split(jax.random.PRNGKey(0), num_devices)
    captions = [file.stem for file in sorted(Path(images).iterdir())[:num_devices]]
    batch = {
        "pixels": read_images(images, num_devices),
        "input_ids": token_ids(tokenizer, captions),
    }
    losses = []
    for _ in range(num_steps):
        state, loss, rng = step(state, text_params, vae_params, shard(batch), rng)
        losses.append(float(unreplicate(loss)))

    params = {"text_encoder": text_params, "vae": vae_params, "unet": state.params}
    save(
        output,
        safety_checker,
        {name: first(tree) for name, tree in params.items()},
        text_encoder=text_encoder,
        vae=vae,
        unet=unet,
        tokenizer=tokenizer,
        scheduler=FlaxPNDMScheduler(**BETAS, skip_prk_steps=True, prediction_type=prediction_type),
    )
    return losses


if __name__ == "__main__":
    run(main)
