"""Pretrain demo/base_model or demo/base_model_xl: tiny models that make images from captions.

    python demo/make_base_model.py                     # 40 minutes on 2 CPU cores with AVX-512
    python demo/make_base_model.py --family sdxl       # SDXL, without training a VAE
    python demo/make_base_model.py --vae_steps 20 --unet_steps 20 --num_latents 256 \\
        --output_dir /tmp/base    # a few minutes

Three stages: CLIP's byte-pair tokenizer is trained on the captions; the VAE on the images; text
encoder and UNet together on (caption, latent) pairs. The result is a pipeline directory in
half precision, with the configs of the models in the repository. --family sdxl makes a tiny SDXL,
with the VAE of demo/base_model, as many parameters, and the same images, captions, noise, steps and
batch.

Why this shape: crops of photographs that the VAE has not seen come back with a mean error of 0.02
(of 1) with 16 latent channels; with 4 it was 0.04, a third of what "black and white" changes. A
UNet of a single resolution learns the edits in less time than one that halves it: after 300 steps
from random weights its loss on the demo's pairs was 0.40, and 0.60 with two resolutions.

Papers: Latent Diffusion Models (arXiv 2112.10752), CLIP (arXiv 2103.00020), SDXL (arXiv
2307.01952).
"""

import json
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, muon
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from tqdm import trange
from transformers import CLIPTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from demo.photographs import EDITS, TRAINING, load_photographs, random_box, resize_box
from diffusers_flax.command_line import run_main
from diffusers_flax.data.images import scaled_shape
from diffusers_flax.loading.files import read_json
from diffusers_flax.models.clip import FlaxCLIPTextModel, FlaxCLIPTextModelWithProjection
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.models.vae import FlaxAutoencoderKL
from diffusers_flax.schedulers.ddpm import FlaxDDPMScheduler
from diffusers_flax.training.models import encode_text

SIZE = 64  # pixels of an image's side
NUM_MERGES = 120  # of CLIP's byte-pair vocabulary
START, END = "<|startoftext|>", "<|endoftext|>"
CAPTIONS = [
    caption.format(name)
    for name in TRAINING.values()
    for caption in ("a photo of {}", *(edit.caption for edit in EDITS))
]
BASE_MODELS = {  # the models in the repository, whose configs are used
    "sd": ROOT / "demo" / "base_model",
    "sdxl": ROOT / "demo" / "base_model_xl",
}
TEXT_ENCODERS = {
    "sd": {"text_encoder": FlaxCLIPTextModel},
    "sdxl": {
        "text_encoder": FlaxCLIPTextModel,
        "text_encoder_2": FlaxCLIPTextModelWithProjection,
    },
}
VAE_BATCH_SIZE, UNET_BATCH_SIZE = 8, 32
VAE_LEARNING_RATE, UNET_LEARNING_RATE = 1e-2, 3e-3  # peaks; warm-up, then cosine to zero
KL_WEIGHT = 5e-4  # weight of the VAE's KL term, per latent number


@dataclass(frozen=True)
class Config:
    family: Literal["sd", "sdxl"] = "sd"  # Stable Diffusion 2 or SDXL
    output_dir: Path | None = None  # of the pipeline; default: demo/base_model, or base_model_xl
    vae_steps: int = 4000  # optimizer steps of the autoencoder; none for SDXL
    unet_steps: int = 3000  # optimizer steps of text encoder and UNet
    num_latents: int = 16384  # images encoded once, to train the UNet on
    seed: int = 0


