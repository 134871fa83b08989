"""Compute the VAE's latents of a dataset once, so that training does not encode images.

The VAE is frozen, and at 256 pixels encoding two images is half of a training step's FLOPs. The
trainer's --cache_latents DIR writes the latents before training and reuses them in later runs. To
write them in advance, e.g. on another machine:

    python cache_latents.py --train_data_dir data --output_dir latents \\
        --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5

With the demo's model and data, in two minutes on a CPU:

    python cache_latents.py --pretrained_model_name_or_path demo/base_model \\
        --train_data_dir demo/output/data --resolution 64 --output_dir /tmp/latents

Each shard of images gives a shard of latents with the same name and rows. `original_image` is the
mode of the VAE's posterior, `edited_image` its mean and standard deviation, both for the image and
for its mirror image, in float16, 49 kB per pair at 256 pixels. `edit_prompt` is copied with all
instructions of a pair. With --cache_masks, `mask` is the mask at the latents' size. With
--cache_references, `reference_image` is the mode of the reference image. Images are cropped to the
central square. Training draws new samples of the edited images' latents in every
step, as without the cache. Undecodable pairs are logged and stored as nulls; training replaces them
as usual.

With several directories, --train_data_dir A B, each gets a subdirectory of --output_dir, to name in
the trainer's --train_data_dir.

Existing shards are kept if VAE, size, precision and dataset match. Otherwise the script stops, or
replaces them with --overwrite_output_dir. Several hosts can share the work in one output directory;
hosts with different shards need a directory each. Runs on GPU, TPU or CPU (5 s per pair on two
cores).
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from diffusers_flax.command_line import AtLeast, Between, ask_before_replacing, run_main
from diffusers_flax.generating.flags import with_single_files
from diffusers_flax.training.flags import chosen_columns
from diffusers_flax.training.latents import latent_dirs, write_latents

# Messages of run_main
INTERRUPTED = "complete shards are saved; run the same command to resume"
LESS_MEMORY = "lower --batch_size, or use --mixed_precision bf16"


@dataclass(frozen=True)
class Config:
    pretrained_model_name_or_path: str  # pipeline directory, hub id or file with the VAE
    # another VAE, directory, hub id or file; "": the model's own
    pretrained_vae_model_name_or_path: str = ""
    train_data_dir: tuple[str, ...] = ("data",)  # directories or URLs of *.parquet shards
    # for the latents; with several train_data_dir a subdirectory for each
    output_dir: str = "latents"
    overwrite_output_dir: bool = False  # replace latents of other settings
    revision: str | None = None  # branch, tag or commit of a hub id
    variant: str | None = None  # variant of the VAE's files, e.g. fp16
    # configs of one-file models: a directory or hub id; default: their family's
    config_name_or_path: str | None = None
    original_image_column: str = ""  # original image; "": as in a known set, docs/data.md
    edited_image_column: str = ""  # edited image; "": likewise
    edit_prompt_column: str = ""  # one or several instructions; "": likewise
    cache_masks: bool = False  # also store masks, for training with --mask_loss_weight
    mask_column: str = ""  # with cache_masks: masks; "": mask_img, mask_image or mask
    cache_references: bool = False  # also store reference images, for UNets that take two images
    reference_image_column: str = ""  # with cache_references: their column; "": reference_image
    # only the shards with the first N pairs of each directory; default: all
    max_train_samples: Annotated[int, AtLeast(1)] | None = None
    resolution: Annotated[int, AtLeast(1)] = 256  # side of the square images, pixels
    # sizes of about resolution² pixels, WIDTHxHEIGHT, as the trainer's; default: only squares
    aspect_ratio_buckets: tuple[str, ...] | None = None
    # with aspect_ratio_buckets: batch size of later runs; sizes with fewer pairs are left out
    train_batch_size: Annotated[int, AtLeast(1)] = 16
    image_interpolation_mode: Literal["dct", "lanczos", "bicubic"] = "dct"  # filter; dct: fastest
    mixed_precision: Literal["no", "bf16"] = "no"  # compute dtype of the VAE
    # pairs per device; default: as many pixels as 8 images of 256 x 256
    batch_size: Annotated[int, AtLeast(1)] | None = None
    # stop if more of the pairs cannot be used
    max_bad_fraction: Annotated[float, Between(0, 1)] = 0.1
    # decoding threads; 0: one per core
    dataloader_num_workers: Annotated[int, AtLeast(0)] = 0


def run(config):
    """Write the latents of all pairs."""
    if config.mask_column and not config.cache_masks:
        raise ValueError(f"--mask_column {config.mask_column} goes with --cache_masks; add it")
    if config.reference_image_column and not config.cache_references:
        column = config.reference_image_column
        raise ValueError(f"--reference_image_column {column} goes with --cache_references; add it")
    vae_flag = {"pretrained_vae_model_name_or_path": "vae"}
    config = with_single_files(config, "pretrained_model_name_or_path", **vae_flag)
    shards = "*.parquet" if len(config.train_data_dir) == 1 else "**/*.parquet"
    ask_before_replacing("output_dir", config.output_dir, config.overwrite_output_dir, shards)
    write_latents(
        config,
        config.output_dir,
        chosen_columns(config, config.cache_masks, config.cache_references),
        config.batch_size,
        config.overwrite_output_dir,
    )
    output_dirs = latent_dirs(config.train_data_dir, config.output_dir)
    for data_dir, output_dir in zip(config.train_data_dir, output_dirs):
        print(f"latents of {data_dir} are in {output_dir}")


def main(args=None):
    """Run the command line."""
    run_main(Config, __doc__, run, args, interrupted=INTERRUPTED, out_of_memory=LESS_MEMORY)


if __name__ == "__main__":
    main()
