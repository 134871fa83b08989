"""The page's API, for other programs. gradio_client shows signatures and docstrings."""

import asyncio
from contextlib import aclosing
from dataclasses import asdict

import gradio as gr

from diffusers_flax.app.editor import ImageRequest, Stopped
from diffusers_flax.app.images import read_mask_file, read_upload
from diffusers_flax.app.layout import LABELS


class Api:
    """Handlers of the API's endpoints."""

    def __init__(self, events):
        """events: Events of the page, which checks settings and words errors."""
        self.editor, self.sessions, self.events = events.editor, events.sessions, events

    def connect(self, c):
        """Attach the endpoints, in the current gr.Blocks; c: components of the page."""

        def offer(function, name, without, from_image=True):
            inputs = [control for x, control in self.events.controls.items() if x not in without]
            inputs = [c.api_image, *inputs, c.api_mask] if from_image else inputs
            options = {"api_name": name, "concurrency_limit": None}
            c.api_button.click(function, inputs, [c.api_result, c.api_settings], **options)

        if self.editor.edits:
            offer(self.api_edit, "edit", ("shape", "strength"))
            return
        if self.editor.task == "text to image":
            without = "image_guidance_scale", "mask_feather", "strength"
            offer(self.api_image, "image", without, from_image=False)
        offer(self.api_image_to_image, "image_to_image", ("image_guidance_scale", "shape"))

    async def api_edit(
        self,
        image,
        instruction,
        guidance_scale,
        image_guidance_scale,
        num_inference_steps,
        seed,
        resolution,
        scheduler,
        accelerate,
        lora,
        lora_weight,
        negative_prompt,
        mask_feather,
        mask=None,
        page: gr.Request = None,
    ):
        """Edit an image; yields the progress, then the result."""
        values = {name: value for name, value in locals().items() if name in LABELS}
        async for update in self._run(values, image, mask, page):
            yield update

    async def api_image(
        self,
        instruction,
        guidance_scale,
        num_inference_steps,
        seed,
        resolution,
        shape,
        scheduler,
        accelerate,
        lora,
        lora_weight,
        negative_prompt,
        page: gr.Request,
    ):
        """Make an image from text; yields the progress, then the result."""
        values = {name: value for name, value in locals().items() if name in LABELS}
        async for update in self._run(values, None, None, page):
            yield update

    async def api_image_to_image(
        self,
        image,
        instruction,
        guidance_scale,
        num_inference_steps,
        seed,
        resolution,
        scheduler,
        accelerate,
        lora,
        lora_weight,
        negative_prompt,
        mask_feather,
        strength,
        mask=None,
        page: gr.Request = None,
    ):
        """Make an image from text and an image; yields the progress, then the result."""
        values = {name: value for name, value in locals().items() if name in LABELS}
        async for update in self._run(values, image, mask, page):
            yield update

    async def _run(self, values, image, mask, page):
        session = self.sessions.get(page.session_hash)
        for file in filter(None, (image, mask)):
            self.sessions.add_upload(session, file)
        try:
            settings = self.events.checked(values)
            if "mask_feather" in values and not image:  # not from text alone
                raise ValueError("there is no image; give image=handle_file(PATH)")
            source, image = image, image and await asyncio.to_thread(read_upload, image)
            mask = read_mask_file(mask, image.size) if mask else None
            request = self.editor.submit(ImageRequest(settings, image, mask, source))
            async with aclosing(self.editor.follow(request)) as following:
                async for progress in following:
                    yield None, {"stage": progress.stage, "step": progress.step}
        except Stopped as error:
            raise gr.Error("cancelled", print_exception=False) from error
        except (ValueError, OSError) as error:
            raise gr.Error(self.events.in_words(error), print_exception=False) from error
        texts = [self.editor.recipe(request, settings)]
        (result,) = self.sessions.add(
            session, request.images, None, [settings], texts, self.editor.edits
        )
        yield result.path, asdict(settings) | {"seconds": request.seconds}
