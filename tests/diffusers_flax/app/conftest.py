"""A tiny model, a photograph, the page, its clients."""

import json
from contextlib import ExitStack

import pytest
from helpers import photo
from served_app import FAST, launch, served
from tiny_models import make_tiny_pipeline


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_pipeline(tmp_path_factory.mktemp("tiny") / "model", unet_channels=(16,))


@pytest.fixture(scope="module")
def photo_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("photo") / "photo.png"
    photo(96, 72).save(file)
    return file


@pytest.fixture(scope="module")
def page(model, photo_file, tmp_path_factory):
    """The page of a tiny model, whose files are in page.files."""
    folder = tmp_path_factory.mktemp("page")
    row = {"input": str(photo_file), "edit": "make it blue", "output": "none.png"}
    (folder / "edits.jsonl").write_text(json.dumps(row))
    flags = "--examples", folder / "edits.jsonl", *FAST, "--max_resolution", "256"
    with served(model, *flags, TMPDIR=str(folder)) as page:
        (page.files,) = folder.glob("edit_app_*")
        yield page
    assert not page.files.exists()


@pytest.fixture
def connect():
    """A function that opens a client of a page's API; its session ends with the test."""
    from gradio_client import Client

    with ExitStack() as opened:

        def open_client(page, folder):
            client = Client(page.url, verbose=False, download_files=folder)
            opened.callback(client.close)
            return client

        yield open_client


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = launch(playwright.chromium)
        yield browser
        browser.close()
