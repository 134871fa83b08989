"""The page's server: port, password, files, and shutdown."""

import os
import signal
import socket
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

PASSWORD = "EDIT_APP_PASSWORD"  # environment variable
LOCAL = ("127.0.0.1", "localhost", "::1")
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
        password = password_file.read_text(encoding="utf-8").strip()
    if bool(username) != bool(password) or (host not in LOCAL and not username):
        raise ValueError(
            f"--host {host}, --username {username}: a page that is open to others needs a "
            f"--username and a password, in --password_file or the environment variable {PASSWORD}"
        )
    return password


def check_port(host, port):
    """Raise an OSError unless a server can listen on a port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    socket.create_server((host, port), family=family).close()


@contextmanager
def files_of_sessions():
    """A new directory for the files of all pages, deleted at the end, also after SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    with tempfile.TemporaryDirectory(prefix="edit_app_", ignore_cleanup_errors=True) as folder:
        # Gradio reads them when components are made.
        os.environ["GRADIO_TEMP_DIR"] = folder
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
        # Seconds; a closed page is noticed after about twice this time.
        os.environ.setdefault("GRADIO_HEARTBEAT_INTERVAL", "3")
        yield Path(folder)


def serve(editor, examples, config, password, folder):
    """Serve the page in threads.

    Args:
        editor: open Editor.
        examples: see layout.build.
        config: flags of the program.
        password: from read_password.
        folder: from files_of_sessions.

    Returns:
        (gr.Blocks, address).
    """
    import gradio as gr

    from diffusers_flax.app.events import Events
    from diffusers_flax.app.layout import TITLES, build
    from diffusers_flax.app.sessions import Sessions

    # Fonts of the system, as others would be loaded from another host.
    fonts = {"font": ("system-ui", "sans-serif"), "font_mono": ("ui-monospace", "monospace")}
    options = {"analytics_enabled": False, "delete_cache": (600, MAX_FILE_AGE)}
    with (
        warnings.catch_warnings(),
        gr.Blocks(title=TITLES[editor.task], fill_width=True, **options) as blocks,
    ):
        warnings.simplefilter("ignore")  # Gradio's own
        components = build(editor, examples)
        Events(editor, Sessions(folder), components).connect(blocks)
    # Requests wait in the editor's queue, which knows how many are before each.
    blocks.queue(max_size=None, default_concurrency_limit=None)
    _, address, _ = blocks.launch(
        server_name=config.host,
        server_port=config.port,
        auth=(config.username, password) if password else None,
        share=False,
        inbrowser=config.open_browser,
        prevent_thread_lock=True,
        quiet=True,
        max_file_size=config.max_upload_mb * 2**20,
        footer_links=["api"],
        theme=gr.themes.Base(primary_hue="teal", neutral_hue="slate", radius_size="md", **fonts),
        css_paths=[PAGE / "page.css"],
        js=(PAGE / "page.js").read_text(encoding="utf-8"),
        favicon_path=PAGE / "icon.png",
        ssr_mode=False,
    )
    return blocks, address
