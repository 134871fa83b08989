"""Plan a download: assign a dataset's parquet shards to workers and write input files for aria2.

Run it on every worker of a slice (`gcloud compute tpus tpu-vm ssh ... --worker=all`) or on one
machine, then start the download. With the InstructPix2Pix dataset (262 shards, 131 GB):

    python script.py --dataset timbrooks/instructpix2pix-clip-filtered
    bash script.sh

Takes seconds and needs no accelerator. It accepts every hub dataset that has parquet files. For
other servers, --urls names a file with one "URL [SIZE_IN_BYTES [SHA256]]" per line; # starts a
comment.

Choice of shards: the hub's parquet conversion (refs/convert/parquet) if it covers the whole split,
else the parquet files in the repository. --revision always selects the files in the repository.
--columns reads the footer of every shard and prints columns, rows and row groups.

Assignment: shards are taken from largest to smallest; each goes to the worker with the fewest bytes
so far. Every worker computes the same plan, without communication. The worker index and the number
of workers come from --worker and --num_workers, else from the TPU VM's environment, else from JAX,
which also knows Slurm's srun and Open MPI's mpirun. `--num_workers 1` on every worker assigns all
shards to every worker. Files in --output_dir:

    download-K.txt   aria2 input file with the shards of worker K; one per worker
    worker-HOST      index of this host's worker, read by script.sh; absent if it is unknown
    manifest.json    {"files": [{url, file, size, sha256, rows, worker}]}; unknown values are null

HF_ENDPOINT replaces the hub's address. HF_TOKEN (or `hf auth login`) gives access to private and
gated datasets; the token is sent to the hub only. Failed requests are repeated: for up to 10
minutes if the server asks to wait (HTTP 429), for up to one minute if it does not answer.
"""

import heapq
import json
import re
import shlex
import socket
import sys
import textwrap
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote, urljoin, urlsplit

import httpx2
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import constants, get_token, hf_hub_url
from huggingface_hub.utils import get_session, parse_ratelimit_headers, validate_repo_id
from tqdm import tqdm

from command_line import run_main
from dataloading.workers import which_worker

CONVERTED_REF = "refs/convert/parquet"  # of the hub's parquet conversion
SPLIT_WORDS = frozenset(
    ("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval")
)
# The names that datasets' push_to_hub gives.
NUMBERED_NAME = re.compile(r"(.+)-\d{5,}-of-(\d{5,})(-[0-9a-f]+)?\.parquet")

RETRY_STATUS = (408, 429, 500, 502, 503, 504)
RETRY_ERRORS = (httpx2.TimeoutException, httpx2.NetworkError, httpx2.RemoteProtocolError)
REQUEST_TIMEOUT = 30  # seconds without data
MAX_REQUESTED_WAIT = 600  # seconds in all; the hub's rate limit resets every 300
MAX_OUTAGE_WAIT = 60  # seconds in all, where the server does not say how long to wait
NUM_FOOTER_THREADS = 8
MAX_UNUSED_FRACTION = 0.05  # of the rows in every epoch; more prints a warning
FOOTER_BYTES = 64 * 1024  # first request; few footers are longer
MAX_FOOTER_BYTES = 256 * 1024 * 1024  # a longer footer means a damaged file

TOKEN_HELP = (
    "set HF_TOKEN to a token of an account with read access (https://hf.co/settings/tokens)"
)
ERRORS = {  # by the hub's X-Error-Code or the HTTP status
    "GatedRepo": f"the dataset is gated: ask for access on its page, then {TOKEN_HELP}",
    "RepoNotFound": f"no such dataset, or it is private; check the name or {TOKEN_HELP}",
    "RevisionNotFound": "no such revision; check --revision",
    401: f"HTTP 401, the token is missing or invalid; {TOKEN_HELP}",
    403: f"HTTP 403, access denied; {TOKEN_HELP}",
}


@dataclass(frozen=True)
class Config:
    dataset: str | None = None  # hub id, OWNER/NAME
    urls: Path | None = None  # instead of dataset: file with lines "URL [SIZE [SHA256]]"
    output_dir: Path = Path("plan")  # directory for the plan
    config: str | None = None  # configuration; default: the only one, or "default"
    split: str = "train"  # split of the dataset
    revision: str | None = None  # branch, tag or commit; default: conversion, else main
    worker: int | None = None  # this worker's index, from 0; needs --num_workers
    num_workers: int | None = None  # number of workers; without --worker, the index is detected
    max_shards: int | None = None  # use only the first N shards; default: all
    columns: bool = False  # read all footers; print columns, rows and row groups


