"""Plan a download: the parquet shards of a dataset, dealt to workers, as input files for aria2.

On every worker of a slice at once (`gcloud compute tpus tpu-vm ssh ... --worker=all`), or on one
machine, for the paper's dataset, 131 GB in 262 shards, and then the download:

    python script.py --dataset timbrooks/instructpix2pix-clip-filtered
    bash script.sh

Takes seconds and no accelerator. Any dataset of the hub will do whose shards are parquet files;
others by --urls: a file of lines "URL [SIZE_IN_BYTES [SHA256]]", # for comments.

Which shards: those of the hub's converted listing (refs/convert/parquet) if it is complete and not
cut off by the hub ("partial"), else the repository's own parquet files, with a line that says so,
or always those by --revision main. --columns reads the footer of every shard, a request or two
each, and reports columns, rows and row groups.

Who gets what: the largest shards first, each to the worker with the fewest bytes so far. Hosts
finish together, and each makes the same plan by itself. A worker knows its index and the count by
--worker and --num_workers, else by the TPU VM's environment, else by JAX, also under Slurm's srun
and Open MPI's mpirun; `--num_workers 1` on every worker gives each all shards. In --output_dir:

    download-K.txt   worker K's part, an aria2 input file; those of all workers
    worker-HOST      this host's K, by which script.sh finds its part; not by --num_workers alone
    manifest.json    {"files": [{url, file, size, sha256, rows, worker}]}, null where unknown

HF_ENDPOINT moves the hub. HF_TOKEN (or `hf auth login`) opens private and gated datasets; it is
sent to the hub's host only. When asked to wait (429), a request waits as told, up to 10 minutes in
all; when the hub cannot be reached, up to one minute.
"""

import heapq
import json
import os
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
from processes_flax import which_worker

CONVERTED = "refs/convert/parquet"  # the revision under which the hub keeps its conversion
SPLIT_WORDS = frozenset(
    ("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval")
)
NUMBERED = re.compile(r"(.+)-\d{5,}-of-(\d{5,})(-[0-9a-f]+)?\.parquet")  # as push_to_hub names them

RETRY_STATUS = (408, 429, 500, 502, 503, 504)
RETRY_ERRORS = (httpx2.TimeoutException, httpx2.NetworkError, httpx2.RemoteProtocolError)
REQUEST_TIMEOUT = 30  # seconds without an answer
MAX_TOLD_WAIT = 600  # seconds, where the server says how long; the hub counts over 300
MAX_OUTAGE_WAIT = 60  # seconds, where it does not
NUM_FOOTER_THREADS = 8
MAX_LEFT_OUT = 0.05  # of the rows, each epoch, before a plan is warned of
FOOTER_BYTES = 64 * 1024  # fetched at first; few footers are longer
MAX_FOOTER_BYTES = 256 * 1024 * 1024  # a length beyond it is a broken one

TOKEN_HELP = (
    "set HF_TOKEN to a token of an account that may read it (https://hf.co/settings/tokens)"
)
ERRORS = {  # by the hub's X-Error-Code, or by status
    "GatedRepo": f"access is by permission: ask for it on the dataset's page, then {TOKEN_HELP}",
    "RepoNotFound": f"no such dataset, or it is private; check the name, or {TOKEN_HELP}",
    "RevisionNotFound": "no such revision; check --revision",
    401: f"HTTP 401, the token is missing or not accepted; {TOKEN_HELP}",
    403: f"HTTP 403, access denied; {TOKEN_HELP}",
}


@dataclass(frozen=True)
class Config:
    dataset: str | None = None  # hub id, OWNER/NAME
    urls: Path | None = None  # instead: file of lines "URL [SIZE [SHA256]]"
    output_dir: Path = Path("plan")
    config: str | None = None  # the dataset's configuration; default: the only one, or "default"
    split: str = "train"
    revision: str | None = None  # branch, tag or commit whose own files are taken; default: main
    worker: int | None = None  # this worker's index, from 0; with --num_workers
    num_workers: int | None = None  # without --worker: whichever this host is
    max_shards: int | None = None  # only the first so many
    columns: bool = False  # read every shard's footer: report columns, rows, row groups


