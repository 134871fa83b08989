"""The page's controls, Gradio components."""

import html
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gradio as gr

from diffusers_flax.app.settings import RANGES, SHAPES
from diffusers_flax.schedulers.factory import SCHEDULERS

OWN_SCHEDULER = "the model's own"
ACCELERATIONS = (
    *("guidance:stop=0.6", "deepcache:interval=2", "deepcache:interval=3", "spectrum", "fbcache"),
    *("tome", "int8"),
)
COMPARED = {  # radio button: setting
    "Instruction scale": "guidance_scale",
    "Image scale": "image_guidance_scale",
}
TITLES = {  # of the page, by the task of its first tab
    "edit": "Edit images by instruction",
    "text to image": "Images from text",
    "inpainting": "Repaint a part of an image",
}
FROM_TEXT, FROM_IMAGE = "Text to image", "Image to image"  # tabs
LABELS = {  # of settings, in the order of the API's arguments
    "instruction": "Instruction",
    "guidance_scale": "Instruction scale",
    "image_guidance_scale": "Image scale",
    "num_inference_steps": "Steps",
    "seed": "Seed",
    "resolution": "Size",
    "shape": "Shape",
    "scheduler": "Scheduler",
    "accelerate": "Acceleration",
    "lora": "LoRA",
    "lora_weight": "LoRA weight",
    "negative_prompt": "Negative prompt",
    "mask_feather": "Soft edge",
    "strength": "Strength",
}
SLIDERS = {  # of settings: step, and what it does
    "guidance_scale": (0.1, "higher: closer to the text"),
    "image_guidance_scale": (0.05, "higher: closer to the input"),
    "num_inference_steps": (1, "more: finer, and slower"),
    "lora_weight": (0.05, None),
    "mask_feather": (1, "pixels in which the change fades in"),
    "strength": (0.05, "higher: further from the image; this part of the steps runs"),
}
hide, show = partial(gr.update, visible=False), partial(gr.update, visible=True)


def image_file(**options):
    """A gr.Image whose value is the path of the unchanged uploaded file, which may be broken.

    Not a subclass, as Gradio writes a stub file beside each.
    """
    image = gr.Image(type="filepath", image_mode=None, format="png", **options)
    image.preprocess = lambda payload: payload and payload.path
    return image


def build(editor, examples):
    """Build the page in the current gr.Blocks.

    Args:
        editor: Editor.
        examples: (paths of images, instructions) to try.

    Returns:
        Namespace of Gradio components; a setting's control has its name.
    """
    images, texts = examples
    c = SimpleNamespace(labels=dict(LABELS), defaults=editor.defaults(), tabs=None)
    if not editor.edits:
        c.labels |= {"instruction": "Prompt", "guidance_scale": "Prompt scale"}
    name = "/".join(Path(str(editor.config.model)).parts[-3:])
    with gr.Row(elem_id="head"):
        gr.HTML(f"<h1>{TITLES[editor.task]}</h1><p>{html.escape(name)}</p>", padding=False)
    with gr.Row(elem_id="columns"):
        with gr.Column(elem_id="request"):
            from_text, shape = editor.task == "text to image", {"label": LABELS["shape"]}
            # The tab that is open; a hidden component, which the browser changes at once.
            c.tab = gr.Textbox(FROM_TEXT if from_text else FROM_IMAGE, visible=False)
            if from_text:
                with gr.Tabs(elem_id="tabs", selected=FROM_TEXT) as c.tabs:
                    with gr.Tab(FROM_TEXT, id=FROM_TEXT) as c.from_text:
                        c.shape = gr.Dropdown([*SHAPES], value=c.defaults.shape, **shape)
                    with gr.Tab(FROM_IMAGE, id=FROM_IMAGE, render_children=True) as c.from_image:
                        build_image(c, editor)
                        build_mask(c, editor, images)
            else:
                c.shape = gr.Dropdown([*SHAPES], value=c.defaults.shape, visible=False, **shape)
                build_image(c, editor)
                if editor.edits:
                    build_instruction(c, editor)
                build_mask(c, editor, images)
            if not editor.edits:
                build_instruction(c, editor)
            build_examples(c.instruction, texts, "Texts to try", "texts")
        with gr.Column(elem_id="results"):
            build_results(c, editor)
        with gr.Column(elem_id="controls"), gr.Accordion("Settings", open=True):
            build_settings(c, editor)
    with gr.Row(visible=False):  # of the API
        c.api_image, c.api_mask = image_file(label="Image"), image_file(label="Mask")
        c.api_reference = image_file(label="Reference")
        c.api_result, c.api_settings = image_file(label="Result"), gr.JSON(label="Settings")
        c.api_button = gr.Button()
    for name in LABELS:
        # converted checks values; Gradio's checks leave tracebacks in the terminal.
        getattr(c, name).preprocess = lambda payload: payload
    return c


def build_slider(c, name, **options):
    """The gr.Slider of a setting."""
    step, info = SLIDERS[name]
    own = {"label": c.labels[name], "step": step, "info": info, "value": getattr(c.defaults, name)}
    setattr(c, name, gr.Slider(*RANGES[name], elem_id=name, **own | options))


def build_image(c, editor):
    """The original image, a reference, and for a model from text how much is replaced."""
    c.image = image_file(
        label="Image",
        sources=["upload", "webcam", "clipboard"],
        height=320,
        elem_id="image",
        buttons=["fullscreen"],
    )
    c.reference = image_file(
        label="Reference: a second image that the model sees",
        sources=["upload", "clipboard"],
        height=160,
        elem_id="reference",
        visible=editor.takes_reference,
    )
    value = 1.0 if editor.task == "inpainting" else 0.8
    build_slider(c, "strength", value=value, visible=not editor.edits)


