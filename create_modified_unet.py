"""Widen a UNet of Stable Diffusion or SDXL from 4 to 8 input channels, for the original image.

    python create_modified_unet.py --output_dir modified_unet \\
        --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5

On a CPU within seconds, with the demo's model:

    python create_modified_unet.py --pretrained_model_name_or_path demo/base_model \\
        --output_dir /tmp/modified_unet

The new channels' weights are zero, so the widened UNet has the same output as the original for any
values of the new channels; the script checks that before it saves. Needs about 8 GB of memory for
Stable Diffusion 1.5, 23 GB for SDXL, and no accelerator.

Paper: InstructPix2Pix (arXiv 2211.09800), section 3.2.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from diffusers_flax.command_line import ask_before_replacing, run_main
from diffusers_flax.generating.single_files import with_single_files
from diffusers_flax.loading.directories import INDEX_NAME, has_component
from diffusers_flax.loading.files import naming_full_disk
from diffusers_flax.loading.hub import download_hint, fetch_config, fetch_file
from diffusers_flax.loading.single_file import PURPOSES
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.published_configs import REFINER_FEATURES, kind_of_unet

CHECK_LATENT_SIZE = 32  # 256 pixels in Stable Diffusion
CHECK_TOLERANCE = 1e-5  # of the largest output; only the order of float32 sums differs


@dataclass(frozen=True)
class Config:
    pretrained_model_name_or_path: str  # pipeline directory, hub id or file with the UNet
    output_dir: str  # directory for the widened UNet
    # input channels of the widened UNet; default: twice the latents' channels
    in_channels: int | None = None
    subfolder: str = "unet"  # subdirectory of the UNet; "": the directory itself
    revision: str | None = None  # branch, tag or commit, if a hub id is given
    variant: str | None = None  # variant of the UNet's files, e.g. fp16
    # configs of one-file models: a directory or hub id; default: their family's
    config_name_or_path: str | None = None
    use_ema_weights: bool = False  # of a one-file model: the averages of the UNet's weights
    overwrite_output_dir: bool = False  # replace a UNet in output_dir; other files are not changed


def widen(params, in_channels):
    """Pad the kernel of conv_in with zeros for more input channels.

    Args:
        params: the UNet's parameter tree, NumPy or jax arrays; not changed.
        in_channels: new number of input channels, larger than before.

    Returns:
        The tree with another kernel of conv_in, (3, 3, in_channels, C).

    Source: InstructPix2Pix (arXiv 2211.09800), section 3.2.
    """
    kernel = np.asarray(params["conv_in"]["kernel"])  # (3, 3, c, C)
    kernel = np.pad(kernel, ((0, 0), (0, 0), (0, in_channels - kernel.shape[2]), (0, 0)))
    return {**params, "conv_in": {**params["conv_in"], "kernel": kernel}}


def largest_difference(narrow, narrow_params, wide, wide_params, key):
    """Compare the widened UNet with the narrow one on random inputs.

    Args:
        narrow, narrow_params, wide, wide_params: modules and their parameters.
        key: PRNG key of the inputs.

    Returns:
        (largest absolute difference, largest absolute output of the narrow UNet), floats.
    """
    keys = jax.random.split(key, 4)
    num_new = wide.in_channels - narrow.in_channels
    side = CHECK_LATENT_SIZE
    latents = jax.random.normal(keys[0], (1, narrow.in_channels, side, side))
    extra = 10 * jax.random.normal(keys[1], (1, num_new, *latents.shape[2:]))
    text = jax.random.normal(keys[2], (1, 77, narrow.cross_attention_dim))
    arguments = [jnp.array([500]), text]
    if narrow.addition_embed_type is not None:  # SDXL
        size = narrow.projection_class_embeddings_input_dim - 6 * narrow.addition_time_embed_dim
        time_ids = jnp.array([[8 * side, 8 * side, 0, 0, 8 * side, 8 * side]], jnp.float32)
        pooled = jax.random.normal(keys[3], (1, size))
        arguments.append({"text_embeds": pooled, "time_ids": time_ids})
    expected = jax.jit(narrow.apply)({"params": narrow_params}, latents, *arguments).sample
    latents = jnp.concatenate((latents, extra), axis=1)
    result = jax.jit(wide.apply)({"params": wide_params}, latents, *arguments).sample
    # Not jnp: XLA's maximum may lose a NaN on a CPU.
    result, expected = np.asarray(result), np.asarray(expected)
    return float(np.abs(result - expected).max()), float(np.abs(expected).max())


def check_flags(config):
    """Raise a ValueError for an output directory or a source that does not fit."""
    if config.output_dir:
        output_dir = Path(config.output_dir).resolve()
        source = Path(config.pretrained_model_name_or_path)
        if output_dir in (source.resolve(), (source / config.subfolder).resolve()):
            raise ValueError(
                f"--output_dir {config.output_dir} is the model that is read and would be "
                "overwritten; name another directory"
            )
        if (output_dir.parent / INDEX_NAME).exists():
            raise ValueError(
                f"--output_dir {config.output_dir} is a component of the pipeline in "
                f"{output_dir.parent}, whose UNet would be overwritten; name another directory"
            )
    ask_before_replacing("output_dir", config.output_dir, config.overwrite_output_dir)
    path, subfolder, revision = (
        config.pretrained_model_name_or_path,
        config.subfolder,
        config.revision,
    )
    given = f"--pretrained_model_name_or_path {path}"
    index = fetch_config(path, INDEX_NAME, None, revision)[0] or {}
    if has_component(index, "text_encoder_2") and not has_component(index, "text_encoder"):
        raise ValueError(
            f"{given} is SDXL's refiner, which lacks the first text encoder; give the base model"
        )
    if fetch_file(path, "config.json", subfolder or None, revision) is None:
        if index or Path(path).is_dir():
            raise ValueError(
                f"{given} has no {Path(subfolder, 'config.json')}; give the directory of a "
                'pipeline, or the directory of a UNet and --subfolder ""'
            )
        remedy = download_hint(path) or "; check the path"
        raise ValueError(
            f"{given} is neither a directory nor a model that can be reached on the hub{remedy}"
        )


def choose_in_channels(config, narrow):
    """The input channels of the widened UNet; raise a ValueError for a UNet of another kind."""
    path = config.pretrained_model_name_or_path
    if narrow.projection_class_embeddings_input_dim == REFINER_FEATURES:
        raise ValueError(f"the UNet of {path} is of SDXL's refiner; give the base model's")
    kind = kind_of_unet(narrow.in_channels, narrow.out_channels)
    if kind not in PURPOSES or (config.in_channels is None and PURPOSES[kind]):
        raise ValueError(
            f"the UNet of {path} has {narrow.in_channels} input channels ({kind or 'not known'}), "
            f"where a text-to-image model has {narrow.out_channels}; give a text-to-image model"
        )
    if config.in_channels is None:
        return 2 * narrow.out_channels
    if config.in_channels <= narrow.in_channels:
        raise ValueError(
            f"--in_channels {config.in_channels} must be more than the {narrow.in_channels} input "
            "channels the UNet has; give a larger number, or leave it out"
        )
    return config.in_channels


def create_modified_unet(config: Config):
    """Load, widen, check, save."""
    jax.config.update("jax_platforms", "cpu")  # exact float32, and no claim on an accelerator
    config = with_single_files(config, "pretrained_model_name_or_path", "unet")
    check_flags(config)
    narrow, narrow_params = FlaxUNet2DConditionModel.from_pretrained(
        config.pretrained_model_name_or_path,
        subfolder=config.subfolder or None,
        revision=config.revision,
        variant=config.variant,
        convert=lambda name, x: x,  # no warning about float16, which the trainer casts
    )
    print(f"loaded {config.pretrained_model_name_or_path}: {narrow.in_channels} input channels")
    in_channels = choose_in_channels(config, narrow)
    wide = narrow.clone(in_channels=in_channels)
    wide_params = widen(narrow_params, in_channels)
    print("checking the widened UNet against the narrow one (compiles both)")
    difference, scale = largest_difference(
        narrow, narrow_params, wide, wide_params, jax.random.key(0)
    )
    print(
        f"largest difference {difference:.2e}, largest output {scale:.2e}, with random latents and "
        f"random numbers in the {in_channels - narrow.in_channels} new channels"
    )
    if not difference <= CHECK_TOLERANCE * scale:
        raise ArithmeticError(
            f"the widened UNet differs from the narrow one by {difference:.2e}; nothing was saved"
        )
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(wide_params))
    with naming_full_disk(Path(config.output_dir), num_bytes):
        wide.save_pretrained(config.output_dir, params=wide_params)
    print(f"saved {config.output_dir}: {in_channels} input channels, all other weights unchanged")


def main(args=None):
    """Command line."""
    run_main(
        Config,
        __doc__,
        create_modified_unet,
        args,
        interrupted="nothing was saved",
    )


if __name__ == "__main__":
    main()
