"""What a pmap loop over many devices and processes needs beside its step.

Under `pmap(axis_name="batch")`: the optimizer and the average shared out over the replicas (ZeRO,
arXiv 1910.02054), by slices of every array.

    grads = mean_slice(grads, num_slices)         # a reduce-scatter
    slices = my_slice(params, num_slices)         # nothing is sent
    updates = whole(updates, params, num_slices)  # an all-gather

On the host: joining the other processes, keeping other runs out of a folder, arrays to the devices
and back, and stopping together.
"""

import contextlib
import fcntl
import functools
import importlib.util
import itertools
import logging
import os
import platform
import signal
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

logger = logging.getLogger(__name__)

WAIT_SECONDS = 3600  # for the others to compile, or for process 0 to save and upload
GOOGLE_PCI_VENDOR = "0x1ae0"  # of TPUs, and of network cards, which have no libtpu
_numbers = itertools.count()
COLLECTIVE_SECONDS = 90  # for the others to come to an operation of CPUs; less than the next
HEARTBEAT_SECONDS = 100  # a process that is silent for so long counts as dead and ends the run
LOCK_SECONDS = 120  # for a run that is ending and still saves, or an NFS lock of a crashed host
MESSAGE_BYTES = 4096  # of an error that all processes are told


def split_axis(shape, num_slices):
    """The longest axis that num_slices divides; None: no such, or 1 slice, and it stays whole."""
    axes = [axis for axis, size in enumerate(shape) if size and size % num_slices == 0]
    return max(axes, key=lambda axis: shape[axis], default=None) if num_slices > 1 else None


def my_slice(tree, num_slices):
    """This replica's slice of every array, under pmap(axis_name="batch")."""

    def cut(x):
        axis = split_axis(x.shape, num_slices)
        if axis is None:
            return x
        size = x.shape[axis] // num_slices
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("batch") * size, size, axis)

    return jax.tree.map(cut, tree)


