"""Plan a download: assign a dataset's files to workers and write input files for aria2.

Run it on every worker of a TPU slice, or on one machine. With the InstructPix2Pix dataset:

    python script.py --dataset timbrooks/instructpix2pix-clip-filtered    # 262 shards, 131 GB
    bash script.sh

All workers make the same plan: each file, from the largest on, goes to the worker with the fewest
bytes so far. In sets of archives or images (docs/edit-sets.md), the parts of an archive and the
images of a directory stay together, and every worker downloads the indexes.

--output_dir has download-K.txt, the aria2 input file of worker K; worker-HOST, the index of this
host's worker if known, for script.sh; and manifest.json, {"files": [{url, file, size, sha256, rows,
worker}]}, with null for unknown values, and for the worker of what all workers download. HF_TOKEN
(or `hf auth login`) opens private and gated datasets; HF_ENDPOINT replaces the hub.
"""

import json
import os
import re
import socket
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx2
from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.utils import RevisionNotFoundError, filter_repo_objects

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
URL_LINE = re.compile(r"(https?://[^\s@/]+/[!-~]*)(?:\s+([1-9]\d*))?(?:\s+([0-9a-fA-F]{64}))?")


def list_repository(dataset, revision):
    """The files of a repository on the hub by path, without hidden ones."""
    tree = HfApi().list_repo_tree(dataset, recursive=True, revision=revision, repo_type="dataset")
    files = []
    for entry in tree:
        if hasattr(entry, "size") and not re.search(r"(^|/)\.", entry.path):  # no directories
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
    split = [numbered[1] if numbered else "train", *words][-1]  # words win
    # The conversion has CONFIG/SPLIT/0000.parquet, or CONFIG/SPLIT-part1/ for over 10000 files.
    if folders and (folders[-1] in SPLITS or re.fullmatch(r"\d{4}\.parquet", name)):
        split = folders.pop()
    return "/".join(folder for folder in folders if folder != "data") or "default", split


def choose_split(shards, config, split):
    """The shards of a configuration and of a split, or of a pattern of splits."""
    places = [config_and_split(file["file"]) for file in shards]
    config = config or (places[0][0] if len(dict(places)) == 1 else "default")
    fits = [place[0] == config and fnmatchcase(place[1], split) for place in places]
    if not any(fits):
        names = sorted({"/".join(place) for place in places})
        raise ValueError(f"choose --config and --split among {names[:20]}; or give --urls")
    return [file for file, is_chosen in zip(shards, fits) if is_chosen]


def list_dataset(flags):
    """(files of a dataset on the hub, whether they are a set of archives or images)."""
    files = list_repository(flags.dataset, flags.revision or "main")
    archives, images, indexes, shards = (matching(files, x) for x in (ARCHIVE, IMAGE, INDEX, SHARD))
    parts = archives + images * (len(images) >= 20 and bool(indexes))  # fewer: figures of the card
    # Parquet files with more than a quarter of the bytes contain the images.
    num_bytes = sum(file["size"] for file in parts) - 4 * sum(file["size"] for file in shards)
    if (parts and num_bytes >= 0) or flags.dataset.lower() in PAIRS_APART:
        if flags.config or flags.split != "train":
            raise ValueError("archives have no --config and --split; choose files with --include")
        return parts + indexes, True
    if flags.revision is None:
        with suppress(RevisionNotFoundError):
            converted = matching(list_repository(flags.dataset, "refs/convert/parquet"), SHARD)
            if converted and not any("/partial" in file["file"] for file in converted):
                shards = converted  # the hub's complete conversion to parquet
    return choose_split(shards, flags.config, flags.split), False


