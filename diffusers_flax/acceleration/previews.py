"""Previews of images while they are denoised.

    preview = Preview(every=5, show=lambda step, keys, images: ...)
    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained("MODEL", preview=preview)

In each `every`-th step the compiled program decodes the clean latents that the step predicts with
TAESD and calls `show` on the host. It does not wait for the call.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from diffusers_flax.schedulers.noise_schedule import predict_x0_and_eps


@dataclass(frozen=True)
class Preview:
    """Previews of a pipeline's images.

    Args:
        every: number of steps between previews; the last step has none.
        show: (number of steps done, uint32 (B, 2), the data of the images' PRNG keys, float32
            (B, H, W, 3) in [0, 1]) -> None, for the images of one device. Arrays are NumPy's. An
            error that it raises ends the call of the pipeline.
        path: directory or hub id of the TAESD; "": the path of accelerate="taesd:path=...", or
            madebyollin/taesd, for SDXL madebyollin/taesdxl. None: nothing is decoded, and show gets
            None for the images, to count steps.
    """

    every: int
    show: Callable
    path: str | None = ""

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
