"""Files of sessions."""

from types import SimpleNamespace

from helpers import photo
from served_app import settings_in

from diffusers_flax.app.sessions import Sessions
from diffusers_flax.app.settings import SOFTWARE, Settings
from diffusers_flax.generating.recipes import recipe_text


def test_files_of_sessions(tmp_path):
    """Closing a session deletes its files and no others."""
    (tmp_path / "upload.png").touch()
    sessions = Sessions(tmp_path)
    pages = [SimpleNamespace(session_hash=name) for name in "ab"]
    ours = sessions.get(pages[0])
    theirs = sessions.get(pages[1])
    assert sessions.get(pages[0]) is ours
    settings = Settings("make it red", seed=7)
    recipe = recipe_text(SOFTWARE, {"edit": settings.instruction, "page": vars(settings)})
    before = ours.save(photo(8, 6), "input")
    made = [session.add(photo(8, 6), before, settings, recipe) for session in (ours, ours, theirs)]
    assert [x.path.name for x in ours.results] == ["002-make-it-red.png", "001-make-it-red.png"]
    assert settings_in(made[0].path) == settings
    sessions.close(pages[0])
    sessions.close(SimpleNamespace(session_hash="never"))
    assert not ours.folder.exists() and made[2].path.exists()
    sessions.close(pages[1])
    assert [file.name for file in tmp_path.iterdir()] == ["upload.png"]
