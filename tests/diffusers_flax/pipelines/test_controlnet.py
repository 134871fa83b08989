"""The ControlNet pipelines against PyTorch's, with the same weights, images and noise."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import (
    ControlNetModel,
    MultiControlNetModel,
    StableDiffusionControlNetPipeline,
    StableDiffusionXLControlNetPipeline,
)
from flax.jax_utils import replicate
from flax.training.common_utils import shard
from helpers import matmuls_of_text, psnr, random_inputs, slow
from PIL import Image
from tiny_models import make_tiny_controlnet, make_tiny_pipeline, make_tiny_xl

from diffusers_flax.models.controlnet import FlaxControlNetModel
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline
from diffusers_flax.pipelines.controlnet import (
    FlaxStableDiffusionControlNetPipeline,
    FlaxStableDiffusionXLControlNetPipeline,
)

STEPS = 6
PROMPTS = ["make it red", "red"]
CLASSES = {
    "sd": (FlaxStableDiffusionControlNetPipeline, StableDiffusionControlNetPipeline, 4),
    "xl": (FlaxStableDiffusionXLControlNetPipeline, StableDiffusionXLControlNetPipeline, 8),
}
pytestmark = [
    # PyTorch's pipeline changes steps_offset to 1; its Euler scheduler has a deprecated conversion.
    pytest.mark.filterwarnings("ignore:The configuration file of this scheduler:FutureWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Pipelines "sd" and "xl", each with the ControlNets "0" and "1" in it."""
    made = tmp_path_factory.mktemp("controlnet")
    sd = make_tiny_pipeline(made / "sd", in_channels=4, scheduler="pndm")
    xl = make_tiny_xl(made / "xl")
    for seed in (0, 1):
        make_tiny_controlnet(sd / str(seed), sd, seed=seed)
        make_tiny_controlnet(xl / str(seed), xl, halvings=3, seed=seed)
    return {"sd": sd, "xl": xl}


def with_torch(family, folder, nets, images, latents, **options):
    """PyTorch's images, (B, H, W, 3); images (B, H, W, 3), or a list of them."""
    nets = [ControlNetModel.from_pretrained(net) for net in nets]
    pipeline = CLASSES[family][1].from_pretrained(
        folder, controlnet=nets if len(nets) > 1 else nets[0]
    )
    pipeline.set_progress_bar_config(disable=True)
    tensors = [torch.tensor(x).permute(0, 3, 1, 2) for x in images]
    return pipeline(
        PROMPTS[: len(latents)],
        image=tensors if len(nets) > 1 else tensors[0],
        latents=torch.tensor(latents),
        num_inference_steps=STEPS,
        guidance_scale=options.pop("guidance_scale", 3.0),
        output_type="np",
        **options,
    ).images


def conditions(number, family, batch=2):
    """Images for each of some ControlNets, and the latents to begin with."""
    images, latents = random_inputs(batch, 32, 64, CLASSES[family][2])
    return [images, images[:, ::-1].copy()][:number], latents


def compare(family, folder, sources, options, tolerance=60):
    """PSNR between both pipelines' images, ours made with the same options."""
    images, latents = conditions(len(sources), family)
    wanted = with_torch(family, folder, sources, images, latents, **options)
    pipeline, params = CLASSES[family][0].from_pretrained(
        folder, controlnet=list(sources) if len(sources) > 1 else sources[0]
    )
    inputs = pipeline.prepare_inputs(PROMPTS, images if len(sources) > 1 else images[0])
    options = {"guidance_scale": 3.0, "num_inference_steps": STEPS} | options
    options = {k: v for k, v in options.items() if k != "negative_prompt"}
    found = pipeline(*inputs, params, jax.random.key(0), latents=latents, **options).images
    assert found.shape == wanted.shape
    assert psnr(found, wanted) > tolerance
    return pipeline, params, inputs, latents, found


