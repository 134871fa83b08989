"""Widen a UNet of Stable Diffusion or SDXL from 4 to 8 input channels, for the original image.

    python create_modified_unet.py --output_dir modified_unet \\
        --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5

With --num_images 2 it widens 4 or 8 channels to 12, for a reference image too. The new channels'
weights are zero, so the output stays the same for any values of them; the script checks that before
it saves. Needs about 8 GB of memory for Stable Diffusion 1.5, 23 GB for SDXL, and no accelerator.

Paper: InstructPix2Pix (arXiv 2211.09800), section 3.2.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from diffusers_flax.command_line import ask_before_replacing, run_main
from diffusers_flax.generating.flags import with_single_files
from diffusers_flax.loading.directories import INDEX_NAME
from diffusers_flax.models.unet import FlaxUNet2DConditionModel

CHECK_TOLERANCE = 1e-5  # of the largest output; only the order of float32 sums differs


@dataclass(frozen=True)
class Config:
    pretrained_model_name_or_path: str  # pipeline directory, hub id or file with the UNet
    output_dir: str  # directory for the widened UNet
    num_images: Literal[1, 2] = 1  # of an edit: the original; with 2 also a reference image
    subfolder: str = "unet"  # subdirectory of the UNet; "": the directory itself
    revision: str | None = None  # branch, tag or commit, if a hub id is given
    variant: str | None = None  # variant of the UNet's files, e.g. fp16
    config_name_or_path: str | None = None  # directory or hub id of a one-file model's configs
    use_ema_weights: bool = False  # of a one-file model: the averages of the UNet's weights
    overwrite_output_dir: bool = False  # replace a UNet in output_dir; other files are not changed


def widen(params, in_channels):
    """Pad the kernel of conv_in with zeros for more input channels.

    Args:
        params: the UNet's parameter tree, NumPy or jax arrays; not changed.
        in_channels: new number of input channels, larger than before.

    Returns:
        The tree with another kernel of conv_in, (3, 3, in_channels, C).
    """
    kernel = np.asarray(params["conv_in"]["kernel"])  # (3, 3, c, C)
    kernel = np.pad(kernel, ((0, 0), (0, 0), (0, in_channels - kernel.shape[2]), (0, 0)))
    return {**params, "conv_in": {**params["conv_in"], "kernel": kernel}}


def largest_difference(narrow, narrow_params, wide, wide_params):
    """Compare the widened UNet with the narrow one on random inputs.

    Returns:
        (largest absolute difference, largest absolute output of the narrow UNet), floats.
    """
    side = 32  # of the latents, 256 pixels in Stable Diffusion
    keys = jax.random.split(jax.random.key(0), 4)
    latents = jax.random.normal(keys[0], (1, narrow.in_channels, side, side))
    extra = 10 * jax.random.normal(keys[1], (1, wide.in_channels - narrow.in_channels, side, side))
    arguments = [jnp.array([500]), jax.random.normal(keys[2], (1, 77, narrow.cross_attention_dim))]
    if narrow.addition_embed_type is not None:  # SDXL
        size = narrow.projection_class_embeddings_input_dim - 6 * narrow.addition_time_embed_dim
        time_ids = jnp.array([[8 * side, 8 * side, 0, 0, 8 * side, 8 * side]], jnp.float32)
        pooled = jax.random.normal(keys[3], (1, size))
        arguments.append({"text_embeds": pooled, "time_ids": time_ids})
    expected = jax.jit(narrow.apply)({"params": narrow_params}, latents, *arguments).sample
    latents = jnp.concatenate((latents, extra), axis=1)
    result = jax.jit(wide.apply)({"params": wide_params}, latents, *arguments).sample
    result, expected = np.asarray(result), np.asarray(expected)  # jnp's maximum may lose a NaN
    return float(np.abs(result - expected).max()), float(np.abs(expected).max())


def check_output_dir(config):
    """Raise a ValueError for an output directory that has another UNet."""
    folder, source = Path(config.output_dir).resolve(), Path(config.pretrained_model_name_or_path)
    of_source = source.resolve(), (source / config.subfolder).resolve()
    if config.output_dir and (folder in of_source or (folder.parent / INDEX_NAME).exists()):
        raise ValueError(
            f"--output_dir {config.output_dir} has another model's UNet; name another directory"
        )
    ask_before_replacing("output_dir", config.output_dir, config.overwrite_output_dir)


def create_modified_unet(config: Config):
    """Load, widen, check, save."""
    jax.config.update("jax_platforms", "cpu")  # exact float32, and no claim on an accelerator
    config = with_single_files(config, "pretrained_model_name_or_path", "unet")
    check_output_dir(config)
    source = config.pretrained_model_name_or_path
    narrow, narrow_params = FlaxUNet2DConditionModel.from_pretrained(
        source,
        subfolder=config.subfolder or None,
        revision=config.revision,
        variant=config.variant,
        convert=lambda name, x: x,  # no warning about float16, which the trainer casts
    )
    print(f"loaded {source}: {narrow.in_channels} input channels; both UNets are compared")
    in_channels = (1 + config.num_images) * narrow.out_channels
    if narrow.in_channels % narrow.out_channels or in_channels <= narrow.in_channels:
        raise ValueError(
            f"the UNet of {source} has {narrow.in_channels} input channels; "
            "widen a text-to-image model, or with --num_images 2 also one for edits"
        )
    wide = narrow.clone(in_channels=in_channels)
    wide_params = widen(narrow_params, in_channels)
    difference, scale = largest_difference(narrow, narrow_params, wide, wide_params)
    what = f"for random inputs and {in_channels - narrow.in_channels} new channels"
    print(f"largest difference {difference:.2e}, largest output {scale:.2e}, {what}")
    if not difference <= CHECK_TOLERANCE * scale:
        raise ArithmeticError(
            f"the widened UNet differs from the narrow one by {difference:.2e}; nothing was saved"
        )
    wide.save_pretrained(config.output_dir, params=wide_params)
    print(f"saved {config.output_dir}: {in_channels} input channels, all other weights unchanged")


def main(args=None):
    """Command line."""
    run_main(Config, __doc__, create_modified_unet, args, interrupted="nothing was saved")


if __name__ == "__main__":
    main()
