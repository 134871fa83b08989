"""What the page does when something is clicked, and its API for other programs."""

import asyncio
import html
import secrets
import time
from contextlib import aclosing
from dataclasses import asdict, replace

import gradio as gr
from PIL import Image

from diffusers_flax.app.editor import ImageRequest, Stopped
from diffusers_flax.app.images import (
    image_to_paint_on,
    painted_mask,
    read_mask_file,
    read_upload,
)
from diffusers_flax.app.layout import (
    COMPARED,
    FROM_IMAGE,
    FROM_TEXT,
    LABELS,
    OWN_SCHEDULER,
    hide,
    show,
)
from diffusers_flax.app.settings import (
    RANGES,
    SCALES,
    Settings,
    check_settings,
    converted,
    settings_of,
)
from diffusers_flax.generating.captions import GRID_MARGIN, captioned, tile_grid
from diffusers_flax.generating.recipes import read_recipe
from diffusers_flax.generating.sizes import fit_image
from diffusers_flax.images import save_image
from diffusers_flax.messages import one_line

MAX_COMPARED = 8
MAX_SHOWN = 60  # images of the session


class Events:
    """Handlers of the page's events."""

    def __init__(self, editor, sessions, components):
        self.editor, self.sessions, self.c = editor, sessions, components
        self.controls = {name: getattr(components, name) for name in LABELS}

    def connect(self, blocks):
        """Attach the handlers, in the current gr.Blocks."""
        c, private = self.c, {"api_visibility": "private", "show_progress": "hidden"}
        quick, slow = private | {"queue": False}, private | {"concurrency_limit": None}
        names = ("tab", "image", "reference", "use_mask", "mask", "mask_file", "keep_seed")
        inputs = {name: getattr(c, name) for name in names} | self.controls
        result = [c.result, c.slider, c.download, c.use]
        changed = [c.seed, c.status, c.run, c.cancel, c.compare, *result, c.gallery, c.comparison]
        run = [c.run.click, c.instruction.submit]
        gr.on(run, self.make, None, changed, inputs_kwargs=inputs, **slow)
        inputs = inputs | {"compared": c.compared, "values": c.values}
        c.compare.click(self.make, None, changed, inputs_kwargs=inputs, **slow)
        c.cancel.click(self.cancel, **quick)
        tabs = [c.tab, c.tabs] if c.tabs else []
        shown = [*self.controls.values(), c.keep_seed, c.status, *result, *tabs]
        c.gallery.select(self.pick, None, shown, **quick)
        c.use.click(self.use_result, None, [c.image, *tabs], **quick)
        if c.tabs:
            # The browser handles the click, without the server, so that the next click finds the
            # right tab. c.tabs needs the value too: gradio ignores an update to its current value.
            for name, one in ((FROM_TEXT, c.from_text), (FROM_IMAGE, c.from_image)):
                opened = f"{{__type__: 'update', selected: '{name}'}}"
                one.select(None, None, tabs, js=f"() => ['{name}', {opened}]", **quick)
        c.image.upload(self.restore, [c.image], [*shown, c.image], **quick)
        paint = [c.use_mask, c.image, c.resolution]
        gr.on([c.use_mask.change, c.image.change], self.paint, paint, c.mask, **quick)
        blocks.unload(self.close)

        def offer(name, without, has_image=True):
            inputs = {x: control for x, control in self.controls.items() if x not in without}
            inputs = {"image": c.api_image, **inputs, "mask": c.api_mask} if has_image else inputs
            inputs |= {"reference": c.api_reference} if self.editor.takes_reference else {}
            outputs = [c.api_result, c.api_settings]
            options = {"api_name": name, "inputs_kwargs": inputs, "concurrency_limit": None}
            c.api_button.click(self.call, None, outputs, **options)

        if self.editor.edits:
            offer("edit", ("shape", "strength"))
        if self.editor.task == "text to image":
            offer("image", ("image_guidance_scale", "mask_feather", "strength"), has_image=False)
        if not self.editor.edits:
            offer("image_to_image", ("image_guidance_scale", "shape"))

    async def call(self, page: gr.Request, image=None, mask=None, reference=None, **values):
        """Make an image; yields the progress, then the result."""
        session = self.sessions.get(page)
        try:
            settings = self.checked(values)
            if "mask_feather" in values and not image:  # not from text alone
                raise ValueError("there is no image; give image=handle_file(PATH)")
            request = await asyncio.to_thread(request_of, settings, image, mask, reference)
            async with aclosing(self.editor.follow(request)) as following:
                async for _ in following:
                    yield None, {"stage": request.stage, "step": request.step}
        except Stopped as error:
            raise gr.Error("cancelled", print_exception=False) from error
        except (ValueError, OSError) as error:
            raise gr.Error(one_line(error), print_exception=False) from error
        recipe = self.editor.recipe(request, settings)
        result = session.add(request.images[0], None, settings, recipe)
        yield result.path, asdict(settings) | {"seconds": request.seconds}

    # ------------------------------------------------------------ requests of the page

    async def make(self, page: gr.Request, compared=None, values=None, **data):
        """Make the images that the controls describe; yields the page's updates.

        Args:
            page: gr.Request.
            compared, values: of a comparison, else None.
            data: {name of a component: its value}.
        """
        c, session = self.c, self.sessions.get(page)
        busy = gr.update(interactive=False)
        yield {c.run: busy, c.compare: busy, c.cancel: show()}
        try:
            settings = self._settings(data)
            scales = () if values is None else self._scales(settings, compared, values)
            request = await asyncio.to_thread(self._request, settings, data, scales)
            session.request, before = request, None
            if request.image is not None:
                size = self.editor.size_of(settings, request.image)
                before = session.save(fit_image(request.image, size), "input")
            seen = None
            async with aclosing(self.editor.follow(request)) as following:
                async for _ in following:
                    update = {c.status: status_of(self.editor, request)}
                    if request.preview is not seen:
                        seen = request.preview
                        update |= self._view(before, session.save(seen, "preview"))
                    yield update
            update = await asyncio.to_thread(self._finished, request, before, session)
        except Stopped:
            update = self._shown(session) | {c.status: status("cancelled", "info")}
        except (ValueError, OSError) as error:
            update = self._failed(error, session)
        ready = gr.update(interactive=True)
        yield update | {c.run: ready, c.compare: ready, c.cancel: hide()}

    def _settings(self, data):
        """Settings from the controls; the seed is new unless it is kept."""
        values = {name: data[name] for name in self.controls}
        if self.editor.edits or data["tab"] == FROM_TEXT:
            del values["strength"]
        if not data["keep_seed"] or values["seed"] is None:
            values["seed"] = secrets.randbelow(RANGES["seed"][1] + 1)
        return self.checked(values)

    def _scales(self, settings, compared, values):
        """(guidance_scale, image_guidance_scale) of each image of a comparison."""
        name = COMPARED[compared] if self.editor.edits else "guidance_scale"
        words = values.replace(",", " ").split()
        if not 2 <= len(words) <= MAX_COMPARED:
            raise ValueError(f"give 2 to {MAX_COMPARED} values, such as 1, 1.5, 2")
        several = [replace(settings, **{name: converted(name, word)}) for word in words]
        for one in several:
            check_settings(one, self.editor.limits)
        return tuple((one.guidance_scale, one.image_guidance_scale) for one in several)

    def checked(self, values):
        """Checked Settings; values: {name: value of its control}."""
        settings = {name: converted(name, value) for name, value in values.items()}
        if settings["scheduler"] in ("", OWN_SCHEDULER):
            settings["scheduler"] = None
        settings = Settings(**settings)
        check_settings(settings, self.editor.limits)
        self.editor.check(settings)
        return settings

    def _request(self, settings, data, scales):
        """The ImageRequest of the controls' values."""
        if not self.editor.edits and settings.strength is None:
            return ImageRequest(settings, scales=scales)
        if not data["image"]:
            raise ValueError("there is no image; drop one, paste one, or take an example")
        layers = data["use_mask"] and (data["mask"] or {}).get("layers")
        painted, file = painted_mask(layers), data["mask_file"]
        if painted and file:
            raise ValueError("there are two masks; remove the file, or switch the painted one off")
        request = request_of(settings, data["image"], file, data["reference"], scales)
        if painted:
            request.mask = painted
        elif data["use_mask"] and not file and self.editor.task != "inpainting":
            raise ValueError("no part is painted; paint what may change, or switch this off")
        return request

    def _finished(self, request, before, session):
        """Save a request's images; returns the updates that show them."""
        c = self.c
        for file in session.folder.glob("preview-*.png"):
            file.unlink()
        several = [replace(request.settings, **dict(zip(SCALES, x))) for x in request.scales]
        for image, settings in zip(request.images, several):
            recipe = self.editor.recipe(request, settings)
            session.shown = session.add(image, before, settings, recipe)
        seconds = f"{request.seconds:.1f} s"
        text = f"seed {request.settings.seed}, {seconds}"
        gallery = [(x.path, x.settings.instruction) for x in session.results[:MAX_SHOWN]]
        update = {c.gallery: show(value=gallery), c.seed: request.settings.seed}
        if len(several) > 1:
            text = f"{len(several)} images in {seconds}"
            tiles = []  # original and results in a row
            if before is not None:
                with Image.open(before) as image:
                    tiles.append(captioned([image.convert("RGB")], request.settings.instruction))
            for image, scales in zip(request.images, request.scales):
                scales = scales[: 1 + self.editor.edits]
                tiles.append(captioned([image], "scale " + ", ".join(f"{x:g}" for x in scales)))
            file = session.folder / f"{len(session.results):03}-comparison.png"
            save_image(tile_grid(tiles, len(tiles), GRID_MARGIN), file)
            update[c.comparison] = show(value=file)
        return self._shown(session) | update | {c.status: status(text, "done")}

    def _shown(self, session):
        """Updates that show the session's result again."""
        c, shown = self.c, session.shown
        if shown is None:
            return {c.result: None, c.slider: None}
        return self._view(shown.before, shown.path) | {
            c.download: gr.update(value=shown.path, interactive=True),
            c.use: gr.update(interactive=True),
        }

    def _view(self, before, after):
        """The update that shows an image with its original, or without; arguments: paths."""
        c = self.c
        if before:
            return {c.result: hide(value=None), c.slider: show(value=(before, after))}
        return {c.result: show(value=after), c.slider: hide(value=None)}

    def _failed(self, error, session):
        """Updates that show an error instead of the result."""
        c, session.shown, gone = self.c, None, gr.update(interactive=False)
        cleared = {c.result: None, c.slider: None, c.download: gone, c.use: gone}
        return cleared | {c.status: status(one_line(error), "failed")}

    # ------------------------------------------------------------ other events

    def cancel(self, page: gr.Request):
        """Stop the session's request."""
        if request := self.sessions.get(page).request:
            request.stopped.set()

    def pick(self, picked: gr.SelectData, page: gr.Request):
        """Show one of the session's images again, with its settings."""
        session = self.sessions.get(page)
        if picked.index >= len(session.results):  # of a page from before a restart
            return self._failed("this image is deleted", session)
        session.shown = session.results[picked.index]
        settings = session.shown.settings
        tab = FROM_TEXT if settings.strength is None else FROM_IMAGE
        update = self._restored(settings) | self._shown(session) | self._open(tab)
        return update | {self.c.status: status(f"seed {settings.seed}", "done")}

    def use_result(self, page: gr.Request):
        """Take the shown result as the original image."""
        shown = self.sessions.get(page).shown
        return {self.c.image: shown.path if shown else gr.skip()} | self._open(FROM_IMAGE)

    def _open(self, tab):
        """Updates that open a tab, on a page that has several."""
        c = self.c
        return {c.tab: tab, c.tabs: gr.update(selected=tab)} if c.tabs else {}

    def restore(self, file, page: gr.Request):
        """Restore the settings that an uploaded image of this program has."""
        c, session = self.c, self.sessions.get(page)
        try:
            read_upload(file)
        except ValueError as error:
            return self._failed(error, session) | {c.image: None}
        recipe = read_recipe(file) or {}
        if ("edit" if self.editor.edits else "prompt") not in recipe:
            return {c.status: ""}
        settings = settings_of(recipe, self.editor.defaults(), self.editor.limits)
        text = "the settings of this file are back; give its original image, if it has one"
        return self._restored(settings) | {c.status: status(text, "info")}

    def _restored(self, settings):
        """Updates of all controls."""
        values = asdict(settings) | {"scheduler": settings.scheduler or OWN_SCHEDULER}
        values |= {"accelerate": [*settings.accelerate], "lora": [*settings.lora]}
        if settings.strength is None:  # the page's stays
            del values["strength"]
        return {self.controls[name]: x for name, x in values.items()} | {self.c.keep_seed: True}

    def paint(self, use_mask, file, resolution, page: gr.Request):
        """Put the image into the mask editor, or hide the editor."""
        if not use_mask:
            return hide()
        session = self.sessions.get(page)
        try:
            image = read_upload(file) if file else None
        except ValueError:
            image = None
        if image is None:
            return show(value=None)
        size = self.editor.size_of(Settings("", resolution=int(resolution)), image)
        large = session.save(image_to_paint_on(image, size), "paint")
        return show(value={"background": str(large), "layers": [], "composite": None})

    def close(self, page: gr.Request):
        """Forget the session."""
        self.cancel(page)
        self.sessions.close(page)


def status(text, state, share=None):
    """The HTML of the status line.

    Args:
        text: a sentence.
        state: "busy", "done", "info" or "failed".
        share: work done, from 0 to 1, for a progress bar; None: no bar.
    """
    bar = "" if share is None else f'<progress value="{share:.3f}" max="1"></progress>'
    text = html.escape(text[:1].upper() + text[1:])
    return f'<div class="line {state}" role="status">{bar}<span>{text}</span></div>'


def status_of(editor, request):
    """The status line of a request of an Editor."""
    if request.step:
        text = f"step {request.step} of {request.num_steps}"
        return status(text, "busy", request.step / request.num_steps)
    if request.stage == "waiting":
        text = f"waiting for {editor.requests.index(request)} request(s) before this one"
    else:
        text = f"{request.stage}, {time.monotonic() - request.since:.0f} s; a new size, number of "
        text += "steps or scheduler compiles first"
    return status(text, "busy")


def request_of(settings, file, mask_file=None, reference_file=None, scales=()):
    """The ImageRequest of files, which may be None."""
    image, reference = (x and read_upload(x) for x in (file, reference_file))
    mask = read_mask_file(mask_file, image.size) if mask_file else None
    return ImageRequest(settings, image, mask, reference, file, reference_file, scales)