def test_image_equals_pytorch(folders):
    folder = folders["sd"]
    pipeline, params, inputs, latents, found = compare("sd", folder, [folder / "0"], {})
    text_only = dict(num_inference_steps=STEPS, guidance_scale=3.0, latents=latents)
    without = pipeline(
        *inputs, params, jax.random.key(0), controlnet_conditioning_scale=0.0, **text_only
    ).images
    assert psnr(found, without) < 40
    program = jax.make_jaxpr(pipeline._generate)(*inputs, params, jax.random.key(0)).jaxpr
    assert matmuls_of_text(program) == 0


@pytest.mark.parametrize(
    ("family", "numbers", "options"),
    slow(
        ("sd", "01", {"controlnet_conditioning_scale": [0.5, 1.5]}),
        ("sd", "0", {"guess_mode": True}),
        ("sd", "0", {"guess_mode": True, "guidance_scale": 1.0}),
        ("sd", "0", {"control_guidance_start": 0.1, "control_guidance_end": 0.7}),
        ("sd", "0", {"control_guidance_end": 2.5 / (STEPS + 1)}),  # at PNDM's repeated timestep
        ("xl", "0", {"controlnet_conditioning_scale": 0.5}),
        (
            "xl",
            "01",
            {"control_guidance_start": [0.0, 0.5], "control_guidance_end": [0.5, 1.0]},
        ),
    ),
)
def test_options_equal_pytorch(folders, family, numbers, options):
    folder = folders[family]
    compare(family, folder, [folder / number for number in numbers], options)


@pytest.mark.slow
def test_global_pooling_equals_pytorch(folders, tmp_path):
    folder = folders["sd"]
    net = make_tiny_controlnet(tmp_path / "net", folder, global_pool_conditions=True)
    compare("sd", folder, [net], {})


