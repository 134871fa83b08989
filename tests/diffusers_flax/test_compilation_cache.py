"""The directory of jax's persistent compilation cache."""

import jax
import pytest

from diffusers_flax.compilation_cache import initialize_cache, use_compilation_cache


@pytest.fixture
def no_programs(programs):
    """Unsets the directory of jax's compilation cache during a test."""
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", programs)


def test_compilation_cache_dir(no_programs, tmp_path):
    assert not use_compilation_cache("")
    assert use_compilation_cache(str(tmp_path / "new" / "folder"))
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "new" / "folder")
    assert not use_compilation_cache(str(tmp_path / "other"))  # one is set already
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_initialize_cache(no_programs, tmp_path):
    for name in ("first", "second"):  # the second call counts
        initialize_cache(tmp_path / name)
        jax.jit(lambda x: x + 1)(1.0)
        assert list((tmp_path / name).iterdir())
