"""Parquet shards on the hub or another server: lists of shards, and their footers.

    shards, source = list_dataset_shards("OWNER/NAME", config=None, split="train", revision=None)

A shard is a row of manifest.json: {url, file, size, sha256, rows, worker}. A request is repeated
for up to MAX_REQUESTED_WAIT seconds if the server asks to wait (HTTP 429), for up to
MAX_OUTAGE_WAIT seconds if it fails or does not answer. script.sh downloads the shards and repeats
on its own.
"""

import multiprocessing
import re
import sys
import textwrap
import time
from collections import Counter
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from fnmatch import fnmatchcase
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import PurePosixPath
from urllib.parse import quote, unquote, urljoin, urlsplit

import httpx2
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import constants, get_token, hf_hub_url
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import get_session, parse_ratelimit_headers, validate_repo_id
from tqdm import tqdm

CONVERTED_REF = "refs/convert/parquet"  # of the hub's parquet conversion
SPLIT_WORDS = frozenset(
    ("train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval")
)
# Names of datasets' push_to_hub.
NUMBERED_NAME = re.compile(r"(.+)-\d{5,}-of-(\d{5,})(-[0-9a-f]+)?\.parquet")
NUM_FOOTER_THREADS = 8
FOOTER_BYTES = 64 * 1024  # first request; few footers are longer
MAX_FOOTER_BYTES = 256 * 1024 * 1024  # a longer footer means a damaged file
MAX_NAMED_PROBLEMS = 10  # in an error message
RETRY_STATUS = (408, 429, 500, 502, 503, 504)
RETRY_ERRORS = (httpx2.TimeoutException, httpx2.NetworkError, httpx2.RemoteProtocolError)
REQUEST_TIMEOUT = 30  # seconds without data
MAX_REQUESTED_WAIT = 600  # seconds in all; the hub's rate limit resets every 300
MAX_OUTAGE_WAIT = 60  # seconds in all, where the server does not say how long to wait

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


def check_dataset_name(dataset):
    """Raise a ValueError for what is not OWNER/NAME."""
    try:
        validate_repo_id(dataset)
    except HFValidationError:
        raise ValueError(
            f"--dataset {dataset} is no name of a dataset on the hub; write OWNER/NAME"
        ) from None


def list_dataset_shards(dataset, config, split, revision, entries=None):
    """List a dataset's shards: the conversion if it is complete, else the repository's files.

    Args:
        dataset: OWNER/NAME.
        config: see select_split.
        split: name, or a pattern of names.
        revision: branch, tag or commit of the repository's files; None prefers the conversion.
        entries: the repository's files if they are listed already.

    Returns:
        (manifest rows sorted by path, description of their source); "file" is the path.

    Raises:
        ValueError: there are no such shards.
    """
    check_dataset_name(dataset)
    selected, reason = [], f"--revision {revision} is given"
    if revision is None:
        converted = list_tree(dataset, CONVERTED_REF)
        selected, problem = select_split(converted, classify_converted, config, split)
        reason = f"the hub's conversion has {problem}"
    source, found_revision = "the hub's conversion", CONVERTED_REF
    if not selected:
        source, found_revision = "the repository's files", revision or constants.DEFAULT_REVISION
        if entries is None:
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
        warn_of_missing_shards(selected)
    rows = [
        manifest_row(
            hf_hub_url(dataset, entry["path"], repo_type="dataset", revision=found_revision),
            entry["size"],
            (entry.get("lfs") or {}).get("oid"),
        )
        | {"file": entry["path"]}
        for entry in selected
    ]
    return rows, f"{source} ({found_revision})"


def warn_of_missing_shards(entries):
    """Print a warning if names such as train-00000-of-00031 announce more or fewer shards.

    Args:
        entries: as for select_split, of one split or several.
    """
    names = (PurePosixPath(entry["path"]).name for entry in entries)
    announced = {match.group(1, 2) for name in names if (match := NUMBERED_NAME.fullmatch(name))}
    prefixes = {prefix for prefix, _ in announced}
    num_found, num_announced = len(entries), sum(int(total) for _, total in announced)
    if announced and len(prefixes) == len(announced) and num_found != num_announced:
        text = f"warning: {num_found} shards, but their names announce {num_announced}"
        print(text, file=sys.stderr)


