"""Images of each open page, deleted when it is closed; Gradio deletes uploads after a day."""

import re
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from diffusers_flax.app.editor import ImageRequest
from diffusers_flax.app.settings import SOFTWARE, Settings
from diffusers_flax.images import save_image


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
        self.root, self.open = Path(root), {}

    def get(self, page):
        """The Session of a gr.Request, new if it is unknown."""
        if page.session_hash not in self.open:
            # A secret name: Gradio serves files to everybody who knows their paths.
            folder = self.root / f"session-{secrets.token_urlsafe(16)}"
            folder.mkdir(parents=True)
            self.open[page.session_hash] = Session(folder)
        return self.open[page.session_hash]

    def close(self, page):
        """Forget the Session of a gr.Request and delete its files."""
        if session := self.open.pop(page.session_hash, None):
            shutil.rmtree(session.folder, ignore_errors=True)