def image_batches(seed, batch_size, recolour):
    """Endless batches: images (B, 3, SIZE, SIZE) float32 in [-1, 1], captions, time ids (B, 6).

    recolour: True permutes and scales the colour channels (for the VAE, which wants every colour).
    """
    rng = np.random.default_rng(seed)
    time_ids_rng = np.random.default_rng([seed, 1])
    images, names = load_photographs(TRAINING), list(TRAINING.values())
    while True:
        batch, captions, time_ids = [], [], []
        for _ in range(batch_size):
            i = rng.integers(len(images))
            box = random_box(rng, images[i], SIZE)
            image = resize_box(images[i], box, SIZE)
            mirrored = rng.random() < 0.5
            if mirrored:
                image = image[:, ::-1]
            time_ids.append(random_time_ids(time_ids_rng, images[i].size, box, mirrored))
            if recolour and rng.random() < 0.5:
                image = image[..., rng.permutation(3)] ** np.float32(rng.uniform(0.6, 1.6))
                image = image * rng.uniform(0.5, 1, 3).astype(np.float32)
            edit = EDITS[rng.integers(len(EDITS))] if rng.random() < 0.6 else None
            caption = "a photo of {}" if edit is None else edit.caption
            captions.append(caption.format(names[i]))
            batch.append(image if edit is None else edit.apply(image))
        yield np.stack(batch).transpose(0, 3, 1, 2) * 2 - 1, captions, np.stack(time_ids)


def random_time_ids(rng, size, box, mirrored):
    """SDXL's micro-conditioning of a square box, for a stored image that contains it.

    The stored image is the square itself or, in two of three cases, a random part of the photograph
    that is wider or higher. Its shorter side is scaled to SIZE and the square is cut out, as the
    trainer does.

    Args:
        rng: numpy Generator.
        size: (width, height) of the photograph.
        box: (left, top, right, bottom).
        mirrored: whether the square is mirrored.

    Returns:
        float32 (6,), see diffusers_flax/data/decoding.py.
    """
    side, longer_axis = box[2] - box[0], rng.integers(3)
    before, stored = np.zeros(2, int), np.full(2, side)  # along x and y
    if longer_axis < 2:
        before[longer_axis] = rng.integers(box[longer_axis] + 1)
        after = rng.integers(size[longer_axis] - box[longer_axis + 2] + 1)
        stored[longer_axis] += before[longer_axis] + after
    width, height = (int(x) for x in stored)
    _, scaled_width = scaled_shape(height, width, (SIZE, SIZE))
    left, top = np.round(before * SIZE / side)
    if mirrored:
        left = scaled_width - SIZE - left
    return np.array([height, width, top, left, SIZE, SIZE], np.float32)


def as_matrix(x):
    """Muon's view of a parameter; a kernel's inputs are all axes but the last."""
    axes = tuple(range(x.ndim - 1))
    return MuonDimensionNumbers(axes, (x.ndim - 1,)) if x.ndim >= 2 else None


def fit(loss_fn, params, batches, num_steps, learning_rate, seed, desc):
    """Minimise loss_fn(params, batch, key) over batches; returns the parameters.

    The optimizer is Muon, AdamW for vectors; warm-up over 5% of the steps, cosine to zero.

    Source: Muon is Scalable for LLM Training (arXiv 2502.16982), section 2.2 for the scale 0.2.
    """
    warmup = max(1, num_steps // 20)
    tx = muon(
        optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, num_steps),
        consistent_rms=0.2,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(as_matrix, params),
    )

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch, key):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    mesh = jax.sharding.Mesh(jax.devices(), ("batch",))
    whole, sharded = jax.NamedSharding(mesh, jax.P()), jax.NamedSharding(mesh, jax.P("batch"))
    params = jax.device_put(params, whole)
    opt_state = jax.device_put(jax.jit(tx.init)(params), whole)
    for i in (progress := trange(num_steps, desc=desc, mininterval=5)):
        key = jax.random.fold_in(jax.random.key(seed), i)
        batch = jax.device_put(next(batches), sharded)
        params, opt_state, loss = step(params, opt_state, batch, key)
        progress.set_postfix(loss=f"{loss:.4f}", refresh=False)
    return jax.device_get(params)


