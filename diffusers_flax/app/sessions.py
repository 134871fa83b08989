"""Images and files of each open page; the files are deleted when it is closed."""

import re
import secrets
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from diffusers_flax.app.editor import ImageRequest
from diffusers_flax.app.settings import SOFTWARE, Settings
from diffusers_flax.images import save_image

MAX_AGE = 12 * 3600  # seconds, of a session that is not used
PAINTED = ("background*.png", "composite*.png", "layer_*.png")  # uploads of Gradio's ImageEditor


@dataclass(frozen=True)
class Result:
    """A result of a page."""

    path: Path  # PNG
    before: Path | None  # PNG of the original image at the same size; None: from text
    settings: Settings


@dataclass
class Session:
    """The state of one page."""

    folder: Path
    results: list[Result] = field(default_factory=list)  # the newest first
    shown: Result | None = None
    request: ImageRequest | None = None  # the last one
    uploads: set[Path] = field(default_factory=set)
    used: float = 0.0  # time.monotonic()
    paints: bool = False  # whether a mask was painted

    def save(self, image, name):
        """Save a temporary image; returns its path."""
        file = self.folder / f"{name}-{secrets.token_hex(4)}.png"
        image.save(file, compress_level=1)
        return file

    def add(self, image, before, settings, recipe):
        """Save a result, with its recipe_text; returns the Result."""
        words = re.sub(r"[^a-z0-9]+", "-", settings.instruction.lower()).strip("-")[:40]
        file = self.folder / f"{len(self.results) + 1:03}-{words or 'image'}.png"
        save_image(image, file, SOFTWARE, texts=recipe)
        self.results.insert(0, Result(file, before, settings))
        return self.results[0]


class Sessions:
    """Sessions by Gradio's session hash."""

    def __init__(self, root):
        """root: Gradio's directory."""
        self.root = Path(root)
        self.open, self.lock = {}, Lock()
        self.examples = {*self.root.rglob("*")}  # Gradio's copies

    def get(self, page, *uploads):
        """The Session of a gr.Request, new if it is unknown; uploads: its files, or None."""
        with self.lock:
            now = time.monotonic()
            for old in [x for x, session in self.open.items() if now - session.used > MAX_AGE]:
                self._delete(old)
            if page.session_hash not in self.open:
                # A secret name: Gradio serves files to everybody who knows their paths.
                folder = self.root / f"session-{secrets.token_urlsafe(16)}"
                folder.mkdir(parents=True)
                self.open[page.session_hash] = Session(folder)
            session = self.open[page.session_hash]
            session.used = now
            files = map(Path, filter(None, uploads))
            session.uploads |= {file for file in files if file.is_relative_to(self.root)}
            return session

    def close(self, page):
        """Forget the Session of a gr.Request and delete its files.

        Gradio does not say which page painted a mask, so masks stay while any page with one is
        open.
        """
        with self.lock:
            self._delete(page.session_hash)

    def _delete(self, number):
        if not (session := self.open.pop(number, None)):
            return
        shutil.rmtree(session.folder, ignore_errors=True)
        others = self.open.values()
        deleted = session.uploads
        if session.paints and not any(other.paints for other in others):
            deleted = deleted.union(*(self.root.glob(f"*/{name}") for name in PAINTED))
        # Uploads with the same content share a file.
        for file in deleted - self.examples.union(*(other.uploads for other in others)):
            file.unlink(missing_ok=True)
