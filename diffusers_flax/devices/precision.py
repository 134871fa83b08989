"""The compute dtype: half precision where a device is fast in it."""

import jax
import jax.numpy as jnp

from diffusers_flax.messages import warn_once
from diffusers_flax.models.attention import cuda_capability


def lacks_bfloat16():
    """Whether the GPU is NVIDIA's from before Ampere, which multiplies float16 but no bfloat16.

    Source: NVIDIA's CUDA C++ Programming Guide, features per compute capability.
    """
    capability = cuda_capability()
    return capability is not None and capability < 8


def warn_if_slow(dtype, instead=jnp.float16):
    """Warn once if the GPU is slow in a compute dtype; returns the dtype.

    Args:
        dtype: to compute in.
        instead: dtype that the warning advises, float16 to make images, float32 to train.
    """
    if dtype == jnp.bfloat16 and lacks_bfloat16():
        warn_once(
            f"this GPU, of compute capability {cuda_capability()}, has no bfloat16 and computes "
            f"it as float32, no faster; choose {jnp.dtype(instead)}"
        )
    return dtype


def choose_dtype(name):
    """The compute dtype to make images in, with a warning if the GPU is slow in it.

    Args:
        name: of the dtype; None: float32 on a CPU, float16 on an NVIDIA GPU before Ampere, else
            bfloat16.
    """
    if name is None:
        name = "float16" if lacks_bfloat16() else "bfloat16"
        name = "float32" if jax.devices()[0].platform == "cpu" else name
    return warn_if_slow(jnp.dtype(name))
