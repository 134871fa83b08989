"""Plan a download: assign a dataset's files to workers and write input files for aria2.

Run it on every worker of a slice (`gcloud compute tpus tpu-vm ssh ... --worker=all`) or on one
machine, then start the download. With the InstructPix2Pix dataset:

    python script.py --dataset timbrooks/instructpix2pix-clip-filtered    # 262 shards, 131 GB
    bash script.sh

It takes seconds and makes the same plan everywhere: files go from largest to smallest, each to the
worker with the fewest bytes so far. In sets of archives or images (docs/edit-sets.md), the parts of
an archive stay together, as do the images of a directory, and indexes go to every worker.

--output_dir has download-K.txt, the aria2 input file of worker K; worker-HOST, the index of this
host's worker if it is known, for script.sh; and manifest.json, {"files": [{url, file, size, sha256,
rows, worker}]}, with null for an unknown value, and for the worker of what all workers download.
HF_TOKEN (or `hf auth login`) opens private and gated datasets; HF_ENDPOINT replaces the hub.
"""

import argparse
import json
import os
import re
import socket
import sys
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx2
from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import RevisionNotFoundError
from huggingface_hub.utils import filter_repo_objects

SPLITS = {"train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval"}
# An archive, or a part of one: .000, .aa, .split.000, .part-aa, .part0
PART = r"[.-](?:(?:split|part)[.-]?)?(?:\d{1,6}|(?!bz|lz|xz|md)[a-y][a-z])"
ARCHIVE = re.compile(rf"(.+\.(?:tar\.gz|tgz|tar))(?:{PART})?")
# An image; the group is its directory, or the one above it with both sides of a pair.
SIDE = "(?:input|output|original|edited|source|target|before|after|mask)s?(?:[_-]?images?)?/"
IMAGE = re.compile(rf"(?i)((?:.*?/)??)(?:{SIDE})*[^/]+\.(?:jpe?g|png|webp|gif|bmp|tiff?|avif)")
INDEX = re.compile(r"(?i).+\.(?:jsonl?(?:\.gz)?|parquet)")
SHARD = re.compile(r".+\.parquet")
# Sets with the two images of a pair in two archives: every worker downloads all of them.
PAIRS_APART = ("a1557811266/inter-edit-train", "apple/pico-banana-400k")
MAX_UNUSED = 0.05  # of the bytes; more prints a warning


def list_repository(dataset, revision):
    """The files of a repository on the hub by path; hidden and unprintable paths are left out."""
    tree = HfApi().list_repo_tree(dataset, recursive=True, revision=revision, repo_type="dataset")
    files = []
    for entry in tree:
        is_hidden = re.search(r"(^|/)\.[^.]", entry.path) or not entry.path.isprintable()
        if hasattr(entry, "size") and not is_hidden:  # directories have no size
            url = hf_hub_url(dataset, entry.path, repo_type="dataset", revision=revision)
            sha256 = entry.lfs and entry.lfs.sha256
            files.append({"url": url, "file": entry.path, "size": entry.size, "sha256": sha256})
    return sorted(files, key=lambda file: file["file"])


def matching(files, pattern):
    """The files with paths that match a compiled pattern."""
    return [file for file in files if pattern.fullmatch(file["file"])]


def config_and_split(path):
    """(configuration, split) of a parquet file in a repository or in the hub's conversion."""
    *folders, name = re.sub(r"-part\d+/", "/", path).split("/")
    words = [word for word in re.split("[^A-Za-z]+", name) if word in SPLITS]
    numbered = re.fullmatch(r"(.+)-\d{5,}-of-\d{5,}(-[0-9a-f]+)?\.parquet", name)
    split = words[-1] if words else numbered[1] if numbered else "train"
    # The conversion has CONFIG/SPLIT/0000.parquet, or CONFIG/SPLIT-part1/ for over 10000 files.
    if folders and (folders[-1] in SPLITS or re.fullmatch(r"\d{4}\.parquet", name)):
        split = folders.pop()
    return "/".join(folder for folder in folders if folder != "data") or "default", split


def choose_split(shards, config, split):
    """The shards of a configuration and of a split, or of a pattern of splits."""
    places = [config_and_split(file["file"]) for file in shards]
    configs = {place[0] for place in places}
    config = config or (configs.pop() if len(configs) == 1 else "default")
    fits = [place[0] == config and fnmatchcase(place[1], split) for place in places]
    if not any(fits):
        names = sorted({"/".join(place) for place in places})
        raise ValueError(f"choose --config and --split among {names[:20]}; or give --urls")
    return [file for file, is_chosen in zip(shards, fits) if is_chosen]


