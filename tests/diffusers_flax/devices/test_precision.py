"""devices/precision.py: the compute dtype by the device's compute capability."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from diffusers_flax import messages
from diffusers_flax.devices import precision
from diffusers_flax.training.models import mixed_precision_dtype


def device(platform, version="", capability=None):
    client = SimpleNamespace(platform_version=version)
    return SimpleNamespace(platform=platform, client=client, compute_capability=capability)


TURING = device("gpu", "cuda 13000", "7.5")


@pytest.mark.parametrize(
    ("device", "default"),
    [
        (device("cpu"), "float32"),
        (device("tpu", "TFRT TPU v4"), "bfloat16"),
        (device("gpu", "rocm 70000", "gfx942"), "bfloat16"),
        (TURING, "float16"),
        (device("gpu", "cuda 13000", "8.0"), "bfloat16"),
    ],
)
def test_the_default_is_fast(monkeypatch, caplog, device, default):
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert precision.choose_dtype(None) == default
    assert caplog.messages == []


def test_a_slow_dtype_is_one_line(monkeypatch, caplog):
    messages.warn_once.cache_clear()
    monkeypatch.setattr(jax, "devices", lambda: [TURING])
    for _ in range(2):
        assert precision.choose_dtype("bfloat16") == jnp.bfloat16
        assert mixed_precision_dtype(SimpleNamespace(mixed_precision="bf16")) == jnp.bfloat16
    assert [x.partition(";")[0] for x in caplog.messages] == [
        "this GPU, of compute capability 7.5, has no bfloat16 and computes it as float32, no faster"
    ] * 2
