"""Shards that are read over the network by range requests, with nothing on disk.

    for file in list_files("hf://datasets/OWNER/NAME"):
        metadata = read_footer(file)

hf://datasets/... and http(s)://... are read over HTTP; all other URLs, such as gs://BUCKET/PATH, by
fsspec and the package that it names for them.
"""

import atexit
import bisect
import io
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from multiprocessing import TimeoutError
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import PurePosixPath
from threading import Event, Lock
from types import SimpleNamespace
from urllib.parse import quote, unquote, urljoin, urlsplit

import fsspec
import httpx2
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import constants, hf_hub_url
from huggingface_hub.utils import build_hf_headers, http_backoff
from tqdm import tqdm

from diffusers_flax.messages import first_names, one_line

HUB_URL = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?")
CONVERTED = "refs/convert/parquet"  # revision of the hub's parquet conversion
SPLIT_WORDS = {"train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval"}
PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "az": "adlfs", "abfs": "adlfs"}
# Entries of fsspec's listings that change with a file's content; the first one is taken.
VERSION_KEYS = ("ETag", "etag", "generation", "xet_hash", "mtime", "LastModified", "created")
RETRY_STATUS = (408, 429, 500, 502, 503, 504)
REQUEST_TIMEOUT = 30  # seconds without data
FIRST_PAUSE, LAST_PAUSE = 0.1, 16  # seconds between repeated requests
NUM_RETRIES = 25  # five minutes in all
NUM_REQUESTS = 16  # at the same time
NUM_FOOTER_THREADS = 8
PIECE_BYTES = 4 << 20  # of a request
MAX_GAP_BYTES = 1 << 20  # that are fetched, too, to save a request
CACHE_BYTES = 512 << 20  # of pieces that are kept in memory
READ_AHEAD_BYTES = 128 << 20  # of row groups that no batch needs yet
MAX_GROUPS_AHEAD = 16
NUM_READERS = 4  # row groups that are read at the same time


@dataclass(frozen=True)
class RemoteFile:
    """A shard at a URL; like a Path it has name, parent, open() and stat()."""

    url: str
    name: str  # as script.sh would name the file
    size: int  # bytes
    version: str  # changes with the content; "": unknown
    fetch: Callable[["RemoteFile", int, int], bytes] = field(compare=False, repr=False)
    # Set: who waits for bytes gives up.
    stopped: Event = field(default_factory=Event, compare=False, repr=False)

    def __str__(self) -> str:
        return self.url

    @property
    def parent(self) -> str:
        """The URL of the directory."""
        return self.url.rpartition("/")[0]

    def stat(self) -> SimpleNamespace:
        """Only st_size."""
        return SimpleNamespace(st_size=self.size)

    def open(self, ranges: Iterable[tuple[int, int]] = ()) -> "RangeReader":
        """Open for reading; ranges: (start, stop) that are fetched at once."""
        return RangeReader(self, ranges)


class RangeReader(io.RawIOBase):
    """A RemoteFile for pyarrow: ranges are fetched ahead in threads, other bytes when read."""

    def __init__(self, file: RemoteFile, ranges: Iterable[tuple[int, int]] = ()):
        self._file, self._position = file, 0
        self._bounds = join_ranges(ranges)
        self._pieces = [pieces().fetch(file, *bounds) for bounds in self._bounds]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}
        self._position = bases[whence] + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        position, last = self._position, self._file.size
        stop = last if size is None or size < 0 else min(position + size, last)
        parts = []
        while position < stop:
            index = bisect.bisect(self._bounds, (position, last)) - 1
            first, end = self._bounds[index] if index >= 0 else (0, 0)
            if position < end:
                parts.append(self._wait_for(self._pieces[index])[position - first : stop - first])
            else:
                following = (start for start, _ in self._bounds[index + 1 : index + 2])
                end = min([stop, *following])
                parts.append(self._file.fetch(self._file, position, end))
            position += len(parts[-1])
        self._position = position
        return b"".join(parts)

    def _wait_for(self, piece: AsyncResult) -> memoryview:
        """A piece; a ValueError if the file is stopped, as repeated requests take minutes."""
        while True:
            try:
                return memoryview(piece.get(timeout=0.5))
            except TimeoutError:
                if self._file.stopped.is_set():
                    raise ValueError(f"{self._file}: reading is stopped") from None


