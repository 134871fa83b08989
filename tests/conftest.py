"""Settings of all tests: CPU with four virtual devices, strict dtype promotion, no network."""

import gc
import os
import signal
import sys
from importlib.metadata import version
from pathlib import Path

# These must be set before jax is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
# One code generator per program: each worker has one core.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=4 --xla_cpu_parallel_codegen_split_count=1"
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"  # cache all programs, see programs()
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"

import pytest

pytest.register_assert_rewrite(
    *("exported", "helpers", "references", "served_app"),
    *("torch_training", "trainer_runs", "trajectories"),
)

# A test run in the background of a shell inherits an ignored SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
if (tpu := Path(sys.prefix, "tpu")).is_dir():  # see the Makefile
    sys.path.append(str(tpu))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [os.environ.get("PYTHONPATH"), str(tpu)])
    )


def pytest_addoption(parser):
    parser.addoption(
        "--optimized",
        action="store_true",
        help="compile with XLA's default optimizations, as users do (make test-all)",
    )


def pytest_configure(config):
    """Without --optimized, leave most of XLA's work out: compilation takes most of the time."""
    if config.getoption("--optimized"):
        return
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # also in child processes
    if version("jaxlib") < "0.11":  # newer ones lack the flag; it saves a fifth of the time
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark as slow the tests of benchmarks, and all `variants` of a test but the first.

    Tests of programs take longest, so they run first.
    """
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)
    seen = set()
    for item in items:
        test = (item.path, getattr(item, "originalname", item.name))
        is_variant = item.get_closest_marker("variants") and test in seen
        seen.add(test)
        if is_variant or item.path.parent.name == "benchmarks":
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Leave imported modules out of garbage collections, which would take a tenth of the time."""
    gc.disable()
    result = yield
    gc.enable()
    gc.freeze()
    return result


@pytest.fixture(autouse=True, scope="session")
def settings(pytestconfig):
    """Set up jax and torch. The process that starts the workers imports neither, to save time."""
    import jax
    import torch

    if not pytestconfig.getoption("--optimized"):  # jax may be imported before pytest_configure()
        jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    torch.set_num_threads(1)  # tiny models are not faster with more; XLA needs the other cores


@pytest.fixture
def optimized():
    """Compile with XLA's default optimizations, as users do."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True, scope="session")
def shared_tiny_models(tmp_path_factory):
    """The directory of tiny models, one for all workers."""
    import tiny_models

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    tiny_models.made_models = folder / "tiny_models"
    tiny_models.made_models.mkdir(exist_ok=True)


@pytest.fixture(autouse=True, scope="session")
def programs(pytestconfig):
    """Persistent compilation cache for all tests and their child processes."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    folder = str(pytestconfig.cache.mkdir(f"programs-jax-{jax.__version__}"))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()
    return folder


@pytest.fixture(autouse=True, scope="module")
def free_programs():
    """Free compiled programs before every test file.

    Linux allows a process 65,530 memory maps by default. A program needs about ten, and XLA
    crashes with a segmentation fault when there are no more.
    """
    import jax

    jax.clear_caches()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def lenient_optimizer():
    """Disables strict dtype promotion inside Optax only."""
    import jax
    import optax

    adamw = optax.adamw

    def lenient_adamw(*args, **options):
        tx = adamw(*args, **options)
        update = jax.numpy_dtype_promotion("standard")(tx.update)
        return optax.GradientTransformation(tx.init, update)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optax, "adamw", lenient_adamw)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A pipeline directory whose unet/ has 8 input channels, like a widened one."""
    from tiny_models import make_tiny_pipeline
    from trainer_runs import SIZE

    return make_tiny_pipeline(tmp_path_factory.mktemp("tiny") / "model", **SIZE)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Sixteen pairs, two batches, in two shards; row 3 of the first cannot be decoded."""
    from shards import write_random_shard

    folder = tmp_path_factory.mktemp("data") / "pairs"
    folder.mkdir()
    write_random_shard(folder / "a.parquet", 9, seed=1, broken=[3])
    write_random_shard(folder / "b.parquet", 7, seed=2)
    return folder


@pytest.fixture
def libtpu_environment(monkeypatch):
    """Restores the settings that target_devices changes."""
    from diffusers_flax.compiling.chips import LIBTPU_ENVIRONMENT

    for name, value in LIBTPU_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
