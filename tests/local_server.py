"""What the stand-ins for servers share: an HTTP server on 127.0.0.1 with recorded requests."""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class LocalServer:
    """A server for the time of a `with` block; subclasses define answer(request).

    Attributes:
        port, endpoint: its address; the server answers under the name localhost, too.
    """

    def __init__(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # or each answer takes 40 ms

            def answer(self):
                server.answer(self)

            do_GET = do_HEAD = do_POST = do_PUT = answer

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *args: None  # clients that are killed mid-transfer
        self.port = self.server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.server.shutdown()
        self.server.server_close()


def send(request, status, body=b"", headers=None):
    """Answer a request with a body of known length."""
    request.send_response(status)
    for name, value in (headers or {}).items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command == "HEAD":
        return
    # A client that asked for a range and gets the full file closes the connection.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        request.wfile.write(body)


def read_body(request):
    """The body of a request, of known length or in chunks."""
    if request.headers.get("Transfer-Encoding") != "chunked":
        return request.rfile.read(int(request.headers.get("Content-Length", 0)))
    body = b""
    while size := int(request.rfile.readline(), 16):
        body += request.rfile.read(size)
        request.rfile.readline()
    request.rfile.readline()
    return body


def lower_case(headers):
    """{lower-case name: value}."""
    return {name.lower(): value for name, value in headers.items()}
