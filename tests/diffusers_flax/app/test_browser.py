"""The page in Chromium."""

import dataclasses
from contextlib import contextmanager

import numpy as np
import pytest
from helpers import photo, wait_for
from PIL import Image
from served_app import (
    FAST,
    edit_by_cli,
    needs_browser,
    served,
    settings_in,
)
from tiny_models import make_tiny_pipeline

from diffusers_flax.app.settings import Settings


@contextmanager
def tab(browser, page, **options):
    """A tab of its own session; it must have no console error and no request elsewhere."""
    context = browser.new_context(viewport={"width": 1280, "height": 1000}, **options)
    opened, wrong = context.new_page(), []
    opened.on("console", lambda x: x.type == "error" and wrong.append(f"console: {x.text}"))
    opened.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    local = (page.url, page.url.replace("http", "ws"), "data:", "blob:")
    opened.on("request", lambda x: x.url.startswith(local) or wrong.append(f"request: {x.url}"))
    opened.goto(page.url)
    opened.wait_for_selector("#run", timeout=60_000)
    try:
        yield opened
    finally:
        context.close()
    assert wrong == []


def click_and_wait(tab, button="#run", state=".done"):
    """Start a request and wait for its end; the text of the status line, which is a new one."""
    tab.evaluate("document.querySelector('#status .line')?.setAttribute('data-old', '')")
    tab.click(button)
    tab.wait_for_selector(f"#status {state}:not([data-old])", timeout=120_000)
    tab.wait_for_selector("#run:not([disabled])")
    return tab.inner_text("#status")


def give(tab, photo_file, instruction="make it red", seed=7):
    tab.set_input_files("#image input[type=file]", photo_file)
    tab.wait_for_selector("#image img")
    tab.fill("#instruction textarea, #instruction input", instruction)
    tab.fill("#seed input", str(seed))
    tab.check("#keep_seed input")


def download(tab, selector, file):
    with tab.expect_download() as started:
        tab.click(selector)
    started.value.save_as(file)
    return np.asarray(Image.open(file))


def value_of(tab, selector):
    return tab.input_value(f"{selector} input, {selector} textarea")


def make_long(tab):
    """Settings of an edit that takes some seconds."""
    fill(tab, "num_inference_steps", 150)
    fill(tab, "resolution", 256)


def fill(tab, name, number):
    tab.fill(f"#{name} input[type=number]", str(number))
    tab.keyboard.press("Tab")


@needs_browser
def test_an_edit_in_the_browser(browser, page, model, photo_file, tmp_path):
    """Upload, instruction, slider, gallery, download, settings from the file, result as input."""
    settings = Settings("make it red", 7.5, 1.5, 3, seed=7, resolution=32)
    expected = edit_by_cli(model, photo_file, tmp_path / "cli.png", settings=settings)
    with tab(browser, page) as opened:
        give(opened, photo_file)
        assert "Seed 7" in click_and_wait(opened)
        assert opened.locator("#result img").count() == 2
        made = download(opened, "#download", tmp_path / "made.png")
        np.testing.assert_array_equal(made, expected)
        assert settings_in(tmp_path / "made.png") == settings

        opened.fill("#instruction textarea, #instruction input", "make it blue")
        opened.uncheck("#keep_seed input")
        click_and_wait(opened)
        seed = int(value_of(opened, "#seed"))
        assert seed != 7
        other = download(opened, "#download", tmp_path / "other.png")
        assert np.any(other != made) and settings_in(tmp_path / "other.png").seed == seed
        opened.click("#gallery button >> nth=1")  # the first one
        wait_for(lambda: value_of(opened, "#seed") == "7")
        assert value_of(opened, "#instruction") == "make it red"
        opened.click("#use")
        opened.wait_for_selector("#image img[src*='make-it-red']")

    with tab(browser, page) as opened:  # of another session
        assert opened.locator("#gallery").count() == 0
        opened.set_input_files("#image input[type=file]", tmp_path / "other.png")
        wait_for(lambda: value_of(opened, "#instruction") == "make it blue")
        assert value_of(opened, "#seed") == str(seed) and opened.is_checked("#keep_seed input")
        assert "settings of this file are back" in opened.inner_text("#status")
        opened.set_input_files("#image input[type=file]", photo_file)


