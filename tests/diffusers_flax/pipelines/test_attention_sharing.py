"""attention_sharing= of text to image, against PyTorch's pipelines with an own processor."""

import jax
import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.schedulers import scheduling_euler_ancestral_discrete
from helpers import edit_json, psnr, slow
from references import open_ours, open_theirs
from tiny_models import make_tiny_pipeline, make_tiny_xl

from diffusers_flax.pipelines.sampling import keys_per_image, normal

# of torch.Tensor.__array__, called by diffusers' schedulers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

PAIR = ["make it red", "it"]
PAIRS = [*PAIR, "red", "make", "it make", "red it", "make", "it red"]
STEPS, SIZE = 5, 32


def write_unet(folder, **config):
    """Write a pipeline's UNet anew, with a first attention of each block to few positions.

    With small random weights each position attends to all of them equally, and shared weights would
    hardly be seen.

    Args:
        folder: of the pipeline.
        config: changes of the UNet's config.
    """
    torch.manual_seed(0)
    unet = UNet2DConditionModel.from_config(
        UNet2DConditionModel.load_config(folder / "unet") | config
    )
    with torch.no_grad():
        for name, weight in unet.named_parameters():
            if "attn1.to_q" in name or "attn1.to_k" in name:
                weight *= 8
    unet.save_pretrained(folder / "unet")


def make_sd(folder, **config):
    """Write a Stable Diffusion model; config: changes of the UNet's."""
    make_tiny_pipeline(folder, in_channels=4, unet_channels=(16, 32), scheduler="euler_ancestral")
    edit_json(folder / "scheduler" / "scheduler_config.json", steps_offset=1)
    write_unet(folder, **config)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{name: directory} of random models."""
    root = tmp_path_factory.mktemp("models")
    xl = make_tiny_xl(root / "xl", scheduler="euler_ancestral")
    write_unet(xl)
    return {"sd": make_sd(root / "sd"), "xl": xl}


@pytest.fixture(scope="module")
def sd(models):
    """The Stable Diffusion pipeline and its parameters."""
    return open_ours(models["sd"])


@pytest.fixture(scope="module")
def xl(models):
    """The SDXL pipeline and its parameters."""
    return open_ours(models["xl"])


def keys_of_pairs(num_images):
    """One key for both images of a pair."""
    return keys_per_image(jax.random.key(3), num_images // 2)[np.arange(num_images) // 2]


def images_of_pairs(loaded, prompts, sharing=None, **options):
    """Images of pairs of prompts; sharing: attention_sharing=, or None to leave it out."""
    pipeline, params = loaded
    options = dict(num_inference_steps=STEPS, height=SIZE, width=SIZE) | options
    if sharing is not None:
        options["attention_sharing"] = sharing
    inputs = pipeline.prepare_inputs(prompts), params, keys_of_pairs(len(prompts))
    return np.asarray(pipeline(*inputs, **options).images)


class SharedAttention:
    """An attention processor of diffusers that writes the weights out.

    While it shares, the weights of the first image replace the second image's in self-attention, in
    each branch of guidance. Source: the published code of InstructPix2Pix,
    stable_diffusion/ldm/modules/attention.py.
    """

    shares = False

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **_):
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context)
        query, key, value = (
            x.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for x in (query, key, value)
        )
        weights = (query @ key.mT * attn.scale).softmax(-1)
        if self.shares and encoder_hidden_states is None:
            of_pairs = weights.unflatten(0, (-1, 2))
            weights = of_pairs[:, [0, 0]].flatten(0, 1)
        out = (weights @ value).transpose(1, 2).flatten(2)
        return attn.to_out[0](out)


def pair_of_pytorch(folder, sharing, monkeypatch):
    """The images of PAIR, with the noise of images_of_pairs."""
    pipeline = open_theirs(folder, "euler_ancestral")
    attention = SharedAttention()
    pipeline.unet.set_attn_processor(attention)
    shape = (4, *[SIZE // pipeline.vae_scale_factor] * 2)
    draws = [normal(keys_of_pairs(2), i, shape) for i in range(STEPS + 1)]
    latents, *draws = (torch.from_numpy(np.array(x)) for x in draws)
    draws = iter(draws)
    monkeypatch.setattr(
        scheduling_euler_ancestral_discrete, "randn_tensor", lambda *_, **__: next(draws)
    )

    def begin(step):
        attention.shares = sharing > step / (STEPS - 1)

    def after_step(pipeline, step, timestep, tensors):
        begin(step + 1)
        return tensors

    begin(0)
    options = dict(guidance_scale=7.5, callback_on_step_end=after_step, output_type="np")
    options |= dict(num_inference_steps=STEPS, height=SIZE, width=SIZE)
    images = pipeline(PAIR, latents=latents, **options).images
    assert next(draws, None) is None  # each step has taken its noise
    return images


@pytest.mark.parametrize(
    ("model", "sharing"),
    [("sd", 0.5), *slow(("sd", 0.0), ("sd", 1.0), ("xl", 0.0), ("xl", 0.5), ("xl", 1.0))],
)
@torch.no_grad()
def test_pairs_are_pytorchs(models, request, model, sharing, monkeypatch):
    """With p = 0.5 and 5 steps the first two share; in the third p is not above 2 / 4.

    With one step more or less the second image is another one.
    """
    loaded = request.getfixturevalue(model)
    found = images_of_pairs(loaded, PAIR, sharing)
    expected = pair_of_pytorch(models[model], sharing, monkeypatch)
    least = min(psnr(found[0], expected[0]), psnr(found[1], expected[1]))
    assert least > 110
    for other in {0.0, 0.25, 0.75, 1.0} - {sharing}:
        different = images_of_pairs(loaded, PAIR, other)
        assert psnr(different[1], expected[1]) < least - 10


@pytest.fixture(scope="module")
def four_pairs(sd):
    """({"sharing", "guidance_scale"} per image, images of PAIRS with them)."""
    per_image = {
        "sharing": np.float32([1, 0, 0, 0.3, 0, 0.6, 0.1, 1]),  # the second image's counts
        "guidance_scale": np.float32([3, 3, 7, 7, 5, 5, 2, 2]),
    }
    return per_image, images_of_pairs(sd, PAIRS, **per_image)


@pytest.mark.slow
def test_each_pair_has_its_own_fraction(sd, four_pairs):
    per_image, together = four_pairs
    pipeline, params = sd
    for j, p in [(0, 0.0), (2, 0.3), (6, 1.0)]:
        scale = per_image["guidance_scale"][j : j + 2]
        alone = pipeline(
            pipeline.prepare_inputs(PAIRS[j : j + 2]),
            params,
            keys_of_pairs(8)[j : j + 2],
            num_inference_steps=STEPS,
            height=SIZE,
            width=SIZE,
            guidance_scale=scale,
            attention_sharing=p,
        ).images
        np.testing.assert_allclose(alone, together[j : j + 2], atol=1e-5)
