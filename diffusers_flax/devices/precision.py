"""The compute dtype: half precision where a device is fast in it."""

import jax
import jax.numpy as jnp

from diffusers_flax.messages import warn_once


def lacks_bfloat16(device):
    """Whether a device is an NVIDIA GPU before Ampere, which multiplies float16 but no bfloat16.

    Source: NVIDIA's CUDA C++ Programming Guide, features per compute capability.
    """
    is_cuda = device.platform == "gpu" and "cuda" in device.client.platform_version
    return is_cuda and float(device.compute_capability) < 8


def slow_dtype(dtype, device):
    """Why a compute dtype is slow on a device, one line; "" if it is not.

    Args:
        dtype: to compute in.
        device: jax.Device.
    """
    if dtype != jnp.bfloat16 or not lacks_bfloat16(device):
        return ""
    return (
        f"{device.device_kind}: compute capability {device.compute_capability} has no bfloat16 and "
        "computes it as float32, no faster; choose float16 for images, float32 for training"
    )


def warn_if_slow(dtype):
    """Warn once if the first device is slow in a compute dtype; returns the dtype."""
    if reason := slow_dtype(dtype, jax.local_devices()[0]):
        warn_once(reason)
    return dtype


def choose_dtype(name):
    """The compute dtype with this name, with a warning if the first device is slow in it.

    Args:
        name: of the dtype; None: float32 on a CPU, float16 on an NVIDIA GPU before Ampere, else
            bfloat16.
    """
    if name is None:
        device = jax.local_devices()[0]
        name = "float16" if lacks_bfloat16(device) else "bfloat16"
        name = "float32" if device.platform == "cpu" else name
    return warn_if_slow(jnp.dtype(name))