def build_mask(c, editor, images):
    """The part that may change, painted or a mask's file, which inpainting models need."""
    is_needed = editor.task == "inpainting"
    title = "The part that may change" if is_needed else "Only a part of the image"
    with gr.Accordion(title, open=is_needed):
        c.use_mask = gr.Checkbox(
            is_needed, label="Paint the part", visible=not is_needed, elem_id="use_mask"
        )
        c.mask = gr.ImageEditor(
            label="Paint the part that may change",
            type="pil",
            image_mode="RGBA",
            format="png",
            sources=[],
            transforms=[],
            layers=False,
            brush=gr.Brush(colors=["#14b8a6"], color_mode="fixed", default_size=40),
            visible=is_needed,
            elem_id="mask",
        )
        c.mask_file = image_file(
            label="Or a mask: white may change",
            sources=["upload", "clipboard"],
            height=160,
            elem_id="mask_file",
        )
        build_slider(c, "mask_feather")
    build_examples(c.image, images, "Images to try", "images")


def build_instruction(c, editor):
    """Instruction and button."""
    c.instruction = gr.Textbox(
        label=c.labels["instruction"],
        placeholder="make it look like winter" if editor.edits else "a red panda reading a map",
        lines=1,
        max_lines=4,
        elem_id="instruction",
    )
    verb = "Edit" if editor.edits else "Make an image"
    c.run = gr.Button(verb, variant="primary", elem_id="run")


def build_examples(component, samples, label, name):
    """Images or instructions to try."""
    if samples:
        options = {"examples_per_page": 12, "cache_examples": False, "api_visibility": "private"}
        rows = [[sample] for sample in samples]
        gr.Examples(rows, [component], label=label, elem_id=f"examples_{name}", **options)


def build_settings(c, editor):
    """The controls of settings."""
    limits, defaults = editor.limits, c.defaults
    build_slider(c, "guidance_scale")
    build_slider(c, "image_guidance_scale", visible=editor.edits)
    build_slider(c, "num_inference_steps")
    step = max(editor.factor, editor.resolution // 8)
    c.resolution = gr.Slider(
        -(-limits.smallest // step) * step,
        limits.largest,
        defaults.resolution,
        step=step,
        label=LABELS["resolution"],
        info="pixels of the longer side",
        elem_id="resolution",
    )
    with gr.Row(elem_id="seeds"):
        c.seed = gr.Number(
            defaults.seed, precision=0, label=LABELS["seed"], elem_id="seed", min_width=140
        )
        c.keep_seed = gr.Checkbox(
            False, label="Keep this seed", container=False, elem_id="keep_seed", min_width=100
        )
    with gr.Accordion("More settings", open=False):
        c.negative_prompt = gr.Textbox(
            "", label=LABELS["negative_prompt"], placeholder="what to avoid", max_lines=3
        )
        scheduler = defaults.scheduler or OWN_SCHEDULER
        choices = [OWN_SCHEDULER, *SCHEDULERS]
        c.scheduler = gr.Dropdown(choices, value=scheduler, label=LABELS["scheduler"])
        c.accelerate = gr.Dropdown(
            [*ACCELERATIONS, *(["taesd"] if editor.decoder else [])],
            value=[*defaults.accelerate],
            label=LABELS["accelerate"],
            info="less work for almost the same image",
            multiselect=True,
            allow_custom_value=True,
        )
        with gr.Row(visible=bool(editor.loras)):
            chosen = {"value": [*defaults.lora], "label": LABELS["lora"]}
            c.lora = gr.Dropdown([*editor.loras], multiselect=True, **chosen)
            build_slider(c, "lora_weight")


def build_results(c, editor):
    """The result, its buttons, earlier results, and a comparison."""
    file = {"type": "filepath", "format": "png", "interactive": False}
    options = file | {"elem_id": "result", "buttons": ["fullscreen"]}
    from_text = editor.task == "text to image"  # at first; one of both is visible
    c.result = gr.Image(label="Result", height=560, visible=from_text, **options)
    c.slider = gr.ImageSlider(
        label="Input and result", max_height=720, visible=not from_text, **options
    )
    with gr.Row(elem_id="progress"):
        c.status = gr.HTML(elem_id="status", padding=False)
        c.cancel = gr.Button("Cancel", variant="stop", elem_id="cancel", visible=False, size="sm")
    with gr.Row(elem_id="actions"):
        small = {"interactive": False, "size": "sm"}
        c.download = gr.DownloadButton("Download PNG", elem_id="download", **small)
        c.use = gr.Button("Use the result as input", elem_id="use", **small)
    c.gallery = gr.Gallery(
        label="Images of this session; click one for its settings",
        columns=5,
        allow_preview=False,
        interactive=False,
        buttons=[],
        elem_id="gallery",
        visible=False,
    )
    with gr.Accordion("Compare values of a scale, side by side", open=False, elem_id="compare"):
        with gr.Row():
            first = [*COMPARED][editor.edits]
            c.compared = gr.Radio([*COMPARED], value=first, label="Scale", visible=editor.edits)
            values = "1, 1.2, 1.5, 2" if editor.edits else "2, 4, 7.5, 12"
            c.values = gr.Textbox(values, label="Values", elem_id="values")
        c.compare = gr.Button("Compare", elem_id="run_comparison")
        buttons = {"buttons": ["download", "fullscreen"], "elem_id": "comparison"}
        c.comparison = gr.Image(label="Comparison", visible=False, **file, **buttons)
