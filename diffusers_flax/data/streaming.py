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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from multiprocessing import TimeoutError
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import PurePosixPath
from threading import Event, Lock
from types import SimpleNamespace
from urllib.parse import quote, unquote, urljoin, urlsplit

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import constants, hf_hub_url
from tqdm import tqdm

from diffusers_flax.data.remote_shards import (
    NUM_FOOTER_THREADS,
    Unanswered,
    error_text,
    fetch_with_retries,
    list_dataset_shards,
    list_tree,
    manifest_row,
    open_response,
    results_of,
    unique_file_names,
    with_retries,
)
from diffusers_flax.messages import first_names, one_line

HUB_URL = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?")
PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "az": "adlfs", "abfs": "adlfs"}
# Entries of fsspec's listings that change with a file's content; the first one is taken.
VERSION_KEYS = ("ETag", "etag", "generation", "xet_hash", "mtime", "LastModified", "created")
FIRST_PAUSE = 0.1  # seconds before a failed request is repeated
MAX_OUTAGE_WAIT = 300  # seconds in all, where the server does not say how long to wait
NUM_REQUESTS = 16  # at the same time
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
    # Where the URL redirects to, once that is known.
    links: list[str] = field(default_factory=list, compare=False, repr=False)
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

    def open(self, mode: str = "rb", ranges: Iterable[tuple[int, int]] = ()) -> "RangeReader":
        """Open for reading; ranges: (start, stop) that are fetched at once."""
        return RangeReader(self, ranges)

    def read_range(self, start: int, stop: int) -> bytes:
        """Read bytes from start to stop, repeating requests that fail.

        Raises:
            ValueError: the server fails for minutes or refuses, or the file has changed.
        """

        def attempt():
            try:
                data = self.fetch(self, start, stop)
            except OSError as error:  # HF_HUB_OFFLINE
                raise ValueError(f"{self.url}: {one_line(error, 200)}") from error
            if len(data) != stop - start:
                raise Unanswered(f"{len(data)} of {stop - start} bytes")
            return data

        return with_retries(self.url, attempt, FIRST_PAUSE, MAX_OUTAGE_WAIT)


class RangeReader(io.RawIOBase):
    """A RemoteFile for pyarrow: ranges are fetched ahead in threads, other bytes when read."""

    def __init__(self, file: RemoteFile, ranges: Iterable[tuple[int, int]] = ()):
        self._file, self._position = file, 0
        self._bounds = join_ranges(ranges)
        self._starts = [start for start, _ in self._bounds]
        self._pieces = [pieces().fetch(file, *bounds) for bounds in self._bounds]

    def readable(self) -> bool:
        """As a file."""
        return True

    def seekable(self) -> bool:
        """As a file."""
        return True

    def tell(self) -> int:
        """As a file."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As a file."""
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}
        self._position = bases[whence] + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        """As a file."""
        position, last = self._position, self._file.size
        stop = last if size is None or size < 0 else min(self._position + size, last)
        parts = []
        while position < stop:
            index = bisect.bisect(self._starts, position) - 1
            if index >= 0 and position < self._bounds[index][1]:
                first, end = self._bounds[index]
                piece = self._wait_for(self._pieces[index])
                data = memoryview(piece)[position - first : stop - first]
            else:
                end = min([stop, *self._starts[index + 1 : index + 2]])
                data = self._file.read_range(position, end)
            parts.append(data)
            position += len(data)
        self._position = position
        return b"".join(parts)

    def _wait_for(self, piece: AsyncResult) -> bytes:
        """A piece; a ValueError if the file is stopped, as repeated requests take minutes."""
        while True:
            try:
                return piece.get(timeout=0.5)
            except TimeoutError:
                if self._file.stopped.is_set():
                    raise ValueError(f"{self._file}: reading is stopped") from None

    def close(self) -> None:
        """As a file."""
        self._pieces, self._bounds, self._starts = [], [], []
        super().close()


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
                piece = self._threads.apply_async(file.read_range, (start, stop))
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


def list_hub(dataset: str, revision: str | None, folder: str | None) -> list[RemoteFile]:
    """RemoteFiles of a dataset's commit; arguments are parts of the URL, see list_files."""
    revision = revision and unquote(revision)
    if folder:
        revision = revision or constants.DEFAULT_REVISION
        rows = [
            manifest_row(
                hf_hub_url(dataset, entry["path"], repo_type="dataset", revision=revision),
                entry["size"],
                (entry.get("lfs") or entry).get("oid"),
            )
            for entry in list_tree(dataset, revision)
            if f"{entry['path']}/".startswith(f"{folder}/") and is_shard(entry["path"])
        ]
    else:
        rows, source = list_dataset_shards(dataset, None, "train", revision)
        revision = source.rpartition("(")[2].rstrip(")")
    # A commit does not change while a run reads it.
    in_url = quote(revision, safe="")
    response = fetch_with_retries(f"{constants.ENDPOINT}/api/datasets/{dataset}/revision/{in_url}")
    if response.status_code != 200:
        raise ValueError(f"{dataset}: {error_text(response)}")
    commit = response.json()["sha"]
    names = unique_file_names([row["url"] for row in rows])
    return [
        RemoteFile(
            row["url"].replace(f"/resolve/{in_url}/", f"/resolve/{commit}/", 1),
            name,
            row["size"],
            row["sha256"] or "",
            fetch_http,
        )
        for row, name in zip(rows, names)
    ]


def is_shard(path: str) -> bool:
    """Whether a path is a shard of its directory."""
    name = PurePosixPath(path).name
    return name.endswith(".parquet") and not name.startswith(".")


