"""What the pages of edit, text-to-image and inpainting models have."""

import pytest
from helpers import edit_json
from served_app import FAST, needs_gradio, served
from tiny_models import make_tiny_pipeline

# What is visible when the page opens, by its label.
MASK = ["Paint the part", "Or a mask: white may change", "Soft edge, pixels"]
RESULT = ["Download PNG", "Use the result as input", "Compare values of a scale, side by side"]
SETTINGS = ["Steps", "Size", "Seed", "Keep this seed", "More settings", "Negative prompt"]
SETTINGS += ["Scheduler", "Acceleration"]
EDITS = [
    *("Image", "Instruction", "Edit", "Only a part of the image", *MASK, "Input and result"),
    *(*RESULT, "Scale", "Values", "Compare", "Settings", "Instruction scale", "Image scale"),
    *SETTINGS,
]
PROMPTED = ["Values", "Compare", "Settings", "Prompt scale", *SETTINGS]
TEXT = [
    *("Text to image", "Shape", "Image to image", "Image", "Strength", "Only a part of the image"),
    *(*MASK, "Prompt", "Make an image", "Result", *RESULT, *PROMPTED),
]
INPAINTING = [
    *("Image", "Strength", "The part that may change", "Paint the part that may change"),
    *(*MASK[1:], "Prompt", "Make an image", "Input and result", *RESULT, *PROMPTED),
]
COMMON = {"instruction", "guidance_scale", "num_inference_steps", "seed", "resolution"}
COMMON |= {"scheduler", "accelerate", "lora", "lora_weight", "negative_prompt"}
OF_AN_IMAGE = COMMON | {"image", "mask", "mask_feather"}


def labels(config):
    """Labels of the components that are visible in a page's config."""
    parts = {part["id"]: part for part in config["components"]}

    def visible(node):
        if part := parts.get(node["id"]):
            props = part["props"]
            if props.get("visible") is False:
                return
            name = props.get("value") if part["type"] == "button" else props.get("label")
            yield from [name] if isinstance(name, str) else []
        for child in node.get("children", ()):
            yield from visible(child)

    return list(visible(config["layout"]))


@pytest.mark.slow
@needs_gradio
@pytest.mark.parametrize(
    ("in_channels", "shown", "endpoints"),
    [
        (8, EDITS, {"/edit": OF_AN_IMAGE | {"image_guidance_scale"}}),
        (4, TEXT, {"/image": COMMON | {"shape"}, "/image_to_image": OF_AN_IMAGE | {"strength"}}),
        (9, INPAINTING, {"/image_to_image": OF_AN_IMAGE | {"strength"}}),
    ],
)
def test_what_a_page_has(tmp_path, in_channels, shown, endpoints):
    import httpx  # Gradio's

    model = make_tiny_pipeline(tmp_path / "model", in_channels)
    if in_channels == 9:
        edit_json(model / "model_index.json", _class_name="StableDiffusionInpaintPipeline")
    with served(model, *FAST) as page:
        assert labels(httpx.get(f"{page.url}config").json()) == shown
        info = httpx.get(f"{page.url}gradio_api/info").json()["named_endpoints"]
    found = {name: [x["parameter_name"] for x in one["parameters"]] for name, one in info.items()}
    assert {name: set(names) for name, names in found.items()} == endpoints
    if in_channels == 8:  # callers may give them by place
        assert found["/edit"] == [
            *("image", "instruction", "guidance_scale", "image_guidance_scale"),
            *("num_inference_steps", "seed", "resolution", "scheduler", "accelerate", "lora"),
            *("lora_weight", "negative_prompt", "mask_feather", "mask"),
        ]