def list_tree(dataset, revision):
    """List a repository's files by path, {"path", "size", "lfs": {"oid"}}; [] if not converted.

    Raises:
        ValueError: no access, or no such dataset or revision.
    """
    url = f"{constants.ENDPOINT}/api/datasets/{dataset}/tree/{quote(revision, safe='')}"
    url += "?recursive=true&expand=false"
    entries = []
    while url:
        response = fetch_with_retries(url)
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
        split: name, or a pattern of names such as FreeForm_*.

    Returns:
        (entries, None), or ([], reason).

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
    truncated = [name for name in splits if fnmatchcase(name, f"partial-{split}")]
    if truncated:
        partial_files = splits[truncated[0]]
        folder = PurePosixPath(partial_files[0]["path"]).parent
        return [], f"only the first part of split {split} ({len(partial_files)} files in {folder})"
    selected = [name for name in splits if fnmatchcase(name, split)]
    if not selected:
        names = textwrap.shorten(", ".join(splits), 500, placeholder=" ...")
        return [], f"no split {split} in configuration {config}, but {names}"
    return [entry for name in selected for entry in splits[name]], None


def manifest_row(url, size, sha256):
    """A shard's entry in manifest.json."""
    return {"url": url, "file": None, "size": size, "sha256": sha256, "rows": None, "worker": None}


def address_problem(url):
    """The problem of an address, or None."""
    try:
        return None if urlsplit(url).hostname and urlsplit(url).port != 0 else "no host, or port 0"
    except ValueError as error:
        return str(error)


