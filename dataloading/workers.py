"""Which worker of a TPU slice, or of a launcher, this process is."""

import os
import re

import httpx2

METADATA_TIMEOUT = 2  # seconds; the metadata server is on the host itself


def vm_metadata(attribute):
    """An attribute of this VM from Google's metadata server; None where there is none."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/attributes/{attribute}"
    options = {"headers": {"Metadata-Flavor": "Google"}, "timeout": METADATA_TIMEOUT}
    try:
        response = httpx2.get(url, trust_env=False, **options)  # without a proxy
    except httpx2.HTTPError:
        return None
    return response.text if response.status_code == 200 else None


def tpu_worker():
    """(index, count) of this host in its TPU slice or slices, None on other machines.

    Source: jax._src.clusters.cloud_tpu_cluster, for the variables that GKE sets and the attributes
    of TPU VMs: worker-network-endpoints is a,b,c; tpu-env has lines KEY: 'value'.
    """
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES")
    index = os.environ.get("TPU_WORKER_ID")
    if not (hosts and index):
        index, hosts = vm_metadata("agent-worker-number"), vm_metadata("worker-network-endpoints")
        if not (hosts and index):
            return None
    slices = os.environ
    if "MEGASCALE_NUM_SLICES" not in slices:
        tpu_env = vm_metadata("tpu-env") or ""
        slices = dict(re.findall(r"^\s*(\w+)\s*:\s*'?([^'\n]*)", tpu_env, re.MULTILINE))
    try:
        per_slice, index = len(hosts.split(",")), int(index)
        slice_id = int(slices.get("MEGASCALE_SLICE_ID") or 0)
        num_slices = int(slices.get("MEGASCALE_NUM_SLICES") or 1)
        fits = 0 <= index < per_slice and 0 <= slice_id < num_slices
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"the TPU's environment says worker {index} of {hosts}, which is inconsistent; "
            "give --worker and --num_workers"
        )
    return slice_id * per_slice + index, num_slices * per_slice


def launcher_task():
    """(index, count, launcher) of this process in a job of Slurm or Open MPI, or None."""
    env = os.environ
    for launcher, index, count, step in (
        ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NODELIST"),
        ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ):
        if int(env.get(count, 1)) > 1:
            if not (index in env and step in env):  # the batch script of Slurm is no task
                raise ValueError(
                    f"{launcher} has {env[count]} tasks and this process is none of them; start "
                    "it with srun or mpirun, or give --worker and --num_workers"
                )
            return int(env[index]), int(env[count]), launcher
    return None


def which_worker(worker, num_workers):
    """(index or None, count, source) of this worker: flags, the TPU's environment or a launcher."""
    if num_workers is not None:
        return worker, num_workers, "flags"
    if found := tpu_worker():
        return *found, "the TPU's environment"
    return launcher_task() or (0, 1, "default")
