"""Plan a download: assign a dataset's parquet shards to workers and write input files for aria2.

Run it on every worker of a slice (`gcloud compute tpus tpu-vm ssh ... --worker=all`) or on one
machine, then start the download. With the InstructPix2Pix dataset (262 shards, 131 GB):

    python script.py --dataset timbrooks/instructpix2pix-clip-filtered
    bash script.sh

Takes seconds and needs no accelerator. It accepts every hub dataset that has parquet files, and
sets that consist of archives or image files with an index, such as sysuyy/ImgEdit; for these the
last lines name the program that makes shards of them. For other servers, --urls names a file with
one "URL [SIZE_IN_BYTES [SHA256]]" per line; # starts a comment.

Choice of shards: the hub's parquet conversion (refs/convert/parquet) if it covers the whole split,
else the parquet files in the repository. --revision always selects the files in the repository.
--columns reads the footer of every shard and prints columns, rows and row groups. How archives are
told from shards: docs/edit-sets.md. --include 'Singleturn/add_*' chooses files.

Assignment: shards are taken from largest to smallest; each goes to the worker with the fewest bytes
so far. Archives likewise, with all of their parts, and image files by directory; index files go to
every worker. Every worker computes the same plan, without communication. The worker index and the
number of workers come from --worker and --num_workers, else from the TPU VM's environment, else
from that of Slurm's srun or Open MPI's mpirun. `--num_workers 1` on every worker assigns all shards
to every worker. Files in --output_dir:

    download-K.txt   aria2 input file with the files of worker K; one per worker
    worker-HOST      index of this host's worker, read by script.sh; absent if it is unknown
    manifest.json    {"files": [{url, file, size, sha256, rows, worker}]}; unknown values are null,
                     and the worker of what all of them download

HF_ENDPOINT replaces the hub's address. HF_TOKEN (or `hf auth login`) gives access to private and
gated datasets; the token is sent to the hub only. Failed requests are repeated: for up to 10
minutes if the server asks to wait (HTTP 429), for up to one minute if it does not answer.
"""

import heapq
import json
import os
import re
import shlex
import socket
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
from tqdm import tqdm

from diffusers_flax.command_line import run_main
from diffusers_flax.data.archives.remote import Selection, list_dataset, list_urls
from diffusers_flax.data.remote_shards import format_range, read_columns, read_url_list

MAX_UNUSED_FRACTION = 0.05  # of the rows in every epoch; more prints a warning
ARCHIVES_DIR = "downloads"  # of script.sh, for archives
MAX_FILES = 5000  # of one worker; script.sh takes about 50 ms for each file, besides its bytes
METADATA_TIMEOUT = 2  # seconds; the metadata server is on the host itself


@dataclass(frozen=True)
class Config:
    dataset: str | None = None  # hub id, OWNER/NAME
    urls: Path | None = None  # instead of dataset: file with lines "URL [SIZE [SHA256]]"
    output_dir: Path = Path("plan")  # directory for the plan
    config: str | None = None  # configuration; default: the only one, or "default"
    split: str = "train"  # split of the dataset, or a pattern of names such as "FreeForm_*"
    revision: str | None = None  # branch, tag or commit; default: conversion, else main
    worker: int | None = None  # this worker's index, from 0; needs --num_workers
    num_workers: int | None = None  # number of workers; without --worker, the index is detected
    max_shards: int | None = None  # use only the first N shards or archives; default: all
    include: tuple[str, ...] = ()  # use only files whose paths fit a pattern; default: all
    columns: bool = False  # read all footers; print columns, rows and row groups


def assign_workers(sizes, num_workers):
    """Assign each shard, largest first, to the worker with the fewest bytes so far.

    No worker gets more than the mean plus one shard. With equal sizes counts differ by one at most.

    Args:
        sizes: bytes, > 0; None counts as the mean of the known sizes.
        num_workers: at least 1.

    Returns:
        Worker index of each shard, list of int in [0, num_workers).

    Source: Graham 1969, Bounds on multiprocessing timing anomalies (longest processing time).
    """
    known = [size for size in sizes if size is not None]
    mean = sum(known) // len(known) if known else 1
    sizes = [mean if size is None else size for size in sizes]
    loads = [(0, worker) for worker in range(num_workers)]
    workers = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):  # a stable sort
        load, workers[i] = heapq.heappop(loads)
        heapq.heappush(loads, (load + sizes[i], workers[i]))
    return workers


