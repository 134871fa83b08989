"""Shards that are read over the network by range requests, with nothing on disk.

    for file, metadata in open_shards("hf://datasets/OWNER/NAME"): ...

hf://datasets/... and http(s)://... are read over HTTP; all other URLs, such as gs://BUCKET/PATH, by
fsspec and the package that it names for them.
"""

import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import PurePosixPath
from types import SimpleNamespace
from urllib.parse import unquote, urljoin, urlsplit

import fsspec
import httpx2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import RevisionNotFoundError
from huggingface_hub.utils import build_hf_headers, http_backoff
from tqdm.contrib.concurrent import thread_map

from diffusers_flax.messages import first_names, one_line

HUB_URL = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?")
CONVERTED = "refs/convert/parquet"  # revision of the hub's parquet conversion
OTHER_SPLITS = re.compile(r"(?<![A-Za-z])(validation|valid|val|dev|test|testing|eval)(?![A-Za-z])")
NOT_CONFIGS = re.compile(r"data|train(ing)?(-part\d+)?")  # folders of the train split
RETRY_ERRORS = (
    *(httpx2.TimeoutException, httpx2.NetworkError, httpx2.RemoteProtocolError),
    RuntimeError,  # http_backoff closes the session after an error, also for other threads
)
REQUEST_TIMEOUT = 30  # seconds without data
FIRST_PAUSE, LAST_PAUSE = 0.1, 16  # seconds between repeated requests
NUM_RETRIES = 25  # five minutes in all
NUM_REQUESTS = 16  # at the same time
PIECE_BYTES = 4 << 20  # of a request
FOOTER_BYTES = 64 << 10  # that are fetched first


@dataclass(frozen=True)
class RemoteFile:
    """A shard at a URL; like a Path it has name, parent and stat()."""

    url: str
    name: str  # as script.sh would name the file
    size: int  # bytes
    fetch: Callable[[int, int], bytes] = field(compare=False, repr=False)  # of (start, stop)

    def __str__(self) -> str:
        return self.url

    @property
    def parent(self) -> str:
        """The URL of the directory."""
        return self.url.rpartition("/")[0]

    def stat(self) -> SimpleNamespace:
        """Only st_size."""
        return SimpleNamespace(st_size=self.size)

    def open(self, ranges: Iterable[tuple[int, int]]) -> pa.BufferReader:
        """Fetch ranges (start, stop); the other bytes are undefined, and take no memory."""
        content = np.empty(self.size, np.uint8)

        def fill(start, stop):
            content[start:stop] = np.frombuffer(self.fetch(start, stop), np.uint8)

        pieces = [
            (first, min(first + PIECE_BYTES, stop))
            for start, stop in ranges
            for first in range(start, stop, PIECE_BYTES)
        ]
        list(requests().map(fill, *zip(*pieces)))
        return pa.BufferReader(content)


@cache
def requests() -> ThreadPoolExecutor:
    """The threads that fetch ranges."""
    return ThreadPoolExecutor(NUM_REQUESTS, "request")


def is_remote(directory: str) -> bool:
    """Whether a directory is a URL."""
    return "://" in str(directory)


def list_files(url: str) -> list[RemoteFile]:
    """List the *.parquet files at a URL by name; hidden files do not count.

    Args:
        url: hf://datasets/OWNER/NAME[@REVISION] has the shards that script.py plans, or those of a
            directory with /PATH; an http(s):// directory has the files that its page links to.

    Raises:
        ValueError: it cannot be listed, a package is missing, or there is none.
    """
    try:
        if match := HUB_URL.fullmatch(url.rstrip("/")):
            files = list_hub(*match.groups())
        elif url.startswith(("http://", "https://")):
            files = list_http(f"{url.rstrip('/')}/")
        elif url.startswith("hf://"):
            raise ValueError("no dataset on the hub; write hf://datasets/OWNER/NAME")
        else:
            files = list_fsspec(url)
    except Exception as error:  # of any library
        raise ValueError(f"{url}: {one_line(error, 200)}; check the address and access") from error
    if not files:
        raise ValueError(f"{url} contains no *.parquet file; name the directory of the shards")
    return sorted(files, key=lambda file: file.name)


