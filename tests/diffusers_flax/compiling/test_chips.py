"""TPU chips and NVIDIA GPUs: names, facts, the compilers, tracing for a GPU that is not there."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from tpu_programs import needs_libtpu

from diffusers_flax.compiling import chips
from diffusers_flax.compiling.chips import (
    GPUS,
    TPUS,
    find_target,
    gpu_compiler,
    target_devices,
    traced_for,
)
from diffusers_flax.models.attention import attention, cuda_capability


@pytest.mark.variants
@pytest.mark.parametrize(
    ("name", "chip", "num_chips", "shape"),
    [
        ("v4-32", TPUS["v4"], 16, "2x2x4"),
        ("v5p-8", TPUS["v5p"], 4, "2x2x1"),
        ("v5litepod-16", TPUS["v5e"], 16, "4x4"),
        ("h100", GPUS["h100"], 1, ""),
        ("a100_40x16", GPUS["a100_40"], 16, ""),
    ],
)
def test_names(name, chip, num_chips, shape):
    assert find_target(name) == (chip, num_chips, shape)


@pytest.mark.parametrize("name", ["h1000", "h100x0", "h100x", "v7-8", "v5e-3"])
def test_unknown_names(name):
    with pytest.raises(ValueError, match=f"{name} is no known target; TPU slices: v4-8, v4-16, "):
        find_target(name)


@needs_libtpu
@pytest.mark.parametrize("name", ["v4-32", "v5p-8", "v5e-1", "v5e-16", "v6e-8", "v4-1024"])
def test_topologies_have_as_many_devices(name, libtpu_environment):
    target = find_target(name)
    devices = target_devices(target)
    assert len(devices) == target.num_chips
    kinds = {"v4": "TPU v4", "v5p": "TPU v5", "v5e": "TPU v5 lite", "v6e": "TPU v6 lite"}
    assert {device.device_kind for device in devices} == {kinds[name.split("-")[0]]}


def lowered_attention(head_dim):
    """The text of attention for CUDA."""
    query = jax.ShapeDtypeStruct((2, 64, 8 * head_dim), jnp.bfloat16)
    jax.clear_caches()
    function = jax.jit(lambda x: attention(x, x, x, num_heads=8))
    return function.trace(query).lower(lowering_platforms=("cuda",)).as_text()


def test_attention_is_traced_for_the_card():
    """cuDNN's kernel takes heads of up to 256 channels on Hopper, 128 before."""
    before = cudnn.check_cudnn_version, cudnn.check_compute_capability
    with traced_for(GPUS["h100"]):
        assert cuda_capability() == 9.0
        assert cudnn.check_compute_capability("8.0")
        assert not cudnn.check_compute_capability("10.0")
        assert cudnn.is_cuda_compute_capability_equal("9.0")
        assert "__cudnn$fmhaSoftmax" in lowered_attention(40)
        assert "__cudnn$fmhaSoftmax" in lowered_attention(160)
    with traced_for(GPUS["rtx4090"]):
        assert "__cudnn$fmhaSoftmax" in lowered_attention(40)
        assert "cudnn" not in lowered_attention(160)
    assert (cudnn.check_cudnn_version, cudnn.check_compute_capability) == before
    with traced_for(TPUS["v5e"]):
        assert "cudnn" not in lowered_attention(40)  # this machine's CPU
    jax.clear_caches()


@pytest.mark.parametrize("number", [None, "0.9.9"])
def test_compiler_not_installed(monkeypatch, tmp_path, number):
    """Or of another version: metadata of wheels beside the package, as pip --target leaves them."""
    for part in ("plugin", "pjrt") if number else ():
        info = tmp_path / f"jax_cuda13_{part}-{number}.dist-info"
        info.mkdir()
        lines = "Metadata-Version: 2.1", f"Name: jax-cuda13-{part}", f"Version: {number}"
        (info / "METADATA").write_text("\n".join(lines))
    monkeypatch.setattr(chips, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    said = "the compiler for NVIDIA GPUs of this jax is not installed; 140 MB: pip install "
    with pytest.raises(ValueError, match=re.escape(f"{said}--upgrade --target {tmp_path}")):
        gpu_compiler()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^libtpu, the TPU's compiler, is not installed"):
        target_devices(find_target("v5e-16"))
