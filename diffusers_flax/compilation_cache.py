"""JAX's persistent compilation cache: its directory, or compiling without it."""

from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


def use_compilation_cache(compilation_cache_dir):
    """Set the directory of jax's compilation cache, unless one is set already.

    Args:
        compilation_cache_dir: directory, created if missing; "": no cache.

    Returns:
        True if the cache uses this directory.

    Raises:
        OSError: it cannot be created.
    """
    if not compilation_cache_dir or jax.config.jax_compilation_cache_dir is not None:
        return False
    folder = Path(compilation_cache_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return True


def initialize_cache(path):
    """Set the directory of jax's compilation cache, also if another one is set.

    jax has removed its function of this name: scripts that call it as cc.initialize_cache(path)
    import it by `from diffusers_flax import compilation_cache as cc`.

    Args:
        path: directory, created when the first program is saved.
    """
    jax.config.update("jax_compilation_cache_dir", str(path))
    compilation_cache.reset_cache()  # jax reads the setting only once


@contextmanager
def no_compilation_cache():
    """Compile without reading or writing jax's persistent cache.

    On a CPU, an executable that was read from the cache and saved again can be loaded, but not run.
    """
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax reads the setting only once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()
