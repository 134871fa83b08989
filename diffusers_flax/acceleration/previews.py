"""Previews of images while they are denoised.

    preview = Preview(every=5, show=lambda step, keys, images: ...)
    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained("MODEL", preview=preview)

In each `every`-th step the compiled program decodes the clean latents that the step predicts with
TAESD and calls `show` on the host. It does not wait for the call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

import jax
import jax.numpy as jnp
import numpy as np

from diffusers_flax.images import made_by, save_image, to_pil
from diffusers_flax.messages import warn_once
from diffusers_flax.pipelines.sampling import keys_per_image
from diffusers_flax.schedulers.noise_schedule import predict_x0_and_eps

PREVIEW = "preview by FlaxDiffusionPipeline"  # marks previews, which later previews may replace


@dataclass(frozen=True)
class Preview:
    """Previews of a pipeline's images.

    Args:
        every: a preview is made after each `every`-th step, except for the last.
        show: (number of steps done, uint32 (B, 2), the data of the images' PRNG keys, float32
            (B, H, W, 3) in [0, 1]) -> None, for the images of one device. Arrays are NumPy's. An
            error that it raises ends the call of the pipeline.
        path: directory or hub id of the TAESD; "": the path that --accelerate taesd names, or
            madebyollin/taesd, for SDXL madebyollin/taesdxl. None: nothing is decoded, and show
            gets None for the images; it counts the steps.
    """

    every: int
    show: Callable
    path: str | None = ""

    def __post_init__(self):
        if not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"--preview {self.every} must be a whole number, at least 1")
        if not callable(self.show):
            raise ValueError(f"Preview: show={self.show!r} must be a function")

    def watch(self, decode, prediction_type, scales, keys, is_shown=None):
        """The function that sampling.denoise calls in each step.

        Args:
            decode: scaled latents (B, C, h, w) -> images (B, H, W, 3).
            prediction_type: of the scheduler's config.
            scales: of noise_scales.
            keys: one per image.
            is_shown: True on one of the devices that make the same images; None: on all.
        """
        alphas, sigmas = map(jnp.asarray, scales)

        def show(step, key_data, images):
            images = None if images is None else np.asarray(images)
            self.show(int(step), np.asarray(key_data), images)

        def watch(i, x, guided):
            step = i + 1

            def send():
                images = None
                if self.path is not None:
                    x_0, _ = predict_x0_and_eps(prediction_type, alphas[i], sigmas[i], x, guided)
                    images = decode(x_0)
                jax.debug.callback(show, step, jax.random.key_data(keys), images)

            is_due = (step % self.every == 0) & (step < len(alphas))
            is_due = is_due if is_shown is None else is_due & is_shown
            jax.lax.cond(is_due, send, lambda: None)

        return watch


def preview_files(every, decoder, outputs, num_steps, seed, kept=(), sizes=None):
    """Write previews next to the images: for OUT.png OUT-step-005.png, OUT-step-010.png, ...

    They replace previews of an earlier run, and no other file.

    Args:
        every: --preview.
        decoder: --preview_decoder.
        outputs: the file of each image, in the order of their keys.
        num_steps: of the images, PNDM's repeated ones included.
        seed: of the images' keys.
        kept: paths or None, files that previews must not replace, besides outputs.
        sizes: (width, height) to scale the previews of each image to; None: they are as decoded.

    Returns:
        Preview, or None without --preview.

    Raises:
        ValueError: there would be no preview, or one would replace a file.
    """
    if every is None:
        if decoder:
            raise ValueError(f"--preview_decoder {decoder} is for --preview; give both or neither")
        return None
    if every >= num_steps:
        raise ValueError(
            f"--preview {every} of {num_steps} steps makes no preview, as the last step makes the "
            f"image; take less than {num_steps}"
        )
    kept = {path.resolve() for path in (*outputs, *kept) if path}
    for path in (
        preview_file(x, i) for x in outputs for i in range(every, num_steps, max(1, every))
    ):
        if path.resolve() in kept or (path.exists() and not made_by(path, PREVIEW)):
            raise ValueError(f"{path} would be replaced by a preview; give it another name")
    keys = jax.random.key_data(keys_per_image(jax.random.key(seed), len(outputs)))
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