def told_wait(headers):
    """Seconds that an answer says to wait, at least 1; None if it does not say.

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
    """GET that waits as told when it asks too often, and for a while when the server is away.

    huggingface_hub's own calls wait without a bound and do not read dates: hence this loop.

    Args:
        url: of the hub, whose host alone gets the token, or of any other host.
        last_bytes: fetch only so many from the end.

    Returns:
        httpx2 response, read; its status may be an error that waiting does not help.

    Raises:
        ValueError: no answer within the bounds.
    """
    address = urlsplit(url)
    on_hub = address[:2] == urlsplit(constants.ENDPOINT)[:2]  # scheme, host and port
    headers = {"Authorization": f"Bearer {token}"} if on_hub and (token := get_token()) else {}
    if last_bytes:
        headers |= {"Range": f"bytes=-{last_bytes}", "Accept-Encoding": "identity"}
    options = {"headers": headers, "timeout": REQUEST_TIMEOUT}
    told_left, outage_left, pause = MAX_TOLD_WAIT, MAX_OUTAGE_WAIT, 1
    while True:
        told = None
        try:
            # Redirects are followed; those to another host without the token.
            with get_session().stream("GET", url, **options) as response:
                length = int(response.headers.get("content-length", 2**63))
                if last_bytes and response.status_code == 200 and length > last_bytes:
                    raise ValueError(f"{url}: the server sends whole files only; drop --columns")
                if response.status_code not in RETRY_STATUS:
                    response.read()
                    return response
                told, reason = told_wait(response.headers), f"HTTP {response.status_code}"
        except RETRY_ERRORS as error:
            reason = str(error) or type(error).__name__
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            kind = type(error).__name__  # the text may quote a bad header: the token
            raise ValueError(f"{url}: {kind}; check the address, HF_ENDPOINT, HF_TOKEN") from None
        if told is None:
            wait, pause, outage_left = pause, min(2 * pause, 16), outage_left - pause
        else:
            wait, told_left = told, told_left - told
        if min(told_left, outage_left) < 0:
            raise ValueError(
                f"{url}: {reason}; {wait:.0f} s more is beyond what this script waits in all "
                f"({MAX_TOLD_WAIT} s if told to, else {MAX_OUTAGE_WAIT} s); try again later"
            )
        tqdm.write(f"{address.netloc}: {reason}; asking again in {wait:.0f} s", file=sys.stderr)
        time.sleep(wait)


def error_text(response):
    """What an error answer means and what to do about it."""
    status, code = response.status_code, response.headers.get("x-error-code")
    return ERRORS.get(code) or ERRORS.get(status) or f"HTTP {status}; check the address"


def list_tree(dataset, revision):
    """A repository's files as the hub lists them ({"path", "size", "lfs": {"oid"}}), by path.

    Raises:
        ValueError: no access, no such dataset or revision; a missing conversion is an empty list.
    """
    url = f"{constants.ENDPOINT}/api/datasets/{dataset}/tree/{quote(revision, safe='')}"
    url += "?recursive=true&expand=false"
    entries = []
    while url:
        response = fetch(url)
        if revision == CONVERTED and response.headers.get("x-error-code") == "RevisionNotFound":
            return []
        if response.status_code != 200:
            raise ValueError(f"{dataset}: {error_text(response)}")
        try:
            entries += [entry for entry in response.json() if entry["type"] == "file"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{url} does not answer as a hub does; check HF_ENDPOINT") from None
        next_page = response.links.get("next", {}).get("url")
        url = next_page and urljoin(url, next_page)
    return sorted(entries, key=lambda entry: entry["path"])


def place_converted(path):
    """(config, split) of a file in the hub's conversion, with "partial-" if cut off, or None.

    Source: dataset-viewer, libcommon/parquet_utils.py: CONFIG/SPLIT/0000.parquet, SPLIT-part1 for
    more than 10000 files; CONFIG/partial-SPLIT/ if cut off, formerly CONFIG/SPLIT/partial/.
    """
    if path.count("/") < 2 or not path.endswith(".parquet"):
        return None
    config, folder, *rest = path.split("/")
    return config, ("partial-" if "partial" in rest else "") + re.sub(r"-part\d+$", "", folder)


def place_own(path):
    """(config, split) of a parquet file that people named, or None.

    The split is the last folder (SPLIT/x.parquet), else a word of the name (train-x.parquet), else
    what is numbered (SPLIT-00000-of-00262.parquet), else train. The config is the folders above,
    "data" left out, or "default".
    """
    *folders, name = path.split("/")
    if not name.endswith(".parquet") or path.startswith(".") or "/." in path:
        return None
    if folders and folders[-1] in SPLIT_WORDS:
        split = folders.pop()
    elif words := [word for word in re.split(r"[^A-Za-z]+", name) if word in SPLIT_WORDS]:
        split = words[-1]
    else:
        split = match[1] if (match := NUMBERED.fullmatch(name)) else "train"
    return "/".join(folder for folder in folders if folder != "data") or "default", split


def choose(entries, place, config, split):
    """The entries of one config and split.

    Args:
        entries: of list_tree.
        place: place_converted or place_own.
        config: None for the only one, or "default".
        split: name.

    Returns:
        (entries, None), or ([], what there is instead).

    Raises:
        ValueError: config is None, and there are several.
    """
    places = {}
    for entry in entries:
        if where := place(entry["path"]):
            places.setdefault(where[0], {}).setdefault(where[1], []).append(entry)
    if not places:
        return [], "no parquet files"
    names = textwrap.shorten(", ".join(places), 500, placeholder=" ...")
    if config is None:
        config = "default" if len(places) > 1 else next(iter(places))
        if config not in places:
            raise ValueError(f"choose one of the dataset's configurations by --config: {names}")
    if config not in places:
        return [], f"no configuration {config}, but {names}"
    splits = places[config]
    if cut_off := splits.get(f"partial-{split}"):
        folder = PurePosixPath(cut_off[0]["path"]).parent
        return [], f"only the first part of split {split} ({len(cut_off)} files in {folder})"
    if split not in splits:
        return [], f"no split {split} in configuration {config}, but {', '.join(splits)}"
    return splits[split], None


def manifest_row(url, size, sha256):
    """A shard as in manifest.json."""
    return {"url": url, "file": None, "size": size, "sha256": sha256, "rows": None, "worker": None}


def shards_of_dataset(dataset, config, split, revision):
    """List a dataset's shards: the converted ones if all are there, else the repository's own.

    Args:
        dataset: OWNER/NAME.
        config: name, or None for the only one, or "default".
        split: name.
        revision: branch, tag or commit of the repository, or None.

    Returns:
        (manifest rows sorted by path, where they come from).

    Raises:
        ValueError: there are none; the message says what there is.
    """
    validate_repo_id(dataset)
    chosen, why = [], f"--revision {revision} is given"
    if revision is None:
        chosen, problem = choose(list_tree(dataset, CONVERTED), place_converted, config, split)
        why = f"the converted listing has {problem}"
    source, found_at = "the hub's converted listing", CONVERTED
    if not chosen:
        source, found_at = "the repository's own files", revision or constants.DEFAULT_REVISION
        entries = list_tree(dataset, found_at)
        chosen, problem = choose(entries, place_own, config, split)
        if problem:
            kinds = Counter(PurePosixPath(entry["path"]).suffix or "other" for entry in entries)
            found = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(5)) or "none"
            raise ValueError(
                f"{dataset}: {why}; the repository's own files ({found}) have {problem}; give "
                "--config, --split or --revision, or a list of addresses by --urls"
            )
        print(f"taking the repository's own files ({found_at}): {why}")
        names = (PurePosixPath(entry["path"]).name for entry in chosen)
        totals = {int(match[2]) for name in names if (match := NUMBERED.fullmatch(name))}
        if len(totals) == 1 and totals != {len(chosen)}:
            print(f"warning: {len(chosen)} shards, named as if of {totals.pop()}", file=sys.stderr)
    rows = [
        manifest_row(
            hf_hub_url(dataset, entry["path"], repo_type="dataset", revision=found_at),
            entry["size"],
            (entry.get("lfs") or {}).get("oid"),
        )
        for entry in chosen
    ]
    return rows, f"{source} ({found_at})"


def shards_of_urls(file):
    """Read a list of shards: per line an address, then optionally size and SHA-256.

    Returns:
        Manifest rows in the order of the file.

    Raises:
        ValueError: names every line that is not as it should be, or twice there.
    """
    line_format = re.compile(
        r"(https?://[!-~]+)(?:[ \t]+([1-9][0-9]*)(?:[ \t]+([0-9a-fA-F]{64}))?)?"
    )
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--urls {file} is not UTF-8; save it as UTF-8 ({error})") from None
    rows, problems, seen = [], [], {}
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines knows other ends
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
        raise ValueError(f"--urls {file}: {'; '.join(problems) or 'there are no addresses in it'}")
    return rows


def file_names(urls):
    """Flat names, all different: a repository path with dashes, or the last part of an address.

    If two would be the same, all are numbered.
    """
    names = []
    for path in (unquote(urlsplit(url).path) for url in urls):
        in_repository = re.search(rf"/resolve/(?:{CONVERTED}|[^/]+)/(.+)", path)
        name = in_repository[1].replace("/", "-") if in_repository else PurePosixPath(path).name
        # The loader wants *.parquet and leaves out what is hidden; a name has 255 bytes at most.
        stem = re.sub(r"[^A-Za-z0-9._-]", "_", name.removesuffix(".parquet"))[-200:].lstrip(".-")
        names.append(f"{stem or 'shard'}.parquet")
    if len(set(names)) < len(names):
        names = [f"{i:05d}-{name}" for i, name in enumerate(names)]
    return names


def deal(sizes, num_workers):
    """Deal shards to workers: the largest first, each to the one with the fewest bytes so far.

    No worker gets more than the mean and one shard; equal shards come out even, give or take one.

    Args:
        sizes: bytes, > 0; None counts as the mean of the others.
        num_workers: at least 1.

    Returns:
        Worker of each shard, list of int in [0, num_workers).

    Source: Graham 1969, Bounds on multiprocessing timing anomalies (longest processing time).
    """
    known = [size for size in sizes if size is not None]
    mean = sum(known) // len(known) if known else 1
    sizes = [mean if size is None else size for size in sizes]
    loads = [(0, worker) for worker in range(num_workers)]
    workers = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):  # equal ones stay in order
        load, workers[i] = heapq.heappop(loads)
        heapq.heappush(loads, (load + sizes[i], workers[i]))
    return workers


def read_footer(url):
    """Read what a parquet file says of itself, by its last bytes.

    Returns:
        (size in bytes, None if not told; pyarrow FileMetaData).

    Raises:
        ValueError: it cannot be fetched, or is no parquet file; the message names it.
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
        raise ValueError(f"{url} is no parquet file, or a broken one: {error}") from error
    if response.status_code == 200:
        return len(tail), footer
    total = response.headers.get("content-range", "").rpartition("/")[2]
    return int(total) if total.isdecimal() else None, footer


