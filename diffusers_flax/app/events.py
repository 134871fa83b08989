"""What the page does when something is clicked."""

import asyncio
import html
import time
from contextlib import aclosing
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace

import gradio as gr
from PIL import Image

from diffusers_flax.app.api import Api
from diffusers_flax.app.editor import ImageRequest, Stopped
from diffusers_flax.app.images import (
    has_paint,
    image_to_paint_on,
    middle_of_change,
    painted_mask,
    read_mask_file,
    read_upload,
)
from diffusers_flax.app.layout import (
    COMPARED,
    FROM_IMAGE,
    FROM_TEXT,
    OWN_SCHEDULER,
    hide,
    labels_of,
    settings_components,
    show,
)
from diffusers_flax.app.settings import (
    SCALES,
    Settings,
    check_settings,
    draw_seed,
    read_settings,
    within_limits,
)
from diffusers_flax.app.status import in_words, status, status_of
from diffusers_flax.generating.captions import GRID_MARGIN, captioned, tile_grid
from diffusers_flax.generating.recipes import checksum_of, read_recipe
from diffusers_flax.generating.sizes import fit_image
from diffusers_flax.images import save_image

MAX_COMPARED = 8


class UnreadableImage(ValueError):
    """The page's image cannot be read."""


def open_image_of_page(file):
    """read_upload, but an UnreadableImage says what is wrong."""
    try:
        return read_upload(file)
    except FileNotFoundError as error:
        raise UnreadableImage("the file of the image is deleted; upload it again") from error
    except ValueError as error:
        raise UnreadableImage(str(error)) from error