def format_size(files):
    """Format the sum of the sizes and the number of unknown sizes."""
    unknown = sum(file["size"] is None for file in files)
    known = tqdm.format_sizeof(sum(file["size"] or 0 for file in files), "B")
    return f"{known} and {unknown} of unknown size" if unknown else known


def aria2_input(files, worker, are_archives):
    """One worker's files as an aria2 input file; script.sh reads the comments about sizes.

    With the first line "# archives", script.sh downloads to ARCHIVES_DIR by default.

    Source: aria2c manual, section "Input File".
    """
    lines = ["# archives"] * are_archives
    for file in files:
        if file["worker"] in (worker, None):
            lines += [f"# size={file['size']}"] if file["size"] else []
            lines += [file["url"], f"  out={file['file']}"]
            lines += [f"  checksum=sha-256={file['sha256']}"] if file["sha256"] else []
    lines = lines or [f"# no shards for worker {worker}: there are more workers than shards"]
    return "\n".join(lines) + "\n"


def write_plan(output_dir, files, worker, num_workers, are_archives):
    """Write the input files of all workers, this worker's index if known, and the manifest."""

    def write(path, text):
        """Move a complete file into place, as hosts may share output_dir."""
        output_dir.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".unfinished-{uuid.uuid4().hex}-{path.name}")
        try:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    for k in range(num_workers):
        write(output_dir / f"download-{k}.txt", aria2_input(files, k, are_archives))
    index_file = output_dir / f"worker-{socket.gethostname()}"
    if worker is None:
        index_file.unlink(missing_ok=True)  # script.sh would use the index of an earlier plan
    else:
        write(index_file, f"{worker}\n")
    write(output_dir / "manifest.json", json.dumps({"files": files}, indent=1) + "\n")
    for path in sorted(output_dir.glob("download-*.txt")):
        k = path.stem.removeprefix("download-")
        if k.isdecimal() and int(k) >= num_workers:
            path.unlink(missing_ok=True)
            print(f"removed {path}, left over from a plan with more workers")


