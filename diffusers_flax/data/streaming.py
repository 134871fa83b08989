"""Shards that are read over the network by range requests, with nothing on disk.

    for file in list_files("hf://datasets/OWNER/NAME"):
        metadata = read_footer(file)

hf://datasets/... and http(s)://... are read over HTTP; all other URLs, such as gs://BUCKET/PATH, by
fsspec and the package that it names for them.
"""

import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import PurePosixPath
from threading import Event
from types import SimpleNamespace
from urllib.parse import unquote, urljoin, urlsplit

import fsspec
import httpx2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import RevisionNotFoundError
from huggingface_hub.utils import build_hf_headers, get_session
from tqdm import tqdm

from diffusers_flax.messages import first_names, one_line

HUB_URL = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?")
CONVERTED = "refs/convert/parquet"  # revision of the hub's parquet conversion
SPLIT_WORDS = {"train", "training", "validation", "valid", "val", "dev", "test", "testing", "eval"}
RETRY_STATUS = (408, 429, 500, 502, 503, 504)
RETRY_ERRORS = (httpx2.TimeoutException, httpx2.NetworkError, httpx2.RemoteProtocolError)
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
    stopped: Event = field(compare=False, repr=False)  # of all files: set, nothing is repeated

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
            data = np.frombuffer(self.fetch(start, stop), np.uint8)
            if len(data) != stop - start:
                raise ValueError(f"{self} has changed while it was read; start again")
            content[start:stop] = data

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
    if match := HUB_URL.fullmatch(url.rstrip("/")):
        files = list_hub(*match.groups())
    elif url.startswith(("http://", "https://")):
        files = list_http(url)
    elif url.startswith("hf://"):
        raise ValueError(f"{url} is no dataset on the hub; write hf://datasets/OWNER/NAME")
    else:
        files = list_fsspec(url)
    if not files:
        raise ValueError(f"{url} contains no *.parquet file; name the directory of the shards")
    return sorted(files, key=lambda file: file.name)


