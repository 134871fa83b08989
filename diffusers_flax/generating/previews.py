"""Files of previews, next to the images: for OUT.png OUT-step-005.png, OUT-step-010.png, ..."""

from threading import Lock

import jax
import numpy as np

from diffusers_flax.images import image_mark, save_image, to_pil
from diffusers_flax.messages import warn_once
from diffusers_flax.pipelines.sampling import keys_of_sequel

PREVIEW = "preview by FlaxDiffusionPipeline"  # marks previews, which later previews may replace
MAX_SEQUELS = 2  # see keys_of_sequel: of inpainting that continues from latents


def preview_files(config, outputs, num_steps, kept, sizes, keys):
    """Write previews next to the images: for OUT.png OUT-step-005.png, OUT-step-010.png, ...

    They replace previews of an earlier run, and no other file.

    Args:
        config: with the flags preview and preview_decoder.
        outputs: file of each image, in the order of their keys.
        num_steps: of each image, or the largest number, see count_steps.
        kept: other files that previews must not replace; paths or None.
        sizes: (width, height) of each image's previews.
        keys: PRNG keys of the images.

    Returns:
        Preview, or None without --preview.

    Raises:
        ValueError: there would be no preview, or one would replace a file.
    """
    every, decoder = config.preview, config.preview_decoder
    if every is None:
        if decoder:
            raise ValueError(f"--preview_decoder {decoder} is for --preview; give both or neither")
        return None
    from diffusers_flax.acceleration.previews import Preview  # not for images without previews

    if every >= num_steps:
        raise ValueError(
            f"--preview {every} of {num_steps} steps makes no preview, as the last step makes the "
            f"image; take less than {num_steps}"
        )
    kept = {path.resolve() for path in (*outputs, *kept) if path}
    steps = range(every, num_steps, every)
    for path in (preview_file(file, step) for file in outputs for step in steps):
        if path.resolve() in kept or (path.exists() and image_mark(path)[0] != PREVIEW):
            raise ValueError(f"{path} would be replaced by a preview; give it another name")
    image_of = {}  # by key: file and size
    for _ in range(MAX_SEQUELS + 1):
        names = [key.tobytes() for key in np.asarray(jax.random.key_data(keys))]
        image_of |= zip(names, zip(outputs, sizes))
        keys = keys_of_sequel(keys)
    one_at_a_time = Lock()  # devices call it from several threads

    def show(step, keys, images):
        with one_at_a_time:
            for name, image in zip((key.tobytes() for key in keys), to_pil(images)):
                file, size = image_of[name]
                try:
                    save_image(image.resize(size), preview_file(file, step), PREVIEW)
                except OSError as error:  # the image itself may still be written
                    warn_once(f"a preview cannot be written: {error}")

    return Preview(every, show, decoder)


def preview_file(file, step):
    """The file of an image's preview."""
    return file.with_name(f"{file.stem}-step-{step:03}{file.suffix}")