def list_dataset(flags):
    """(files of a dataset on the hub, whether they are a set of archives or images).

    A set has no parquet files with a quarter of its bytes, which would contain the images. Shards
    are of the hub's conversion if it is complete, without a directory partial-SPLIT or partial.
    """
    files = list_repository(flags.dataset, flags.revision or "main")
    archives, images, indexes = (matching(files, x) for x in (ARCHIVE, IMAGE, INDEX))
    shards = matching(files, SHARD)
    parts = archives + images * (len(images) >= 20 and bool(indexes))  # fewer: figures of the card
    num_bytes = sum(file["size"] for file in parts) - 4 * sum(file["size"] for file in shards)
    if (parts and num_bytes >= 0) or flags.dataset.lower() in PAIRS_APART:
        if flags.config or flags.split != "train":
            raise ValueError("archives have no --config and --split; choose files with --include")
        return parts + indexes, True
    if flags.revision is None:
        with suppress(RevisionNotFoundError):
            converted = matching(list_repository(flags.dataset, "refs/convert/parquet"), SHARD)
            if converted and not any("/partial" in file["file"] for file in converted):
                shards = converted
    return choose_split(shards, flags.config, flags.split), False


def list_urls(list_file):
    """(files of a list, whether they are a set of archives or images)."""
    line_format = re.compile(
        r"(https?://[^\s@/]+/[!-~]*)(?:\s+([1-9]\d*))?(?:\s+([0-9a-fA-F]{64}))?"
    )
    if not list_file.is_file():
        raise ValueError(f"--urls {list_file} is not a file")
    files = {}
    for number, line in enumerate(list_file.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if found := line_format.fullmatch(line.strip()):
            url, size, sha256 = found[1], found[2] and int(found[2]), found[3] and found[3].lower()
            path = re.sub("/.+/resolve/(refs/.+/parquet|[^/]+)/", "", unquote(urlsplit(url).path))
            files[url] = {"url": url, "file": path, "size": size, "sha256": sha256}
        elif line.strip() and not line.lstrip().startswith("#"):
            raise ValueError(f"--urls {list_file}: line {number} is not URL [SIZE [SHA256]]")
    files = list(files.values())
    if not matching(files, ARCHIVE):
        return files, False
    shared = os.path.commonpath([os.path.dirname(f"/{file['file']}") for file in files])
    for file in files:  # directories below the common one are kept
        file["file"] = os.path.relpath(f"/{file['file']}", shared)
    return files, True


def unit_of(path):
    """What goes to one worker: an archive with its parts, a directory of images; "": to all."""
    found = ARCHIVE.fullmatch(path) or IMAGE.fullmatch(path)
    return (found[1] or "./") if found else ""


def name_shards(files):
    """Name shards for one directory: paths in a repository with dashes, or ends of addresses."""
    names = [re.sub("^/.*/", "/", file["file"]).replace("/", "-") for file in files]
    stems = [re.sub(r"[^A-Za-z0-9._-]", "_", name.removesuffix(".parquet")) for name in names]
    names = [f"{stem[-200:].lstrip('.-') or 'shard'}.parquet" for stem in stems]
    for number, (file, name) in enumerate(zip(files, names)):
        file["file"] = name if len(set(names)) == len(names) else f"{number:05d}-{name}"


def assign_workers(units, num_workers):
    """Give each list of files, from the largest on, to the worker with the fewest bytes so far.

    No worker gets more than the mean plus one list. Returns the bytes of each worker.
    Source: Graham 1969, Bounds on multiprocessing timing anomalies (longest processing time).
    """
    sizes = [[file["size"] for file in unit] for unit in units]
    known = [sum(unit) for unit in sizes if None not in unit]
    mean = sum(known) // len(known) if known else 1  # for unknown sizes
    sizes = [mean if None in unit else sum(unit) for unit in sizes]
    loads = [0] * num_workers
    for i in sorted(range(len(units)), key=lambda i: -sizes[i]):  # a stable sort
        worker = loads.index(min(loads))
        loads[worker] += sizes[i]
        for file in units[i]:
            file["worker"] = worker
    return loads


def vm_attribute(name):
    """An attribute of a TPU VM from Google's metadata server, or ""."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/attributes/{name}"
    options = {"headers": {"Metadata-Flavor": "Google"}, "timeout": 2, "trust_env": False}
    with suppress(httpx2.HTTPError):
        return httpx2.get(url, **options).raise_for_status().text
    return ""


def find_worker():
    """(index, number of workers) of this process; (0, 1) outside of TPU slices and jobs."""
    env = os.environ  # of GKE, srun and mpirun
    index = env.get("TPU_WORKER_ID") or vm_attribute("agent-worker-number")
    hosts = env.get("TPU_PROCESS_ADDRESSES") or env.get("TPU_WORKER_HOSTNAMES")
    if index and (hosts := hosts or vm_attribute("worker-network-endpoints")):
        slices = dict(re.findall(r"(\w+)\s*:\s*'([^']*)'", vm_attribute("tpu-env"))) | env
        count, slice_id = hosts.count(",") + 1, int(slices.get("MEGASCALE_SLICE_ID") or 0)
        num_slices = int(slices.get("MEGASCALE_NUM_SLICES") or 1)
        return slice_id * count + int(index), num_slices * count
    if "SLURM_STEP_NUM_TASKS" in env:
        return int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"])
    return int(env.get("OMPI_COMM_WORLD_RANK", 0)), int(env.get("OMPI_COMM_WORLD_SIZE", 1))


def write_plan(folder, files, worker, num_workers, is_set):
    """Write the input files of all workers, this worker's index if known, and the manifest."""
    lines = {f"download-{k}.txt": ["# archives"] * is_set for k in range(num_workers)}
    for file in files:
        entry = [f"# size={file['size']}"] if file["size"] else []
        entry += [file["url"], f"  out={file['file']}"]
        entry += [f"  checksum=sha-256={file['sha256']}"] if file["sha256"] else []
        for k in range(num_workers) if file["worker"] is None else [file["worker"]]:
            lines[f"download-{k}.txt"] += entry
    lines["manifest.json"] = [json.dumps({"files": files}, indent=1)]
    index_file = f"worker-{socket.gethostname()}"
    if worker is not None:
        lines[index_file] = [worker]
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob("download-[0-9]*.txt"), folder / index_file]:
        if path.name not in lines:
            path.unlink(missing_ok=True)  # of an earlier plan
    for name in lines:  # complete files, as hosts may share the folder
        unfinished = folder / f".unfinished-{socket.gethostname()}-{os.getpid()}"
        text = "".join(f"{line}\n" for line in lines[name] or ["# more workers than files"])
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(folder / name)


