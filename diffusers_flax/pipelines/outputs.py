"""What calls of the pipelines return."""

import jax
import numpy as np
from flax import struct

from diffusers_flax.outputs import ModelOutput


@struct.dataclass
class FlaxImagePipelineOutput(ModelOutput):
    """images, float32 in [0, 1]: (B, H, W, 3), with jit (devices, B, H, W, 3).

    With output_type="latent" the scaled latents instead, (B, 4, h, w); with "pil" a flat list.
    """

    images: jax.Array | np.ndarray | list


@struct.dataclass
class FlaxStableDiffusionXLPipelineOutput(FlaxImagePipelineOutput):
    """The result of SDXL's pipelines; see FlaxImagePipelineOutput."""


@struct.dataclass
class FlaxStableDiffusionPipelineOutput(FlaxImagePipelineOutput):
    """images as in FlaxImagePipelineOutput, and the result of the safety checker.

    nsfw_content_detected is a list of bool, one per image, devices flattened; False without a
    safety checker. Images for which it is True are black.
    """

    nsfw_content_detected: list | bool