def get(url: str, start: int = 0, stop: int = 0) -> httpx2.Response:
    """GET of all bytes, or of start to stop, repeated for minutes if the server or network fails.

    The token is sent only to the hub.

    Raises:
        ValueError: there is no answer, or one without the bytes.
    """
    headers = build_hf_headers() if url.startswith(f"{constants.ENDPOINT}/") else {}
    if stop:
        headers |= {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    try:
        response = http_backoff(
            *("GET", url),
            max_retries=NUM_RETRIES,
            base_wait_time=FIRST_PAUSE,
            max_wait_time=LAST_PAUSE,
            retry_on_exceptions=RETRY_ERRORS,
            headers=headers,
            timeout=REQUEST_TIMEOUT,
            follow_redirects=True,
        )
    except (httpx2.HTTPError, OSError, RuntimeError) as error:  # its text may have a signed link
        response = getattr(error, "response", None)
        if response is None:
            raise ValueError(f"{url}: {type(error).__name__}; check the address") from error
    if response.status_code != (206 if stop else 200):
        need = "HTTP 206 of a range request" if stop else "HTTP 200"
        raise ValueError(f"{url}: HTTP {response.status_code}, not {need}; check HF_TOKEN")
    return response


def http_file(url: str, name: str, size: int) -> RemoteFile:
    """A RemoteFile that is fetched over HTTP."""
    return RemoteFile(url, name, size, lambda start, stop: get(url, start, stop).content)


def list_hub(dataset: str, revision: str | None, folder: str | None) -> list[RemoteFile]:
    """RemoteFiles of a dataset's commit; arguments are parts of the URL, see list_files."""
    shards = []
    if not (revision or folder):
        try:
            commit, sizes = list_repository(dataset, CONVERTED)
            if not any("partial" in path for path in sizes):  # the hub converts only the beginning
                shards = train_shards(dataset, sizes)
        except RevisionNotFoundError:
            pass
    if not shards:
        commit, sizes = list_repository(dataset, unquote(revision or "main"))
        if folder:
            shards = [path for path in sizes if path.startswith(f"{folder}/")]
        else:
            shards = train_shards(dataset, sizes)
    urls = [hf_hub_url(dataset, path, repo_type="dataset", revision=commit) for path in shards]
    return [http_file(url, name_of(path), sizes[path]) for url, path in zip(urls, shards)]


def name_of(path: str) -> str:
    """The name of a dataset's file in a directory, as script.py's plan has it."""
    stem = path.replace("/", "-").removesuffix(".parquet")
    return re.sub(r"[^A-Za-z0-9._-]", "_", stem)[-200:].lstrip(".-") + ".parquet"


def list_repository(dataset: str, revision: str) -> tuple[str, dict[str, int]]:
    """The commit of a revision, which does not change while a run reads it, and {shard: size}."""
    info = HfApi().dataset_info(dataset, revision=revision, files_metadata=True)
    files = sorted((file.rfilename, file.size) for file in info.siblings)
    return info.sha, {path: size for path, size in files if is_shard(path)}


def train_shards(dataset: str, paths: Iterable[str]) -> list[str]:
    """The paths of the train split of the only config, or of the config "default"."""
    configs = {}
    for path in paths:
        if not OTHER_SPLITS.search(path):
            folders = [x for x in path.split("/")[:-1] if not NOT_CONFIGS.fullmatch(x)]
            configs.setdefault("/".join(folders) or "default", []).append(path)
    if len(configs) > 1 and "default" not in configs:
        raise ValueError(
            f"it has the configurations {first_names(sorted(configs))}; name the directory of one: "
            f"hf://datasets/{dataset}/PATH"
        )
    return configs.get("default") or next(iter(configs.values()), [])


def is_shard(path: str) -> bool:
    """Whether a path is a shard of its directory."""
    return path.endswith(".parquet") and not f"/{path}".rpartition("/")[2].startswith(".")


def list_http(url: str) -> list[RemoteFile]:
    """RemoteFiles of the links on a page."""
    links = re.findall(r'href\s*=\s*["\']?([^"\'\s>]+)', get(url).text)
    addresses = dict.fromkeys(urljoin(url, link) for link in links)
    addresses = [x for x in addresses if x.startswith(url) and is_shard(urlsplit(x).path)]

    def describe(address: str) -> RemoteFile:
        size = get(address, 0, 1).headers["content-range"].rpartition("/")[2]
        return http_file(address, unquote(urlsplit(address).path.rpartition("/")[2]), int(size))

    return thread_map(describe, addresses, max_workers=NUM_REQUESTS, delay=1)


def list_fsspec(url: str) -> list[RemoteFile]:
    """RemoteFiles of a directory on any of fsspec's file systems, which repeat requests."""
    fs, root = fsspec.core.url_to_fs(url)

    def fetch_from(path: str, start: int, stop: int) -> bytes:
        try:
            return fs.cat_file(path, start=start, end=stop)
        except Exception as error:  # of any library
            raise ValueError(f"{path}: {one_line(error, 200)}; check the access") from error

    files = []
    for info in fs.ls(root, detail=True):
        if info["type"] == "file" and is_shard(path := info["name"]):
            address, name = fs.unstrip_protocol(path), PurePosixPath(path).name
            files.append(RemoteFile(address, name, info["size"], partial(fetch_from, path)))
    return files


def read_footer(file: RemoteFile) -> pq.FileMetaData:
    """Read a shard's footer.

    Raises:
        ValueError: it cannot be fetched or is not parquet.
    """
    # The file ends with the footer, its length in four bytes and a mark of four bytes.
    footer = file.fetch(max(0, file.size - FOOTER_BYTES), file.size)
    num_bytes = int.from_bytes(footer[-8:-4], "little") + 8
    if len(footer) < num_bytes <= file.size:
        footer = file.fetch(file.size - num_bytes, file.size)
    try:
        return pq.read_metadata(pa.BufferReader(footer))
    except pa.ArrowException as error:
        raise ValueError(f"{file} is not a parquet file ({one_line(error, 200)})") from error


def open_shards(url: str) -> list[tuple[RemoteFile, pq.FileMetaData]]:
    """List the shards at a URL and read their footers, in threads.

    Raises:
        ValueError: see list_files and read_footer.
    """
    files = list_files(url)
    footers = thread_map(read_footer, files, max_workers=NUM_REQUESTS, delay=1)
    print(f"streams {len(files)} shards from {files[0].parent}")  # for the hub with the commit
    return list(zip(files, footers))
