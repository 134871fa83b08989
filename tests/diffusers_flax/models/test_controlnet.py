"""ControlNets against PyTorch diffusers with the same random weights."""

import json

import jax
import numpy as np
import pytest
import torch
from diffusers import ControlNetModel, MultiControlNetModel, UNet2DConditionModel
from flax.traverse_util import flatten_dict
from helpers import ROOT
from references import flax_params, to_jax

from diffusers_flax.models.controlnet import FlaxControlNetModel, FlaxMultiControlNetModel
from diffusers_flax.models.unet import FlaxUNet2DConditionModel

TOLERANCE = 2e-4  # of the largest output, float32

SD1 = dict(
    block_out_channels=(32, 64),
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    layers_per_block=1,
    attention_head_dim=4,
    cross_attention_dim=24,
    conditioning_embedding_out_channels=(8, 8, 16, 16),
)
SDXL = dict(
    attention_head_dim=(2, 4),
    transformer_layers_per_block=(1, 2),
    use_linear_projection=True,
    addition_embed_type="text_time",
    addition_time_embed_dim=8,
    projection_class_embeddings_input_dim=20 + 6 * 8,
)
CONFIGS = {
    "sd1": {},
    "sd2": dict(attention_head_dim=(2, 4), use_linear_projection=True),
    "sdxl": SDXL | dict(down_block_types=("DownBlock2D", "CrossAttnDownBlock2D")),
    "sdxl without attention": SDXL
    | dict(down_block_types=("DownBlock2D", "DownBlock2D"), mid_block_type="UNetMidBlock2D"),
    "several layers, bgr": dict(
        layers_per_block=2,
        norm_num_groups=16,
        norm_eps=1e-3,
        flip_sin_to_cos=False,
        freq_shift=1,
        num_attention_heads=8,
        only_cross_attention=(True, False),
        controlnet_conditioning_channel_order="bgr",
    ),
    "four channels, two halvings": dict(
        conditioning_channels=4, conditioning_embedding_out_channels=(8, 16, 16)
    ),
    "global pooling": dict(global_pool_conditions=True),
    "eight input channels": dict(in_channels=8),
}


def pair(seed=0, **config):
    """(PyTorch's model, random also in zero convolutions; our module; its parameters)."""
    torch.manual_seed(seed)
    config = SD1 | config
    theirs = ControlNetModel(**config).eval()
    for name, parameter in theirs.named_parameters():
        if name.startswith("controlnet_") and not parameter.any():
            torch.nn.init.normal_(parameter.data, std=0.1)
    return theirs, FlaxControlNetModel(**config), flax_params(theirs)


def inputs_of(module, batch, height, width):
    """(sample, timesteps, text, image, keywords), tensors."""
    factor = 2 ** (len(module.conditioning_embedding_out_channels) - 1)
    inputs = (
        torch.randn(batch, module.in_channels, height, width),
        torch.randint(0, 1000, (batch,)),
        torch.randn(batch, 7, module.cross_attention_dim),
        torch.rand(batch, module.conditioning_channels, factor * height, factor * width),
    )
    if module.addition_embed_type is None:
        return inputs, {}
    sizes = torch.randint(0, 1024, (batch, 6)).float()
    return inputs, {"added_cond_kwargs": {"text_embeds": torch.randn(batch, 20), "time_ids": sizes}}


def check_equal(ours, theirs, tolerance=TOLERANCE):
    """Our residuals, channels-last, differ by less than tolerance times PyTorch's largest value."""
    ours, theirs = ([*down, middle] for down, middle in (ours, theirs))
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs):
        other = other.detach().numpy().transpose(0, 2, 3, 1)
        assert mine.shape == other.shape
        assert np.abs(np.asarray(mine, np.float32) - other).max() < tolerance * np.abs(other).max()