def read_columns(files):
    """Read all shards' footers, fill in rows and missing sizes, and print what they hold.

    Args:
        files: manifest rows; changed.

    Raises:
        ValueError: a shard cannot be read, or its size is not as listed; the message names it.
    """
    row_groups, shards_with = [], {}  # (rows, bytes); columns -> names of files
    bar = tqdm(desc="footers", total=len(files), unit="shard")
    with bar, ThreadPool(NUM_FOOTER_THREADS) as pool:  # its threads do not hold up Ctrl-C
        footers = pool.imap(read_footer, [file["url"] for file in files])
        for file, (size, footer) in zip(files, footers):
            if size and file["size"] and size != file["size"]:
                raise ValueError(f"{file['url']} has {size} bytes, not {file['size']} as listed")
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
        print(f" of {spread(rows)} rows, {spread(sizes, 'B')}", end="")
    print("" if len(shards_with) == 1 else "; warning: the shards do not all have the same columns")
    for columns, names in shards_with.items():
        which = textwrap.shorten(", ".join(names), 200, placeholder=" ...")
        print(f"columns of {len(names)} shards ({which}):", *columns, sep="\n  ")


def spread(values, unit=""):
    """Smallest to largest, for people, or the one there is."""
    show = partial(tqdm.format_sizeof, suffix=unit) if unit else str
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} to {high}"