class Pieces:
    """Parts of files that are fetched in threads; the newest CACHE_BYTES are kept.

    So a small set is fetched once and not in each epoch. The threads of a ThreadPool do not delay
    the end of the process.
    """

    def __init__(self):
        self._threads, self._lock = ThreadPool(NUM_REQUESTS), Lock()
        atexit.register(self._threads.terminate)
        self._kept: dict[tuple[RemoteFile, int, int], AsyncResult] = {}  # oldest first
        self._num_bytes = 0

    def fetch(self, file: RemoteFile, start: int, stop: int) -> AsyncResult:
        """Begin to fetch a piece, unless it is kept."""
        key = file, start, stop
        with self._lock:
            piece = self._kept.pop(key, None)
            if piece is None:
                self._num_bytes += stop - start
            if piece is None or (piece.ready() and not piece.successful()):
                piece = self._threads.apply_async(file.fetch, key)
            self._kept[key] = piece
            while self._num_bytes > CACHE_BYTES:
                _, first, last = oldest = next(iter(self._kept))
                del self._kept[oldest]
                self._num_bytes -= last - first
        return piece


@cache
def pieces() -> Pieces:
    """The pieces of all files of this process."""
    return Pieces()


def join_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges with small gaps, and cut them into pieces of PIECE_BYTES; sorted."""
    joined = []
    for start, stop in sorted(ranges):
        if joined and start - joined[-1][1] <= MAX_GAP_BYTES:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return [
        (first, min(first + PIECE_BYTES, stop))
        for start, stop in joined
        for first in range(start, stop, PIECE_BYTES)
    ]


def chunk_ranges(metadata: pq.FileMetaData, index: int, columns: Iterable[str]) -> list:
    """(start, stop) of the column chunks of some columns, with their fields, in a row group."""
    row_group, ranges = metadata.row_group(index), []
    for chunk in map(row_group.column, range(row_group.num_columns)):
        if any(f"{chunk.path_in_schema}.".startswith(f"{name}.") for name in columns):
            start = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                start = min(start, chunk.dictionary_page_offset)
            ranges.append((start, start + chunk.total_compressed_size))
    return ranges


def is_remote(directory: str) -> bool:
    """Whether a directory is a URL."""
    return "://" in str(directory)


def list_files(url: str) -> list[RemoteFile]:
    """List the *.parquet files at a URL by name; hidden files do not count.

    Args:
        url: hf://datasets/OWNER/NAME[@REVISION] has the shards that script.py plans, or those of a
            directory with /PATH; an http(s):// directory has the files that its page links to.

    Raises:
        ValueError: it cannot be listed, or a package is missing.
    """
    if match := HUB_URL.fullmatch(url.rstrip("/")):
        files = list_hub(*match.groups())
    elif url.startswith(("http://", "https://")):
        files = list_http(url)
    elif url.startswith("hf://"):
        raise ValueError(f"{url} is no dataset on the hub; write hf://datasets/OWNER/NAME")
    else:
        files = list_fsspec(url)
    return sorted(files, key=lambda file: file.name)


def get(url: str, start: int = 0, stop: int = 0) -> httpx2.Response:
    """GET, repeated for minutes if the server or the network fails.

    Args:
        url: address; the token is sent only if it is on the hub.
        start, stop: bytes; 0, 0: all.

    Raises:
        ValueError: there is no answer, or one without the bytes.
    """
    headers = build_hf_headers() if url.startswith(f"{constants.ENDPOINT}/") else {}
    if stop:
        headers |= {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    try:
        response = http_backoff(
            "GET",
            url,
            headers=headers,
            timeout=REQUEST_TIMEOUT,
            max_retries=NUM_RETRIES,
            base_wait_time=FIRST_PAUSE,
            max_wait_time=LAST_PAUSE,
            retry_on_status_codes=RETRY_STATUS,
        )
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        # An error's text may have a signed link.
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = f"HTTP {status}" if status else type(error).__name__
        raise ValueError(f"{url}: {reason}; check the address and HF_TOKEN") from None
    status = response.status_code
    if stop and status == 200:
        raise ValueError(f"{url}: no range requests on this server; download the files")
    if stop and status == 416:  # the range begins after the end
        raise ValueError(f"{url} has changed while it was read; start again")
    if status not in (200, 206):
        reason = response.headers.get("x-error-code") or f"HTTP {status}"
        raise ValueError(f"{url}: {reason}; check the address and HF_TOKEN")
    return response


def fetch_http(file: RemoteFile, start: int, stop: int) -> bytes:
    """Read a range over HTTP."""
    response = get(file.url, start, stop)
    # The version is an ETag or a time, which ends in GMT; the hub's files are of a commit.
    header = {'"': "etag", "T": "last-modified"}.get(file.version[-1:], "")
    sent = response.headers.get("content-range", "").lower()
    is_other = response.headers.get(header, file.version) != file.version
    if is_other or sent != f"bytes {start}-{stop - 1}/{file.size}":
        raise ValueError(f"{file.url} has changed while it was read ({sent}); start again")
    return response.content


def list_hub(dataset: str, revision: str | None, folder: str | None) -> list[RemoteFile]:
    """RemoteFiles of a dataset's commit; arguments are parts of the URL, see list_files."""
    shards, folder = [], folder and f"{folder}/"
    if not (revision or folder):
        commit, files = list_repository(dataset, CONVERTED)
        shards = train_shards(dataset, files, split_of_converted)
    if not shards:
        revision = unquote(revision or constants.DEFAULT_REVISION)
        commit, files = list_repository(dataset, revision)
        if folder:
            shards = [path for path in files if path.startswith(folder) and is_shard(path)]
        else:
            shards = train_shards(dataset, files, split_of_original)
    return [
        RemoteFile(
            hf_hub_url(dataset, path, repo_type="dataset", revision=commit),
            name_of(path),
            *files[path],
            fetch_http,
        )
        for path in shards
    ]