@pytest.mark.slow
@needs_browser
def test_masks_and_comparisons_in_the_browser(browser, page, photo_file, tmp_path):
    """Paint restricts an edit; a comparison makes an image per value and one of all."""
    with tab(browser, page) as opened:
        give(opened, photo_file)
        opened.click("text=Only a part of the image")
        opened.check("#use_mask input")
        opened.wait_for_selector("#mask canvas", timeout=30_000)
        assert "No part is painted" in click_and_wait(opened, state=".failed")
        box = opened.locator("#mask canvas").first.bounding_box()
        x, y = box["x"] + 3, box["y"] + 0.5 * box["height"]  # in the margin, left of the image
        opened.mouse.move(x, y)
        opened.mouse.down()
        for step in range(8):
            opened.mouse.move(x + 0.05 * step * box["width"], y)
        opened.mouse.up()
        opened.wait_for_timeout(500)
        click_and_wait(opened)
        masked = download(opened, "#download", tmp_path / "masked.png")
        with Image.open(photo_file) as image:
            before = np.asarray(image.resize((32, 24), Image.Resampling.LANCZOS))
        same = (masked == before).all(-1)
        assert 0.5 < same.mean() < 0.95 and same[:, 16:].all()

        opened.uncheck("#use_mask input")
        opened.click("text=Compare values of a scale")
        wait_for(lambda: value_of(opened, "#values"))  # when the part is opened
        opened.fill("#values textarea, #values input", "1.2 1.5, 3")
        opened.keyboard.press("Tab")
        assert "3 images" in click_and_wait(opened, "#run_comparison")
        figure = download(opened, "#comparison a[download]", tmp_path / "figure.png")
        assert figure.shape[1] > 4 * 32
        opened.click("#gallery button >> nth=0")
        wait_for(lambda: opened.input_value("#image_guidance_scale input[type=number]") == "3")


@pytest.mark.slow
@needs_browser
def test_a_model_from_text_has_a_tab_with_an_image(browser, photo_file, tmp_path):
    """Upload, strength and a mask's file; a click on an image opens its tab again."""
    model = make_tiny_pipeline(tmp_path / "model", in_channels=4)
    mask = Image.new("L", (96, 72))
    mask.paste(255, (48, 0, 96, 72))
    mask.save(tmp_path / "mask.png")
    from_text, from_image = "[role=tab]:has-text('Text to')", "[role=tab]:has-text('Image to')"
    with served(model, *FAST) as page, tab(browser, page) as opened:
        opened.fill("#instruction textarea, #instruction input", "a red panda")
        click_and_wait(opened)
        assert opened.locator("#result img").count() == 1
        opened.click(from_image)
        assert "There is no image" in click_and_wait(opened, state=".failed")
        give(opened, photo_file, "a blue panda")
        fill(opened, "strength", 0.2)
        text = click_and_wait(opened, state=".failed")
        assert "strength=0.2 of num_inference_steps=3 leaves no step" in text.lower()
        fill(opened, "strength", 0.7)
        assert "Seed 7" in click_and_wait(opened)
        assert opened.locator("#result img").count() == 2  # the slider
        whole = download(opened, "#download", tmp_path / "whole.png")
        settings = Settings("a blue panda", num_inference_steps=3, seed=7, resolution=32)
        settings = dataclasses.replace(settings, strength=0.7)
        assert settings_in(tmp_path / "whole.png", edits=False) == settings

        opened.click("text=Only a part of the image")
        opened.set_input_files("#mask_file input[type=file]", tmp_path / "mask.png")
        opened.wait_for_selector("#mask_file img")
        click_and_wait(opened)
        masked = download(opened, "#download", tmp_path / "masked.png")
        with Image.open(photo_file) as image:
            before = np.asarray(image.resize((32, 24), Image.Resampling.LANCZOS))
        assert whole.shape == masked.shape == (24, 32, 3)
        assert (masked[:, :16] == before[:, :16]).all() and np.any(masked[:, 16:] != before[:, 16:])
        assert np.any(whole[:, :16] != before[:, :16])

        opened.click("#gallery button >> nth=2")  # from text
        opened.wait_for_selector(f"{from_text}[aria-selected=true]")
        assert value_of(opened, "#instruction") == "a red panda"
        wait_for(lambda: opened.locator("#result img").count() == 1)
        click_and_wait(opened)
        for _ in range(2):
            opened.click("#use")
            opened.wait_for_selector(f"{from_image}[aria-selected=true]")
            opened.wait_for_selector("#image img[src*='a-red-panda']")
            opened.click(from_text)


@pytest.mark.slow
@needs_browser
def test_two_tabs_cancel_and_a_tab_that_is_closed(browser, page, photo_file, tmp_path):
    """A long request is cancelled, and one of a closed tab ends, so that the next one runs."""
    with tab(browser, page) as opened:
        give(opened, photo_file)
        make_long(opened)
        opened.click("#run")
        opened.wait_for_selector("#status progress", timeout=120_000)
        opened.keyboard.press("Escape")
        opened.wait_for_selector("#status .info", timeout=20_000)
        assert opened.inner_text("#status") == "Cancelled"
        fill(opened, "num_inference_steps", 3)
        fill(opened, "resolution", 32)

        photo(80, 60).save(tmp_path / "second.png")
        before = {*page.files.glob("session-*")}
        with tab(browser, page) as second:
            give(second, tmp_path / "second.png", "invert the colors", seed=8)
            make_long(second)
            second.click("#run")
            second.wait_for_selector("#status progress", timeout=120_000)
            opened.click("#run")
            wait_for(lambda: "waiting for 1 request" in opened.inner_text("#status").lower())
            (folder,) = {*page.files.glob("session-*")} - before
            assert [file.name.partition("-")[0] for file in folder.iterdir()] == ["input"]
        opened.wait_for_selector("#status .done", timeout=60_000)
        assert "Seed 7" in opened.inner_text("#status")
        wait_for(lambda: not folder.exists())
