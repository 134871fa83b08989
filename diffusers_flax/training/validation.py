"""Validation images: edit them during training, draw grids and an animation."""

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from PIL import Image, ImageOps

from diffusers_flax.data.buckets import nearest_sizes
from diffusers_flax.data.images import load_image
from diffusers_flax.generating.captions import GRID_IMAGE_SIZE, GRID_MARGIN, captioned, tile_grid
from diffusers_flax.loading.files import save_whole
from diffusers_flax.training.models import params_beside_unet
from diffusers_flax.training.placement import compile_pmapped, local_rows, replicate
from diffusers_flax.training.sharding import combine, gather

NUM_INFERENCE_STEPS = 20
SHORT_RUN = 100_000  # steps times batch; after fewer samples a model edits well at low scales only
GIF_SIDE = 1024  # longer side of a frame, pixels, at most
GIF_SECONDS = 0.5  # per frame; four times as long for the last


def guidance_scales(config, pipeline, num_steps):
    """Guidance scales for a run's model: the flags, or the defaults of docs/editing.md.

    Args:
        config: flags of the program.
        pipeline: InstructPix2Pix.
        num_steps: length of the run.

    Returns:
        (guidance_scale, image_guidance_scale).
    """
    scales = (7.5, 1.5)
    if num_steps * config.train_batch_size < SHORT_RUN:
        scales = (2.0, 1.2)
    elif pipeline.is_cosxl_edit:
        scales = (7.0, 1.5)
    elif "XL" in pipeline.torch_class_name:
        scales = (3.0, 1.5)
    given = (config.validation_guidance_scale, config.validation_image_guidance_scale)
    return tuple(scale if flag is None else flag for flag, scale in zip(given, scales))


class Validation:
    """Edits images during training and writes them to OUTPUT_DIR/validation/step-N.png.

    Args:
        config: flags of the program.
        pipeline: InstructPix2Pix.
        sizes: (width, height) of the batches' images; an image is cropped to the nearest one.
        num_steps: length of the run.

    Attributes:
        images: PIL images, [] without --validation_image.
    """

    def __init__(self, config, pipeline, sizes, num_steps):
        self.pipeline = replace(pipeline, storage=config.storage) if config.storage else pipeline
        self.images = load_validation_images(config.validation_image, sizes)
        self.seed, self.p_gather = config.seed, None
        self.scales = guidance_scales(config, pipeline, num_steps)
        prompts = list(config.validation_prompt)  # one for each image, or one for all
        self.prompts = prompts * (len(self.images) if len(prompts) == 1 else 1)
        self.folder = Path(config.output_dir, "validation")

    def edit(self, step, weights, axes, p_frozen):
        """Edit the images on this process's devices, one batch per size; process 0 writes them.

        All processes call this together.

        Args:
            step: number of completed steps.
            weights: the UNet's trained parameters, sharded.
            axes: of shard_axes.
            p_frozen: train_step's frozen parameters, replicated.

        Returns:
            Path of the grid of images before and after.
        """
        pipeline, num_devices = self.pipeline, jax.local_device_count()
        if self.p_gather is None:
            gather_all = partial(gather, axes=axes, dtype=pipeline.unet.dtype)
            self.p_gather = compile_pmapped(jax.pmap(gather_all, axis_name="batch"), weights)
        # On several hosts the parameters are global arrays, and the inputs this process's.
        p_params = {
            "unet": combine(p_frozen.get("unet", {}), self.p_gather(weights)),
            **params_beside_unet(p_frozen),
            "scheduler": replicate(pipeline.scheduler.create_state()),
        }
        edits = [None] * len(self.images)
        for size in dict.fromkeys(image.size for image in self.images):
            places = [i for i, image in enumerate(self.images) if image.size == size]
            padded = places + places[-1:] * (-len(places) % num_devices)
            inputs = pipeline.prepare_inputs(
                [self.prompts[i] for i in padded], [self.images[i] for i in padded]
            )
            images = pipeline(
                *(x.reshape(num_devices, -1, *x.shape[1:]) for x in inputs),
                p_params,
                jax.random.key(self.seed),
                NUM_INFERENCE_STEPS,
                *self.scales,
                jit=True,
            ).images
            for place, edit in zip(places, pipeline.numpy_to_pil(local_rows(images))):
                edits[place] = edit
        path = self.folder / f"step-{step:06d}.png"
        if jax.process_index() == 0:
            save_whole(path, validation_grid(list(zip(self.images, edits)), self.prompts).save)
            write_progress(self.folder)
        return path


def load_validation_images(paths, sizes):
    """Load images and crop each to the nearest of the batches' sizes, by aspect ratio.

    Args:
        paths: of --validation_image.
        sizes: (width, height) each.

    Returns:
        PIL images, RGB.
    """
    images = [load_image(path) for path in paths]
    nearest = nearest_sizes(np.reshape([image.size for image in images], (-1, 2)), sizes)
    return [
        ImageOps.fit(image, sizes[size], Image.Resampling.LANCZOS)
        for image, size in zip(images, nearest)
    ]


def validation_grid(pairs, prompts):
    """Draw one tile per edit: before and after, with the instruction below.

    Args:
        pairs: list of (before, after), PIL images; all are fitted into the size of the first, and
            small images are enlarged.
        prompts: the instruction of each pair.

    Returns:
        PIL image, RGB.
    """
    side = max(GRID_IMAGE_SIZE, *pairs[0][0].size)
    size = ImageOps.contain(pairs[0][0], (side, side)).size
    tiles = []
    for pair, prompt in zip(pairs, prompts):
        images = [ImageOps.pad(image, size, color="white") for image in pair]
        tiles.append(captioned(images, prompt))
    # A tile is about twice as wide as high.
    return tile_grid(tiles, max(1, round(math.sqrt(len(tiles) / 2))), GRID_MARGIN)


def step_images(folder):
    """{N: path} of the images FOLDER/step-N.png, sorted by N."""
    steps = {}
    for path in Path(folder).glob("step-*.png"):
        if match := re.fullmatch(r"step-(\d+)\.png", path.name):
            steps[int(match[1])] = path
    return dict(sorted(steps.items()))


def drop_step_images(folder, last_step):
    """Remove the images of steps after last_step from a directory and its animation."""
    for step, path in step_images(folder).items():
        if step > last_step:
            path.unlink()
    write_progress(folder)


def write_progress(folder):
    """Write FOLDER/progress.gif, an animation of step_images(folder) with captions.

    Without images the file is removed.
    """
    steps, path = step_images(folder), Path(folder, "progress.gif")
    if not steps:
        path.unlink(missing_ok=True)
        return
    frames = []
    for step, file in steps.items():
        image = load_image(file)
        image.thumbnail((GIF_SIDE, GIF_SIDE))
        frames.append(captioned([image], f"step {step}"))
    milliseconds = [1000 * GIF_SECONDS] * (len(frames) - 1) + [4000 * GIF_SECONDS]
    options = dict(save_all=True, append_images=frames[1:], duration=milliseconds, loop=0)
    save_whole(path, partial(frames[0].save, **options))