def run(flags):
    """Write the plan and print the next commands."""
    worker, num_workers = (flags.worker, flags.num_workers) if flags.num_workers else find_worker()
    if flags.worker is not None and flags.num_workers is None:
        raise ValueError(f"--worker {flags.worker} needs --num_workers")
    least = min(1 if x is None else x for x in (flags.num_workers, flags.max_shards))
    if least < 1 or not 0 <= (flags.worker or worker or 0) < num_workers:
        raise ValueError("--worker must be below --num_workers; it and --max_shards at least 1")
    files, is_set = list_urls(flags.urls) if flags.urls else list_dataset(flags)
    if flags.include:  # names of archives, paths of other files; and all indexes
        indexes = [file for file in files if is_set and not unit_of(file["file"])]
        options = {"allow_patterns": flags.include, "key": lambda x: ARCHIVE.sub(r"\1", x["file"])}
        files = [x for x in filter_repo_objects(files, **options) if x not in indexes] + indexes
    if not files:
        raise ValueError(f"--include {flags.include} or --urls {flags.urls} chooses no files")
    if not is_set:
        name_shards(files)
    units = {}
    for file in files:
        file |= {"rows": None, "worker": None}
        units.setdefault(unit_of(file["file"]) if is_set else file["file"], []).append(file)
    common = units.pop("", [])
    units = list(units.values())[: flags.max_shards]
    is_apart = num_workers > 1 and str(flags.dataset).lower() in PAIRS_APART
    loads = assign_workers([] if is_apart else units, num_workers)
    files = [file for unit in units for file in unit] + common
    write_plan(flags.output_dir, files, worker, num_workers, is_set)

    print(f"{len(files)} files, the first is {files[0]['url']}; {num_workers} workers")
    used = num_workers * min(loads)  # as every worker trains on as many rows as the smallest
    if used < (1 - MAX_UNUSED) * sum(loads):
        share = f"warning: {1 - used / sum(loads):.0%} of the rows are unused in every epoch"
        print(f"{share}; see --num_workers 1", file=sys.stderr)
    k = 0 if num_workers == 1 else "K" if worker is None else worker
    print(f"next, on worker {k}: bash script.sh {flags.output_dir}/download-{k}.txt")
    if is_set:
        share = f" --worker {k} --num_workers {num_workers}" * is_apart
        print(f"then: python parquet_processing.py --pairs downloads --output_dir data{share}")


def main(args=None):
    """Command line."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.error = lambda message: parser.exit(2, f"error: {message}; --help lists the flags\n")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--dataset", help="hub id, OWNER/NAME")
    source.add_argument("--urls", type=Path, help='file with lines "URL [SIZE [SHA256]]"')
    add = parser.add_argument
    add("--output_dir", type=Path, default="plan", help="directory for the plan")
    add("--config", help='configuration; default: the only one, or "default"')
    add("--split", default="train", help="split, or a pattern such as FreeForm_*")
    add("--revision", help="branch, tag or commit; default: the conversion, else main")
    add("--worker", type=int, help="index of this worker, from 0; needs --num_workers")
    add("--num_workers", type=int, help="default: as many as the TPU slice or the job has")
    add("--max_shards", type=int, help="use only the first N shards or archives")
    add("--include", nargs="+", help="use only files with paths that fit a pattern")
    try:
        run(parser.parse_args(args))
    except (ValueError, OSError, httpx2.HTTPError) as error:
        parser.error(" ".join(str(error).split()))
    except KeyboardInterrupt:
        parser.exit(130, "interrupted; run the same command again\n")


if __name__ == "__main__":
    main()
