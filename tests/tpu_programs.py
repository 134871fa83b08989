"""What the tests of programs for TPUs share."""

import importlib.util
import re

import jax
import numpy as np
import pytest
from safetensors import safe_open

from diffusers_flax.compiling.programs import EditProgramFlags, image_program
from diffusers_flax.flops import matmul_flops

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason='the TPU\'s compiler is not installed: pip install "jax[tpu]"',
)


def tensor_shapes(folder, pattern=""):
    """The shapes of a directory's weights whose names, PyTorch's, have a regular expression."""
    with safe_open(next(folder.glob("*.safetensors")), "np") as tensors:
        names = [name for name in tensors.keys() if re.search(pattern, name)]  # noqa: SIM118
        return [tuple(tensors.get_slice(name).get_shape()) for name in names]


def elements(shapes, num_slices=1):
    """Number of values in one of num_slices shards; arrays without a divisible axis count fully."""
    cut = [any(size % num_slices == 0 for size in shape) for shape in shapes]
    return sum(int(np.prod(shape)) // (num_slices if c else 1) for shape, c in zip(shapes, cut))


def accelerated(model, *accelerate, **more):
    """Flags of `edit` with a tiny model."""
    options = {"resolution": 64, "scheduler": "ddim", "accelerate": accelerate} | more
    return EditProgramFlags(tpu="v5e-1", pretrained_model_name_or_path=str(model), **options)


def count_flops(config, index=0):
    """FLOPs of the step of a program that makes images; index 1: the ones in int8."""
    step = image_program(config, jax.devices()[:1]).parts["step"]
    return matmul_flops(jax.make_jaxpr(step.function)(*step.args).jaxpr, step.fractions)[index]