def requested_wait(headers):
    """Seconds that a response asks the client to wait, at least 1, or None.

    Source: RFC 9110, section 10.2.3 (Retry-After: seconds or a date); the hub's RateLimit header.
    """
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return limit.reset_in_seconds + 1
    value = headers.get("retry-after", "").strip()
    if value.isdecimal():
        return max(1, int(value))
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(1, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


def fetch(url, last_bytes=None):
    """GET with bounded retries after rate limits, server errors and network errors.

    huggingface_hub's retries are unbounded and ignore dates in Retry-After.

    Args:
        url: address; the token is sent only if it is on the hub.
        last_bytes: fetch this many bytes from the end of the file; None fetches all.

    Returns:
        httpx2 response with its content; the status may be an error that retries cannot fix.

    Raises:
        ValueError: no response within MAX_REQUESTED_WAIT or MAX_OUTAGE_WAIT seconds.
    """
    on_hub = url.startswith(f"{constants.ENDPOINT}/")  # as in script.sh
    headers = {"Authorization": f"Bearer {token}"} if on_hub and (token := get_token()) else {}
    if last_bytes:
        headers |= {"Range": f"bytes=-{last_bytes}", "Accept-Encoding": "identity"}
    options = {"headers": headers, "timeout": REQUEST_TIMEOUT}
    wait_left, outage_left, pause = MAX_REQUESTED_WAIT, MAX_OUTAGE_WAIT, 1
    while True:
        requested = None
        try:
            # httpx2 drops the token when a redirect leads to another host.
            with get_session().stream("GET", url, **options) as response:
                length = int(response.headers.get("content-length", 2**63))
                if last_bytes and response.status_code == 200 and length > last_bytes:
                    raise ValueError(f"{url}: no range requests on this server; omit --columns")
                if response.status_code not in RETRY_STATUS:
                    response.read()
                    return response
                requested = requested_wait(response.headers)
                reason = f"HTTP {response.status_code}"
        except RETRY_ERRORS as error:
            reason = str(error) or type(error).__name__
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            kind = type(error).__name__  # its text may quote the header with the token
            raise ValueError(f"{url}: {kind}; check the address, HF_ENDPOINT, HF_TOKEN") from None
        if requested is None:
            wait, pause, outage_left = pause, min(2 * pause, 16), outage_left - pause
        else:
            wait, wait_left = requested, wait_left - requested
        if min(wait_left, outage_left) < 0:
            raise ValueError(
                f"{url}: {reason}; waiting {wait:.0f} s more would exceed the limit "
                f"({MAX_REQUESTED_WAIT} s if the server asks for it, else {MAX_OUTAGE_WAIT} s); "
                "try again later"
            )
        tqdm.write(f"{urlsplit(url).netloc}: {reason}; retrying in {wait:.0f} s", file=sys.stderr)
        time.sleep(wait)


def error_text(response):
    """The meaning of an error response and its remedy."""
    status, code = response.status_code, response.headers.get("x-error-code")
    return ERRORS.get(code) or ERRORS.get(status) or f"HTTP {status}; check the address"


def list_tree(dataset, revision):
    """List a repository's files by path, {"path", "size", "lfs": {"oid"}}; [] if not converted.

    Raises:
        ValueError: no access, or no such dataset or revision.
    """
    url = f"{constants.ENDPOINT}/api/datasets/{dataset}/tree/{quote(revision, safe='')}"
    url += "?recursive=true&expand=false"
    entries = []
    while url:
        response = fetch(url)
        error_code = response.headers.get("x-error-code")
        if revision == CONVERTED_REF and error_code == "RevisionNotFound":
            return []
        if response.status_code != 200:
            raise ValueError(f"{dataset}: {error_text(response)}")
        try:
            entries += [entry for entry in response.json() if entry["type"] == "file"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{url} did not return a file list; check HF_ENDPOINT") from None
        next_page = response.links.get("next", {}).get("url")
        url = next_page and urljoin(url, next_page)
    return sorted(entries, key=lambda entry: entry["path"])


def classify_converted(path):
    """(config, split) of a parquet file in the hub's conversion, else None.

    Source: dataset-viewer, libcommon/parquet_utils.py: CONFIG/SPLIT/0000.parquet, SPLIT-part1 for
    more than 10000 files; CONFIG/partial-SPLIT/ or CONFIG/SPLIT/partial/ if truncated.
    The result calls a truncated split "partial-SPLIT".
    """
    if path.count("/") < 2 or not path.endswith(".parquet"):
        return None
    config, folder, *rest = path.split("/")
    return config, ("partial-" if "partial" in rest else "") + re.sub(r"-part\d+$", "", folder)


def classify_original(path):
    """(config, split) of a parquet file in the dataset's repository, else None.

    The split is the last directory (SPLIT/x.parquet), else a word of the name (train-x.parquet),
    else the prefix of the number (SPLIT-00000-of-00262.parquet), else train. The config consists of
    the remaining directories except "data", else it is "default".
    """
    *folders, name = path.split("/")
    if not name.endswith(".parquet") or path.startswith(".") or "/." in path:
        return None
    if folders and folders[-1] in SPLIT_WORDS:
        split = folders.pop()
    elif words := [word for word in re.split(r"[^A-Za-z]+", name) if word in SPLIT_WORDS]:
        split = words[-1]
    else:
        split = match[1] if (match := NUMBERED_NAME.fullmatch(name)) else "train"
    return "/".join(folder for folder in folders if folder != "data") or "default", split


def select_split(entries, classify, config, split):
    """The entries of one config and split.

    Args:
        entries: files as list_tree returns them.
        classify: classify_converted or classify_original.
        config: name; None selects the only config, or "default" among several.
        split: name.

    Returns:
        (entries, None), or ([], reason why there are none).

    Raises:
        ValueError: config is None and the dataset has several without a "default".
    """
    configs = {}
    for entry in entries:
        if key := classify(entry["path"]):
            configs.setdefault(key[0], {}).setdefault(key[1], []).append(entry)
    if not configs:
        return [], "no parquet files"
    names = textwrap.shorten(", ".join(configs), 500, placeholder=" ...")
    if config is None:
        config = "default" if len(configs) > 1 else next(iter(configs))
        if config not in configs:
            raise ValueError(f"choose one of several configurations with --config: {names}")
    if config not in configs:
        return [], f"no configuration {config}, but {names}"
    splits = configs[config]
    if partial_files := splits.get(f"partial-{split}"):
        folder = PurePosixPath(partial_files[0]["path"]).parent
        return [], f"only the first part of split {split} ({len(partial_files)} files in {folder})"
    if split not in splits:
        return [], f"no split {split} in configuration {config}, but {', '.join(splits)}"
    return splits[split], None


def manifest_row(url, size, sha256):
    """A shard's entry in manifest.json."""
    return {"url": url, "file": None, "size": size, "sha256": sha256, "rows": None, "worker": None}


def list_dataset_shards(dataset, config, split, revision):
    """List a dataset's shards: the conversion if it is complete, else the repository's files.

    Args:
        dataset: OWNER/NAME.
        config: see select_split.
        split: name.
        revision: branch, tag or commit of the repository's files; None prefers the conversion.

    Returns:
        (manifest rows sorted by path, description of their source).

    Raises:
        ValueError: there are no such shards.
    """
    validate_repo_id(dataset)
    selected, reason = [], f"--revision {revision} is given"
    if revision is None:
        entries = list_tree(dataset, CONVERTED_REF)
        selected, problem = select_split(entries, classify_converted, config, split)
        reason = f"the hub's conversion has {problem}"
    source, found_revision = "the hub's conversion", CONVERTED_REF
    if not selected:
        source, found_revision = "the repository's files", revision or constants.DEFAULT_REVISION
        entries = list_tree(dataset, found_revision)
        selected, problem = select_split(entries, classify_original, config, split)
        if problem:
            kinds = Counter(PurePosixPath(entry["path"]).suffix or "other" for entry in entries)
            found = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(5)) or "none"
            raise ValueError(
                f"{dataset}: {reason}; the repository's files ({found}) have {problem}; give "
                "--config, --split or --revision, or a list of addresses with --urls"
            )
        print(f"using the repository's files ({found_revision}): {reason}")
        names = (PurePosixPath(entry["path"]).name for entry in selected)
        totals = {int(match[2]) for name in names if (match := NUMBERED_NAME.fullmatch(name))}
        if len(totals) == 1 and totals != {len(selected)}:
            text = f"warning: {len(selected)} shards, but their names announce {totals.pop()}"
            print(text, file=sys.stderr)
    rows = [
        manifest_row(
            hf_hub_url(dataset, entry["path"], repo_type="dataset", revision=found_revision),
            entry["size"],
            (entry.get("lfs") or {}).get("oid"),
        )
        for entry in selected
    ]
    return rows, f"{source} ({found_revision})"


def read_url_list(file):
    """Read a list of shards, one "URL [SIZE [SHA256]]" per line.

    Returns:
        Manifest rows in the order of the file.

    Raises:
        ValueError: the list is empty, or lines are malformed or repeated; names them all.
    """
    line_format = re.compile(
        r"(https?://[!-~]+)(?:[ \t]+([1-9][0-9]*)(?:[ \t]+([0-9a-fA-F]{64}))?)?"
    )
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--urls {file} is not UTF-8; save it as UTF-8 ({error})") from None
    except OSError as error:
        raise ValueError(
            f"--urls {file} cannot be read: {error.strerror}; check the path"
        ) from None
    rows, problems, seen = [], [], {}
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines also splits at \x0b
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = line_format.fullmatch(line.strip())
        if not match:
            problems.append(f'line {number} is not "URL [SIZE [SHA256]]"')
        elif match[1] in seen:
            problems.append(f"line {number} repeats line {seen[match[1]]}")
        else:
            seen[match[1]] = number
            rows.append(
                manifest_row(match[1], match[2] and int(match[2]), match[3] and match[3].lower())
            )
    if problems or not rows:
        raise ValueError(f"--urls {file}: {'; '.join(problems) or 'it lists no addresses'}")
    return rows


def unique_file_names(urls):
    """Unique file names: a repository path with dashes, or the last component of an address.

    If two names collide, all get a number as prefix.
    """
    names = []
    for path in (unquote(urlsplit(url).path) for url in urls):
        in_repository = re.search(rf"/resolve/(?:{CONVERTED_REF}|[^/]+)/(.+)", path)
        name = in_repository[1].replace("/", "-") if in_repository else PurePosixPath(path).name
        # The loader reads *.parquet except hidden files; a name has at most 255 bytes.
        stem = re.sub(r"[^A-Za-z0-9._-]", "_", name.removesuffix(".parquet"))[-200:].lstrip(".-")
        names.append(f"{stem or 'shard'}.parquet")
    if len(set(names)) < len(names):
        names = [f"{i:05d}-{name}" for i, name in enumerate(names)]
    return names


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


def read_footer(url):
    """Read the footer of a remote parquet file.

    Returns:
        (size in bytes or None if unknown, pyarrow FileMetaData).

    Raises:
        ValueError: the file cannot be fetched or is not parquet.
    """
    last_bytes = FOOTER_BYTES
    for _ in range(2):
        response = fetch(url, last_bytes)
        if response.status_code not in (200, 206):
            raise ValueError(f"{url}: {error_text(response)}")
        tail = response.content
        last_bytes = int.from_bytes(tail[-8:-4], "little") + 8
        if tail[-4:] != b"PAR1" or not len(tail) < last_bytes <= MAX_FOOTER_BYTES:
            break
    try:
        footer = pq.read_metadata(pa.BufferReader(tail))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{url} is not a parquet file, or is damaged: {error}") from error
    if response.status_code == 200:
        return len(tail), footer
    total = response.headers.get("content-range", "").rpartition("/")[2]
    return int(total) if total.isdecimal() else None, footer


def read_columns(files):
    """Read all footers, add rows and missing sizes to the manifest, and print a summary.

    Args:
        files: manifest rows, changed in place.

    Raises:
        ValueError: a shard cannot be read or does not have the listed size.
    """
    row_groups, shards_with = [], {}  # (rows, bytes); columns -> names of files
    bar = tqdm(desc="footers", total=len(files), unit="shard")
    with bar, ThreadPool(NUM_FOOTER_THREADS) as pool:  # exits at once on Ctrl-C
        footers = pool.imap(read_footer, [file["url"] for file in files])
        for file, (size, footer) in zip(files, footers):
            if size and file["size"] and size != file["size"]:
                raise ValueError(f"{file['url']} has {size} bytes, the list says {file['size']}")
            file["size"], file["rows"] = file["size"] or size, footer.num_rows
            schema = footer.schema.to_arrow_schema()
            columns = tuple(f"{field.name}: {field.type}" for field in schema)
            shards_with.setdefault(columns, []).append(file["file"])
            for group in map(footer.row_group, range(footer.num_row_groups)):
                chunks = map(group.column, range(group.num_columns))
                num_bytes = sum(chunk.total_compressed_size for chunk in chunks)
                row_groups.append((group.num_rows, num_bytes))
            bar.update()

    print(f"{sum(file['rows'] for file in files)} rows, {len(row_groups)} row groups", end="")
    if row_groups:
        rows, sizes = zip(*row_groups)
        print(f" of {format_range(rows)} rows, {format_range(sizes, 'B')}", end="")
    print("" if len(shards_with) == 1 else "; warning: the shards do not all have the same columns")
    for columns, names in shards_with.items():
        short_names = textwrap.shorten(", ".join(names), 200, placeholder=" ...")
        print(f"columns of {len(names)} shards ({short_names}):", *columns, sep="\n  ")


def format_range(values, unit=""):
    """Format as "smallest to largest", or as one value if all are equal."""
    show = partial(tqdm.format_sizeof, suffix=unit) if unit else str
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} to {high}"