def total_size(files):
    """The sum of the sizes, for people, and how many are unknown."""
    unknown = sum(file["size"] is None for file in files)
    known = tqdm.format_sizeof(sum(file["size"] or 0 for file in files), "B")
    return f"{known} and {unknown} of unknown size" if unknown else known


def aria2_input(files, worker):
    """One worker's part as an aria2 input file; in its comments script.sh reads the sizes.

    Source: aria2c manual, section "Input File".
    """
    lines = []
    for file in files:
        if file["worker"] == worker:
            lines += [f"# size={file['size']}"] if file["size"] else []
            lines += [file["url"], f"  out={file['file']}"]
            lines += [f"  checksum=sha-256={file['sha256']}"] if file["sha256"] else []
    lines = lines or [f"# nothing for worker {worker}: there are more workers than shards"]
    return "\n".join(lines) + "\n"


def write_file(path, text):
    """Write a file that appears under its name when it is complete."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # hosts may share the folder
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_plan(output_dir, files, worker, num_workers):
    """Write all parts, the index of this worker if it is known, and the manifest."""
    output_dir.mkdir(parents=True, exist_ok=True)
    for k in range(num_workers):
        write_file(output_dir / f"download-{k}.txt", aria2_input(files, k))
    note = output_dir / f"worker-{socket.gethostname()}"
    if worker is None:
        note.unlink(missing_ok=True)  # an earlier plan's would mislead script.sh
    else:
        write_file(note, f"{worker}\n")
    write_file(output_dir / "manifest.json", json.dumps({"files": files}, indent=1) + "\n")
    for path in sorted(output_dir.glob("download-*.txt")):
        k = path.stem.removeprefix("download-")
        if k.isdecimal() and int(k) >= num_workers:
            path.unlink(missing_ok=True)
            print(f"removed {path}: it was for a plan with more workers")


def check(config):
    """Refuse flags that do not go together."""
    if (config.dataset is None) == (config.urls is None):
        raise ValueError("give --dataset NAME or --urls FILE, one of them")
    if config.urls and (config.config or config.revision):
        raise ValueError("--urls goes without --config and --revision, which choose in a dataset")
    for name in ("num_workers", "max_shards"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    if config.worker is not None and not 0 <= config.worker < (config.num_workers or 0):
        raise ValueError(f"--worker {config.worker} must be from 0 to --num_workers less one")
    if config.output_dir.exists() and not config.output_dir.is_dir():
        raise ValueError(f"--output_dir {config.output_dir} is a file; name a folder")


def run(config):
    """List, deal, write, and say what comes next."""
    check(config)
    # First, where the processes meet: none waits for another that waits for the network.
    worker, num_workers, known_from = which_worker(config.worker, config.num_workers)
    if config.urls:
        files, source = shards_of_urls(config.urls), str(config.urls)
    else:
        files, source = shards_of_dataset(
            config.dataset, config.config, config.split, config.revision
        )
    if any("@" in urlsplit(file["url"]).netloc for file in files):
        place = "--urls" if config.urls else "HF_ENDPOINT"
        raise ValueError(f"an address in {place} holds a password; the plan is no place for it")
    for file, name in zip(files, file_names([file["url"] for file in files])):
        file["file"] = name
    files = files[: config.max_shards]  # named before, so that a name does not depend on it
    # Before --columns fills in sizes: hosts agree, with the flag or without.
    for file, its_worker in zip(files, deal([file["size"] for file in files], num_workers)):
        file["worker"] = its_worker
    if config.columns:
        read_columns(files)
    write_plan(config.output_dir, files, worker, num_workers)

    parts = [[file for file in files if file["worker"] == k] for k in range(num_workers)]
    counts = [len(part) for part in parts]
    part_sizes = [sum(file["size"] or 0 for file in part) for part in parts]
    print(f"{len(files)} shards, {total_size(files)}, from {source}")
    print(
        f"workers: {num_workers} (by {known_from}), each {spread(counts)} shards, "
        f"{spread(part_sizes, 'B')}"
    )
    left_out = 1 - num_workers * min(counts) / len(files)
    if left_out > MAX_LEFT_OUT:
        print(
            f"warning: {spread(counts)} shards a worker, and all train on as many rows as the one "
            f"with the fewest: some {left_out:.0%} of the rows would be left out every epoch. "
            "--num_workers 1 on every worker gives each all shards, and the loader shares out rows",
            file=sys.stderr,
        )
    k = 0 if num_workers == 1 else worker
    where = "worker K" if k is None else f"worker {k}, {counts[k]} shards, {total_size(parts[k])}"
    part = config.output_dir / f"download-{'K' if k is None else k}.txt"
    print(f"next, on {where}: bash script.sh {shlex.quote(str(part))} data")


def main(args=None):
    """Command line."""
    run_main(
        Config,
        __doc__,
        run,
        args,
        interrupted="run the same command again",
    )


if __name__ == "__main__":
    main()
