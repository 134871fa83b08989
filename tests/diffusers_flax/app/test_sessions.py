"""Files of sessions."""

from pathlib import Path
from types import SimpleNamespace

from helpers import photo
from served_app import settings_in

from diffusers_flax.app.sessions import Sessions
from diffusers_flax.app.settings import SOFTWARE, Settings
from diffusers_flax.generating.recipes import recipe_text


def test_files_of_sessions(tmp_path):
    """Closing a session deletes its files and no others."""
    example, upload, both = (
        tmp_path / "hash" / f"{name}.png" for name in ("example", "upload", "both")
    )
    example.parent.mkdir()
    example.touch()
    sessions = Sessions(tmp_path)
    for file in (upload, both):
        file.touch()
    pages = [SimpleNamespace(session_hash=name) for name in "ab"]
    ours = sessions.get(pages[0], example, upload, both, Path(__file__), None)
    theirs = sessions.get(pages[1], both)
    assert sessions.get(pages[0]) is ours
    settings = Settings("make it red", seed=7)
    recipe = recipe_text(SOFTWARE, {"edit": settings.instruction, "page": vars(settings)})
    before = ours.save(photo(8, 6), "input")
    made = [session.add(photo(8, 6), before, settings, recipe) for session in (ours, ours, theirs)]
    assert [x.path.name for x in ours.results] == ["002-make-it-red.png", "001-make-it-red.png"]
    assert settings_in(made[0].path) == settings
    sessions.close(pages[0])
    sessions.close(SimpleNamespace(session_hash="never"))
    assert not ours.folder.exists() and not upload.exists()
    kept = (example, both, Path(__file__), made[2].path)
    assert all(file.exists() for file in kept)
    sessions.close(pages[1])
    assert example.exists() and not both.exists()