class Events:
    """Handlers of the page's events."""

    def __init__(self, editor, sessions, components):
        self.editor, self.sessions, self.c = editor, sessions, components
        self.controls = settings_components(components)
        self.labels = labels_of(editor.edits) | {"values": "Values"}
        self.names = SimpleNamespace(**asdict(editor.defaults()) | vars(editor.config))

    def connect(self, blocks):
        """Attach the handlers, in the current gr.Blocks."""
        c, private = self.c, {"api_visibility": "private"}
        quick = private | {"queue": False, "show_progress": "hidden"}
        slow = private | {"concurrency_limit": None, "show_progress": "hidden"}
        inputs = {c.tab, c.image, c.use_mask, c.mask, c.mask_file, c.keep_seed}
        inputs |= {*self.controls.values()}
        gr.on([c.run.click, c.instruction.submit], self.make, inputs, self._all(), **slow)
        c.compare.click(self.compare, inputs | {c.compared, c.values}, self._all(), **slow)
        c.cancel.click(self.cancel, None, None, **quick)
        c.roll.click(lambda: (draw_seed(), True), None, [c.seed, c.keep_seed], **quick)
        tabs = [c.tab, c.tabs] if c.tabs else []
        shown = [*self.controls.values(), c.keep_seed, c.status, *self._result(), *tabs]
        c.gallery.select(self.pick, None, shown, **quick)
        c.comparison.select(self.pick_compared, None, shown, **quick)
        c.use.click(self.use_result, None, [c.image, *tabs], **quick)
        if c.tabs:
            # In the browser alone, so that a click on the button at once finds it. c.tabs must know
            # of it: an update to the tab that it knows opens nothing.
            for name, one in ((FROM_TEXT, c.from_text), (FROM_IMAGE, c.from_image)):
                opened = f"{{__type__: 'update', selected: '{name}'}}"
                one.select(None, None, tabs, js=f"() => ['{name}', {opened}]", **quick)
        c.image.upload(self.restore, [c.image], [*shown, c.image], **slow)
        paint = {"fn": self.paint, "inputs": [c.use_mask, c.image, c.resolution]}
        paint |= {"outputs": [c.mask, c.mask_feather]} | quick
        gr.on([c.use_mask.change, c.image.change], **paint)
        blocks.load(self.state, None, [c.state], **quick)
        timer = gr.Timer(1)
        timer.tick(self.tick, None, [c.state, timer], **quick)
        Api(self).connect(c)
        blocks.unload(self.close)

    def _all(self):
        """Components that a request changes."""
        c = self.c
        gallery = [c.gallery_title, c.gallery, c.comparison, c.figure]
        buttons = [c.run, c.cancel, c.compare]
        return [c.image, c.seed, c.status, *buttons, *self._result(), *gallery]

    def _result(self):
        """Components of a result."""
        return [self.c.result, self.c.slider, self.c.download, self.c.use]

    # ------------------------------------------------------------ requests

    async def make(self, data, page: gr.Request):
        """Make an image."""
        session = self.sessions.get(page.session_hash)
        async for update in self._run(data, session, self._scales_of_one):
            yield update

    async def compare(self, data, page: gr.Request):
        """Make an image at several values of a scale."""
        session = self.sessions.get(page.session_hash)
        async for update in self._run(data, session, self._scales_of_several):
            yield update

    async def _run(self, data, session, scales_of):
        """Make the images that the controls describe; yields the page's updates."""
        c = self.c
        for file in filter(None, (data[c.image], data[c.mask_file])):
            self.sessions.add_upload(session, file)
        if data[c.use_mask] and session.painted_since == float("inf"):
            session.painted_since = 0  # a mask from before a lost connection
        try:
            if self.editor.edits and not data[c.image] and not (data[c.instruction] or "").strip():
                raise ValueError(
                    "there is no image and no instruction; drop an image, and say what to change"
                )
            settings = self._settings(data)
            scales = scales_of(settings, data)
            request = await asyncio.to_thread(self._request, settings, data, scales)
            self.editor.submit(request)
        except (ValueError, OSError) as error:
            yield self._failed(error, session)
            raise self._toast(error) from error
        session.request = request
        try:
            async for update in self._watch(request, session):
                yield update
        except Stopped:
            yield self._without_preview(session) | {c.status: status("cancelled", "info")}
        except (ValueError, OSError) as error:
            yield self._idle() | self._failed(error, session)
            raise self._toast(error) from error
        except Exception:  # the log of the server has it
            message = "this failed on the server, whose log says why"
            yield self._idle() | self._failed(message, session)
            raise
        finally:
            self.editor.stop(request)  # of a page that was closed

    async def _watch(self, request, session):
        """The page's updates for a submitted request."""
        c, before, seen = self.c, None, None
        busy = gr.update(interactive=False)
        yield {c.run: busy, c.compare: busy, c.cancel: show()}
        if request.image is not None:
            fitted = fit_image(
                request.image, self.editor.size_of(request.settings, request.image.size)
            )
            before = self.sessions.save(session, fitted, "input")
        async with aclosing(self.editor.follow(request)) as following:
            async for progress in following:
                update = {c.status: status_of(self.editor, request, progress)}
                if progress.preview not in (None, seen):
                    shown = self.sessions.save(session, progress.preview, "preview")
                    if seen is None:
                        update |= await asyncio.to_thread(self._compared, before, shown)
                    else:  # the slider stays where it is
                        update |= self._view(before, shown)
                    seen = progress.preview
                yield update
        yield await asyncio.to_thread(self._finished, request, before, session)

    def _settings(self, data):
        """Settings from the controls; the seed is new unless it is kept."""
        values = {name: data[control] for name, control in self.controls.items()}
        if self.editor.edits or data[self.c.tab] == FROM_TEXT:
            del values["strength"]
        if not data[self.c.keep_seed] or values["seed"] is None:
            values["seed"] = draw_seed()
        return self.checked(values)

    def checked(self, values):
        """Checked Settings; values: {name: value of its control}."""
        own = values["scheduler"] in (None, OWN_SCHEDULER)
        changes = {"scheduler": None if own else values["scheduler"]}
        changes |= {name: values[name] or "" for name in ("instruction", "negative_prompt")}
        for name in ("accelerate", "lora"):
            several = values.get(name) or ()
            several = (several,) if isinstance(several, str) else several
            if not isinstance(several, list | tuple) or not all(
                isinstance(value, str) for value in several
            ):
                raise ValueError(f"--{name} {several} is not a list of names")
            changes[name] = tuple(several)
        if "strength" in values:
            changes["strength"] = as_number("strength", values["strength"], float)
        for field in fields(Settings):
            if isinstance(field.default, float | int) and field.name in values:
                changes[field.name] = as_number(field.name, values[field.name], type(field.default))
        settings = Settings(**values | changes)
        check_settings(settings, self.editor.limits)
        self.editor.check(settings)
        for text in (settings.instruction, settings.negative_prompt):
            if message := self.editor.cut_text(text):
                gr.Warning(html.escape(message))
        return settings

    def _request(self, settings, data, scales):
        """The ImageRequest of the controls' values."""
        c = self.c
        if not self.editor.edits and settings.strength is None:
            return ImageRequest(settings, scales=scales)
        if not data[c.image]:
            raise ValueError("there is no image; drop one, paste one, or take an example")
        image = open_image_of_page(data[c.image])
        mask = self._mask(data, image.size)
        return ImageRequest(settings, image, mask, data[c.image], scales)

    def _mask(self, data, size):
        """The mask, painted or of a file, or None; size: (width, height) of its image."""
        layers = (data[self.c.mask] or {}).get("layers") or []
        file, use_paint = data[self.c.mask_file], data[self.c.use_mask]
        if self.editor.task == "inpainting" or file:  # paint is not asked for
            use_paint = use_paint and has_paint(layers)
        if file and use_paint:
            raise ValueError("there are two masks; remove the file, or switch the painted one off")
        if file:
            return read_mask_file(file, size)
        return painted_mask(layers) if use_paint else None

    def _scales_of_one(self, settings, data):
        return ()

    def _scales_of_several(self, settings, data):
        """(guidance_scale, image_guidance_scale) for each value."""
        words = data[self.c.values].replace(",", " ").split()
        values = [as_number("values", word, float) for word in words]
        if not 2 <= len(values) <= MAX_COMPARED:
            raise ValueError(f"give 2 to {MAX_COMPARED} values, such as 1, 1.5, 2")
        name = COMPARED[data[self.c.compared]] if self.editor.edits else "guidance_scale"
        several = [replace(settings, **{name: value}) for value in values]
        for one in several:
            check_settings(one, self.editor.limits)
            self.editor.check(one)
        return tuple((one.guidance_scale, one.image_guidance_scale) for one in several)

    def _finished(self, request, before, session):
        """Save a request's images; returns the updates that show them."""
        c, edits = self.c, self.editor.edits
        for file in session.folder.glob("preview-*.png"):
            file.unlink()
        names = ("guidance_scale", "image_guidance_scale")
        several = [
            replace(request.settings, **dict(zip(names, scales))) for scales in request.scales
        ]
        texts = [self.editor.recipe(request, one) for one in several]
        results = self.sessions.add(session, request.images, before, several, texts, edits)
        gallery = [(result.path, result.settings.instruction) for result in session.results]
        update = self._idle() | self._shown(results[-1], session)
        update |= {
            c.gallery: show(value=gallery),
            c.gallery_title: show(),
            c.seed: request.settings.seed,
        }
        seconds = f"{request.seconds:.1f} s{', with compiling' * request.has_compiled}"
        text = f"{results[-1].summary}; {seconds}"
        if len(results) > 1:
            session.comparison = results
            text = f"{len(results)} images in {seconds}"
            captions = [self._caption(one, several) for one in several]
            strip = [(result.path, caption) for result, caption in zip(results, captions)]
            update[c.comparison] = show(value=strip, columns=len(strip))
            update[c.figure] = show(value=self._figure(request, before, captions, session))
        return update | {c.status: status(text, "done")}

    def _caption(self, settings, several):
        """An image's value of the compared scale."""
        for name in SCALES:
            if len({getattr(one, name) for one in several}) > 1:
                return f"{self.labels[name].lower()} {getattr(settings, name):g}"
        return ""

    def _figure(self, request, before, captions, session):
        """Save a comparison as one image: original and results in a row, with captions."""
        images, captions = [*request.images], [*captions]
        if before is not None:
            with Image.open(before) as image:
                before = image.convert("RGB")
            images, captions = [before, *images], [request.settings.instruction, *captions]
        scale = -(-192 // max(images[0].size)) if max(images[0].size) < 192 else 1
        large = [image.resize([side * scale for side in image.size]) for image in images]
        tiles = [captioned([image], text) for image, text in zip(large, captions)]
        file = session.folder / f"{session.number:03}-comparison.png"
        save_image(tile_grid(tiles, len(tiles), GRID_MARGIN), file)
        return file

    def _shown(self, result, session):
        """Updates that show a Result."""
        c, session.shown = self.c, result
        return self._compared(result.before, result.path) | {
            c.download: gr.update(value=result.path, interactive=True),
            c.use: gr.update(interactive=True),
        }

    def _compared(self, before, after):
        """The update that shows a result; before, after: paths of the original and of the result.

        The slider starts in the middle of the change.
        """
        if not before:
            return self._view(before, after)
        with Image.open(before) as first, Image.open(after) as second:
            middle = middle_of_change(first.convert("RGB"), second.convert("RGB"))
        return self._view(before, after, slider_position=middle)

    def _view(self, before, after, **options):
        """The update that shows a result with its original, or without; options: of the slider."""
        c = self.c
        if before:
            return {c.result: hide(value=None), c.slider: show(value=(before, after), **options)}
        return {c.result: show(value=after), c.slider: hide(value=None)}

    def _idle(self):
        """Updates after a request."""
        c, ready = self.c, gr.update(interactive=True)
        return {c.run: ready, c.compare: ready, c.cancel: hide()}

    def _without_preview(self, session):
        """Updates after a request without images: the previous result."""
        if session.shown and session.shown.path.exists():
            return self._idle() | self._shown(session.shown, session)
        return self._idle() | {self.c.result: None, self.c.slider: None}

    def _failed(self, error, session):
        """Updates that show an error instead of the result; an unreadable image goes too."""
        c, session.shown = self.c, None
        update = {c.status: status(self.in_words(error), "failed")}
        update |= {c.result: None, c.slider: None}
        update[c.download] = gr.update(value=None, interactive=False)
        update[c.use] = gr.update(interactive=False)
        return update | ({c.image: None} if isinstance(error, UnreadableImage) else {})

    def _toast(self, error):
        """An exception that Gradio shows over the page, also on a phone."""
        text = self.in_words(error)
        return gr.Error(html.escape(text[:1].upper() + text[1:]), duration=5, print_exception=False)

    def in_words(self, error):
        """An error's message, with the page's labels."""
        return in_words(error, self.names, self.labels)

    # ------------------------------------------------------------ other events

    def cancel(self, page: gr.Request):
        """Stop the session's request."""
        if request := self.sessions.get(page.session_hash).request:
            self.editor.stop(request)

    def pick(self, picked: gr.SelectData, page: gr.Request):
        """Show one of the session's images again, with its settings."""
        session = self.sessions.get(page.session_hash)
        return self._picked(session.results, picked.index, session)

    def pick_compared(self, picked: gr.SelectData, page: gr.Request):
        """Show one of the comparison's images, with its settings."""
        session = self.sessions.get(page.session_hash)
        return self._picked(session.comparison, picked.index, session)

    def _picked(self, results, index, session):
        if index >= len(results) or not results[index].path.exists():
            return self._failed("this image is deleted", session)
        result = results[index]
        tab = FROM_TEXT if result.settings.strength is None else FROM_IMAGE
        update = self._restored(result.settings) | self._shown(result, session) | self._open(tab)
        return update | {self.c.status: status(result.summary, "done")}

    def use_result(self, page: gr.Request):
        """Take the shown result as the original image."""
        shown = self.sessions.get(page.session_hash).shown
        return {self.c.image: shown.path if shown else gr.skip()} | self._open(FROM_IMAGE)

    def _open(self, tab):
        """Updates that open a tab, on a page that has several."""
        c = self.c
        return {c.tab: tab, c.tabs: gr.update(selected=tab)} if c.tabs else {}

    def restore(self, file, page: gr.Request):
        """Restore the settings that an uploaded image of this program has."""
        try:
            open_image_of_page(file)
        except UnreadableImage as error:
            yield self._failed(error, self.sessions.get(page.session_hash))
            raise self._toast(error) from error
        session, recipe = self.sessions.get(page.session_hash), read_recipe(file) or {}
        original, checksum = recipe.get("input", recipe.get("image")), checksum_of(file)
        plain, edits = self.editor.defaults(), self.editor.edits
        if (settings := read_settings(file, plain, edits)) is None or session.restored == checksum:
            yield {self.c.status: ""}
            return
        settings, changed = within_limits(settings, self.editor.limits)
        text = "the settings of this file are back"
        if original:
            session.restored = checksum
            text += (
                f"; now give its original image, {Path(str(original)).name}, or this file again to "
                "change the result further"
            )
        if changed:
            text += (
                f"; this page cannot have its {', '.join(self.labels[name] for name in changed)}"
            )
        cleared = {self.c.image: None} if original else {}
        yield self._restored(settings) | cleared | {self.c.status: status(text, "info")}

    def _restored(self, settings):
        """Updates of all controls."""
        update = {control: getattr(settings, name) for name, control in self.controls.items()}
        update[self.controls["scheduler"]] = settings.scheduler or OWN_SCHEDULER
        for name in ("accelerate", "lora"):
            update[self.controls[name]] = [*getattr(settings, name)]
        if settings.strength is None:  # the page's stays
            del update[self.controls["strength"]]
        return update | {self.c.keep_seed: True}

    def paint(self, use_mask, file, resolution, page: gr.Request):
        """Put the image into the mask editor, or hide the editor."""
        session = self.sessions.get(page.session_hash)
        if file:
            self.sessions.add_upload(session, file)
        feather = gr.update(visible=use_mask or not self.editor.edits)  # a file may have one too
        if not use_mask:
            return hide(), feather
        session.painted_since = min(session.painted_since, time.time())
        try:
            image = open_image_of_page(file) if file else None
        except UnreadableImage:
            image = None
        if image is None:
            return show(value=None), feather
        size = self.editor.size_of(Settings("", resolution=int(resolution)), image.size)
        large = self.sessions.save(session, image_to_paint_on(image, size), "paint")
        return show(value={"background": str(large), "layers": [], "composite": None}), feather

    def tick(self):
        """Refresh the model's state, every second until it is ready."""
        is_busy = any(request.is_trial for request in [*self.editor.requests])
        return self.state(), gr.update(active=is_busy)

    def state(self):
        """The model's state, HTML."""
        trial = next((request for request in [*self.editor.requests] if request.is_trial), None)
        if trial is None and self.editor.trial_error:
            error = html.escape(self.in_words(self.editor.trial_error))
            return f'<span class="failed" title="{error}">the first program failed</span>'
        if trial is None:
            return '<span class="ready">ready</span>'
        width, height = self.editor.program_size(trial)
        seconds = time.monotonic() - trial.progress.since
        return f'<span class="busy">compiling for {width}x{height}, {seconds:.0f} s</span>'

    def close(self, page: gr.Request):
        """Forget the session."""
        self.cancel(page)
        self.sessions.close(page.session_hash)


def as_number(name, value, kind):
    """The page's value as a number; kind: float or int."""
    try:
        number = kind(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"--{name} {value} is not a number") from None
    if kind is int and number != float(value):
        raise ValueError(f"--{name} {value} is not a whole number")
    return number
