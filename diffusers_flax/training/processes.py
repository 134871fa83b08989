"""Processes of a training run: wait, lock the output directory, stop.

At SIGTERM all processes stop after the same step. All functions also work for a single process.
"""

import contextlib
import itertools
import logging
import os
import platform
import signal
import time
from pathlib import Path

import jax
import numpy as np
from filelock import FileLock, Timeout
from jax.experimental import multihost_utils

from diffusers_flax.data.options import Processes

logger = logging.getLogger(__name__)

WAIT_SECONDS = 3600  # timeout of wait_for_all; others may still compile, or process 0 upload
LOCK_SECONDS = 120  # timeout for the lock; NFS releases a crashed host's lock late
MESSAGE_BYTES = 4096  # maximum size of an error message that process 0 sends
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


def on_process_0(function):
    """Call function() on process 0 only; all processes call this together.

    Returns:
        The function's result on process 0, None on the other processes.

    Raises:
        ValueError: function raised a ValueError or OSError; all processes raise its message.
    """
    result, error = None, None
    if jax.process_index() == 0:
        try:
            result = function()
        except (ValueError, OSError) as raised:
            error = raised
    message = "" if error is None else str(error) or repr(error)
    if jax.process_count() > 1:
        wait_for_all("process 0 has checked")
        text = np.zeros(MESSAGE_BYTES, np.uint8)
        encoded = np.frombuffer(message.encode()[:MESSAGE_BYTES], np.uint8)
        text[: len(encoded)] = encoded
        message = from_process_0(text).tobytes().rstrip(b"\0").decode(errors="ignore")
    if message:
        raise ValueError(message) from error
    return result


@contextlib.contextmanager
def lock_folder(folder):
    """A context that locks --output_dir against other runs, by flock on FOLDER/.lock.

    The file names the process. The system releases the lock when the process ends, also after
    SIGKILL; a leftover file does not lock. On a file system without flock there is a warning and no
    lock. File systems in user space, such as gcsfuse, lock only between processes of one host.

    Args:
        folder: Path; created if missing, and then removed at the end if it is empty.

    Raises:
        ValueError: another process holds the lock for LOCK_SECONDS.
    """
    is_new, path = not folder.exists(), folder / ".lock"
    # Without flock, filelock's soft lock would outlive a killed process.
    lock = FileLock(path, poll_interval=0.5, fallback_to_soft=False)
    try:
        acquire(lock, folder)
    except OSError as error:
        if error.filename is not None:  # the file cannot be opened
            raise
        logger.warning(
            "%s cannot be locked (%s); make sure that no other run uses the directory", path, error
        )
    path.write_text(f"process {os.getpid()} on {platform.node()}")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the directory may have been removed
            path.unlink()
        lock.release()
        if is_new:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


def acquire(lock, folder):
    """Acquire the FileLock of a folder; see lock_folder."""

    def holder():
        with contextlib.suppress(FileNotFoundError):  # released just now
            return Path(lock.lock_file).read_text() or "another process"
        return "another process"

    with contextlib.suppress(Timeout, FileNotFoundError):
        lock.acquire(blocking=False)
        return
    print(f"waiting for {holder()}, which uses {folder}", flush=True)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            lock.acquire(timeout=max(0, deadline - time.monotonic()))
            return
        except FileNotFoundError:  # the last holder has just removed the folder that it created
            if time.monotonic() > deadline:
                raise
            time.sleep(lock.poll_interval)
        except Timeout as error:
            raise ValueError(
                f"--output_dir {folder} is in use by {holder()}; wait until it ends, stop it, or "
                "name another directory"
            ) from error


class StopSignal:
    """A context that turns SIGTERM (preemption) and Ctrl-C into a request to stop after a step.

    A signal to one of several processes makes `requested` true on all at the same step. A second
    signal ends the process at once.
    """

    def __init__(self):
        self.number = None  # of the signal
        self.handlers = {}  # {number: handler before the context}

    def __enter__(self):
        # jax's handler of SIGTERM informs the other processes.
        numbers = (
            [signal.SIGINT] if jax.distributed.is_initialized() else [signal.SIGTERM, signal.SIGINT]
        )
        for number in numbers:
            self.handlers[number] = signal.signal(number, self._note)
        return self

    def _note(self, number, frame):
        if jax.distributed.is_initialized():
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.number = number
        self.__exit__()

    def requested(self, step):
        """Whether to stop after this step; all processes ask after every step."""
        if jax.distributed.is_initialized() and multihost_utils.reached_preemption_sync_point(step):
            self.number = signal.SIGTERM
        return self.number is not None

    def __exit__(self, *exception):
        while self.handlers:
            signal.signal(*self.handlers.popitem())