@pytest.mark.slow
def test_all_devices_as_published(folders):
    """The published example: parameters assigned, split keys, jit=True, also pmap(_generate)."""
    folder = folders["sd"]
    controlnet, controlnet_params = FlaxControlNetModel.from_pretrained(folder / "0", from_pt=True)
    pipeline, params = FlaxStableDiffusionControlNetPipeline.from_pretrained(
        folder, controlnet=controlnet, safety_checker=None, dtype=jnp.float32
    )
    params["controlnet"] = controlnet_params
    number = jax.device_count()
    condition = Image.fromarray(np.uint8(255 * conditions(1, "sd", 1)[0][0][0]))
    prompt_ids = pipeline.prepare_text_inputs(["red"] * number)
    image = pipeline.prepare_image_inputs([condition] * number)
    rng = jax.random.split(jax.random.PRNGKey(0), number)
    options = dict(num_inference_steps=2)
    p_params, p_ids, p_image = replicate(params), shard(prompt_ids), shard(image)
    images = pipeline(
        prompt_ids=p_ids, image=p_image, params=p_params, prng_seed=rng, jit=True, **options
    ).images
    assert images.shape == (number, 1, *image.shape[2:], 3)
    keys = jax.vmap(jax.random.fold_in, (0, None))(jax.random.wrap_key_data(rng), 0)
    arguments = prompt_ids, image, params, keys
    on_one = pipeline(*arguments, **options).images
    np.testing.assert_allclose(images[:, 0], on_one, atol=1e-5)
    scales = jnp.full((number, 1), 0.0)
    off = pipeline(
        p_ids, p_image, p_params, rng, controlnet_conditioning_scale=scales, jit=True, **options
    ).images
    assert np.abs(off - images).max() > 1e-2
    two = dataclasses.replace(pipeline, controlnet=[controlnet, controlnet])
    twice = {"controlnet": [controlnet_params] * 2}
    images_of_two = np.stack([image, image], axis=1)
    summed = two(
        *(p_ids, shard(images_of_two), p_params | replicate(twice), rng),
        controlnet_conditioning_scale=[0.25, 0.75],
        jit=True,
        **options,
    ).images
    np.testing.assert_allclose(summed, images, atol=1e-4)
    generate = jax.pmap(pipeline._generate, static_broadcasted_argnums=4)
    again = generate(p_ids, p_image, p_params, rng, 2, jnp.full(number, 7.5))
    np.testing.assert_allclose(again, images, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", CLASSES)
def test_saved_pipelines_open_in_pytorch(folders, family, tmp_path):
    folder, (cls, torch_class, _) = folders[family], CLASSES[family]
    nets = [folder / "0", folder / "1"]
    pipeline, params = cls.from_pretrained(folder, controlnet=nets)
    params["controlnet"] = [params["controlnet"][f"nets_{i}"] for i in range(2)]
    pipeline.save_pretrained(tmp_path / "two", params)
    theirs = torch_class.from_pretrained(tmp_path / "two")
    assert isinstance(theirs.controlnet, MultiControlNetModel)
    for i, net in enumerate(theirs.controlnet.nets):
        for name, x in ControlNetModel.from_pretrained(nets[i]).state_dict().items():
            assert torch.equal(net.state_dict()[name], x)
    theirs.save_pretrained(tmp_path / "theirs")
    again, loaded = FlaxDiffusionPipeline.from_pretrained(tmp_path / "theirs")
    assert type(again) is cls and len(again.nets) == 2
    for i, tree in enumerate(params["controlnet"]):
        jax.tree.map(np.testing.assert_array_equal, tree, loaded["controlnet"][f"nets_{i}"])
    index = [json.loads((tmp_path / x / "model_index.json").read_text()) for x in ("two", "theirs")]
    assert index[0]["controlnet"] == index[1]["controlnet"]

    pipeline, params = cls.from_pretrained(folder, controlnet=str(nets[0]))
    pipeline.save_pretrained(tmp_path / "one", params)
    assert isinstance(torch_class.from_pretrained(tmp_path / "one").controlnet, ControlNetModel)
    again, loaded = FlaxDiffusionPipeline.from_pretrained(tmp_path / "one")
    jax.tree.map(np.testing.assert_array_equal, params["controlnet"], loaded["controlnet"])


@pytest.mark.slow
def test_mistakes(folders):
    folder = folders["sd"]
    cls = FlaxStableDiffusionControlNetPipeline
    net, net_params = FlaxControlNetModel.from_pretrained(folder / "0")
    for wrong, text in (
        (None, "has no ControlNet; give controlnet="),
        (folders["xl"] / "0", r"has cross_attention_dim=48, the UNet 24: they are of"),
        (folder / "unet", "is the config of UNet2DConditionModel, not of ControlNetModel"),
    ):
        with pytest.raises(ValueError, match=text):
            cls.from_pretrained(folder, **({} if wrong is None else {"controlnet": wrong}))
    pipeline, params = cls.from_pretrained(folder, controlnet=net)
    images, _ = conditions(1, "sd")
    prompt_ids, image = pipeline.prepare_inputs("red", images[0])
    call = dict(prompt_ids=prompt_ids, image=image, params=params, prng_seed=jax.random.key(0))
    params["controlnet"] = net_params
    for options, text in (
        ({"control_guidance_start": 0.5, "control_guidance_end": 0.5}, "the start below the end"),
        ({"controlnet_conditioning_scale": [1.0, 2.0]}, "has 2 entries, there are 1 ControlNets"),
    ):
        with pytest.raises(ValueError, match=text):
            pipeline(**call | options)
    two = dataclasses.replace(pipeline, controlnet=[net, net])
    with pytest.raises(ValueError, match=r"2 ControlNets take \(batch, 2, channels, height, wid"):
        two(**call)
    assert two.prepare_image_inputs([images[0], images[0][0]]).shape == (2, 2, 3, 32, 64)
    odd = Image.new("RGB", (33, 70))
    assert pipeline.prepare_image_inputs(odd).shape == (1, 3, 68, 32)
