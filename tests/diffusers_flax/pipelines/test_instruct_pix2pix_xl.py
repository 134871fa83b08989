"""The SDXL InstructPix2Pix pipeline against PyTorch diffusers."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import PROMPTS, psnr, random_inputs
from references import edit_with_torch_xl
from tiny_models import make_tiny_pipeline, make_tiny_xl

from diffusers_flax.generating.models import (
    EDIT,
    ModelOptions,
    check_tasks,
    factor_and_resolution,
    load_weights,
    open_model,
)
from diffusers_flax.parameters import cast_params
from diffusers_flax.pipelines.instruct_pix2pix import (
    FlaxStableDiffusionInstructPix2PixPipeline,
)
from diffusers_flax.pipelines.instruct_pix2pix_xl import (
    FlaxStableDiffusionXLInstructPix2PixPipeline,
)

# of torch.Tensor.__array__, called by diffusers' schedulers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_xl(tmp_path_factory.mktemp("xl") / "model", edits=True)


@pytest.fixture(scope="module")
def loaded(folder):
    return FlaxStableDiffusionXLInstructPix2PixPipeline.from_pretrained(folder)


@pytest.mark.parametrize(
    ("scheduler", "options", "batch", "size", "negative_prompt", "scales"),
    [
        ("euler", {}, 2, (40, 56), None, dict(guidance_scale=3.0, image_guidance_scale=1.5)),
        pytest.param(
            *("ddim", {"prediction_type": "v_prediction"}, 1, (64, 64), ["red"]),
            dict(guidance_scale=5.0, image_guidance_scale=2.0, guidance_rescale=0.7),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("dpmsolver++", {}, 2, (72, 40), ["upside colors", "red"]),
            dict(guidance_scale=7.5, image_guidance_scale=1.0, guidance_rescale=0.5),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_images_are_those_of_pytorch(
    tmp_path, scheduler, options, batch, size, negative_prompt, scales
):
    folder = make_tiny_xl(tmp_path / "model", scheduler=scheduler, edits=True, **options)
    input_images, latents = random_inputs(batch, *size, 8)
    prompts = PROMPTS[:batch]
    expected = edit_with_torch_xl(folder, prompts, input_images, latents, negative_prompt, **scales)
    pipeline, params = FlaxStableDiffusionXLInstructPix2PixPipeline.from_pretrained(folder)
    prompt_ids, image = pipeline.prepare_inputs(prompts, input_images)
    images = pipeline(
        prompt_ids,
        image,
        params,
        jax.random.key(0),
        8,
        latents=latents,
        neg_prompt_ids=negative_prompt and pipeline.prepare_text_inputs(negative_prompt),
        **scales,
    ).images
    assert images.dtype == jnp.float32 and images.shape == (batch, *size, 3)
    assert psnr(images, expected) > 60


def test_what_edits_in_bfloat16_round(folder, loaded):
    """Not the weights of a VAE that computes in float32."""
    _, configs = check_tasks(str(folder), [EDIT])
    assert factor_and_resolution(configs) == (8, 64)  # the UNet has 8 latents
    options, pipeline_type = (
        ModelOptions(jnp.bfloat16),
        FlaxStableDiffusionXLInstructPix2PixPipeline,
    )
    pipeline = open_model(folder, pipeline_type, None, (), options)
    params = load_weights(pipeline, folder, options)
    jax.tree.map(np.testing.assert_array_equal, params["vae"], loaded[1]["vae"])
    del params["scheduler"]
    dtypes = {name: {x.dtype for x in jax.tree.leaves(tree)} for name, tree in params.items()}
    assert dtypes.pop("vae") == {np.dtype(np.float32)}
    assert list(dtypes.values()) == 3 * [{np.dtype(jnp.bfloat16)}]
    vae = pipeline.vae.clone(force_upcast=False)
    cast_params(dataclasses.replace(pipeline, vae=vae), params)
    assert {x.dtype for x in jax.tree.leaves(params["vae"])} == {np.dtype(jnp.bfloat16)}


@pytest.mark.slow
def test_other_models_are_refused_by_name(folder, tmp_path):
    base = make_tiny_xl(tmp_path / "base")
    pix2pix = make_tiny_pipeline(tmp_path / "pix2pix")
    refiner = make_tiny_xl(tmp_path / "refiner", refiner=True)
    half, other_vae = (shutil.copytree(folder, tmp_path / name) for name in ("half", "other_vae"))
    shutil.rmtree(half / "text_encoder_2")
    shutil.copytree(pix2pix / "vae", other_vae / "vae", dirs_exist_ok=True)
    ours = FlaxStableDiffusionXLInstructPix2PixPipeline
    for cls, path, message in (
        (ours, base, "has in_channels=4, .* needs 8"),
        (ours, pix2pix, "not Stable Diffusion XL"),
        (ours, refiner, "it is a refiner, which needs an image"),
        (ours, other_vae, "has scaling_factor 0.18215: it is Stable Diffusion's VAE"),
        (ours, half, "lacks text_encoder_2/config.json; copy or download it again"),
        (FlaxStableDiffusionInstructPix2PixPipeline, folder, "open it with FlaxStableDiffusionXL"),
    ):
        with pytest.raises(ValueError, match=message):
            cls.from_pretrained(path)
