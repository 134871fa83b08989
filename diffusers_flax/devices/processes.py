"""Joining the processes of several hosts, which then run one program on all their devices."""

import importlib.util
import os
import re
import zlib
from pathlib import Path

import jax
import numpy as np

from diffusers_flax.messages import one_line

GOOGLE_PCI_VENDOR = "0x1ae0"  # of TPUs, and of network cards, which have no libtpu
COLLECTIVE_SECONDS = 90  # timeout of a collective operation on CPUs; below HEARTBEAT_SECONDS
# Errors of a process whose peer has died.
LOST_PROCESS = "(?i)gloo|unavailable|deadline|aborted|coordination|connection"
HEARTBEAT_SECONDS = 100  # a process that is silent for this long counts as dead and ends the run


def on_tpu_vm():
    """Whether jax will use a TPU here, whose metadata server knows the other hosts.

    In notebooks the environment variables name this host alone, and there is no such server: Colab
    has TPU_WORKER_HOSTNAMES "localhost", Kaggle also TPU_PROCESS_ADDRESSES "local", which jax would
    look up as the name of a host for five minutes.
    """
    env = os.environ
    hosts = env.get("TPU_PROCESS_ADDRESSES") or env.get("TPU_WORKER_HOSTNAMES", "")
    is_one_slice = env.get("MEGASCALE_NUM_SLICES", "1") == "1"
    is_alone = hosts != "" and "," not in hosts and is_one_slice
    if is_alone or env.get("JAX_PLATFORMS", "tpu").split(",")[0] not in ("", "tpu"):
        return False
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    is_google = any(vendor.read_text().strip() == GOOGLE_PCI_VENDOR for vendor in vendors)
    return is_google and importlib.util.find_spec("libtpu") is not None


def start_distributed(coordinator_address=None, num_processes=None, process_id=None):
    """Join the other processes that the arguments, a TPU slice, Slurm or Open MPI name, if any.

    Args:
        coordinator_address: HOST:PORT of process 0.
        num_processes: number of processes.
        process_id: number of this process, from 0.

    Raises:
        ValueError: some arguments are missing.
    """
    arguments, env = (coordinator_address, num_processes, process_id), os.environ
    several_tasks = env.get("SLURM_NTASKS", env.get("OMPI_COMM_WORLD_SIZE", "1")) != "1"
    several_tasks |= "," in env.get("TPU_WORKER_HOSTNAMES", "")
    if any(argument is not None for argument in arguments):
        if any(argument is None for argument in arguments):
            raise ValueError(
                "coordinator_address=, num_processes= and process_id= go together; give all three"
            )
    elif jax.distributed.is_initialized() or not (several_tasks or on_tpu_vm()):
        return
    # On CPUs the default is half a minute, less than a busy machine takes to compile a step.
    timeout = "--xla_cpu_collective_timeout_seconds"
    if timeout not in (flags := os.environ.get("XLA_FLAGS", "")):
        os.environ["XLA_FLAGS"] = f"{flags} {timeout}={COLLECTIVE_SECONDS}"
    jax.distributed.initialize(*arguments, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    # Connect the devices now: a process that compiles later may exceed the timeout of the rest.
    jax.pmap(lambda x: jax.lax.psum(x, "batch"), "batch")(np.ones(jax.local_device_count()))


def check_agreement(text):
    """Check that all processes have the same text, for example their settings.

    Raises:
        ValueError: it names the processes that differ from process 0.
    """
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils  # not for one process

    checksums = multihost_utils.process_allgather(np.uint32(zlib.crc32(text.encode())))
    different = np.flatnonzero(checksums != checksums[0]).tolist()
    if different:
        raise ValueError(
            f"process {', '.join(map(str, different))} has other settings or models "
            "than process 0; start all with the same command"
        )


def list_of_process_0(numbers):
    """Process 0's list of whole numbers, on all processes, which call this together.

    numbers: list of int32 of any length, of which only process 0's counts.
    """
    from jax.experimental import multihost_utils

    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(numbers))))
    row = np.resize(np.array([*numbers, 0], np.int32), length)
    return multihost_utils.broadcast_one_to_all(row).tolist() if length else []


def explain_lost_process(error):
    """The message for an error caused by a lost process; None for other errors."""
    reason = one_line(error, 200)
    if (
        isinstance(error, jax.errors.JaxRuntimeError)
        and jax.process_count() > 1
        and re.search(LOST_PROCESS, reason)
    ):
        return (
            f"process {jax.process_index()} has lost another process ({reason}); start all "
            "processes again with the same command"
        )
    return None
