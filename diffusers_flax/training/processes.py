"""Processes of a training run: wait, share numbers, lock the output directory.

All functions also work for a single process.
"""

import contextlib
import itertools
import logging

import jax
import numpy as np
from filelock import FileLock, Timeout
from jax.experimental import multihost_utils

from diffusers_flax.data.options import Processes

logger = logging.getLogger(__name__)

WAIT_SECONDS = 3600  # timeout of wait_for_all; others may still compile, or process 0 upload
LOCK_SECONDS = 120  # timeout for the lock; NFS releases a crashed host's lock late
_numbers = itertools.count()


def all_processes() -> Processes:
    """jax's processes, for the datasets."""
    all_gather = multihost_utils.process_allgather if jax.process_count() > 1 else None
    return Processes(jax.process_index(), jax.process_count(), all_gather)


def wait_for_all(name):
    """Wait until all processes have made the same call; error messages contain `name`.

    Collectives of the devices would time out after half a minute.
    """
    if jax.process_count() > 1:
        import orbax.checkpoint as ocp  # seconds to import

        everyone = set(range(jax.process_count()))
        name = f"{name} {next(_numbers)}"  # barriers need distinct names
        ocp.multihost.sync_global_processes(name, timeout=WAIT_SECONDS, processes=everyone)


def from_process_0(x):
    """Process 0's array, on all processes."""
    if jax.process_count() == 1:
        return x
    bits = multihost_utils.broadcast_one_to_all(x.view(np.int32))  # a sum of floats loses -0.0
    return np.asarray(bits).view(x.dtype)


@contextlib.contextmanager
def locked(folder):
    """A context that locks a directory (Path) against other runs, by flock on FOLDER/.lock.

    The system releases the lock when the process ends, also after SIGKILL. On a file system without
    flock there is a warning and no lock.

    Raises:
        ValueError: another process holds the lock for LOCK_SECONDS.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Without flock, filelock's soft lock would outlive a killed process.
    lock = FileLock(folder / ".lock", timeout=LOCK_SECONDS, fallback_to_soft=False)
    try:
        lock.acquire(poll_interval=0.5)
    except Timeout as error:
        raise ValueError(
            f"--output_dir {folder} is in use by another run; wait until it ends, stop it, or name "
            "another directory"
        ) from error
    except OSError as error:
        if error.filename is not None:  # the file cannot be opened, rather than locked
            raise
        logger.warning("%s cannot be locked (%s); start no other run in it", folder, error)
    try:
        yield
    finally:
        (folder / ".lock").unlink(missing_ok=True)
        lock.release()
        with contextlib.suppress(OSError):  # it is not empty
            folder.rmdir()