def after_all(tree):
    """The same tree, once all replicas are here, which only matters for processes with CPUs.

    Gloo's reduce-scatter waits half a minute for the others, in which one that is still compiling
    does not come; its all-reduce waits as long as it is told to, COLLECTIVE_SECONDS.
    """
    if jax.default_backend() != "cpu" or jax.process_count() == 1:
        return tree
    n = jax.lax.axis_size("batch")
    one = jax.lax.psum(jax.lax.axis_index("batch"), "batch") - (n * (n - 1) // 2 - 1)
    return jax.tree.map(lambda x: x * one.astype(x.dtype), tree)


def mean_slice(grads, num_slices):
    """This replica's slice of the mean of all replicas' gradients: a reduce-scatter.

    A single replica's gradients are returned as they are.
    """
    if jax.lax.axis_size("batch") == 1:  # XLA would copy them, on a CPU in a single thread
        return grads

    def reduce(g):
        axis = split_axis(g.shape, num_slices)
        if axis is None:
            return jax.lax.pmean(g, "batch")
        return jax.lax.psum_scatter(g, "batch", scatter_dimension=axis, tiled=True) / num_slices

    return jax.tree.map(reduce, after_all(grads))


def whole(slices, like, num_slices):
    """Put the replicas' slices together again, an all-gather; like: a tree of the whole shapes."""

    def gather(x, full):
        axis = split_axis(full.shape, num_slices)
        return x if axis is None else jax.lax.all_gather(x, "batch", axis=axis, tiled=True)

    return jax.tree.map(gather, slices, like)


def norm_of_slices(slices, like, num_slices):
    """Global norm of a tree of which every replica has its slices."""
    squares = jax.tree.map(lambda x: jnp.sum(jnp.square(x)), slices)
    is_cut = [split_axis(x.shape, num_slices) is not None for x in jax.tree.leaves(like)]
    cut = sum(x for x, c in zip(jax.tree.leaves(squares), is_cut) if c)
    uncut = sum(x for x, c in zip(jax.tree.leaves(squares), is_cut) if not c)
    return jnp.sqrt(jax.lax.psum(cut, "batch") + uncut if any(is_cut) else uncut)


def lift(tree):
    """Give arrays the device axis back that pmap takes off, for what is updated in place.

    Between pmap's own two reshapes XLA's CPU compiler makes a copy of what is donated: of the
    whole optimizer's state. Here they cancel.
    """
    return jax.tree.map(lambda x: x[None] if x.ndim else x, tree)


def unlift(tree):
    """Undo lift."""
    return jax.tree.map(lambda x: x[0] if x.ndim else x, tree)


def several_tasks():
    """Do Slurm, Open MPI or a TPU's environment say that there are several processes?"""
    env = os.environ
    tasks = env.get("SLURM_NTASKS", env.get("OMPI_COMM_WORLD_SIZE", "1"))
    return tasks != "1" or "," in env.get("TPU_WORKER_HOSTNAMES", "")


def on_tpu_vm():
    """Is there a TPU that jax will use? Its metadata server then knows the other hosts, if any."""
    if os.environ.get("JAX_PLATFORMS", "tpu").split(",")[0] not in ("", "tpu"):
        return False
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    is_google = any(vendor.read_text().strip() == GOOGLE_PCI_VENDOR for vendor in vendors)
    return is_google and importlib.util.find_spec("libtpu") is not None


def start_distributed(coordinator_address=None, num_processes=None, process_id=None):
    """Join the other processes, if arguments, a TPU slice, Slurm or Open MPI say there are any.

    Args:
        coordinator_address: HOST:PORT of process 0.
        num_processes, process_id: how many there are, and which this one is, from 0.

    Raises:
        ValueError: some are given and not all, the process is none of them, or they are needed.
    """
    arguments = (coordinator_address, num_processes, process_id)
    if any(argument is not None for argument in arguments):
        if any(argument is None for argument in arguments) or not 0 <= process_id < num_processes:
            raise ValueError(
                f"coordinator_address={coordinator_address}, num_processes={num_processes}, "
                f"process_id={process_id}: give all three, process_id from 0 to num_processes-1"
            )
    elif jax.distributed.is_initialized():
        return
    elif not (several_tasks() or on_tpu_vm()):
        if jax.process_count() > 1:
            raise ValueError(
                f"jax finds {jax.process_count()} processes, but not where they are; give "
                "coordinator_address, num_processes and process_id"
            )
        return
    # On CPUs; half a minute otherwise, and a busy machine may take longer to compile a step.
    timeout = "--xla_cpu_collective_timeout_seconds"
    if timeout not in (flags := os.environ.get("XLA_FLAGS", "")):
        os.environ["XLA_FLAGS"] = f"{flags} {timeout}={COLLECTIVE_SECONDS}"
    jax.distributed.initialize(*arguments, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    # Connects the devices while the processes are together: later one may compile for longer than
    # the others would wait for it.
    jax.pmap(lambda x: jax.lax.psum(x, "batch"), "batch")(np.ones(jax.local_device_count()))


def check_agreement(text):
    """See to it that all processes have the same text, for example of their flags.

    Raises:
        ValueError: the processes that differ from process 0.
    """
    if jax.process_count() == 1:
        return
    checksums = multihost_utils.process_allgather(np.uint32(zlib.crc32(text.encode())))
    different = np.flatnonzero(checksums != checksums[0]).tolist()
    if different:
        raise ValueError(
            f"process {', '.join(map(str, different))} was started with other flags or "
            "models than process 0; start all with the same command"
        )


def wait_for_all(what):
    """Wait until all processes are here, and each of them as often.

    Not by a collective operation of the devices, some of which wait for half a minute only.
    """
    if jax.process_count() > 1:
        everyone = set(range(jax.process_count()))
        name = f"{what} {next(_numbers)}"  # which has to be a new one each time
        ocp.multihost.sync_global_processes(name, timeout=WAIT_SECONDS, processes=everyone)


def put(tree):
    """Put a copy of NumPy arrays on every device of this process, as pmap takes and gives them.

    Returns:
        The tree with arrays (local devices, ...), whose memory a program may take over (donate).
    """
    n = jax.local_device_count()
    return jax.tree.map(lambda x: _place([_movable(np.asarray(x))[None]] * n), tree)


def put_slices(x, num_slices):
    """Put each device's slice of a NumPy array on it, as split_axis cuts; like put where it cannot.

    Returns:
        Array (local devices, ...), as for put.
    """
    axis = split_axis(x.shape, num_slices)
    if axis is None:
        return put(x)
    slices = np.split(x, num_slices, axis)
    numbers = [jax.devices().index(device) for device in jax.local_devices()]
    return _place([_movable(slices[number])[None] for number in numbers])


def put_shares(batch):
    """Put equal shares of this process's batch, dict of (B, ...), on its devices."""
    n = jax.local_device_count()
    return {
        name: _place(list(x.reshape(n, 1, len(x) // n, *x.shape[1:]))) for name, x in batch.items()
    }


def _place(parts):
    devices = jax.local_devices()
    sharding = jax.NamedSharding(jax.sharding.Mesh(np.array(devices), ("batch",)), jax.P("batch"))
    arrays = [jax.device_put(part, device) for part, device in zip(parts, devices)]
    shape = (len(devices), *parts[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _movable(x):
    """x, for a CPU with its data off the boundaries of 64 bytes.

    Data on one are used where they are, and as they are NumPy's, no program may take them over: a
    step would hold what it updates twice.
    """
    if jax.default_backend() != "cpu":
        return x
    memory = np.empty(x.nbytes + 64, np.uint8)
    start = (x.itemsize - memory.ctypes.data) % 64
    moved = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    moved[...] = x
    return moved


def first(x):
    """A replicated array's copy on this process's first device, as a NumPy array."""
    copy = np.asarray(x.addressable_shards[0].data)
    return copy.reshape(copy.shape[1:])


def local_shares(x):
    """What this process's devices hold of (devices, B, ...), as a NumPy array (B of all, ...)."""
    return np.concatenate([np.asarray(shard.data)[0] for shard in x.addressable_shards])


@functools.cache
def _gather(shape, num_slices):
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.pmap(lambda x: whole(x, like, num_slices), axis_name="batch")


def to_host(tree, like, num_slices=1):
    """Whole NumPy arrays of what pmap gave, whole or in slices; all processes call it together.

    One array after the other, so that no device holds more than one of them twice.

    Args:
        tree: arrays (local devices, ...).
        like: a tree of the whole shapes.
        num_slices: that split_axis cut the arrays into.
    """

    def gather(x, full):
        is_cut = split_axis(full.shape, num_slices) is not None
        return first(_gather(full.shape, num_slices)(x) if is_cut else x)

    return jax.tree.map(gather, tree, like)


def from_process_0(x):
    """Process 0's array on all processes, bit for bit."""
    if jax.process_count() == 1:
        return x
    bits = multihost_utils.broadcast_one_to_all(x.view(np.int32))  # a sum, which loses -0.0
    return np.asarray(bits).view(x.dtype)


def on_process_0(function):
    """Call function() on process 0; all processes call this together.

    Returns:
        What function returned, on process 0; None on the others.

    Raises:
        ValueError: function raised a ValueError or an OSError; all processes raise its message.
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
    """Keep other runs out of --output_dir as long as the context lasts.

    The lock is flock's, on FOLDER/.lock. The system releases it when its process ends, also after
    SIGKILL, and it holds for all paths to the folder. The file names its holder; left behind, it
    locks nothing. Without flock on the file system there is a warning and no lock. File systems in
    user space, such as gcsfuse, lock among the processes of one host only.

    Args:
        folder: Path; made if it does not exist, and then removed if it is empty at the end.

    Raises:
        ValueError: another process has the lock, and keeps it for LOCK_SECONDS.
    """
    is_new, path = not folder.exists(), folder / ".lock"
    deadline = None
    while (file := _lock_file(path)) is None:
        with contextlib.suppress(FileNotFoundError):  # released just now
            holder = path.read_text() or "another process"
            if deadline is None:
                deadline = time.monotonic() + LOCK_SECONDS
                print(f"waiting for {holder}, which uses {folder}", flush=True)
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"--output_dir {folder} is in use by {holder}; wait until it ends, stop it, or "
                    "name another folder"
                )
        time.sleep(0.5)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the folder may be gone
            path.unlink()
        file.close()
        if is_new:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


def _lock_file(path):
    """The file at path, open and locked, with this process's name in it; None: it is taken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = path.open("a")
    except FileNotFoundError:  # another process released the lock and removed the folder
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError as error:
        logger.warning(
            "%s cannot be locked (%s); see to it that no other run uses the folder", path, error
        )
    if os.fstat(file.fileno()).st_nlink == 0:  # another process released the lock, file removed
        file.close()
        return None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}")
    file.flush()
    return file


class StopSignal:
    """SIGTERM, by which slices and clusters announce their end, and Ctrl-C, as a thing to ask for.

    With many processes it is enough that one of them gets SIGTERM, and all are told at the same
    step. A second signal acts as if there were no StopSignal.
    """

    def __enter__(self):
        self.number = None
        self.kept = {}
        # jax's own handler of SIGTERM tells the other processes.
        numbers = (
            [signal.SIGINT] if jax.distributed.is_initialized() else [signal.SIGTERM, signal.SIGINT]
        )
        for number in numbers:
            self.kept[number] = signal.signal(number, self._note)
        return self

    def _note(self, number, frame):
        if jax.distributed.is_initialized():
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.number = number
        self.__exit__()

    def came_by(self, step):
        """Is it time to stop? All processes ask at each of the same steps."""
        if jax.distributed.is_initialized() and multihost_utils.reached_preemption_sync_point(step):
            self.number = signal.SIGTERM
        return self.number is not None

    def __exit__(self, *exception):
        while self.kept:
            signal.signal(*self.kept.popitem())
