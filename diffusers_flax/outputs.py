"""ModelOutput, the base of outputs of models and schedulers; outputs of pipelines.

@flax.struct.dataclass
class FlaxDecoderOutput(ModelOutput):
    sample: jax.Array

output = FlaxDecoderOutput(sample)
output.sample, output["sample"], output[0], output.to_tuple()[0]  # the same array
"""

from collections import OrderedDict
from dataclasses import fields
from typing import Any

import jax
import numpy as np
from flax import struct


class ModelOutput(OrderedDict):
    """Base of output dataclasses: a dict of the fields that are not None, in their order.

    Values are read by attribute, name, index or slice. Iteration gives names, as in any dict;
    to_tuple() gives values. With flax.struct.dataclass an output is a pytree of all its fields.
    """

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                super().__setitem__(field.name, value)

    def __getitem__(self, key: str | int | slice) -> Any:
        """The value of a name, or entries of to_tuple()."""
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        object.__setattr__(self, name, value)

    def to_tuple(self) -> tuple:
        """The values that are not None, in the order of the fields."""
        return tuple(self.values())

    def __reduce__(self):  # copy and pickle by fields
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    def _refuse(self, *args, **kwargs):
        raise TypeError(f"{type(self).__name__} has fixed fields; use replace(name=value)")

    __delitem__ = pop = popitem = setdefault = update = clear = _refuse


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