def list_urls(list_file):
    """(files of a list, whether they are a set of archives or images)."""
    files = {}
    for number, line in enumerate(list_file.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if found := URL_LINE.fullmatch(line.strip()):
            url, size, sha256 = found[1], found[2] and int(found[2]), found[3] and found[3].lower()
            path = re.sub("/.+/resolve/(refs/.+/parquet|[^/]+)/", "", unquote(urlsplit(url).path))
            files[url] = {"url": url, "file": path, "size": size, "sha256": sha256}
        elif line.strip() and not line.lstrip().startswith("#"):
            raise ValueError(f"--urls {list_file}: line {number} is not URL [SIZE [SHA256]]")
    return list(files.values()), bool(matching(files.values(), ARCHIVE))


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
    """Give each list of files, from the largest on, to the worker with the fewest bytes so far."""
    # Source: Graham 1969, longest processing time. If a size is unknown, all files count as equal.
    has_sizes = all(file["size"] for unit in units for file in unit)
    sizes = [sum(file["size"] if has_sizes else 1 for file in unit) for unit in units]
    loads = [0] * num_workers
    for size, unit in sorted(zip(sizes, units), key=lambda pair: -pair[0]):  # a stable sort
        worker = loads.index(min(loads))
        loads[worker] += size
        for file in unit:
            file["worker"] = worker


def vm_attribute(name):
    """An attribute of a TPU VM from Google's metadata server, or ""."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/attributes/{name}"
    header = {"Metadata-Flavor": "Google"}
    with suppress(httpx2.HTTPError):
        return httpx2.get(url, headers=header, timeout=2, trust_env=False).raise_for_status().text
    return ""


def find_worker():
    """(index, number of workers) of this process; (0, 1) outside of TPU slices."""
    env = os.environ  # GKE has all of it there
    index = env.get("TPU_WORKER_ID") or vm_attribute("agent-worker-number")
    hosts = env.get("TPU_PROCESS_ADDRESSES") or env.get("TPU_WORKER_HOSTNAMES")
    if index and (hosts := hosts or vm_attribute("worker-network-endpoints")):
        slices = dict(re.findall(r"(\w+)\s*:\s*'([^']*)'", vm_attribute("tpu-env"))) | env
        count, slice_id = hosts.count(",") + 1, int(slices.get("MEGASCALE_SLICE_ID") or 0)
        num_slices = int(slices.get("MEGASCALE_NUM_SLICES") or 1)
        return slice_id * count + int(index), num_slices * count
    return 0, 1


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
    host = socket.gethostname()
    lines |= {} if worker is None else {f"worker-{host}": [worker]}
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob("download-[0-9]*.txt"), folder / f"worker-{host}"]:
        if path.name not in lines:
            path.unlink(missing_ok=True)  # of an earlier plan
    for name in lines:  # complete files, as hosts may share the folder
        unfinished = folder / f".unfinished-{host}-{os.getpid()}"
        unfinished.write_text("".join(f"{line}\n" for line in lines[name]), encoding="utf-8")
        unfinished.replace(folder / name)


def run(flags):
    """Write the plan and print the next commands."""
    worker, num_workers = flags.worker, flags.num_workers
    if worker is None and num_workers is None:
        worker, num_workers = find_worker()
    if not 0 <= (worker or 0) < (num_workers or 0) or flags.max_shards < 1:
        raise ValueError("--worker needs --num_workers above it; --max_shards must be at least 1")
    files, is_set = list_urls(flags.urls) if flags.urls else list_dataset(flags)
    if flags.include:  # patterns fit archives without the ends of their parts
        patterns = flags.include + ["*.json*", "*.parquet"] * is_set  # all indexes
        options = {"allow_patterns": patterns, "key": lambda x: ARCHIVE.sub(r"\1", x["file"])}
        files = list(filter_repo_objects(files, **options))
    if not files:
        raise ValueError(f"--include {flags.include} or --urls {flags.urls} chooses no files")
    if not is_set:
        name_shards(files)
    units = {}
    for file in files:
        file |= {"file": file["file"].lstrip("/"), "rows": None, "worker": None}
        units.setdefault(unit_of(file["file"]) if is_set else file["file"], []).append(file)
    common = units.pop("", [])
    units = list(units.values())[: flags.max_shards]
    is_apart = num_workers > 1 and str(flags.dataset).lower() in PAIRS_APART
    assign_workers([] if is_apart else units, num_workers)
    files = [file for unit in units for file in unit] + common
    write_plan(flags.output_dir, files, worker, num_workers, is_set)
    print(f"{len(files)} files, the first is {files[0]['url']}; {num_workers} workers")
    k = "K" if worker is None and num_workers > 1 else worker or 0
    print(f"next, on worker {k}: bash script.sh {flags.output_dir}/download-{k}.txt")
    if is_set:
        share = f" --worker {k} --num_workers {num_workers}" * is_apart
        print(f"then: python parquet_processing.py --pairs downloads --output_dir data{share}")


def main(args=None):
    """Command line."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
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
    add("--num_workers", type=int, help="default: as many as the TPU slice has, else 1")
    add("--max_shards", type=int, default=10**9, help="use only the first N shards or archives")
    add("--include", nargs="+", help="use only files with paths that fit a pattern")
    try:
        run(parser.parse_args(args))
    except (ValueError, OSError, httpx2.HTTPError) as error:
        parser.error(" ".join(str(error).split()))
    except KeyboardInterrupt:
        parser.exit(130, "interrupted; run the same command again\n")


if __name__ == "__main__":
    main()
