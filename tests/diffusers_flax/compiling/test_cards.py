"""NVIDIA GPUs: names, facts, the compiler, tracing for a GPU that is not there."""

import importlib.util
import re
from importlib.metadata import PackageNotFoundError

import jax
import jax.numpy as jnp
import jaxlib
import pytest
from diffusers_flax.compiling.cards import (
    CARDS,
    find_compiler,
    find_gpus,
    target_config,
    traced_for,
)
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from diffusers_flax.compiling import cards
from diffusers_flax.models.attention import attention, cuda_capability


@pytest.mark.parametrize(
    ("name", "card", "count"),
    [
        ("h100", "h100", 1),
        ("h100x8", "h100", 8),
        ("rtx6000pro", "rtx6000pro", 1),
        ("rtx4090x2", "rtx4090", 2),
        ("a100_40x16", "a100_40", 16),
    ],
)
def test_names(name, card, count):
    host = find_gpus(name)
    assert (host.chip, host.num_chips, host.num_hosts) == (CARDS[card], count, 1)


@pytest.mark.parametrize("name", ["h1000", "h100x0", "h100x", "x8", "h100 x8", "rtx"])
def test_unknown_names(name):
    said = f"--gpu {name} is not known; known are a100_40, a100_80, h100, h200, l4, rtx4090, "
    with pytest.raises(ValueError, match=re.escape(said)):
        find_gpus(name)


def test_peaks_are_those_of_the_tensor_cores():
    """FLOPs of a core and cycle times cores and clock; an H100's clock is lower under load."""
    per_cycle = {"a100_40": 2048, "h100": 4096, "l4": 1024, "rtx4090": 512, "rtx6000pro": 1024}
    for name, flops in per_cycle.items():
        card = CARDS[name]
        assert card.flops == pytest.approx(flops * card.cores * card.clock * 1e9, rel=0.08), name


def test_memory_that_a_program_can_use():
    sizes = {"a100_40": 40, "a100_80": 80, "h100": 80, "h200": 141, "l4": 24, "rtx4090": 24}
    for name, size in sizes.items():
        # Sold in units of 10^9 or 2^30 bytes.
        assert 0.85 * size * 1e9 / 2**30 < CARDS[name].memory < size * 0.95, name


def test_target_config_has_the_facts():
    text = target_config(CARDS["rtx4090"])
    for fact in ("core_count: 128", "memory_bandwidth: 1008000000000", "clock_rate_ghz: 2.52"):
        assert fact in text
    assert "cuda_compute_capability { major: 8 minor: 9 feature_extension: NONE }" in text
    hopper = target_config(CARDS["h100"])
    assert "{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }" in hopper


def lowered_attention(head_dim):
    """The text of attention for CUDA."""
    query = jax.ShapeDtypeStruct((2, 64, 8 * head_dim), jnp.bfloat16)
    jax.clear_caches()
    function = jax.jit(lambda x: attention(x, x, x, num_heads=8))
    return function.trace(query).lower(lowering_platforms=("cuda",)).as_text()


def test_attention_is_traced_for_the_card():
    """cuDNN's kernel takes heads of up to 256 channels on Hopper, 128 before."""
    before = cudnn.check_cudnn_version, cudnn.check_compute_capability
    with traced_for(CARDS["h100"]):
        assert cuda_capability() == 9.0
        assert cudnn.check_compute_capability("8.0")
        assert not cudnn.check_compute_capability("10.0")
        assert cudnn.is_cuda_compute_capability_equal("9.0")
        assert "__cudnn$fmhaSoftmax" in lowered_attention(40)
        assert "__cudnn$fmhaSoftmax" in lowered_attention(160)
    with traced_for(CARDS["rtx4090"]):
        assert "__cudnn$fmhaSoftmax" in lowered_attention(40)
        assert "cudnn" not in lowered_attention(160)
    assert (cudnn.check_cudnn_version, cudnn.check_compute_capability) == before
    with traced_for(None):
        assert "cudnn" not in lowered_attention(40)  # this machine's CPU
    jax.clear_caches()


def test_compiler_not_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(cards, "FOLDER", tmp_path / "gpu")
    said = "the compiler for NVIDIA GPUs is not installed; 140 MB: pip install --upgrade --target "
    with pytest.raises(ValueError, match=re.escape(f"{said}{tmp_path}/gpu jax-cuda13-plugin==")):
        find_compiler()


@pytest.mark.parametrize("wrong", ["plugin", "pjrt"])
def test_compiler_of_another_version(wrong, monkeypatch, tmp_path):
    """Metadata of wheels beside the package, as pip --target leaves them."""
    folder = tmp_path / "gpu"
    (folder / "jax_cuda13_plugin").mkdir(parents=True)
    (folder / "jax_cuda13_plugin" / "__init__.py").touch()
    for part in ("plugin", "pjrt"):
        number = "0.9.9" if part == wrong else jaxlib.__version__
        info = folder / f"jax_cuda13_{part}-{number}.dist-info"
        info.mkdir()
        lines = "Metadata-Version: 2.1", f"Name: jax-cuda13-{part}", f"Version: {number}"
        (info / "METADATA").write_text("\n".join(lines))
    monkeypatch.setattr(cards, "FOLDER", folder)
    monkeypatch.syspath_prepend(folder)
    said = rf"^jax_cuda13_{wrong} is of jax 0\.9\.9, but jaxlib is .*: pip install --upgrade "
    with pytest.raises(ValueError, match=said):
        find_compiler()


def test_part_of_the_compiler_is_missing(monkeypatch, tmp_path):
    (tmp_path / "jax_cuda13_plugin").mkdir()
    (tmp_path / "jax_cuda13_plugin" / "__init__.py").touch()

    def fake_version(package):
        if package == "jax_cuda13_pjrt":
            raise PackageNotFoundError(package)
        return jaxlib.__version__

    monkeypatch.setattr(cards, "FOLDER", tmp_path)
    monkeypatch.setattr(cards, "version", fake_version)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"^jax_cuda13_pjrt is not installed: pip install "):
        find_compiler()
