"""The page's server: port, password, files, and shutdown."""

import logging
import os
import secrets
import signal
import socket
import tempfile
import threading
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path

PASSWORD = "EDIT_APP_PASSWORD"  # environment variable
LOCAL = ("127.0.0.1", "localhost", "::1")
HEARTBEAT = "3"  # seconds; a closed page is noticed after about twice this time
MAX_FILE_AGE = 24 * 3600  # seconds, of uploads
PAGE = Path(__file__).parent / "page"


def read_password(username, password_file, host):
    """The page's password, or None.

    Raises:
        ValueError: a password without a user, a user without a password, or a page open to other
            machines without both.
    """
    password = os.environ.get(PASSWORD)
    if password_file is not None:
        try:
            password = password_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--password_file {password_file} cannot be read: {error}") from error
        if not password:
            raise ValueError(f"--password_file {password_file} is empty; write the password to it")
    source = f"--password_file {password_file}" if password_file else PASSWORD
    if username and not password:
        raise ValueError(
            f"--username {username} has no password; write it to a --password_file, or to the "
            f"environment variable {PASSWORD}"
        )
    if password and not username:
        raise ValueError(f"{source} is a password without a user; give --username too")
    if host not in LOCAL and not username:
        raise ValueError(
            f"--host {host} opens the page to others; give --username and a --password_file"
        )
    return password


def check_port(host, port):
    """Raise a ValueError unless a server can listen on a port."""
    if not 0 < port < 2**16:
        raise ValueError(f"--port {port} must be from 1 to {2**16 - 1}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"--host {host} is no address of this machine: {error}") from error
    with socket.socket(family) as opened:
        # As the server does, so that the port of a server that has just ended is free.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind(address)
        except OSError as error:
            raise ValueError(
                f"--port {port} of {host} is in use or not allowed ({error.strerror}); name "
                "another --port, or end the program that has it"
            ) from error


@contextmanager
def files_of_sessions():
    """A new directory for the files of all pages, deleted at the end, also after SIGTERM."""
    earlier = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        with tempfile.TemporaryDirectory(prefix="edit_app_", ignore_cleanup_errors=True) as folder:
            settings = {
                "GRADIO_TEMP_DIR": folder,
                "GRADIO_ANALYTICS_ENABLED": "False",
                "GRADIO_HEARTBEAT_INTERVAL": os.environ.get("GRADIO_HEARTBEAT_INTERVAL", HEARTBEAT),
            }
            before = {name: os.environ.get(name) for name in settings}
            os.environ.update(settings)  # Gradio reads them when components are made
            try:
                yield Path(folder)
            finally:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the files are being deleted
                for name, value in before.items():
                    if value is None:
                        del os.environ[name]
                    else:
                        os.environ[name] = value
    finally:
        signal.signal(signal.SIGTERM, earlier)


def make_blocks(editor, examples, folder):
    """The page, a gr.Blocks.

    Args:
        editor: open Editor.
        examples: see layout.build.
        folder: from files_of_sessions.
    """
    import gradio as gr

    from diffusers_flax.app.events import Events
    from diffusers_flax.app.layout import TITLES, build
    from diffusers_flax.app.sessions import Sessions

    options = {"analytics_enabled": False, "delete_cache": (600, MAX_FILE_AGE)}
    with (
        warnings.catch_warnings(),
        gr.Blocks(title=TITLES[editor.task][0], fill_width=True, **options) as blocks,
    ):
        warnings.simplefilter("ignore")  # Gradio's own
        components = build(editor, examples)
        sessions = Sessions(folder)
        Events(editor, sessions, components).connect(blocks)
    # Requests wait in the editor's queue, which knows how many are before each.
    return blocks.queue(max_size=None, default_concurrency_limit=None)


class NoClosedPages(logging.Filter):
    """Drops tracebacks of pages that are closed while they send or load a file."""

    def filter(self, record):
        from starlette.requests import ClientDisconnect

        error = record.exc_info and record.exc_info[1]
        is_deleted = isinstance(error, RuntimeError) and isinstance(
            error.__context__, FileNotFoundError
        )
        return not (isinstance(error, ClientDisconnect) or is_deleted)


def start_server(blocks, config, password):
    """Serve the page in threads; returns its address."""
    from diffusers_flax.app.layout import theme

    logging.getLogger("uvicorn.error").addFilter(NoClosedPages())

    def is_user(name, given):
        same = secrets.compare_digest(name.encode(), config.username.encode())
        return secrets.compare_digest(given.encode(), password.encode()) and same

    _, local, _ = blocks.launch(
        server_name=config.host,
        server_port=config.port,
        auth=is_user if password else None,
        share=False,
        inbrowser=config.open_browser,
        prevent_thread_lock=True,
        quiet=True,
        show_error=False,
        max_file_size=config.max_upload_mb * 2**20,
        footer_links=["api"],
        theme=theme(),
        css_paths=[PAGE / "page.css"],
        js=(PAGE / "page.js").read_text(encoding="utf-8"),
        favicon_path=PAGE / "icon.png",
        pwa=False,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
    )
    return local


def wait_for_end():
    """Return after Ctrl-C or SIGTERM."""
    with suppress(KeyboardInterrupt):
        threading.Event().wait()