def format_size(files):
    """Format the sum of the sizes and the number of unknown sizes."""
    unknown = sum(file["size"] is None for file in files)
    known = tqdm.format_sizeof(sum(file["size"] or 0 for file in files), "B")
    return f"{known} and {unknown} of unknown size" if unknown else known


def aria2_input(files, worker):
    """One worker's shards as an aria2 input file; script.sh reads the sizes in its comments.

    Source: aria2c manual, section "Input File".
    """
    lines = []
    for file in files:
        if file["worker"] == worker:
            lines += [f"# size={file['size']}"] if file["size"] else []
            lines += [file["url"], f"  out={file['file']}"]
            lines += [f"  checksum=sha-256={file['sha256']}"] if file["sha256"] else []
    lines = lines or [f"# no shards for worker {worker}: there are more workers than shards"]
    return "\n".join(lines) + "\n"


def write_plan(output_dir, files, worker, num_workers):
    """Write the input files of all workers, this worker's index if known, and the manifest."""

    def write(path, text):
        """Move a complete file into place: hosts may share output_dir."""
        output_dir.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".unfinished-{uuid.uuid4().hex}-{path.name}")
        try:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    for k in range(num_workers):
        write(output_dir / f"download-{k}.txt", aria2_input(files, k))
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


def check(config):
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