def list_http(url: str) -> list[RemoteFile]:
    """RemoteFiles of the links on a page, or of one file."""
    addresses = [url]
    if not is_shard(urlsplit(url).path):
        url = f"{url.rstrip('/')}/"
        response = fetch_with_retries(url)
        if response.status_code != 200:
            raise ValueError(f"{url}: HTTP {response.status_code}; check the address")
        links = re.findall(r'href\s*=\s*["\']?([^"\'\s>]+)', response.text)
        addresses = dict.fromkeys(urljoin(url, link) for link in links)
        addresses = [x for x in addresses if x.startswith(url) and is_shard(urlsplit(x).path)]

    def describe(address):
        def attempt():
            with open_range(address, [], 0, 1) as response:
                size = response.headers.get("content-range", "").rpartition("/")[2]
                if not size.isdecimal():
                    raise ValueError(f"{address}: the server names no size; download the files")
                headers = response.headers
                return int(size), headers.get("etag") or headers.get("last-modified", "")

        name = PurePosixPath(unquote(urlsplit(address).path)).name
        return RemoteFile(address, name, *with_retries(address, attempt), fetch_http)

    with ThreadPool(NUM_FOOTER_THREADS) as pool:  # exits at once on Ctrl-C
        return list(results_of(pool.imap(describe, addresses)))


def list_fsspec(url: str) -> list[RemoteFile]:
    """RemoteFiles of a directory on any of fsspec's file systems."""
    protocol = urlsplit(url).scheme
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        remedy = f"; pip install {PACKAGES[protocol]}" if protocol in PACKAGES else ""
        raise ValueError(f"{url}: {one_line(error, 200)}{remedy}") from error

    def attempt():
        with fsspec_errors(url):
            return fs.ls(root, detail=True)

    return [
        RemoteFile(
            fs.unstrip_protocol(info["name"]),
            PurePosixPath(info["name"]).name,
            info["size"],
            str(next((info[key] for key in VERSION_KEYS if info.get(key)), "")),
            partial(fetch_fsspec, fs, info["name"]),
        )
        for info in with_retries(url, attempt)
        if info["type"] == "file" and is_shard(info["name"])
    ]


@contextmanager
def fsspec_errors(url: str) -> Iterator[None]:
    """A context in which a file system's errors become Unanswered, or a ValueError if permanent."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error, 200)}"
        status = getattr(error, "status", None) or getattr(error, "code", None)  # aiohttp, gcsfs
        if str(status).startswith("4") and str(status) not in ("408", "429"):
            kinds = (Exception,)
        else:
            kinds = (FileNotFoundError, PermissionError, ValueError, TypeError, NotImplementedError)
        if isinstance(error, kinds):
            raise ValueError(f"{url}: {reason}; check the address and access") from error
        raise Unanswered(reason) from error


def fetch_fsspec(fs, path: str, file: RemoteFile, start: int, stop: int) -> bytes:
    """Read a range by fsspec."""
    with fsspec_errors(file.url):
        return fs.cat_file(path, start=start, end=stop)


@contextmanager
def open_range(url: str, links: list[str], start: int, stop: int) -> Iterator:
    """A context with the response that has bytes start to stop of a file.

    Args:
        url: of the file; a hub redirects to a link that expires.
        links: the link to use instead of url, if one is known; changed in place.
        start, stop: in bytes.

    Raises:
        Unanswered, ValueError: see open_response.
    """
    link = next(iter(links), url)
    with open_response(link, f"bytes={start}-{stop - 1}", url) as response:
        status, is_redirected = response.status_code, str(response.url) != url
        if status != 206:
            links.clear()
            if link != url:
                raise Unanswered(f"HTTP {status}", wait=0)
            if is_redirected and status == 403:
                raise Unanswered(f"HTTP {status}")
            refuse_status(url, status)
        yield response
        if is_redirected:
            links[:] = [str(response.url)]


def fetch_http(file: RemoteFile, start: int, stop: int) -> bytes:
    """Read a range over HTTP."""
    with open_range(file.url, file.links, start, stop) as response:
        total = response.headers.get("content-range", "").rpartition("/")[2]
        has_changed = total.isdecimal() and int(total) != file.size
        # An ETag or a time, which ends in GMT; the hub's files are of a commit.
        header = {'"': "etag", "T": "last-modified"}.get(file.version[-1:])
        if header:
            has_changed |= response.headers.get(header, file.version) != file.version
        if has_changed:
            raise ValueError(f"{file.url} has changed while it was read; start again")
        sent = response.headers.get("content-range", "").lower()
        if not sent.startswith(f"bytes {start}-{stop - 1}/"):
            raise Unanswered(f"{sent or 'no Content-Range'} instead of bytes {start}-{stop - 1}")
        return response.read()


def refuse_status(url: str, status: int) -> None:
    """Raise the ValueError for an answer without the range."""
    if status == 200:
        raise ValueError(f"{url}: no range requests on this server; download the files")
    if status == 416:  # the range begins after the end
        raise ValueError(f"{url} has changed while it was read; start again")
    remedy = "check the address"
    if url.startswith(f"{constants.ENDPOINT}/"):
        remedy = error_text(SimpleNamespace(status_code=status, headers={}))
    raise ValueError(f"{url}: HTTP {status}; {remedy}")


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
    bar = tqdm(desc="footers", total=len(files), unit="shard", delay=1)
    with bar, ThreadPool(NUM_FOOTER_THREADS) as pool:  # exits at once on Ctrl-C
        shards = []
        for file, metadata in zip(files, results_of(pool.imap(read_footer, files))):
            shards.append((file, metadata))
            bar.update()
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
