"""The endpoints of the pages of edit, text-to-image and inpainting models."""

import pytest
from helpers import edit_json
from served_app import FAST, needs_gradio, served
from tiny_models import make_tiny_pipeline

OF_AN_IMAGE = [  # callers may give them by place
    *("image", "instruction", "guidance_scale", "num_inference_steps", "seed", "resolution"),
    *("scheduler", "accelerate", "lora", "lora_weight", "negative_prompt", "mask_feather"),
]
EDIT = [*OF_AN_IMAGE[:3], "image_guidance_scale", *OF_AN_IMAGE[3:], "mask"]
FROM_TEXT = [*OF_AN_IMAGE[1:6], "shape", *OF_AN_IMAGE[6:-1]]
FROM_IMAGE = [*OF_AN_IMAGE, "strength", "mask"]


@pytest.mark.slow
@needs_gradio
@pytest.mark.parametrize(
    ("in_channels", "endpoints"),
    [
        (8, {"/edit": EDIT}),
        (4, {"/image": FROM_TEXT, "/image_to_image": FROM_IMAGE}),
        (9, {"/image_to_image": FROM_IMAGE}),
    ],
)
def test_endpoints(tmp_path, in_channels, endpoints):
    import httpx  # Gradio's

    model = make_tiny_pipeline(tmp_path / "model", in_channels)
    if in_channels == 9:
        edit_json(model / "model_index.json", _class_name="StableDiffusionInpaintPipeline")
    with served(model, *FAST) as page:
        info = httpx.get(f"{page.url}gradio_api/info").json()["named_endpoints"]
    found = {name: [x["parameter_name"] for x in one["parameters"]] for name, one in info.items()}
    assert found == endpoints