def get(url: str, start: int = 0, stop: int = 0, stopped: Event | None = None) -> httpx2.Response:
    """GET, repeated for minutes if the server or the network fails.

    Args:
        url: address; the token is sent only if it is on the hub.
        start, stop: bytes; 0, 0: all.
        stopped: if it is set, nothing is repeated.

    Raises:
        ValueError: there is no answer, or one without the bytes.
    """
    headers = build_hf_headers() if url.startswith(f"{constants.ENDPOINT}/") else {}
    if stop:
        headers |= {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    stopped, pause = stopped or Event(), FIRST_PAUSE
    for _ in range(NUM_RETRIES + 1):
        try:
            response = get_session().get(
                url, headers=headers, timeout=REQUEST_TIMEOUT, follow_redirects=True
            )
            reason = f"HTTP {response.status_code}"
            if response.status_code not in RETRY_STATUS:
                break
        except (httpx2.HTTPError, OSError) as error:  # its text may have a signed link
            reason = type(error).__name__
            if not isinstance(error, RETRY_ERRORS):
                break
        if stopped.wait(pause):
            break
        pause = min(2 * pause, LAST_PAUSE)
    if reason == "HTTP 200" and stop:
        raise ValueError(f"{url}: no range requests on this server; download the files")
    if reason not in ("HTTP 200", "HTTP 206"):
        raise ValueError(f"{url}: {reason}; check the address and HF_TOKEN")
    return response


def http_file(url: str, name: str, size: int, stopped: Event) -> RemoteFile:
    """A RemoteFile that is fetched over HTTP."""

    def fetch(start, stop):
        return get(url, start, stop, stopped).content

    return RemoteFile(url, name, size, fetch, stopped)


def list_hub(dataset: str, revision: str | None, folder: str | None) -> list[RemoteFile]:
    """RemoteFiles of a dataset's commit; arguments are parts of the URL, see list_files."""
    shards = []
    try:
        if not (revision or folder):
            try:
                commit, sizes = list_repository(dataset, CONVERTED)
                shards = train_shards(dataset, sizes, split_of_converted)
            except RevisionNotFoundError:
                pass
        if not shards:
            commit, sizes = list_repository(dataset, revision and unquote(revision))
            if folder:
                shards = [path for path in sizes if path.startswith(f"{folder}/")]
            else:
                shards = train_shards(dataset, sizes, split_of_original)
    except (httpx2.HTTPError, OSError) as error:
        reason = one_line(error, 200)
        raise ValueError(f"{dataset}: {reason}; check the address and HF_TOKEN") from error
    stopped = Event()
    return [
        http_file(
            hf_hub_url(dataset, path, repo_type="dataset", revision=commit),
            name_of(path),
            sizes[path],
            stopped,
        )
        for path in shards
    ]


def name_of(path: str) -> str:
    """The name of a dataset's file in a directory, as script.py's plan has it."""
    stem = path.replace("/", "-").removesuffix(".parquet")
    return re.sub(r"[^A-Za-z0-9._-]", "_", stem)[-200:].lstrip(".-") + ".parquet"


def list_repository(dataset: str, revision: str | None) -> tuple[str, dict[str, int]]:
    """The commit of a revision, which does not change while a run reads it, and {shard: size}."""
    info = HfApi().dataset_info(dataset, revision=revision or "main", files_metadata=True)
    files = sorted((file.rfilename, file.size) for file in info.siblings)
    return info.sha, {path: size for path, size in files if is_shard(path)}


def train_shards(dataset: str, paths: Iterable[str], split_of: Callable) -> list[str]:
    """The paths of the train split of the only config, or of the config "default"; [] without.

    Args:
        dataset: for the error.
        paths: of all shards.
        split_of: split_of_converted or split_of_original.
    """
    configs = {}
    for path in paths:
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
    addresses, stopped = [url], Event()
    if not is_shard(urlsplit(url).path):
        url = f"{url.rstrip('/')}/"
        links = re.findall(r'href\s*=\s*["\']?([^"\'\s>]+)', get(url).text)
        addresses = dict.fromkeys(urljoin(url, link) for link in links)
        addresses = [x for x in addresses if x.startswith(url) and is_shard(urlsplit(x).path)]

    def describe(address: str) -> RemoteFile:
        size = get(address, 0, 1, stopped).headers["content-range"].rpartition("/")[2]
        name = PurePosixPath(unquote(urlsplit(address).path)).name
        return http_file(address, name, int(size), stopped)

    return in_threads(describe, addresses, stopped)


def in_threads(function: Callable, items: list, stopped: Event) -> list:
    """The results for all items, with a progress bar; after an error nothing is repeated."""
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        try:
            return list(tqdm(pool.map(function, items), total=len(items), delay=1))
        except BaseException:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise


def list_fsspec(url: str) -> list[RemoteFile]:
    """RemoteFiles of a directory on any of fsspec's file systems, which repeat requests."""
    try:
        fs, root = fsspec.core.url_to_fs(url)
        entries = fs.ls(root, detail=True)
    except Exception as error:  # of any library
        raise ValueError(f"{url}: {one_line(error, 200)}; check the address and access") from error

    def fetch(path: str, start: int, stop: int) -> bytes:
        try:
            return fs.cat_file(path, start=start, end=stop)
        except Exception as error:  # of any library
            raise ValueError(f"{path}: {one_line(error, 200)}; check the access") from error

    stopped = Event()
    return [
        RemoteFile(
            fs.unstrip_protocol(info["name"]),
            PurePosixPath(info["name"]).name,
            info["size"],
            partial(fetch, info["name"]),
            stopped,
        )
        for info in entries
        if info["type"] == "file" and is_shard(info["name"])
    ]


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
    shards = list(zip(files, in_threads(read_footer, files, files[0].stopped)))
    print(f"streams {len(files)} shards from {files[0].parent}")  # for the hub with the commit
    return shards
