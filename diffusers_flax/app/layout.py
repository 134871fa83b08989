"""The page's controls, Gradio components."""

import html
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gradio as gr

from diffusers_flax.app.settings import RANGES, SHAPES
from diffusers_flax.schedulers.factory import SCHEDULERS

FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
MONOSPACE = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")
OWN_SCHEDULER = "the model's own"
ACCELERATIONS = (
    *("guidance:stop=0.6", "deepcache:interval=2", "deepcache:interval=3", "spectrum", "fbcache"),
    *("tome", "int8"),
)
MAX_EXAMPLES = 12  # shown at once
COMPARED = {  # radio button: setting
    "Instruction scale": "guidance_scale",
    "Image scale": "image_guidance_scale",
}
TITLES = {  # of the page, by the task of its first tab: short and long
    "edit": ("Edit images", "Edit images by instruction"),
    "text to image": ("Images from text", "Images from text"),
    "inpainting": ("Repaint images", "Repaint a part of an image"),
}
FROM_TEXT, FROM_IMAGE = "Text to image", "Image to image"  # tabs
LABELS = {  # of settings
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


def labels_of(edits):
    """LABELS for a model; edits: whether it edits images."""
    return LABELS if edits else LABELS | {"instruction": "Prompt", "guidance_scale": "Prompt scale"}


def image_file(**options):
    """A gr.Image whose value is the path of the unchanged uploaded file, which may be broken.

    Not a subclass, as Gradio writes a stub file beside each.
    """
    image = gr.Image(type="filepath", image_mode=None, format="png", **options)
    image.preprocess = lambda payload: payload and payload.path
    return image


def theme():
    """Colors, and fonts of the system, as others would be loaded from another host."""
    return gr.themes.Base(
        primary_hue=gr.themes.colors.teal,
        secondary_hue=gr.themes.colors.teal,
        neutral_hue=gr.themes.colors.slate,
        font=FONTS,
        font_mono=MONOSPACE,
        radius_size=gr.themes.sizes.radius_md,
        spacing_size=gr.themes.sizes.spacing_md,
    ).set(
        background_fill_primary="*neutral_50",
        block_background_fill="white",
        block_shadow="none",
        block_label_text_size="*text_sm",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_text_color="white",
        button_primary_background_fill_dark="*primary_600",
        slider_color="*primary_600",
        checkbox_background_color_selected="*primary_600",
        checkbox_border_color_dark="*neutral_500",
    )


def build(editor, examples):
    """Build the page in the current gr.Blocks.

    Args:
        editor: Editor.
        examples: (paths of images, instructions) to try.

    Returns:
        Namespace of Gradio components; a setting's control has its name.
    """
    c, defaults = SimpleNamespace(), editor.defaults()
    path = Path(str(editor.config.model))  # a hub id is shown whole
    name = "/".join(path.parts[-3:] if path.name == "model" else path.parts[-2:])
    with gr.Row(elem_id="head"):
        gr.HTML(f"<h1>{TITLES[editor.task][1]}</h1><p>{html.escape(name)}</p>", padding=False)
        c.state = gr.HTML(elem_id="state", padding=False)
    with gr.Row(elem_id="columns"):
        with gr.Column(elem_id="request"):
            build_request(c, editor, defaults, examples)
        with gr.Column(elem_id="results"):
            build_results(c, editor)
            build_comparison(c, editor)
        with gr.Column(elem_id="controls"), gr.Accordion("Settings", open=True):
            build_settings(c, editor, defaults)
    with gr.Row(visible=False):  # of the API
        c.api_image, c.api_mask = image_file(label="Image"), image_file(label="Mask")
        c.api_result, c.api_settings = image_file(label="Result"), gr.JSON(label="Settings")
        c.api_button = gr.Button()
    for control in settings_components(c).values():
        if isinstance(control, gr.Slider | gr.Number | gr.Dropdown):
            # check_settings checks values; Gradio's checks leave tracebacks in the terminal.
            control.preprocess = lambda payload: payload
    return c


def build_request(c, editor, defaults, examples):
    """What an image is made of: tabs for a model from text; then instruction and button."""
    images, texts = examples
    # The tab that is open; a hidden component, which the browser changes at once.
    c.tab = gr.Textbox(FROM_TEXT if editor.task == "text to image" else FROM_IMAGE, visible=False)
    if editor.task == "text to image":
        with gr.Tabs(elem_id="tabs", selected=FROM_TEXT) as c.tabs:
            with gr.Tab(FROM_TEXT, id=FROM_TEXT) as c.from_text:
                c.shape = build_shape(defaults)
            with gr.Tab(FROM_IMAGE, id=FROM_IMAGE, render_children=True) as c.from_image:
                build_original(c, editor, defaults, images)
        build_instruction(c, editor)
    else:
        c.tabs, c.shape = None, build_shape(defaults, visible=False)
        if editor.edits:
            build_image(c)
            build_instruction(c, editor)
            build_strength(c, editor)
            build_mask(c, editor, defaults)
            build_examples(c.image, images, "Images to try", "images")
        else:
            build_original(c, editor, defaults, images)
            build_instruction(c, editor)
    label = "Instructions to try" if editor.edits else "Prompts to try"
    build_examples(c.instruction, texts, label, "texts")


def build_original(c, editor, defaults, images):
    """The original image of a model from text, and what becomes of it."""
    build_image(c)
    build_examples(c.image, images, "Images to try", "images")
    build_strength(c, editor)
    build_mask(c, editor, defaults)


def build_image(c):
    """The original image."""
    c.image = image_file(
        label="Image",
        sources=["upload", "webcam", "clipboard"],
        height=320,
        elem_id="image",
        buttons=["fullscreen"],
    )


def build_shape(defaults, visible=True):
    """The shape of images from text."""
    return gr.Dropdown(
        [*SHAPES], value=defaults.shape, label=LABELS["shape"], visible=visible, elem_id="shape"
    )


def build_strength(c, editor):
    """How much of the original image is replaced."""
    c.strength = gr.Slider(
        *RANGES["strength"],
        1.0 if editor.task == "inpainting" else 0.8,
        step=0.05,
        label=LABELS["strength"],
        info="higher: further from the image; this part of the steps runs",
        visible=not editor.edits,
        elem_id="strength",
    )


def build_instruction(c, editor):
    """Instruction and button."""
    c.instruction = gr.Textbox(
        label=labels_of(editor.edits)["instruction"],
        placeholder="make it look like winter" if editor.edits else "a red panda reading a map",
        lines=1,
        max_lines=4,
        elem_id="instruction",
    )
    verb = "Edit" if editor.edits else "Make an image"
    c.run = gr.Button(verb, variant="primary", elem_id="run")


def build_mask(c, editor, defaults):
    """The mask editor; for models from text also a file. An inpainting model needs one of them."""
    is_needed = editor.task == "inpainting"
    what = "edit" if editor.edits else "change"
    with gr.Accordion(
        "The part that may change" if is_needed else "Only a part of the image", open=is_needed
    ):
        c.use_mask = gr.Checkbox(
            is_needed,
            label=f"Restrict the {what} to what I paint",
            visible=not is_needed,
            elem_id="use_mask",
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
            visible=not editor.edits,
            elem_id="mask_file",
        )
        c.mask_feather = gr.Slider(
            *RANGES["mask_feather"],
            defaults.mask_feather,
            step=1,
            label=f"{LABELS['mask_feather']}, pixels",
            visible=not editor.edits,
        )


def build_examples(component, samples, label, name):
    """Images or instructions to try."""
    if samples:
        gr.Examples(
            [[sample] for sample in samples],
            [component],
            label=label,
            examples_per_page=MAX_EXAMPLES,
            cache_examples=False,
            elem_id=f"examples_{name}",
            api_visibility="private",
        )


def build_settings(c, editor, defaults):
    """The controls of settings."""
    limits, labels = editor.limits, labels_of(editor.edits)
    step = max(editor.checked.factor, editor.checked.resolution // 8)
    c.guidance_scale = gr.Slider(
        *RANGES["guidance_scale"],
        defaults.guidance_scale,
        step=0.1,
        label=labels["guidance_scale"],
        info="higher: a stronger edit" if editor.edits else "higher: closer to the prompt",
    )
    c.image_guidance_scale = gr.Slider(
        *RANGES["image_guidance_scale"],
        defaults.image_guidance_scale,
        step=0.05,
        label=labels["image_guidance_scale"],
        elem_id="image_guidance_scale",
        info="higher: closer to the input",
        visible=editor.edits,
    )
    c.num_inference_steps = gr.Slider(
        *RANGES["num_inference_steps"],
        defaults.num_inference_steps,
        step=1,
        label=labels["num_inference_steps"],
        info="more: finer, and slower",
        elem_id="num_inference_steps",
    )
    c.resolution = gr.Slider(
        *(-(-limits.smallest // step) * step, limits.largest, defaults.resolution),
        step=step,
        label=labels["resolution"],
        info="pixels of the longer side",
        elem_id="resolution",
    )
    with gr.Row(elem_id="seeds"):
        c.seed = gr.Number(
            defaults.seed, precision=0, label=labels["seed"], elem_id="seed", min_width=140
        )
        with gr.Column(min_width=100):
            c.keep_seed = gr.Checkbox(
                False, label="Keep this seed", container=False, elem_id="keep_seed"
            )
            c.roll = gr.Button("Roll a new one", elem_id="roll", size="sm")
    with gr.Accordion("More settings", open=False):
        c.negative_prompt = gr.Textbox(
            "", label=labels["negative_prompt"], placeholder="what to avoid", max_lines=3
        )
        c.scheduler = gr.Dropdown(
            [OWN_SCHEDULER, *SCHEDULERS],
            value=defaults.scheduler or OWN_SCHEDULER,
            label=labels["scheduler"],
        )
        c.accelerate = gr.Dropdown(
            [*ACCELERATIONS, *(["taesd"] if editor.decoder else [])],
            value=[*defaults.accelerate],
            label=labels["accelerate"],
            info="less work for almost the same image",
            multiselect=True,
            allow_custom_value=True,
        )
        with gr.Row(visible=bool(editor.loras)):
            c.lora = gr.Dropdown(
                [*editor.loras], value=[*defaults.lora], label=labels["lora"], multiselect=True
            )
            c.lora_weight = gr.Slider(
                *RANGES["lora_weight"], 1.0, step=0.05, label=labels["lora_weight"]
            )


def build_results(c, editor):
    """The result, its buttons, and earlier results."""
    options = {"type": "filepath", "format": "png", "interactive": False, "elem_id": "result"}
    options["buttons"] = ["fullscreen"]
    from_text = editor.task == "text to image"  # at first; one of both is visible
    c.result = gr.Image(label="Result", height=560, visible=from_text, **options)
    c.slider = gr.ImageSlider(
        label="Input and result",
        max_height=720,
        slider_position=50,
        visible=not from_text,
        **options,
    )
    with gr.Row(elem_id="progress"):
        c.status = gr.HTML(elem_id="status", padding=False)
        c.cancel = gr.Button("Cancel", variant="stop", elem_id="cancel", visible=False, size="sm")
    with gr.Row(elem_id="actions"):
        c.download = gr.DownloadButton(
            "Download PNG", interactive=False, size="sm", elem_id="download"
        )
        c.use = gr.Button(
            "Use the result as input",
            interactive=False,
            size="sm",
            elem_id="use",
        )
    c.gallery_title = gr.HTML(
        "Images of this session; click one for its settings",
        visible=False,
        padding=False,
        elem_classes="title",
    )
    c.gallery = gr.Gallery(
        show_label=False,
        columns=5,
        height="auto",
        object_fit="contain",
        allow_preview=False,
        elem_id="gallery",
        interactive=False,
        buttons=[],
        visible=False,
    )


def build_comparison(c, editor):
    """Controls and images of a comparison."""
    with gr.Accordion("Compare values of a scale, side by side", open=False, elem_id="compare"):
        with gr.Row():
            c.compared = gr.Radio(
                [*COMPARED],
                value="Image scale" if editor.edits else "Instruction scale",
                label="Scale",
                visible=editor.edits,
                elem_id="compared",
            )
            c.values = gr.Textbox(
                "1, 1.2, 1.5, 2" if editor.edits else "2, 4, 7.5, 12",
                label="Values",
                elem_id="values",
            )
        c.compare = gr.Button("Compare", elem_id="run_comparison")
        c.comparison = gr.Gallery(
            show_label=False,
            columns=4,
            height="auto",
            object_fit="contain",
            allow_preview=False,
            interactive=False,
            buttons=[],
            elem_id="comparison",
            visible=False,
        )
        c.figure = gr.DownloadButton(
            "Download as one image", size="sm", visible=False, elem_id="figure"
        )


def settings_components(c):
    """{setting: its control}."""
    return {name: getattr(c, name) for name in LABELS}


hide, show = partial(gr.update, visible=False), partial(gr.update, visible=True)
