"""Train a TAESD for the VAE of the demo's models, for --accelerate taesd:path=demo/output/taesd.

    python demo/make_tiny_vae.py

The published TAESD decodes Stable Diffusion's latents, taesdxl decodes SDXL's. The demo's VAE has
other latents; here a FlaxAutoencoderTiny of half the published width learns the VAE's latents
and images from the photographs of make_base_model.py. Six minutes on two CPU cores.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from demo.make_base_model import BASE_MODELS, fit, image_batches
from diffusers_flax.command_line import Above, AtLeast, run_main
from diffusers_flax.models.tiny_vae import FlaxAutoencoderTiny
from diffusers_flax.models.vae import FlaxAutoencoderKL

WIDTHS = (32, 32, 32)
TINY_VAE = FlaxAutoencoderTiny(
    encoder_block_out_channels=WIDTHS,
    decoder_block_out_channels=WIDTHS,
    latent_channels=16,
    num_encoder_blocks=(1, 3, 3),
    num_decoder_blocks=(3, 3, 1),
)


@dataclass(frozen=True)
class Config:
    """Train a TAESD for the demo."""

    output_dir: Path = ROOT / "demo" / "output" / "taesd"  # of the TAESD
    num_steps: Annotated[int, AtLeast(2)] = 1000  # optimizer steps
    batch_size: Annotated[int, AtLeast(1)] = 8  # images per step, a multiple of the devices
    learning_rate: Annotated[float, Above(0)] = 2e-3  # peak; warm-up, then cosine to zero
    seed: int = 0


def tiny_vae_loss(params, images, key, *, vae, vae_params):
    """Mean absolute plus mean squared error of latents and of decoded images.

    Args:
        params: of TINY_VAE.
        images: (B, 3, SIZE, SIZE) in [-1, 1].
        key: of the noise in the VAE's latents.
        vae, vae_params: the teacher.

    Returns:
        Scalar, the sum of both errors.
    """
    teacher = partial(vae.apply, {"params": vae_params})
    student = partial(TINY_VAE.apply, {"params": params})
    posterior, scale = teacher(images, method=vae.encode).latent_dist, vae.scaling_factor
    mode, latents = (
        jnp.transpose(x, (0, 3, 1, 2)) for x in (posterior.mode(), posterior.sample(key))
    )
    decoded = teacher(latents, method=vae.decode).sample
    errors = (
        student(images, method=TINY_VAE.encode).latents - scale * mode,
        student(scale * latents, method=TINY_VAE.decode).sample - decoded,
    )
    return sum(jnp.abs(error).mean() + jnp.square(error).mean() for error in errors)


def run(config):
    """Train and save."""
    vae, vae_params = FlaxAutoencoderKL.from_pretrained(BASE_MODELS["sd"] / "vae")
    params, seed = jax.jit(TINY_VAE.init_weights)(jax.random.key(config.seed)), config.seed
    batches = (images for images, *_ in image_batches(seed + 1, config.batch_size, False))
    loss = partial(tiny_vae_loss, vae=vae, vae_params=vae_params)
    params = fit(loss, params, batches, config.num_steps, config.learning_rate, seed + 2, "TAESD")
    TINY_VAE.save_pretrained(config.output_dir, params)
    print(f"saved {config.output_dir}")


def main(args=None):
    """Command line."""
    run_main(Config, __doc__, run, args)


if __name__ == "__main__":
    main()
