"""Files of previews, next to the images: for OUT.png OUT-step-005.png, OUT-step-010.png, ..."""

from threading import Lock

import jax
import numpy as np

from diffusers_flax.images import save_image, to_pil
from diffusers_flax.pipelines.sampling import keys_of_sequel

MAX_SEQUELS = 2  # see keys_of_sequel: of inpainting that continues from latents


class PreviewFiles:
    """Writes previews.

    Args:
        every: number of steps between previews.
        path: of the TAESD, see Preview.
    """

    def __init__(self, every, path):
        from diffusers_flax.acceleration.previews import Preview  # not for images without previews

        self.preview, self._image_of = Preview(every, self._show, path), {}
        self._one_at_a_time = Lock()  # devices call _show from several threads

    def add(self, outputs, sizes, keys, num_steps):
        """Add images: their files, (width, height) of their previews, PRNG keys, largest steps.

        Raises:
            ValueError: there would be no preview.
        """
        every = self.preview.every
        if every >= num_steps:
            raise ValueError(
                f"--preview {every} of {num_steps} steps makes no preview, as the last step makes "
                f"the image; take less than {num_steps}"
            )
        for _ in range(MAX_SEQUELS + 1):
            names = [key.tobytes() for key in np.asarray(jax.random.key_data(keys))]
            self._image_of |= zip(names, zip(outputs, sizes))
            keys = keys_of_sequel(keys)

    def _show(self, step, keys, images):
        with self._one_at_a_time:
            for key, image in zip(keys, to_pil(images)):
                file, size = self._image_of[key.tobytes()]
                name = f"{file.stem}-step-{step:03}{file.suffix}"
                save_image(image.resize(size), file.with_name(name))