def run(config):
    """Write the plan and print the next command."""
    check(config)
    # Processes may synchronise here; doing so before network access avoids waiting for retries.
    worker, num_workers, known_from = which_worker(config.worker, config.num_workers)
    if config.urls:
        files, source = read_url_list(config.urls), str(config.urls)
    else:
        files, source = list_dataset_shards(
            config.dataset, config.config, config.split, config.revision
        )
    if any("@" in urlsplit(file["url"]).netloc for file in files):
        place = "--urls" if config.urls else "HF_ENDPOINT"
        raise ValueError(f"an address in {place} has a password; remove it: plans are plain text")
    for file, name in zip(files, unique_file_names([file["url"] for file in files])):
        file["file"] = name
    files = files[: config.max_shards]  # after naming: names do not depend on it
    # Before --columns adds sizes: plans with and without --columns must agree.
    assigned = assign_workers([file["size"] for file in files], num_workers)
    for file, assigned_worker in zip(files, assigned):
        file["worker"] = assigned_worker
    if config.columns:
        read_columns(files)
    write_plan(config.output_dir, files, worker, num_workers)

    parts = [[file for file in files if file["worker"] == k] for k in range(num_workers)]
    counts = [len(part) for part in parts]
    part_sizes = [sum(file["size"] or 0 for file in part) for part in parts]
    print(f"{len(files)} shards, {format_size(files)}, from {source}")
    print(
        f"workers: {num_workers} (by {known_from}), each {format_range(counts)} shards, "
        f"{format_range(part_sizes, 'B')}"
    )
    unused = 1 - num_workers * min(counts) / len(files)
    if unused > MAX_UNUSED_FRACTION:
        print(
            f"warning: each worker gets {format_range(counts)} shards and trains on as many rows "
            f"as the smallest one: about {unused:.0%} of the rows are unused in every epoch; use "
            "--num_workers 1 on every worker to give each worker all shards",
            file=sys.stderr,
        )
    k = 0 if num_workers == 1 else worker
    where = "worker K" if k is None else f"worker {k}, {counts[k]} shards, {format_size(parts[k])}"
    part = config.output_dir / f"download-{'K' if k is None else k}.txt"
    print(f"next, on {where}: bash script.sh {shlex.quote(str(part))} data")


def main(args=None):
    """Command line."""
    run_main(Config, __doc__, run, args, interrupted="run the same command again")


if __name__ == "__main__":
    main()