def check_flags(config):
    """Raise a ValueError for flags that are out of range or contradict each other."""
    if (config.dataset is None) == (config.urls is None):
        both = ", not both" if config.urls else ""
        raise ValueError(f"give one of --dataset NAME and --urls FILE{both}")
    if config.urls and (config.config or config.revision or config.split != Config.split):
        raise ValueError(
            "--urls excludes --config, --split and --revision, which apply to --dataset"
        )
    for name in ("num_workers", "max_shards"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    if config.worker is not None and config.num_workers is None:
        raise ValueError(
            f"--worker {config.worker} needs the number of workers; also give --num_workers"
        )
    if config.worker is not None and not 0 <= config.worker < config.num_workers:
        raise ValueError(f"--worker {config.worker} must be from 0 to {config.num_workers - 1}")
    if config.output_dir.exists() and not config.output_dir.is_dir():
        raise ValueError(f"--output_dir {config.output_dir} is a file; name a directory")


def vm_metadata(attribute):
    """An attribute of this VM from Google's metadata server, or None."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/attributes/{attribute}"
    options = {"headers": {"Metadata-Flavor": "Google"}, "timeout": METADATA_TIMEOUT}
    try:
        response = httpx2.get(url, trust_env=False, **options)  # without a proxy
    except httpx2.HTTPError:
        return None
    return response.text if response.status_code == 200 else None


def tpu_worker():
    """(index, count) of this host in its TPU slice or slices; None on other machines.

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


def assign(found, num_workers):
    """Set the worker of every file; None: all of them download it."""
    units = list(found.units.values())
    sizes = [[row["size"] for row in unit] for unit in units]
    sums = [None if None in unit else sum(unit) for unit in sizes]
    for unit, worker in zip(units, assign_workers(sums, num_workers)):
        for row in unit:
            row["worker"] = None if found.is_spread and num_workers > 1 else worker


def describe_shares(found, num_workers, known_from):
    """What is in the plan, and how much of it each worker gets; prints what is unused."""
    rows, word = found.rows, "archives" if found.kind else "shards"
    shares = [[row for row in rows if row["worker"] in (k, None)] for k in range(num_workers)]
    num_bytes = [sum(row["size"] or 0 for row in share) for share in shares]
    owners = [unit[0]["worker"] for unit in found.units.values()]
    counts = [sum(owner in (k, None) for owner in owners) for k in range(num_workers)]
    if found.kind:
        print(f"the set comes as {found.kind}; shards are made after the download")
        if any(name.endswith("/") for name in found.units):
            word = "archives or directories"
    print(
        f"{len(rows)} {'files' if found.kind else 'shards'}, {format_size(rows)}, from "
        f"{found.source}\n"
        f"workers: {num_workers} (by {known_from}), each {format_range(counts)} {word}, "
        f"{format_range(num_bytes, 'B')}"
    )
    parts = counts
    if found.kind:  # rows are not known; bytes of what is divided
        shared = sum(row["size"] or 0 for row in rows if row["worker"] is None)
        parts = [size - shared for size in num_bytes]
    unused = 1 - num_workers * min(parts) / sum(parts) if sum(parts) else 0
    if unused > MAX_UNUSED_FRACTION and num_workers > 1:
        print(
            f"warning: each worker gets {format_range(counts)} {word} and trains on as many rows "
            f"as the smallest one: about {unused:.0%} of the rows are unused in every epoch; use "
            f"--num_workers 1 on every worker to give each worker all {word}",
            file=sys.stderr,
        )
    return shares


def describe_archives(found, worker, num_workers):
    """What follows the download of archives, in lines."""
    lines, mine = [], ""
    if found.first_step:
        lines.append(f"before the last command: {found.first_step}")
    if num_workers > 1 and found.is_spread:
        lines.append("a pair may need any two of the archives: every worker downloads all of them")
        mine = f" --worker {'K' if worker is None else worker} --num_workers {num_workers}"
    elif num_workers > 1:
        lines.append(
            "pairs whose images are on two workers are left out and counted; if there are many, "
            "plan with --num_workers 1 on every worker"
        )
    lines.append(
        f"then: python parquet_processing.py --pairs {ARCHIVES_DIR} --output_dir data{mine}"
    )
    return "\n".join(lines)


def run(config):
    """Write the plan and print the next command."""
    check_flags(config)
    # Processes may synchronise here; doing so before network access avoids waiting for retries.
    worker, num_workers, known_from = which_worker(config.worker, config.num_workers)
    if config.urls:
        found = list_urls(read_url_list(config.urls), config.include, str(config.urls))
    else:
        selection = Selection(config.config, config.split, config.revision, config.include)
        found = list_dataset(config.dataset, selection)
    are_archives = bool(found.kind)
    if any("@" in urlsplit(file["url"]).netloc for file in found.rows):
        place = "--urls" if config.urls else "HF_ENDPOINT"
        raise ValueError(f"an address in {place} has a password; remove it: plans are plain text")
    if config.columns and are_archives:
        raise ValueError(
            "--columns reads the footers of shards, but these are archives with an index; leave "
            "it out"
        )
    found = found.first(config.max_shards)  # after naming: names do not depend on it
    # Before --columns adds sizes: plans with and without --columns must agree.
    assign(found, num_workers)
    files = found.rows
    owners = [file["worker"] for file in files]
    most = owners.count(None) + max(map(owners.count, range(num_workers)))
    if most > MAX_FILES and are_archives:
        raise ValueError(
            f"{most} files for one worker are too many for script.sh, which takes up to "
            f"{MAX_FILES}; choose some with --include, or download all with hf download "
            f"--repo-type dataset NAME --local-dir {ARCHIVES_DIR}"
        )
    if config.columns:
        read_columns(files)
    write_plan(config.output_dir, files, worker, num_workers, are_archives)

    shares = describe_shares(found, num_workers, known_from)
    k = 0 if num_workers == 1 else worker
    where = "worker K"
    if k is not None:
        kind = "files" if are_archives else "shards"
        where = f"worker {k}, {len(shares[k])} {kind}, {format_size(shares[k])}"
    file = config.output_dir / f"download-{'K' if k is None else k}.txt"
    folder = ARCHIVES_DIR if are_archives else "data"
    print(f"next, on {where}: bash script.sh {shlex.quote(str(file))} {folder}")
    if are_archives:
        print(describe_archives(found, worker, num_workers))


def main(args=None):
    """Command line."""
    run_main(Config, __doc__, run, args, interrupted="run the same command again")


if __name__ == "__main__":
    main()
