"""devices/precision.py: the compute dtype by the device's compute capability."""

import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from diffusers_flax import messages
from diffusers_flax.devices import precision
from diffusers_flax.training.models import mixed_precision_dtype

CPU = SimpleNamespace(platform="cpu", client=SimpleNamespace(platform_version=""))
TPU = SimpleNamespace(platform="tpu", client=SimpleNamespace(platform_version="TFRT TPU v4"))
ROCM = SimpleNamespace(
    platform="gpu",
    client=SimpleNamespace(platform_version="rocm 70000"),
    compute_capability="gfx942",
)


def nvidia(capability):
    client = SimpleNamespace(platform_version="cuda 13000")
    return SimpleNamespace(platform="gpu", client=client, compute_capability=capability)


VOLTA, TURING, AMPERE, BLACKWELL = map(nvidia, ("7.0", "7.5", "8.0", "12.0"))
REASON = (
    "this GPU, of compute capability 7.5, has no bfloat16 and computes it as float32, no faster; "
    "choose "
)


@pytest.fixture
def on(monkeypatch):
    """on(device) makes it the first device."""
    messages.warn_once.cache_clear()
    return lambda device: monkeypatch.setattr(jax, "devices", lambda: [device])


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
    for _ in range(2):
        assert precision.choose_dtype("bfloat16") == jnp.bfloat16
        assert mixed_precision_dtype(SimpleNamespace(mixed_precision="bf16")) == jnp.bfloat16
    assert caplog.record_tuples == [
        ("diffusers_flax.messages", logging.WARNING, REASON + dtype)
        for dtype in ("float16", "float32")
    ]
