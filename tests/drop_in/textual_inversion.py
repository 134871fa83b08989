"""Learn the embedding of a new token, as scripts for diffusers 0.39 do."""

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


def table(params):
    """The subtree of CLIP's parameters that has the token embeddings."""
    return params["text_model"]["embeddings"]["token_embedding"]


def add_row(model, vocab_size, source):
    """Give a text model a vocabulary of vocab_size; new rows are copies of row source."""
    assert model.config.vocab_size != vocab_size
    model.config.vocab_size = vocab_size
    params = model.params
    rows = table(params)["embedding"]
    enlarged = jnp.zeros((vocab_size, rows.shape[1])).at[:].set(rows[source])
    table(params)["embedding"] = enlarged.at[: len(rows)].set(rows)
    model.params = params


def labels(params, name=""):
    """params with "learned" at the token embeddings and "frozen" at other leaves."""
    if name == "token_embedding":
        return "learned"
    if isinstance(params, dict):
        return {key: labels(value, key) for key, value in params.items()}
    return "frozen"


def main(model, images, safety_checker, output, placeholder, initializer, num_steps):
    """Train on an image per device and save the pipeline and OUTPUT/learned_embeds.npy.

    placeholder is the new token, which starts as the token initializer. Returns the losses.
    """
    tokenizer = CLIPTokenizer.from_pretrained(model, subfolder="tokenizer")
    assert tokenizer.add_tokens(placeholder) == 1
    (source,) = tokenizer.encode(initializer, add_special_tokens=False)
    learned = tokenizer.convert_tokens_to_ids(placeholder)
    text_encoder = FlaxCLIPTextModel.from_pretrained(model, subfolder="text_encoder", revision=None)
    vae, vae_params = FlaxAutoencoderKL.from_pretrained(model, subfolder="vae", revision=None)
    unet, unet_params = FlaxUNet2DConditionModel.from_pretrained(
        model, subfolder="unet", revision=None
    )
    add_row(text_encoder, len(tokenizer), source)
    original = table(text_encoder.params)["embedding"]
    tx = optax.multi_transform(
        {"learned": optax.adamw(1e-2), "frozen": optax.set_to_zero()}, labels(text_encoder.params)
    )
    state = TrainState.create(apply_fn=text_encoder.__call__, params=text_encoder.params, tx=tx)
    scheduler = FlaxDDPMScheduler(**BETAS, num_train_timesteps=1000)

    def train_step(state, vae_params, unet_params, batch, rng):
        dropout_rng, rng, next_rng = jax.random.split(rng, 3)

        def loss_fn(params):
            states = state.apply_fn(
                batch["input_ids"], params=params, dropout_rng=dropout_rng, train=True
            )[0]
            return diffusion_loss(
                vae,
                vae_params,
                unet,
                unet_params,
                scheduler,
                batch["pixels"],
                states,
                rng,
                train=False,
            ).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        loss, grads = jax.lax.pmean((loss, grads), "batch")
        state = state.apply_gradients(grads=grads)
        row = table(state.params)["embedding"][learned]
        table(state.params)["embedding"] = original.at[learned].set(row)  # the other rows stay
        return state, loss, next_rng

    step = jax.pmap(train_step, "batch", donate_argnums=(0,))
    state, vae_params, unet_params = map(replicate, (state, vae_params, unet_params))
    num_devices = jax.local_device_count()
    rng = jax.random.split(jax.random.PRNGKey(0), num_devices)
    batch = {
        "pixels": read_images(images, num_devices),
        "input_ids": token_ids(tokenizer, [f"make it {placeholder}"] * num_devices),
    }
    losses = []
    for _ in range(num_steps):
        state, loss, rng = step(state, vae_params, unet_params, shard(batch), rng)
        losses.append(float(unreplicate(loss)))

    params = {"text_encoder": state.params, "vae": vae_params, "unet": unet_params}
    params = {name: first(tree) for name, tree in params.items()}
    save(
        output,
        safety_checker,
        params,
        text_encoder=text_encoder,
        vae=vae,
        unet=unet,
        tokenizer=tokenizer,
        scheduler=FlaxPNDMScheduler(**BETAS, skip_prk_steps=True),
    )
    embedding = table(params["text_encoder"])["embedding"][learned]
    jnp.save(f"{output}/learned_embeds.npy", {placeholder: embedding})
    return losses


if __name__ == "__main__":
    run(main)
