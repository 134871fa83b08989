"""What the tests of programs for NVIDIA GPUs share."""

import sys

import pytest

from diffusers_flax.compiling.chips import gpu_compiler


def missing_compiler():
    """Why the compiler for NVIDIA GPUs cannot be used; "" if it can."""
    path = list(sys.path)
    try:
        gpu_compiler()
    except ValueError as error:
        return str(error)
    finally:
        sys.path[:] = path  # jax would find the plugin there, in tests that need none
    return ""


MISSING = missing_compiler()
needs_gpu_compiler = pytest.mark.skipif(bool(MISSING), reason=f"make gpu-compiler ({MISSING})")