def vae_loss(params, images, key, *, vae):
    """Mean absolute plus mean squared error of the reconstruction, plus the KL term."""
    posterior = vae.apply({"params": params}, images, method=vae.encode).latent_dist
    latents = jnp.transpose(posterior.sample(key), (0, 3, 1, 2))
    error = vae.apply({"params": params}, latents, method=vae.decode).sample - images
    kl = posterior.kl().mean() / posterior.mean[0].size
    return jnp.abs(error).mean() + jnp.square(error).mean() + KL_WEIGHT * kl


@partial(jax.jit, static_argnums=0)
def encode_images(vae, params, images):
    """The most likely latents of images, (B, h, w, 16), without the scaling factor."""
    return vae.apply({"params": params}, images, method=vae.encode).latent_dist.mode()


def train_vae(vae, config):
    """Train the autoencoder: (vae, parameters); its scaling_factor brings latents to variance 1."""
    params, seed = jax.jit(vae.init_weights)(jax.random.key(config.seed)), config.seed
    batches = (images for images, *_ in image_batches(seed + 1, VAE_BATCH_SIZE, True))
    loss = partial(vae_loss, vae=vae)
    params = fit(loss, params, batches, config.vae_steps, VAE_LEARNING_RATE, seed + 2, "VAE")
    images, *_ = next(image_batches(seed + 3, 512, False))
    scale = float(1 / jnp.std(encode_images(vae, params, images)))
    return vae.clone(scaling_factor=scale), params


