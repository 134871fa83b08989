"""A local file server that reproduces the failures of a busy hub and its CDN, on 127.0.0.1.

`http://127.0.0.1:PORT/resolve/NAME` is the hub: it redirects to `http://localhost:PORT/cdn/NAME?...`,
a signed link which goes bad after some requests. Both are one server; the Host header tells them
apart. What is wrong with each file is set by a `Fault`.
"""

import contextlib
import itertools
import threading
import time
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from urllib.parse import quote

from local_server import LocalServer

BLOCK = 16 * 1024


@dataclass
class Fault:
    """The failures of one file; each request takes the first entry of a list."""

    hub: list = field(default_factory=list)  # statuses of the hub's first answers; 0: no answer
    delay: float = 0  # seconds before the hub answers
    cdn: list = field(default_factory=list)  # statuses the CDN answers before it sends
    cuts: int = 0  # this many answers stop half-way
    link_requests: int = 10**9  # a signed link answers 403 after this many requests
    wrong: list = field(default_factory=list)  # contents sent instead of the right one


class FlakyServer(LocalServer):
    """Serves `files` ({name: bytes}) and records requests and sent bytes.

    Args:
        files: name -> content.
        faults: name -> Fault; a file that is not named here is served well.
        rate: bytes/s of one connection, or None for all it can.
        token: answer 401 to requests of the hub without this bearer token.
        redirect: False makes the hub send the files itself.

    `http://127.0.0.1:PORT/resolve/` is a page with links to the files.
    """

    def __init__(self, files, faults=(), rate=None, token=None, redirect=True):
        self.files = dict(files)
        self.faults = defaultdict(Fault, faults)
        self.rate = rate
        self.token = token
        self.redirect = redirect
        self.sent = Counter()  # body bytes handed to the socket, by file
        self.requests = []  # (host, method, name, status, Authorization or None)
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.links = itertools.count()
        self.link_uses = Counter()

        super().__init__()

    def __exit__(self, *exception):
        self.over.set()
        super().__exit__(*exception)

    def url(self, name):
        return f"{self.endpoint}/resolve/{name}"

    def answer(self, request):
        """Answer one request with a redirect, bytes, or the next failure of the file."""
        path, _, query = request.path.partition("?")
        role, _, name = path.lstrip("/").partition("/")
        host = request.headers["Host"].split(":")[0]
        authorization = request.headers["Authorization"]
        headers, body, cut = {}, b"", False
        fault = self.faults[name]
        if role == "resolve":
            self.over.wait(fault.delay)
        with self.lock:
            planned = fault.hub if role == "resolve" else fault.cdn
            if role == "resolve" and self.token and authorization != f"Bearer {self.token}":
                status = 401
            elif planned:
                status = planned.pop(0)
                if status in (429, 503):
                    headers["Retry-After"] = "1"
            elif role == "resolve" and not name:
                links = (f'<a href="{quote(file)}">{file}</a>' for file in self.files)
                status, body = 200, "\n".join(links).encode()
            elif name not in self.files:
                status = 404
            elif role == "resolve" and self.redirect:
                status = 302
                link = next(self.links)
                headers["Location"] = f"http://localhost:{self.port}/cdn/{name}?link={link}"
            elif self.link_uses[query] >= fault.link_requests:
                status = 403
            else:
                self.link_uses[query] += 1
                body = fault.wrong.pop(0) if fault.wrong else self.files[name]
                status, start, stop = 200, 0, len(body)
                if wanted := request.headers["Range"]:
                    first, _, last = wanted.removeprefix("bytes=").partition("-")
                    start, stop = int(first), int(last or len(body) - 1) + 1
                    status = 206
                    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(body)}"
                headers["Accept-Ranges"] = "bytes"
                headers["ETag"] = f'"{zlib.crc32(body):08x}"'
                body = memoryview(body)[start:stop]
                if request.command == "GET" and fault.cuts:
                    fault.cuts -= 1
                    cut = True
            self.requests.append((host, request.command, name, status, authorization))
        if status == 0:
            request.close_connection = True
            return
        request.send_response(status)
        for key, value in headers.items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command == "HEAD":
            return
        if cut:
            body = body[: len(body) // 2]
            request.close_connection = True
        with contextlib.suppress(OSError):
            self.send(request, name, body)

    def send(self, request, name, body):
        """Send body at the server's rate and count the bytes sent."""
        for start in range(0, len(body), BLOCK):
            block = body[start : start + BLOCK]
            request.wfile.write(block)
            with self.lock:
                self.sent[name] += len(block)
            if self.rate:
                time.sleep(len(block) / self.rate)
