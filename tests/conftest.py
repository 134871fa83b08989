"""Test-wide settings: a CPU with four forced devices, strict dtype promotion, no network."""

import gc
import os
import signal
import sys
from pathlib import Path

# Before jax is imported anywhere.
os.environ["JAX_PLATFORMS"] = "cpu"
# Fusion emitters take a fifth of the time to compile.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=4 --xla_cpu_use_fusion_emitters=false"
)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # compiling is most of the suite's time
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"  # see programs
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"

import jax
import pytest
import torch
from jax.experimental.compilation_cache import compilation_cache

ROOT = Path(__file__).resolve().parent.parent
# The files that take longest start first, so that no worker is left alone with one at the end.
LONGEST_FILES = (
    *("test_resume", "test_train", "test_models", "test_pipelines", "test_drop_in"),
    *("test_sdxl_single", "test_tpu_compile", "test_pipeline_instruct_pix2pix", "test_blocks"),
    *("test_pipelines_published", "test_reference_snippets", "test_cache_latents"),
)

# Shells start background jobs with SIGINT ignored, and child processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # tiny models gain nothing from two, and lose where XLA holds the other
jax.config.update("jax_numpy_dtype_promotion", "strict")
if (tpu := ROOT / ".venv" / "tpu").is_dir():  # libtpu, see the Makefile
    sys.path.append(str(tpu))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [os.environ.get("PYTHONPATH"), str(tpu)])
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the benchmarks' tests slow, and order the files."""
    for item in items:
        if item.path.stem.startswith("test_benchmark"):
            item.add_marker("slow")
    rank = {name: number for number, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


@pytest.fixture
def optimized():
    """Compile as users' programs are compiled."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True, scope="session")
def programs(pytestconfig):
    """Folder that keeps what all tests and the processes they start compile, for later runs too."""
    folder = str(pytestconfig.cache.mkdir(f"programs-jax-{jax.__version__}"))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()
    return folder


@pytest.fixture(autouse=True, scope="module")
def free_programs():
    """Free what a file's tests have compiled.

    A program takes about ten memory maps of the 65,530 that Linux allows a process by default, and
    XLA dies of a segmentation fault where it gets no more.
    """
    yield
    jax.clear_caches()
    gc.collect()