def name_of(path: str) -> str:
    """The name of a dataset's file in a directory, as script.py's plan has it."""
    stem = path.replace("/", "-").removesuffix(".parquet")
    return re.sub(r"[^A-Za-z0-9._-]", "_", stem)[-200:].lstrip(".-") + ".parquet"


def list_repository(dataset: str, revision: str) -> tuple[str, dict[str, tuple[int, str]]]:
    """The commit of a revision, and {path: (size, SHA-256 or "")}; no files without a conversion.

    A commit does not change while a run reads it.
    """
    url = f"{constants.ENDPOINT}/api/datasets/{dataset}/revision/{quote(revision, safe='')}"
    try:
        info = get(f"{url}?blobs=true").json()
    except ValueError as error:
        if revision == CONVERTED and "RevisionNotFound" in str(error):
            return "", {}
        raise
    files = {
        file["rfilename"]: (file["size"], (file.get("lfs") or {}).get("sha256", ""))
        for file in info["siblings"]
    }
    return info["sha"], dict(sorted(files.items()))


def train_shards(dataset: str, files: Iterable[str], split_of: Callable) -> list[str]:
    """The paths of the train split of the only config, or of the config "default"; [] without.

    Args:
        dataset: for the error.
        files: paths.
        split_of: split_of_converted or split_of_original.
    """
    configs = {}
    for path in filter(is_shard, files):
        config, split = split_of(path)
        configs.setdefault(config, {}).setdefault(split, []).append(path)
    config = next(iter(configs), "") if len(configs) < 2 else "default"
    if configs and config not in configs:
        raise ValueError(
            f"{dataset} has the configurations {first_names(sorted(configs))}; name the directory "
            f"of one: hf://datasets/{dataset}/PATH"
        )
    splits = configs.get(config, {})
    return [] if "partial-train" in splits else splits.get("train", [])


def split_of_converted(path: str) -> tuple[str, str]:
    """(config, split) of a file in the hub's conversion; "partial-SPLIT" if it is truncated.

    Source: dataset-viewer, libcommon/parquet_utils.py: CONFIG/SPLIT/0000.parquet, SPLIT-part1 for
    more than 10000 files; CONFIG/partial-SPLIT/ or CONFIG/SPLIT/partial/ if truncated.
    """
    config, _, inside = path.partition("/")
    folder = re.sub(r"-part\d+$", "", inside.partition("/")[0])
    return config, ("partial-" if "/partial/" in path else "") + folder


def split_of_original(path: str) -> tuple[str, str]:
    """(config, split) of a file in a dataset's repository.

    The split is the last directory (SPLIT/x.parquet), else a word of the name (train-x.parquet),
    else the prefix of the number (SPLIT-00000-of-00262.parquet), else train. The config consists of
    the remaining directories except "data", else it is "default".
    """
    *folders, name = path.split("/")
    numbered = re.fullmatch(r"(.+)-\d{5,}-of-\d{5,}(-[0-9a-f]+)?\.parquet", name)
    if folders and folders[-1] in SPLIT_WORDS:
        split = folders.pop()
    elif words := [word for word in re.split(r"[^A-Za-z]+", name) if word in SPLIT_WORDS]:
        split = words[-1]
    else:
        split = numbered[1] if numbered else "train"
    return "/".join(folder for folder in folders if folder != "data") or "default", split


