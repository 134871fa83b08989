"""edit_app.py: its flags, and its start and end."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT, free_port
from served_app import FAST, needs_gradio, served
from tiny_models import make_tiny_pipeline

import edit_app
from diffusers_flax.app import server
from diffusers_flax.app.editor import Editor


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_pipeline(tmp_path_factory.mktemp("tiny") / "model", unet_channels=(16,))


@pytest.mark.variants
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--username", "anna"], "needs a --username and a password"),
        (["--password_file", "none.txt", "--username", "anna"], "none.txt"),
        (["--host", "0.0.0.0"], "a page that is open to others needs a --username"),
        (["--model", "nowhere"], "nowhere has no model_index.json"),
        (["--num_inference_steps", "151"], "num_inference_steps=151 must be from 1 to 150"),
        (["--max_resolution", "32"], "resolution=64 must be from 4 to 32"),
        (["--examples", "none.jsonl"], "none.jsonl cannot be read"),
        (["--accelerate", "taesd"], "--accelerate taesd needs a TAESD; start with --preview_dec"),
    ],
)
def test_bad_input_is_one_line(model, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(edit_app, "find_spec", lambda name: True)
    monkeypatch.setattr(Editor, "open", None)
    Path("secret.txt").write_text("secret\n")
    given = [] if "--model" in flags else ["--model", str(model)]
    port = [] if "--port" in flags else ["--port", str(free_port())]
    with pytest.raises(SystemExit) as stop:
        edit_app.main([*given, *port, *flags])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_no_gradio(model, monkeypatch, capsys):
    monkeypatch.setenv(server.PASSWORD, "secret")
    assert server.read_password("anna", None, "0.0.0.0") == "secret"
    port = free_port()
    server.check_port("127.0.0.1", port)
    monkeypatch.setattr(edit_app, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        edit_app.main(["--model", str(model), "--username", "anna", "--port", str(port)])
    message = 'the package gradio is missing; install it in a clone: pip install ".[app]"'
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.slow
@needs_gradio
def test_a_used_port_a_password_and_ctrl_c(model, tmp_path):
    """A second start says that the port is in use; Ctrl-C ends at once and deletes the files."""
    import httpx
    from gradio_client import Client

    (tmp_path / "password.txt").write_text("secret\n")
    (tmp_path / "tmp").mkdir()
    flags = "--username", "anna", "--password_file", "password.txt", *FAST
    with served(model, *flags, cwd=tmp_path, TMPDIR=str(tmp_path / "tmp")) as page:
        command = [sys.executable, ROOT / "edit_app.py", "--model", model]
        second = [*command, "--port", str(page.port)]
        done = subprocess.run(list(map(str, second)), capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert "Address already in use" in done.stderr
        for path in ("config", "gradio_api/info"):
            assert httpx.get(f"{page.url}{path}").status_code == 401
        with pytest.raises(Exception, match=r"(?i)login|auth|credential"):
            Client(page.url, verbose=False, auth=("anna", "wrong"))
        Client(page.url, verbose=False, auth=("anna", "secret")).view_api(print_info=False)
        assert list((tmp_path / "tmp").glob("edit_app_*")) != []
        started = time.monotonic()
        page.process.send_signal(signal.SIGINT)  # while the first program compiles
        _, errors = page.process.communicate(timeout=20)
        print(f"Ctrl-C: {time.monotonic() - started:.2f} s")
        assert time.monotonic() - started < 2
        assert page.process.returncode == 130
        assert "interrupted; the page is closed, and its images are deleted" in errors
        assert list((tmp_path / "tmp").glob("edit_app_*")) == []