def write_vocabulary(folder):
    """Learn the byte-pair merges on the captions; write CLIP's vocab.json and merges.txt.

    The order of equally frequent pairs differs from one call to the next.
    """
    bpe = Tokenizer(BPE(end_of_word_suffix="</w>"))
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = BpeTrainer(vocab_size=10**6, end_of_word_suffix="</w>", show_progress=False)
    bpe.train_from_iterator(CAPTIONS, trainer)
    merges = json.loads(bpe.to_str())["model"]["merges"][:NUM_MERGES]
    # CLIP's order: bytes, bytes that end a word, merges, start and end of text.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    symbols = [*alphabet, *(f"{symbol}</w>" for symbol in alphabet)]
    symbols += ["".join(merge) for merge in merges] + [START, END]
    (folder / "vocab.json").write_text(json.dumps({x: i for i, x in enumerate(symbols)}))
    lines = ["#version: 0.2", *(" ".join(merge) for merge in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n")


def latent_batches(vae, vae_params, tokenizers, config):
    """Endless batches to train the UNet on.

    Yields:
        {"latents": (B, 16, h, w), scaled; "input_ids": (B, N, 77), for N tokenizers, 10% of the
        rows for the text ""; "is_null": (B,), True for these rows; "time_ids": (B, 6)}.
    """
    rng = np.random.default_rng(config.seed + 4)
    images = image_batches(config.seed + 5, 256, recolour=False)
    latents, captions, time_ids = [], [], []
    for _ in trange(-(-config.num_latents // 256), desc="encode", mininterval=5):
        batch, batch_captions, batch_time_ids = next(images)
        mode = np.asarray(encode_images(vae, vae_params, batch)).transpose(0, 3, 1, 2)
        latents.append(mode * np.float32(vae.scaling_factor))
        captions += batch_captions
        time_ids.append(batch_time_ids)
    latents, time_ids = np.concatenate(latents), np.concatenate(time_ids)
    texts, options = [*captions, ""], dict(padding="max_length", return_tensors="np")
    ids = np.stack([x(texts, **options).input_ids for x in tokenizers], axis=1).astype(np.int32)
    while True:
        rows = rng.integers(len(latents), size=UNET_BATCH_SIZE)
        is_null = rng.random(UNET_BATCH_SIZE) < 0.1
        yield {
            "latents": latents[rows],
            "input_ids": ids[np.where(is_null, len(latents), rows)],
            "is_null": is_null,
            "time_ids": time_ids[rows],
        }


def text_to_image_loss(params, batch, key, *, unet, encoders, scheduler):
    """Mean squared error of the predicted v. Source: Salimans and Ho (arXiv 2202.00512)."""
    x_0 = batch["latents"]
    noise_key, timestep_key = jax.random.split(key)
    noise = jax.random.normal(noise_key, x_0.shape)
    num_timesteps = scheduler.config.num_train_timesteps
    timesteps = jax.random.randint(timestep_key, (len(x_0),), 0, num_timesteps)
    state = scheduler.create_state()
    x_t = scheduler.add_noise(state, x_0, noise, timesteps)
    target = scheduler.get_velocity(state, x_0, noise, timesteps)
    if len(encoders) == 1:
        ids = batch["input_ids"][:, 0]
        inputs = [encode_text(encoders[0], params["text_encoders"][0], ids)["states"]]
    else:  # SDXL, whose null text is zeros
        of_text = batch["input_ids"], batch["time_ids"]
        text = encode_text(encoders, params["text_encoders"], *of_text)
        kept = 1 - batch["is_null"].astype(jnp.float32)
        added = {"text_embeds": text["pooled"] * kept[:, None], "time_ids": text["time_ids"]}
        inputs = [text["states"] * kept[:, None, None], added]
    v_pred = unet.apply({"params": params["unet"]}, x_t, timesteps, *inputs).sample
    return jnp.square(v_pred - target).mean()


def run(config):
    """Train, write the pipeline directory."""
    base, seed = BASE_MODELS[config.family], config.seed
    output_dir = config.output_dir or base
    jax.config.update("jax_num_cpu_devices", 2)  # XLA runs small operations on one core per device
    if output_dir != base:
        ignored = shutil.ignore_patterns("*.safetensors")
        shutil.copytree(base, output_dir, ignore=ignored, dirs_exist_ok=True)
    if config.family == "sd":
        write_vocabulary(output_dir / "tokenizer")
        vae = FlaxAutoencoderKL.from_config(base, subfolder="vae")
        vae, vae_params = train_vae(vae, config)
    else:
        vae, vae_params = FlaxAutoencoderKL.from_pretrained(BASE_MODELS["sd"], subfolder="vae")

    tokenizers, encoders = [], []
    for name, encoder_class in TEXT_ENCODERS[config.family].items():
        folder = output_dir / name.replace("text_encoder", "tokenizer")
        tokenizers.append(CLIPTokenizer.from_pretrained(folder))
        encoders.append(encoder_class(read_json(base / name / "config.json"), _do_init=False))
    unet = FlaxUNet2DConditionModel.from_config(base, subfolder="unet")
    keys = jax.random.split(jax.random.key(seed + 6), 1 + len(encoders))
    params = {
        "unet": jax.jit(unet.init_weights)(keys[0]),
        "text_encoders": tuple(jax.jit(x.init_weights)(key) for x, key in zip(encoders, keys[1:])),
    }
    scheduler = FlaxDDPMScheduler.from_config(base / "scheduler")
    loss = partial(text_to_image_loss, unet=unet, encoders=tuple(encoders), scheduler=scheduler)
    batches = latent_batches(vae, vae_params, tokenizers, config)
    params = fit(loss, params, batches, config.unet_steps, UNET_LEARNING_RATE, seed + 7, "UNet")

    half = dict(dtype=np.float16)
    for name, encoder, trained in zip(
        TEXT_ENCODERS[config.family], encoders, params["text_encoders"]
    ):
        encoder.save_pretrained(output_dir / name, trained, **half)
    vae = vae.clone(scaling_factor=round(vae.scaling_factor, 5))
    vae.save_pretrained(output_dir / "vae", params=vae_params, **half)
    unet.save_pretrained(output_dir / "unet", params=params["unet"], **half)
    print(f"saved {output_dir}")


def main(args=None):
    """Command line."""
    run_main(Config, __doc__, run, args)


if __name__ == "__main__":
    main()