def is_shard(path: str) -> bool:
    """Whether a path is a shard of its directory."""
    return path.endswith(".parquet") and not f"/{path}".rpartition("/")[2].startswith(".")


def list_http(url: str) -> list[RemoteFile]:
    """RemoteFiles of the links on a page, or of one file."""
    addresses = [url]
    if not is_shard(urlsplit(url).path):
        url = f"{url.rstrip('/')}/"
        links = re.findall(r'href\s*=\s*["\']?([^"\'\s>]+)', get(url).text)
        addresses = dict.fromkeys(urljoin(url, link) for link in links)
        addresses = [x for x in addresses if x.startswith(url) and is_shard(urlsplit(x).path)]

    def describe(address: str) -> RemoteFile:
        headers = get(address, 0, 1).headers
        size = int(headers["content-range"].rpartition("/")[2])
        version = headers.get("etag") or headers.get("last-modified", "")
        name = PurePosixPath(unquote(urlsplit(address).path)).name
        return RemoteFile(address, name, size, version, fetch_http)

    return in_threads(describe, addresses)


def in_threads(function: Callable, items: Iterable) -> list:
    """The results for all items, with a progress bar; exits at once on Ctrl-C."""
    items, results = list(items), []
    with ThreadPool(NUM_FOOTER_THREADS) as pool, tqdm(total=len(items), delay=1) as bar:
        running = [pool.apply_async(function, (item,)) for item in items]
        for result in running:
            while not result.ready():  # Ctrl-C just before a wait without a limit is lost
                result.wait(1)
            results.append(result.get())
            bar.update()
    return results


def list_fsspec(url: str) -> list[RemoteFile]:
    """RemoteFiles of a directory on any of fsspec's file systems, which repeat requests."""
    protocol = urlsplit(url).scheme
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        remedy = f"; pip install {PACKAGES[protocol]}" if protocol in PACKAGES else ""
        raise ValueError(f"{url}: {one_line(error, 200)}{remedy}") from error
    try:
        entries = fs.ls(root, detail=True)
    except Exception as error:  # of any library
        raise ValueError(f"{url}: {one_line(error, 200)}; check the address and access") from error
    return [
        RemoteFile(
            fs.unstrip_protocol(info["name"]),
            PurePosixPath(info["name"]).name,
            info["size"],
            str(next((info[key] for key in VERSION_KEYS if info.get(key)), "")),
            partial(fetch_fsspec, fs, info["name"]),
        )
        for info in entries
        if info["type"] == "file" and is_shard(info["name"])
    ]


def fetch_fsspec(fs, path: str, file: RemoteFile, start: int, stop: int) -> bytes:
    """Read a range by fsspec."""
    try:
        data = fs.cat_file(path, start=start, end=stop)
    except Exception as error:  # of any library
        raise ValueError(f"{file}: {one_line(error, 200)}; check the address and access") from error
    if len(data) != stop - start:
        raise ValueError(f"{file} has changed while it was read; start again")
    return data


@lru_cache(maxsize=10_000)
def read_footer(file: RemoteFile) -> pq.FileMetaData:
    """Read a shard's footer, once in a process.

    Raises:
        ValueError: it cannot be fetched or is not parquet.
    """
    try:
        return pq.read_metadata(file.open())
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{file} is not a parquet file, or is damaged ({one_line(error, 200)})"
        ) from error


def open_shards(url: str) -> list[tuple[RemoteFile, pq.FileMetaData]]:
    """List the shards at a URL and read their footers, in threads.

    Raises:
        ValueError: see list_files and read_footer; there are no shards.
    """
    files = list_files(url)
    if not files:
        raise ValueError(f"{url} contains no *.parquet file; name the directory of the shards")
    shards = list(zip(files, in_threads(read_footer, files)))
    print(f"streams {len(files)} shards from {files[0].parent}")  # for the hub with the commit
    return shards


def versions_of(files: Iterable) -> dict[str, str]:
    """{name: version} of the RemoteFiles among files, for state_dict."""
    return {
        file.name: file.version for file in files if isinstance(file, RemoteFile) and file.version
    }


def changed_files(saved: dict[str, str] | None, current: dict[str, str] | None) -> list[str]:
    """A text for the shards whose content has changed, [] without any.

    Args:
        saved, current: versions_of; a shard that only one of them has is not compared.
    """
    current = current or {}
    changed = [name for name, old in (saved or {}).items() if current.get(name, old) != old]
    if not changed:
        return []
    return [
        f"the content of {first_names(changed)} has changed; hf://datasets/OWNER/NAME@COMMIT names "
        "the files of a commit"
    ]
