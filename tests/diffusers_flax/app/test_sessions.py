"""Files of sessions."""

import time
from pathlib import Path

from helpers import photo

from diffusers_flax.app.sessions import MAX_RESULTS, Sessions
from diffusers_flax.app.settings import (
    Settings,
    page_recipe,
    read_settings,
)


def test_files_of_sessions(tmp_path):
    """A session keeps its latest images; closing it deletes its files and no others."""
    example, upload, both = (tmp_path / f"{name}.png" for name in ("example", "upload", "both"))
    example.touch()
    sessions = Sessions(tmp_path)
    upload.touch()
    both.touch()
    ours, theirs = sessions.get("a"), sessions.get("b")
    assert sessions.get("a") is ours
    settings = Settings("make it red")
    texts = [page_recipe(settings, {"edit": settings.instruction})]
    for _ in range(MAX_RESULTS + 2):
        before = sessions.save(ours, photo(8, 6), "input")
        sessions.add(ours, [photo(8, 6)], before, [settings], texts, edits=True)
    (other,) = sessions.add(theirs, [photo(8, 6)], None, [settings], texts, edits=True)
    assert other.path.name == "001-make-it-red.png"
    names = sorted(file.name for file in ours.folder.iterdir())
    assert len(names) == 2 * MAX_RESULTS and len(ours.results) == MAX_RESULTS
    assert names[0] == "003-make-it-red.png" and names[-1].startswith("input-")
    assert read_settings(ours.results[0].path, Settings(""), edits=True) == settings
    for file in (example, upload, both, Path(__file__)):
        sessions.add_upload(ours, file)
    sessions.add_upload(theirs, both)
    (tmp_path / "hash").mkdir()
    painted = [tmp_path / "hash" / f"{name}.png" for name in ("background", "layer_0")]
    for file in painted:
        file.touch()
    theirs.painted_since = time.time() - 60
    sessions.get("paints later").painted_since = time.time() + 60
    sessions.close("a")
    assert all(file.exists() for file in painted)  # may be of b
    sessions.close("never")
    assert not ours.folder.exists() and other.path.exists()
    assert not upload.exists()
    assert all(file.exists() for file in (example, both, Path(__file__)))
    sessions.close("b")
    assert not any(file.exists() for file in (*painted, both))
    (uploaded := tmp_path / "hash" / "background-1.png").touch()
    sessions.get("never paints")
    sessions.close("never paints")
    assert uploaded.exists()
