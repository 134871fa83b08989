"""Files of previews, next to the images: for OUT.png OUT-step-005.png, OUT-step-010.png, ..."""

from threading import Lock

import jax
import numpy as np

from diffusers_flax.images import image_mark, save_image, to_pil
from diffusers_flax.messages import warn_once
from diffusers_flax.pipelines.sampling import count_steps, keys_per_image

PREVIEW = "preview by FlaxDiffusionPipeline"  # marks previews, which later previews may replace


def preview_files(config, outputs, scheduler, steps, kept=(), sizes=None):
    """Write previews next to the images: for OUT.png OUT-step-005.png, OUT-step-010.png, ...

    They replace previews of an earlier run, and no other file.

    Args:
        config: with the flags preview, preview_decoder and seed.
        outputs: file of each image, in the order of their keys.
        scheduler, steps: see count_steps.
        kept: other files that previews must not replace; paths or None.
        sizes: (width, height) of each image's previews; None: as decoded.

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

    num_steps = count_steps(scheduler, steps)
    if every >= num_steps:
        raise ValueError(
            f"--preview {every} of {num_steps} steps makes no preview, as the last step makes the "
            f"image; take less than {num_steps}"
        )
    kept = {path.resolve() for path in (*outputs, *kept) if path}
    for path in (
        preview_file(x, i) for x in outputs for i in range(every, num_steps, max(1, every))
    ):
        if path.resolve() in kept or (path.exists() and image_mark(path)[0] != PREVIEW):
            raise ValueError(f"{path} would be replaced by a preview; give it another name")
    keys = jax.random.key_data(keys_per_image(jax.random.key(config.seed), len(outputs)))
    names = [key.tobytes() for key in np.asarray(keys)]
    files, sizes = dict(zip(names, outputs)), dict(zip(names, sizes or ()))
    one_at_a_time = Lock()  # devices call it from several threads

    def show(step, keys, images):
        with one_at_a_time:
            for name, image in zip((key.tobytes() for key in keys), to_pil(images)):
                image = image.resize(sizes.get(name, image.size))
                try:
                    save_image(image, preview_file(files[name], step), PREVIEW)
                except OSError as error:  # the image itself may still be written
                    warn_once(f"a preview cannot be written: {error}")

    return Preview(every, show, decoder)


def preview_file(file, step):
    """The file of an image's preview."""
    return file.with_name(f"{file.stem}-step-{step:03}{file.suffix}")
