"""Images and files of each open page; the files are deleted when it is closed."""

import re
import secrets
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from diffusers_flax.app.settings import SOFTWARE, Settings
from diffusers_flax.images import save_image

MAX_RESULTS = 60  # of a page; older ones are deleted
MAX_AGE = 12 * 3600  # seconds, of a session without a new image
PAINTED = ("background*.png", "composite*.png", "layer_*.png")  # uploads of Gradio's ImageEditor


@dataclass(frozen=True)
class Result:
    """A result of a page."""

    path: Path  # PNG
    before: Path | None  # PNG of the original image at the same size; None: from text
    settings: Settings
    summary: str


@dataclass
class Session:
    """Images of one page, the newest first."""

    folder: Path
    results: list = field(default_factory=list)
    comparison: list = field(default_factory=list)  # Results of the last one
    shown: Result | None = None
    request: Any = None  # the last one
    uploads: set = field(default_factory=set)  # Paths
    number: int = 0  # of results so far
    used: float = field(default_factory=time.monotonic)
    restored: str = ""  # SHA-256 of the file whose settings came last
    painted_since: float = float("inf")  # seconds since 1970, of the first mask; inf: none


class Sessions:
    """Sessions by Gradio's session hash."""

    def __init__(self, root):
        """root: Gradio's directory."""
        self.root = Path(root)
        self.open, self.lock = {}, Lock()
        self.examples = {*self.root.rglob("*")}  # Gradio's copies

    def get(self, number):
        """The Session of a hash, new if it is unknown."""
        with self.lock:
            now = time.monotonic()
            for old in [x for x, session in self.open.items() if now - session.used > MAX_AGE]:
                self._delete(old)
            if number not in self.open:
                # A secret name: Gradio serves files to everybody who knows their paths.
                folder = self.root / f"session-{secrets.token_urlsafe(16)}"
                folder.mkdir(parents=True)
                self.open[number] = Session(folder)
            self.open[number].used = now
            return self.open[number]

    def close(self, number):
        """Forget a Session and delete its files.

        Gradio does not say which page painted a mask, so a mask stays while any page that may have
        painted it is open.
        """
        with self.lock:
            self._delete(number)

    def _delete(self, number):
        if session := self.open.pop(number, None):
            shutil.rmtree(session.folder, ignore_errors=True)
            # Uploads with the same content share a file.
            others = self.open.values()
            kept = self.examples.union(*(other.uploads for other in others))
            for file in session.uploads - kept:
                file.unlink(missing_ok=True)
            first = min((other.painted_since for other in others), default=float("inf"))
            painted = (file for name in PAINTED for file in self.root.glob(f"*/{name}"))
            for file in {*painted} - kept:
                with suppress(FileNotFoundError):  # Gradio deletes old files too
                    if session.painted_since <= file.stat().st_mtime < first:
                        file.unlink()

    def add_upload(self, session, path):
        """Note a session's uploaded file, to delete it with the session."""
        if (file := Path(path)).is_relative_to(self.root):
            session.uploads.add(file)

    def save(self, session, image, name):
        """Save a temporary image; returns its path."""
        file = session.folder / f"{name}-{secrets.token_hex(4)}.png"
        image.save(file, compress_level=1)
        return file

    def add(self, session, images, before, settings, texts, edits):
        """Save results.

        Args:
            session: Session.
            images: PIL images.
            before: path of the original image at their size, from save, or None.
            settings: Settings of each image.
            texts: of page_recipe, for each image.
            edits: whether the model edits images.

        Returns:
            The Results, also at the start of session.results.
        """
        made = []
        for image, of_image, recipe in zip(images, settings, texts):
            session.number += 1
            words = re.sub(r"[^a-z0-9]+", "-", of_image.instruction.lower()).strip("-")[:40]
            file = session.folder / f"{session.number:03}-{words or 'image'}.png"
            save_image(image, file, SOFTWARE, texts=recipe)
            made.append(Result(file, before, of_image, of_image.summary(edits)))
        session.results[:0] = reversed(made)
        for old in session.results[MAX_RESULTS:]:
            old.path.unlink(missing_ok=True)
        del session.results[MAX_RESULTS:]
        kept = {result.before for result in session.results}
        for file in session.folder.glob("input-*.png"):
            if file not in kept:
                file.unlink()
        return made
