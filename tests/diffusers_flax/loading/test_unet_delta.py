"""UnetDelta against PyTorch's pipelines with the same sum of weights."""

import shutil
from functools import partial

import diffusers
import jax
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict
from helpers import PROMPTS, psnr, random_inputs
from original_layout import original_layout, write_single_file
from references import edit_with_torch, edit_with_torch_xl
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_pipeline, make_tiny_xl

from diffusers_flax import FlaxDiffusionPipeline
from diffusers_flax.loading.weights import torch_to_flax

# of torch.Tensor.__array__, called by diffusers' schedulers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
WEIGHTS = "diffusion_pytorch_model.safetensors"
SCALES = dict(guidance_scale=3.0, image_guidance_scale=1.5)


def make_models(folder, make, weight=1.0):
    """An edit model, a base model, a distilled UNet that embeds the guidance, and the sum.

    Args:
        folder: of the four directories.
        make: (folder, edits, seed) of a tiny model.
        weight: of the difference in the sum.
    """
    edit, base = make(folder / "edit", True, 0), make(folder / "base", False, 1)
    distilled, summed = folder / "distilled", shutil.copytree(edit, folder / "sum")
    config = diffusers.UNet2DConditionModel.load_config(base / "unet")
    torch.manual_seed(2)
    unet = diffusers.UNet2DConditionModel.from_config(config, time_cond_proj_dim=8)
    unet.save_pretrained(distilled)
    weights = load_file(summed / "unet" / WEIGHTS)
    theirs, ours = load_file(distilled / WEIGHTS), load_file(base / "unet" / WEIGHTS)
    for name, x in weights.items():
        x[(slice(None), slice(0, 4)) if name == "conv_in.weight" else ...] += weight * (
            theirs[name] - ours[name]
        )
    save_file(weights, summed / "unet" / WEIGHTS, {"format": "pt"})
    return edit, base, distilled, summed


def make_sd(folder, edits, seed):
    return make_tiny_pipeline(folder, in_channels=8 if edits else 4, seed=seed)


def make_xl(folder, edits, seed):
    return make_tiny_xl(folder, edits=edits, seed=seed)


@pytest.mark.parametrize(
    ("make", "edit_theirs", "factor", "steps"),
    [
        (make_sd, edit_with_torch, 4, 20),
        pytest.param(make_xl, edit_with_torch_xl, 8, 8, marks=pytest.mark.slow),
    ],
    ids=["sd", "sdxl"],
)
def test_edits_are_those_of_pytorch(tmp_path, make, edit_theirs, factor, steps):
    """Half of the difference; the first convolution's goes to the noisy latents."""
    edit, base, distilled, summed = make_models(tmp_path, make, 0.5)
    images, latents = random_inputs(2, 32, 48, factor)
    expected = edit_theirs(summed, PROMPTS[:2], images, latents, **SCALES)
    delta = (distilled, f"{base}:0.5")
    pipeline, params = FlaxDiffusionPipeline.from_pretrained(edit, unet_delta=delta)
    wanted = dict(
        torch_to_flax(name, x.numpy()) for name, x in load_file(summed / "unet" / WEIGHTS).items()
    )
    for name, x in flatten_dict(params["unet"], sep="/").items():
        np.testing.assert_allclose(x, wanted[name], rtol=1e-6, atol=1e-7, err_msg=name)
    inputs = pipeline.prepare_inputs(PROMPTS[:2], images)
    call = partial(pipeline, num_inference_steps=steps, latents=latents, **SCALES)
    found = call(*inputs, params, jax.random.key(0)).images
    assert psnr(found, expected) > 60


@pytest.mark.slow
def test_sources_and_their_types(tmp_path):
    """A pipeline, a UNet's directory, files, shards; the sum is float32 for any dtypes."""
    edit, base, distilled, _ = make_models(tmp_path, make_xl)
    open_with = partial(FlaxDiffusionPipeline.from_pretrained, edit)
    expected = open_with(unet_delta=(distilled, base))[1]["unet"]
    unet = diffusers.UNet2DConditionModel.from_pretrained(base / "unet")
    unet.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    for suffix in ("bin", "ckpt"):
        torch.save(load_file(distilled / WEIGHTS), tmp_path / f"distilled.{suffix}")
    whole = original_layout(base)
    files = [write_single_file(tmp_path / f"base{end}", whole) for end in (".safetensors", ".ckpt")]
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    for sources in (
        (str(distilled / WEIGHTS), base / "unet"),
        (tmp_path / "distilled.bin", f"{tmp_path / 'shards'}:1"),
        (tmp_path / "distilled.ckpt", base),
        *((distilled, file) for file in files),
    ):
        found = open_with(unet_delta=sources)[1]["unet"]
        jax.tree.map(np.testing.assert_array_equal, found, expected)

    halves = {}
    for folder, dtype in ((distilled, torch.float16), (base / "unet", torch.bfloat16)):
        half = {name: x.to(dtype) for name, x in load_file(folder / WEIGHTS).items()}
        halves[dtype] = tmp_path / f"{str(dtype)[6:]}.safetensors"
        save_file(half, halves[dtype])
    found = open_with(unet_delta=tuple(halves.values()))[1]["unet"]["conv_out"]["kernel"]
    kernels = [load_file(x)["conv_out.weight"].float().numpy() for x in halves.values()]
    before = load_file(edit / "unet" / WEIGHTS)["conv_out.weight"].numpy()
    _, wanted = torch_to_flax("conv_out.weight", before + (kernels[0] - kernels[1]))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)
    assert found.dtype == np.float32


@pytest.mark.slow
def test_wrong_differences_are_one_line(tmp_path):
    edit, base, distilled, _ = make_models(tmp_path, make_xl)
    sd = make_tiny_pipeline(tmp_path / "sd", in_channels=4)
    for delta, message in (
        ([distilled], "write DISTILLED BASE or DISTILLED BASE:WEIGHT"),
        ([distilled, f"{base}:x"], f"unet_delta={base}:x: x is not a number"),
        ([sd, base], f"unet_delta={sd} {base} is of another family"),
        ([tmp_path / "absent.safetensors", base], "absent.safetensors does not exist; check the"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            FlaxDiffusionPipeline.from_pretrained(edit, unet_delta=delta)
        assert "\n" not in str(error.value)
