"""Pretrain demo/base_model: a tiny Stable Diffusion that makes crops of photographs from captions.

    python demo/make_base_model.py                                     # about HOURS on 2 CPU cores
    python demo/make_base_model.py --vae_steps 20 --unet_steps 20 --output_dir /tmp/base   # a minute

Three stages: CLIP's byte-pair tokenizer is trained on the captions; the VAE on the pictures; text
encoder and UNet together on (caption, latent) pairs. The result is a diffusers pipeline folder in
half precision. Finished stages are kept in --work_dir and not run again.

Papers: Latent Diffusion Models (arXiv 2112.10752), CLIP (arXiv 2103.00020).
"""

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import serialization
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from demo.photographs import EDITS, TRAINING, load_photographs, random_crop  # noqa: E402
from modeling_flax_clip import FlaxCLIPTextModel  # noqa: E402
from modeling_flax_unet import FlaxUNet2DConditionModel  # noqa: E402
from modeling_flax_vae import FlaxAutoencoderKL  # noqa: E402

SIZE = 64  # pixels of a picture's side
VOCAB_SIZE = 512 + 2 + 94  # CLIP's 2 x 256 byte symbols, start and end of text, merges
NUM_TRAIN_TIMESTEPS = 1000
BETA_START, BETA_END = 0.00085, 0.012

VAE = FlaxAutoencoderKL(
    down_block_types=("DownEncoderBlock2D",) * 3,
    up_block_types=("UpDecoderBlock2D",) * 3,
    block_out_channels=(16, 32, 64),
    norm_num_groups=8,
    sample_size=SIZE,
)


@dataclass(frozen=True)
class Config:
    output_dir: str = str(ROOT / "demo" / "base_model")  # where the pipeline folder goes
    work_dir: str = str(ROOT / "demo" / "work")  # finished stages
    vae_steps: int = 3000  # optimizer steps of the autoencoder
    unet_steps: int = 4000  # optimizer steps of text encoder and UNet
    vae_batch_size: int = 16
    unet_batch_size: int = 32
    learning_rate: float = 2e-3  # peak, both stages; warm-up, then cosine to zero
    kl_weight: float = 1e-4  # weight of the VAE's KL term, per latent number
    seed: int = 0


def picture_batches(seed, batch_size, recolour):
    """Batches for ever: pictures (B, 3, SIZE, SIZE) float32 in [-1, 1] and their captions.

    recolour: True permutes and scales the colour channels (for the VAE, which wants every colour).
    """
    rng = np.random.default_rng(seed)
    pictures, names = load_photographs(TRAINING)
    while True:
        batch, captions = [], []
        for _ in range(batch_size):
            i = rng.integers(len(pictures))
            picture = random_crop(rng, pictures[i], SIZE)
            if rng.random() < 0.5:
                picture = picture[:, ::-1]
            if recolour and rng.random() < 0.5:
                picture = picture[..., rng.permutation(3)] ** np.float32(rng.uniform(0.6, 1.6))
                picture = picture * rng.uniform(0.5, 1, 3).astype(np.float32)
            edit = EDITS[rng.integers(len(EDITS))] if rng.random() < 0.6 else None
            caption = "a photo of {}" if edit is None else edit.caption
            captions.append(caption.format(names[i]))
            batch.append(picture if edit is None else edit.apply(picture))
        yield np.stack(batch).transpose(0, 3, 1, 2) * 2 - 1, captions


def optimizer(learning_rate, num_steps):
    """AdamW, global-norm clip, warm-up over 5% of the steps, cosine to zero."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, max(1, num_steps // 20), num_steps
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-4))


def fit(loss_fn, params, batches, num_steps, learning_rate, seed, desc):
    """Minimise loss_fn(params, batch, key) over batches; returns the parameters."""
    tx = optimizer(learning_rate, num_steps)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch, key):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = jax.jit(tx.init)(params)
    progress = tqdm(range(num_steps), desc=desc, mininterval=5)
    average = None
    for i in progress:
        key = jax.random.fold_in(jax.random.key(seed), i)
        params, opt_state, loss = step(params, opt_state, next(batches), key)
        loss = float(loss)
        if not np.isfinite(loss):
            raise ValueError(f"the loss of stage {desc} is {loss} at step {i}; lower --learning_rate")
        average = loss if average is None else 0.98 * average + 0.02 * loss
        progress.set_postfix(loss=f"{average:.4f}", refresh=False)
    return params


def vae_loss(params, pictures, key, *, kl_weight):
    """Mean absolute plus mean squared error of the reconstruction, plus the KL term."""
    posterior = VAE.apply({"params": params}, pictures, method=VAE.encode).latent_dist
    latents = jnp.transpose(posterior.sample(key), (0, 3, 1, 2))
    error = VAE.apply({"params": params}, latents, method=VAE.decode).sample - pictures
    kl = posterior.kl().mean() / posterior.mean[0].size
    return jnp.abs(error).mean() + jnp.square(error).mean() + kl_weight * kl


def train_vae(config):
    """The autoencoder's parameters, and the factor that brings its latents to unit variance."""
    params = jax.jit(VAE.init_weights)(jax.random.key(config.seed))
    batches = (
        pictures for pictures, _ in picture_batches(config.seed + 1, config.vae_batch_size, True)
    )
    loss = partial(vae_loss, kl_weight=config.kl_weight)
    params = fit(
        loss, params, batches, config.vae_steps, config.learning_rate, config.seed + 2, "VAE"
    )
    pictures, _ = next(picture_batches(config.seed + 3, 512, False))
    encode = jax.jit(partial(VAE.apply, method=VAE.encode))
    latents = encode({"params": params}, pictures).latent_dist.mode()
    return jax.device_get({"params": params, "scaling_factor": 1 / jnp.std(latents)})


def stage(work_dir, name, make):
    """The result of make(), from work_dir if a run before has left it there."""
    path = Path(work_dir) / f"{name}.msgpack"
    if not path.exists():
        result = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(serialization.msgpack_serialize(result))
        unfinished.rename(path)
    return serialization.msgpack_restore(path.read_bytes())


if __name__ == "__main__":
    config = tyro.cli(Config, description=__doc__)
    vae = stage(config.work_dir, "vae", partial(train_vae, config))
    print(vae["scaling_factor"])
