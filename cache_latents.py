"""The VAE's latents of every pair, computed once and kept, so that training need not compute them.

Encoding two images takes about as much work as the rest of a training step at 256 pixels, and
the VAE is frozen: the trainer makes such a folder by itself with --cache_latents DIR, and later
runs with the same flag find it. To make it beforehand, perhaps on another machine:

    python cache_latents.py --train_data_dir data --output_dir latents \\
        --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5

With the demo's model and data, two minutes on a CPU:

    python cache_latents.py --pretrained_model_name_or_path demo/base_model \\
        --train_data_dir demo/output/data --resolution 64 --output_dir /tmp/latents

Every shard becomes one of the same name, with the same rows: `original_image` holds the mode of the
image's posterior, `edited_image` its mean and standard deviation, each of the image as it is
and mirrored, float16; `edit_prompt` is copied. Pairs that cannot be decoded are named and have
nulls, and training replaces them as it would have. A pair takes 49 kB at 256 pixels. What is there
already is not made again, and what another VAE, size, precision or dataset left there is refused.
The square is cut from the middle. Latents are sampled from the posterior anew at every step, as
without the cache.

Needs what the VAE needs: a GPU, a TPU, or a CPU with patience (5 s a pair on two cores). Hosts with
shards of their own have a folder of their own each; hosts that share both share the work.
"""

from dataclasses import dataclass
from typing import Literal

from command_line import run_main
from training_models import write_latents


@dataclass(frozen=True)
class Config:
    pretrained_model_name_or_path: str  # pipeline folder or hub id, for its VAE
    train_data_dir: str = "data"  # folder with the *.parquet shards
    output_dir: str = "latents"  # folder for those with latents
    revision: str | None = None  # branch, tag or commit, of a hub id
    variant: str | None = None  # e.g. fp16, of the VAE's file
    original_image_column: str = ""  # "" finds original_image or input_image
    edited_image_column: str = ""  # "" finds edited_image
    edit_prompt_column: str = ""  # "" finds edit_prompt
    max_train_samples: int | None = None  # only the shards that hold the first so many pairs
    resolution: int = 256  # side of the square images, pixels
    image_interpolation_mode: Literal["dct", "lanczos", "bicubic"] = "dct"  # dct: while decoding
    mixed_precision: Literal["no", "bf16"] = "no"  # compute dtype of the VAE
    # Pairs at once on each device, at most a row group's; None: 8 at 256 pixels.
    batch_size: int | None = None
    max_bad_fraction: float = 0.1  # share of pairs that cannot be decoded at which it stops
    dataloader_num_workers: int = 0  # decoding threads; 0 takes one per core


def run(config):
    """Write the latents of all pairs."""
    write_latents(config, config.output_dir, config.batch_size)
    print(f"latents of {config.train_data_dir} are in {config.output_dir}")


def main(args=None):
    """Command line."""
    run_main(
        Config,
        __doc__,
        run,
        args,
        interrupted="the shards finished so far are kept",
        out_of_memory="lower --batch_size, or use --mixed_precision bf16",
    )


if __name__ == "__main__":
    main()
