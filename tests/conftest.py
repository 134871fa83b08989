"""Test-wide settings: a CPU with four forced devices, strict dtype promotion, no network."""

import os
import sys
from pathlib import Path

# Before jax is imported anywhere.
os.environ["JAX_PLATFORMS"] = "cpu"
# Compiling is most of the suite's time, so the compiler may be quick about it.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