@pytest.mark.variants
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_outputs_equal_pytorch(name):
    theirs, ours, params = pair(**CONFIGS[name])
    inputs, added = inputs_of(ours, 2, 8, 12)
    shapes = {key: np.shape(x) for key, x in flatten_dict(params, sep="/").items()}
    assert ours._param_shapes() == shapes
    options = {"conditioning_scale": 0.7, **added}
    expected = theirs(*inputs, **options, return_dict=False)
    arrays, added = jax.tree.map(to_jax, (inputs, added))
    result = jax.jit(ours.apply)({"params": params}, *arrays, conditioning_scale=0.7, **added)
    check_equal(result.to_tuple(), expected)
    if name not in ("sd1", "global pooling"):
        return
    guess = jax.jit(ours.apply, static_argnames=("guess_mode", "return_dict"))
    result = guess({"params": params}, *arrays, guess_mode=True, return_dict=False)
    check_equal(result, theirs(*inputs, guess_mode=True, return_dict=False))


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, SDXL | {"down_block_types": ("DownBlock2D",) * 2}])
def test_from_unet_equals_pytorch(config):
    torch.manual_seed(0)
    config = SD1 | config
    conditioning = {"conditioning_embedding_out_channels": (8, 16)}
    del config["conditioning_embedding_out_channels"]
    up = dict(up_block_types=[f"{x}".replace("Down", "Up") for x in config["down_block_types"]])
    unet = UNet2DConditionModel(**config, **up)
    theirs = ControlNetModel.from_unet(unet, **conditioning)
    ours, params = FlaxControlNetModel.from_unet(
        FlaxUNet2DConditionModel.from_config(unet.config), **conditioning, params=flax_params(unet)
    )
    names = ours.config.keys() & theirs.config.keys()
    assert {n: ours.config[n] for n in names} == {
        n: tuple(x) if isinstance(x := theirs.config[n], list) else x for n in names
    }
    wanted, found = flatten_dict(flax_params(theirs)), flatten_dict(params)
    assert wanted.keys() == found.keys()
    for path, x in found.items():
        is_random = path[0] == "controlnet_cond_embedding" and path[1] != "conv_out"
        assert x.shape == wanted[path].shape
        assert is_random or (x == wanted[path]).all()
    _, untrained = FlaxControlNetModel.from_unet(
        FlaxUNet2DConditionModel.from_config(unet.config),
        **conditioning,
        load_weights_from_unet=False,
        rng=jax.random.key(1),
    )
    assert (untrained["conv_in"]["kernel"] != params["conv_in"]["kernel"]).any()


@pytest.mark.slow
def test_files_go_both_ways(tmp_path):
    theirs, _, params = pair(**CONFIGS["several layers, bgr"])
    theirs.save_pretrained(tmp_path / "theirs")
    ours, loaded = FlaxControlNetModel.from_pretrained(tmp_path / "theirs")
    assert ours.controlnet_conditioning_channel_order == "bgr"
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    ours.save_pretrained(tmp_path / "ours", loaded)
    again, info = ControlNetModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    configs = [{k: v for k, v in x.config.items() if k[0] != "_"} for x in (again, theirs)]
    assert len({json.dumps(config, sort_keys=True) for config in configs}) == 1
    for key, x in again.state_dict().items():
        assert torch.equal(x, theirs.state_dict()[key])
    ours.save_pretrained(tmp_path / "flax", loaded, flax_msgpack=True)
    (tmp_path / "flax" / "diffusion_pytorch_model.safetensors").unlink()
    _, published = FlaxControlNetModel.from_pretrained(tmp_path / "flax")
    jax.tree.map(np.testing.assert_array_equal, published, params)


@pytest.mark.slow
@torch.no_grad()
def test_several_controlnets_equal_pytorch(tmp_path):
    pairs = [pair(seed) for seed in (0, 1)]
    theirs = MultiControlNetModel([torch_net for torch_net, _, _ in pairs])
    theirs.save_pretrained(str(tmp_path / "controlnet"))
    ours, params = FlaxMultiControlNetModel.from_pretrained(tmp_path)
    (sample, t, text, image), _ = inputs_of(pairs[0][1], 2, 8, 8)
    images, scales = [image, torch.rand_like(image)], [0.5, 2.0]
    expected = theirs(sample, t, text, images, scales, return_dict=False)
    arrays = [to_jax(x) for x in (sample, t, text, torch.stack(images, 1))]
    result = jax.jit(ours.apply)({"params": params}, *arrays, scales)
    check_equal(result.to_tuple(), expected)
    listed = ours.apply({"params": params}, *arrays[:3], list(map(to_jax, images)), scales)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), result, listed)

    ours.save_pretrained(tmp_path / "saved" / "controlnet", [params["nets_0"], params["nets_1"]])
    again = MultiControlNetModel.from_pretrained(str(tmp_path / "saved" / "controlnet"))
    for key, x in again.state_dict().items():
        assert torch.equal(x, theirs.state_dict()[key])


@pytest.mark.slow
def test_parameter_tree_is_the_published_one():
    """With the default config and Stable Diffusion 1.5's text states."""
    found = FlaxControlNetModel(cross_attention_dim=768)._param_shapes()
    published = json.loads((ROOT / "tests" / "published_flax_param_shapes.json").read_text())
    unet = {key: tuple(shape) for key, shape in published["sd15_unet"].items()}
    wanted = {
        key: shape
        for key, shape in unet.items()
        if not key.startswith(("up_blocks", "conv_norm_out", "conv_out"))
    }
    widths = [320] * 4 + [640] * 3 + [1280] * 5
    layers = {f"controlnet_down_blocks_{i}": (1, 1, C, C) for i, C in enumerate(widths)}
    layers["controlnet_mid_block"] = (1, 1, 1280, 1280)
    sizes = [(3, 16), (16, 16), (16, 32), (32, 32), (32, 96), (96, 96), (96, 256), (256, 320)]
    names = ["conv_in", *(f"blocks_{i}" for i in range(6)), "conv_out"]
    for name, size in zip(names, sizes):
        layers[f"controlnet_cond_embedding/{name}"] = (3, 3, *size)
    for name, shape in layers.items():
        wanted |= {f"{name}/kernel": shape, f"{name}/bias": shape[-1:]}
    assert found == wanted
