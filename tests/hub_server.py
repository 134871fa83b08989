"""A small stand-in for the Hugging Face hub, its CDN and a TPU VM's metadata server, over HTTP."""

import contextlib
import hashlib
import json
from collections import defaultdict
from urllib.parse import parse_qs, quote, unquote, urlsplit

from huggingface_hub import constants
from local_server import LocalServer, lower_case, send

PAGE = 50  # entries per page of a tree
TPU_VARIABLES = (
    "TPU_WORKER_ID",
    "TPU_WORKER_HOSTNAMES",
    "TPU_PROCESS_ADDRESSES",
    "MEGASCALE_NUM_SLICES",
    "MEGASCALE_SLICE_ID",
)


class Hub(LocalServer):
    """The server's files and recorded requests; use as a context manager.

    Attributes:
        endpoint: the hub's address; the same server is the CDN under the name localhost.
        trees: {(dataset, revision): {path: bytes, or size alone for a file that is only listed}}.
        token: what a request must bring, if not None.
        failures: {start of path: [(status, headers), ...]}: the first of them is answered once.
        attributes: of the metadata server.
        requests: list of (host, path with query, {lower-case header: value}) as they came in.
    """

    def __init__(self):
        self.trees, self.attributes, self.failures = {}, {}, defaultdict(list)
        self.token, self.requests = None, []
        super().__init__()

    def add(self, dataset, files, revision="main"):
        self.trees.setdefault((dataset, revision), {}).update(files)

    def paths(self, host=None):
        """Paths asked for, without their query."""
        return [urlsplit(path).path for at, path, _ in self.requests if host in (None, at)]

    def answer(self, request):
        host = request.headers["Host"].split(":")[0]
        headers = lower_case(request.headers)
        self.requests.append((host, request.path, headers))
        url = urlsplit(request.path)
        path = unquote(url.path)
        for start, failures in self.failures.items():
            if path.startswith(start) and failures:
                status, headers = failures.pop(0)
                return send(request, status, headers=headers)
        if path.startswith("/computeMetadata/v1/instance/attributes/"):
            value = self.attributes.get(path.rpartition("/")[2])
            if value is None or request.headers["Metadata-Flavor"] != "Google":
                return send(request, 404)
            return send(request, 200, value.encode())
        if path.startswith("/cdn/") and host == "localhost":
            return self.send_bytes(request, path)
        allowed = request.headers["Authorization"] == f"Bearer {self.token}"
        if path.startswith("/api/datasets/"):
            if "/revision/" in path:
                return self.send_commit(request, path)
            dataset, _, revision = path.removeprefix("/api/datasets/").partition("/tree/")
            if self.token and not allowed:
                return send(request, 401, headers={"X-Error-Code": "RepoNotFound"})
            return self.send_tree(request, dataset, revision, parse_qs(url.query))
        dataset, _, rest = path.removeprefix("/datasets/").partition("/resolve/")
        if self.token and not allowed:
            return send(request, 403, headers={"X-Error-Code": "GatedRepo"})
        target = f"http://localhost:{self.port}/cdn/{quote(dataset)}/{quote(rest)}?signed=SECRET"
        return send(request, 302, headers={"Location": target})

    def send_commit(self, request, path):
        """The commit of a revision; its files are those of the revision, also if these change."""
        dataset, _, revision = path.removeprefix("/api/datasets/").partition("/revision/")
        if dataset not in {name for name, _ in self.trees}:
            return send(request, 404, headers={"X-Error-Code": "RepoNotFound"})
        if (dataset, revision) not in self.trees:
            return send(request, 404, headers={"X-Error-Code": "RevisionNotFound"})
        files = self.trees[dataset, revision]
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.add(dataset, dict(files), commit)
        siblings = [
            {
                "rfilename": path,
                "size": len(content),
            }
            for path, content in files.items()
        ]
        send(
            request, 200, json.dumps({"id": dataset, "sha": commit, "siblings": siblings}).encode()
        )

    def send_tree(self, request, dataset, revision, query):
        if dataset not in {name for name, _ in self.trees}:
            return send(request, 404, headers={"X-Error-Code": "RepoNotFound"})
        self.trees.setdefault((dataset, "main"), {})  # every repository has it
        if (dataset, revision) not in self.trees:
            return send(request, 404, headers={"X-Error-Code": "RevisionNotFound"})
        files = self.trees[dataset, revision]
        entries = [{"type": "directory", "path": "somewhere.parquet", "oid": "0", "size": 0}]
        for path, content in sorted(files.items(), reverse=True):  # in arbitrary order
            known = isinstance(content, bytes)
            entry = {"type": "file", "path": path, "oid": "0"}
            entry["size"] = len(content) if known else content
            if known and not path.endswith((".md", ".json", ".jsonl")):
                oid = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": oid, "size": entry["size"], "pointerSize": 130}
            entries.append(entry)
        start = int(query.get("cursor", ["0"])[0])
        headers = {"Content-Type": "application/json"}
        if start + PAGE < len(entries):
            more = f"{urlsplit(request.path).path}?recursive=true&cursor={start + PAGE}"
            headers["Link"] = f'<{self.endpoint}{more}>; rel="next"'
        send(request, 200, json.dumps(entries[start : start + PAGE]).encode(), headers)

    def send_bytes(self, request, path):
        _, _, rest = path.split("/", 2)
        content = next(
            files[rest.removeprefix(f"{dataset}/{revision}/")]
            for (dataset, revision), files in self.trees.items()
            if rest.startswith(f"{dataset}/{revision}/")
        )
        wanted = request.headers.get("Range")
        if not wanted:
            return send(request, 200, content)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = int(first or 0), len(content)
        if not first:
            start = max(0, stop - int(last))
        elif last:
            stop = min(stop, int(last) + 1)
        headers = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        send(request, 206, content[start:stop], headers)


@contextlib.contextmanager
def hub_of_this_process(monkeypatch, tmp_path):
    """A Hub for huggingface_hub in this process, an empty working directory and no TPU."""
    with Hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        counts = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", *counts, *TPU_VARIABLES):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{hub.port}")
        (tmp_path / "work").mkdir()
        monkeypatch.chdir(tmp_path / "work")
        yield hub