def read_url_list(file):
    """Read a list of shards, one "URL [SIZE [SHA256]]" per line.

    Returns:
        Manifest rows in the order of the file.

    Raises:
        ValueError: the list is empty, or lines are malformed or repeated; names the first ten.
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
        if not line.isascii():
            problems.append(f"line {number} has letters outside of ASCII; write them as %XX")
        elif not match:
            problems.append(f'line {number} is not "URL [SIZE [SHA256]]"')
        elif match[1] in seen:
            problems.append(f"line {number} repeats line {seen[match[1]]}")
        elif problem := address_problem(match[1]):
            problems.append(f"line {number}: {problem}")
        else:
            seen[match[1]] = number
            rows.append(
                manifest_row(match[1], match[2] and int(match[2]), match[3] and match[3].lower())
            )
    if problems or not rows:
        more = len(problems) - MAX_NAMED_PROBLEMS
        named = problems[:MAX_NAMED_PROBLEMS] + [f"and {more} more"] * (more > 0)
        raise ValueError(f"--urls {file}: {'; '.join(named) or 'it lists no addresses'}")
    return rows


def url_path(url):
    """The path of a file in its repository, or /PATH of another address."""
    path = unquote(urlsplit(url).path)
    in_repository = re.search(rf"/resolve/(?:{CONVERTED_REF}|[^/]+)/(.+)", path)
    return in_repository[1] if in_repository else path


def file_names(names):
    """Some of many names for a message, at most 300 characters."""
    return textwrap.shorten(", ".join(names), 300, placeholder=" ...")


def unique_file_names(urls):
    """Unique file names: a repository path with dashes, or the last component of an address.

    If two names collide, all get a number as prefix.
    """
    names = []
    for path in map(url_path, urls):
        name = PurePosixPath(path).name if path.startswith("/") else path.replace("/", "-")
        # The loader reads *.parquet except hidden files; a name has at most 255 bytes.
        stem = re.sub(r"[^A-Za-z0-9._-]", "_", name.removesuffix(".parquet"))[-200:].lstrip(".-")
        names.append(f"{stem or 'shard'}.parquet")
    if len(set(names)) < len(names):
        names = [f"{i:05d}-{name}" for i, name in enumerate(names)]
    return names


def read_footer(url):
    """Read the footer of a remote parquet file.

    Returns:
        (size in bytes or None if unknown, pyarrow FileMetaData).

    Raises:
        ValueError: the file cannot be fetched or is not parquet.
    """
    last_bytes = FOOTER_BYTES
    for _ in range(2):
        response = fetch_with_retries(url, last_bytes)
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
        for file, (size, footer) in zip(files, results_of(footers)):
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


def results_of(results):
    """Yield the results of ThreadPool.imap.

    Each wait ends after a second, because Ctrl-C just before a wait without a limit is lost.
    """
    while True:
        try:
            yield results.next(timeout=1)
        except multiprocessing.TimeoutError:
            continue
        except StopIteration:
            return


def format_range(values, unit=""):
    """Format as "smallest to largest", or as one value if all are equal."""
    show = partial(tqdm.format_sizeof, suffix=unit) if unit else str
    low, high = show(min(values)), show(max(values))
    return low if low == high else f"{low} to {high}"


class Unanswered(Exception):
    """A request without a good answer that may get one later."""

    def __init__(self, reason, wait=None):
        """wait: seconds that the server asks to wait; None: it does not say."""
        super().__init__(reason)
        self.wait = wait


def with_retries(address, attempt, pause=1, outage_wait=MAX_OUTAGE_WAIT):
    """Call attempt() again, after growing pauses, while it raises Unanswered.

    Args:
        address: for messages.
        attempt: function that makes a request.
        pause: seconds before the first repetition.
        outage_wait: seconds in all, with those of failed requests, where the server does not say
            how long to wait.

    Raises:
        ValueError: no answer within MAX_REQUESTED_WAIT or outage_wait seconds.
    """
    wait_left, outage_left = MAX_REQUESTED_WAIT, outage_wait
    while True:
        started = time.monotonic()
        try:
            return attempt()
        except Unanswered as failure:
            reason, requested = failure, failure.wait
        outage_left -= time.monotonic() - started
        if requested is None:
            wait, pause, outage_left = pause, min(2 * pause, 16), outage_left - pause
        else:
            wait, wait_left = requested, wait_left - requested
        if min(wait_left, outage_left) < 0:
            raise ValueError(
                f"{address}: {reason}; waiting {wait:.0f} s more would exceed the limit "
                f"({MAX_REQUESTED_WAIT} s if the server asks for it, else {outage_wait} s); "
                "try again later"
            )
        if wait >= 1:  # a short pause is no news
            text = f"{urlsplit(address).netloc}: {reason}; retrying in {wait:.0f} s"
            tqdm.write(text, file=sys.stderr)
        time.sleep(wait)


def fetch_with_retries(url, last_bytes=None):
    """GET with bounded retries after rate limits, server errors and network errors.

    huggingface_hub's retries are unbounded and ignore dates in Retry-After.

    Args:
        url: address; the token is sent only if it is on the hub.
        last_bytes: fetch this many bytes from the end of the file; None fetches all.

    Returns:
        httpx2 response with its content; the status may be an error that retries cannot fix.

    Raises:
        ValueError: no response, see with_retries.
    """
    wanted = f"bytes=-{last_bytes}" if last_bytes else ""

    def attempt():
        with open_response(url, wanted) as response:
            length = int(response.headers.get("content-length", 2**63))
            if last_bytes and response.status_code == 200 and length > last_bytes:
                raise ValueError(f"{url}: no range requests on this server; omit --columns")
            response.read()
            return response

    return with_retries(url, attempt)


@contextmanager
def open_response(url, wanted="", address=None):
    """GET; a context with an httpx2 response whose content is not read yet.

    Args:
        url: address; the token is sent only if it is on the hub.
        wanted: value of the header Range; "": everything.
        address: url in error messages, if url is a signed link.

    Raises:
        Unanswered: the server or the network fails, also in the context.
        ValueError: the request cannot be made.
    """
    on_hub = url.startswith(f"{constants.ENDPOINT}/")  # as in script.sh
    headers = {"Authorization": f"Bearer {token}"} if on_hub and (token := get_token()) else {}
    if wanted:
        headers |= {"Range": wanted, "Accept-Encoding": "identity"}
    try:
        # httpx2 drops the token when a redirect leads to another host.
        with get_session().stream("GET", url, headers=headers, timeout=REQUEST_TIMEOUT) as response:
            if response.status_code in RETRY_STATUS:
                wait = requested_wait(response.headers)
                raise Unanswered(f"HTTP {response.status_code}", wait)
            yield response
    except RETRY_ERRORS as error:
        raise Unanswered(str(error) or type(error).__name__) from None
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        kind = type(error).__name__  # its text may quote the header with the token
        raise ValueError(
            f"{address or url}: {kind}; check the address, HF_ENDPOINT, HF_TOKEN"
        ) from None


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


def error_text(response):
    """Meaning and remedy of an error response."""
    status, code = response.status_code, response.headers.get("x-error-code")
    return ERRORS.get(code) or ERRORS.get(status) or f"HTTP {status}; check the address"
