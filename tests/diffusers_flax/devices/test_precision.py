"""devices/precision.py: the compute dtype by the device's compute capability."""

import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from diffusers_flax import messages
from diffusers_flax.devices import precision
from training.models import mixed_precision_dtype

CPU = SimpleNamespace(platform="cpu", client=SimpleNamespace(platform_version=""))
TPU = SimpleNamespace(platform="tpu", client=SimpleNamespace(platform_version="TFRT TPU v4"))
ROCM = SimpleNamespace(
    platform="gpu",
    client=SimpleNamespace(platform_version="rocm 70000"),
    compute_capability="gfx942",
)


def nvidia(name, capability):
    client = SimpleNamespace(platform_version="cuda 13000")
    return SimpleNamespace(
        platform="gpu", client=client, device_kind=name, compute_capability=capability
    )


TURING, VOLTA = nvidia("Tesla T4", "7.5"), nvidia("Tesla V100-SXM2-16GB", "7.0")
AMPERE, BLACKWELL = nvidia("NVIDIA A100", "8.0"), nvidia("NVIDIA RTX 5090", "12.0")
REASON = (
    "Tesla T4: compute capability 7.5 has no bfloat16 and computes it as float32, no faster; "
    "choose float16 for images, float32 for training"
)


@pytest.fixture
def on(monkeypatch):
    """on(device) makes it the first device."""
    messages.warn_once.cache_clear()
    return lambda device: monkeypatch.setattr(jax, "local_devices", lambda: [device])


@pytest.mark.parametrize(
    ("device", "default"),
    [
        (CPU, "float32"),
        (TPU, "bfloat16"),
        (ROCM, "bfloat16"),
        (VOLTA, "float16"),
        (TURING, "float16"),
        (AMPERE, "bfloat16"),
        (BLACKWELL, "bfloat16"),
    ],
)
def test_the_default_is_fast(on, caplog, device, default):
    on(device)
    assert precision.choose_dtype(None) == default
    assert caplog.messages == []


def test_a_slow_dtype_is_one_line(on, caplog):
    on(TURING)
    assert precision.choose_dtype("bfloat16") == jnp.bfloat16
    assert mixed_precision_dtype(SimpleNamespace(mixed_precision="bf16")) == jnp.bfloat16
    assert caplog.record_tuples == [("diffusers_flax.messages", logging.WARNING, REASON)]


@pytest.mark.parametrize("device", [CPU, TPU, ROCM, AMPERE, BLACKWELL])
def test_bfloat16_is_fast(device):
    assert precision.slow_dtype(jnp.dtype("bfloat16"), device) == ""


@pytest.mark.parametrize("name", ["float16", "float32"])
def test_other_dtypes_are_fast(on, caplog, name):
    on(TURING)
    assert precision.choose_dtype(name) == name
    assert mixed_precision_dtype(SimpleNamespace(mixed_precision="no")) == jnp.float32
    assert caplog.messages == []
