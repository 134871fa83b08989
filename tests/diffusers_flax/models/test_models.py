"""UNet and VAE against PyTorch diffusers with the same random weights; published trees."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution as TorchPosterior
from flax.traverse_util import flatten_dict
from helpers import ROOT
from references import flax_params, to_jax

from diffusers_flax.models.clip import FlaxCLIPTextModelWithProjectionModule, FlaxCLIPTextModule
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.models.vae import (
    FlaxAutoencoderKL,
    FlaxDiagonalGaussianDistribution,
    with_tile,
)

TOLERANCE = 2e-4  # of the largest output, float32
PUBLISHED_SHAPES = ROOT / "tests" / "published_flax_param_shapes.json"

SD1_BLOCKS = dict(
    down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    block_out_channels=(32, 64, 96),
    cross_attention_dim=24,
)
SDXL = dict(
    attention_head_dim=(2, 4, 6),
    use_linear_projection=True,
    addition_embed_type="text_time",
    addition_time_embed_dim=8,
)
# name: (config of both, batch, height, width)
UNETS = {
    "instruct-pix2pix": (dict(attention_head_dim=8, in_channels=8), 3, 16, 8),
    "sd1 at 40x56": (dict(attention_head_dim=4), 2, 40, 56),
    "sd1 at odd sizes": (dict(attention_head_dim=8), 3, 9, 13),
    "sd2": (dict(attention_head_dim=(2, 4, 6), use_linear_projection=True), 2, 16, 24),
    "only_cross_attention": (dict(only_cross_attention=(True, False, True)), 2, 8, 8),
    "layers per block": (
        dict(layers_per_block=(1, 2, 3), transformer_layers_per_block=(2, 1, 3)),
        1,
        8,
        16,
    ),
    "no middle block": (dict(mid_block_type=None), 2, 8, 8),
    "norms and time": (
        dict(norm_num_groups=16, norm_eps=1e-3, flip_sin_to_cos=False, freq_shift=1),
        2,
        8,
        8,
    ),
    "all attention": (
        dict(
            down_block_types=("CrossAttnDownBlock2D",) * 3,
            up_block_types=("CrossAttnUpBlock2D",) * 3,
            upcast_attention=True,
        ),
        1,
        16,
        8,
    ),
    "sdxl base": (
        SDXL
        | dict(
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 3),
            projection_class_embeddings_input_dim=20 + 6 * 8,
        ),
        2,
        16,
        24,
    ),
    "sdxl refiner": (
        SDXL
        | dict(
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=2,
            projection_class_embeddings_input_dim=20 + 5 * 8,
        ),
        1,
        8,
        8,
    ),
}


def error(ours, theirs):
    """Largest difference, relative to the largest value."""
    ours, theirs = np.asarray(ours, np.float32), theirs.detach().float().numpy()
    assert ours.shape == theirs.shape
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


def unet_pair(config, seed=0):
    torch.manual_seed(seed)
    config = {**SD1_BLOCKS, **config}
    theirs = UNet2DConditionModel(**config).eval()
    return theirs, FlaxUNet2DConditionModel(**config), flax_params(theirs)


def unet_inputs(module, batch, height, width):
    inputs = (
        torch.randn(batch, module.in_channels, height, width),
        torch.randint(0, 1000, (batch,)),
        torch.randn(batch, 7, module.cross_attention_dim),
    )
    if module.addition_embed_type is None:
        return inputs, {}
    num_ids = (module.projection_class_embeddings_input_dim - 20) // module.addition_time_embed_dim
    sizes = torch.randint(0, 1024, (batch, num_ids)).float()
    return inputs, {"added_cond_kwargs": {"text_embeds": torch.randn(batch, 20), "time_ids": sizes}}


@pytest.mark.variants
@pytest.mark.parametrize("name", UNETS)
@torch.no_grad()
def test_unet_equals_pytorch(name):
    config, batch, height, width = UNETS[name]
    theirs, ours, params = unet_pair(config)
    inputs, added = unet_inputs(ours, batch, height, width)
    expected = theirs(*inputs, **added).sample
    inputs, added = jax.tree.map(to_jax, (inputs, added))
    result = jax.jit(ours.apply)({"params": params}, *inputs, **added).sample
    assert result.dtype == jnp.float32
    assert error(result, expected) < TOLERANCE


@pytest.mark.slow
@torch.no_grad()
def test_unet_takes_scalar_timestep_tuple_output_and_residuals():
    theirs, ours, params = unet_pair({})
    (x, _, text), _ = unet_inputs(ours, 2, 8, 8)
    skips = [torch.randn(2, 32, 8, 8) for _ in range(3)]
    skips += [torch.randn(2, 32, 4, 4)] + [torch.randn(2, 64, 4, 4) for _ in range(2)]
    skips += [torch.randn(2, 64, 2, 2)] + [torch.randn(2, 96, 2, 2) for _ in range(2)]
    middle = torch.randn(2, 96, 2, 2)
    extra = dict(down_block_additional_residuals=tuple(skips), mid_block_additional_residual=middle)
    (expected,) = theirs(x, 77, text, **extra, return_dict=False)
    (result,) = jax.jit(ours.apply, static_argnames="return_dict")(
        {"params": params},
        to_jax(x),
        77,
        to_jax(text),
        down_block_additional_residuals=[to_jax(s.permute(0, 2, 3, 1)) for s in skips],
        mid_block_additional_residual=to_jax(middle.permute(0, 2, 3, 1)),
        return_dict=False,
    )
    assert error(result, expected) < TOLERANCE


@pytest.mark.slow
def test_unet_gradients_equal_pytorch_and_checkpointing_recomputes():
    two_levels = dict(
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        attention_head_dim=4,
    )
    theirs, ours, params = unet_pair(two_levels)
    (x, t, text), _ = unet_inputs(ours, 2, 8, 8)
    target = torch.randn(2, 4, 8, 8)
    torch.nn.functional.mse_loss(theirs(x, t, text).sample, target).backward()
    for name, parameter in theirs.named_parameters():
        theirs.get_parameter(name).data = parameter.grad  # so that flax_params reads gradients
    expected = flatten_dict(flax_params(theirs))

    num_convolutions = []
    for module in (ours, ours.clone(gradient_checkpointing=True)):

        def loss(params, module=module):
            prediction = module.apply({"params": params}, to_jax(x), to_jax(t), to_jax(text)).sample
            return jnp.square(prediction - to_jax(target)).mean()

        gradient = jax.jit(jax.grad(loss)).trace(params)
        num_convolutions.append(str(gradient.jaxpr).count("conv_general_dilated"))
        grads = flatten_dict(gradient.lower().compile()(params))
        assert grads.keys() == expected.keys()
        norm = np.sqrt(sum(np.sum(g**2) for g in expected.values()))
        for key, grad in grads.items():
            difference = np.linalg.norm(np.asarray(grad) - expected[key])
            assert difference < 1e-3 * np.linalg.norm(expected[key]) + 1e-6 * norm, key
    plain, recomputed = num_convolutions
    assert recomputed > plain + 5


@pytest.mark.variants
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(dual_cross_attention=True), "dual_cross_attention"),
        (dict(addition_embed_type="text"), "addition_embed_type='text' is not supported"),
        (dict(mid_block_type="UNetMidBlock2D"), "mid_block_type='UNetMidBlock2D' is not supported"),
        (dict(down_block_types=("AttnDownBlock2D",) * 3), "AttnDownBlock2D is not supported"),
        (dict(attention_head_dim=(2, 4)), "attention_head_dim has 2 entries"),
        (dict(dropout=0.1), "dropout=0.1 is not supported"),
    ],
)
def test_unet_refuses_unsupported_configs(config, words):
    with pytest.raises(ValueError, match=words):
        module = FlaxUNet2DConditionModel.from_config({**SD1_BLOCKS, **config})
        jax.eval_shape(module.init_weights, jax.random.key(0))


VAE_CONFIG = dict(
    down_block_types=("DownEncoderBlock2D",) * 3,
    up_block_types=("UpDecoderBlock2D",) * 3,
    block_out_channels=(32, 64, 64),
)
VAES = {
    "sizes": (dict(layers_per_block=1), 3, 40, 56),
    "two layers": (dict(layers_per_block=2), 1, 32, 32),
    "16 latent channels": (dict(latent_channels=16, norm_num_groups=16), 2, 16, 24),
    "no attention": (dict(mid_block_add_attention=False), 2, 16, 16),
    "no quant_conv": (dict(use_quant_conv=False, use_post_quant_conv=False), 1, 16, 16),
}


def vae_pair(config):
    torch.manual_seed(0)
    config = {**VAE_CONFIG, **config}
    theirs = AutoencoderKL(**config).eval()
    return theirs, FlaxAutoencoderKL(**config), flax_params(theirs)


@pytest.mark.variants
@pytest.mark.parametrize("name", VAES)
@torch.no_grad()
def test_vae_equals_pytorch(name):
    config, batch, height, width = VAES[name]
    theirs, ours, params = vae_pair(config)
    x = torch.rand(batch, 3, height, width) * 2 - 1
    expected = theirs.encode(x).latent_dist
    decoded = theirs.decode(expected.mode()).sample
    variables = {"params": params}

    encode = jax.jit(lambda v, x: ours.apply(v, x, method=ours.encode))
    posterior = encode(variables, to_jax(x)).latent_dist
    latents = jnp.transpose(posterior.mode(), (0, 3, 1, 2))
    assert error(latents, expected.mode()) < TOLERANCE
    assert error(jnp.transpose(posterior.std, (0, 3, 1, 2)), expected.std) < TOLERANCE
    assert error(posterior.kl(), expected.kl()) < TOLERANCE

    decode = jax.jit(lambda v, z: ours.apply(v, z, method=ours.decode))
    assert error(decode(variables, to_jax(expected.mode())).sample, decoded) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("height", "width", "tile"), [(56, 40, 32), (80, 24, 32), (36, 100, 16), (32, 28, 32)]
)
@torch.no_grad()
def test_tiled_vae_equals_pytorch(height, width, tile):
    """Also with tiles at the ends that are smaller, and an image of one tile."""
    theirs, ours, params = vae_pair({})
    theirs.enable_tiling()
    theirs.tile_sample_min_size, theirs.tile_latent_min_size = tile, tile // 4
    x = torch.rand(2, 3, height, width) * 2 - 1
    expected = theirs.encode(x).latent_dist
    decoded = theirs.decode(expected.mode()).sample
    tiled, variables = with_tile(ours, tile), {"params": params}
    encode, decode = (jax.jit(partial(tiled.apply, method=x)) for x in ("encode", "decode"))
    posterior = encode(variables, to_jax(x)).latent_dist
    assert error(jnp.transpose(posterior.mode(), (0, 3, 1, 2)), expected.mode()) < TOLERANCE
    assert error(jnp.transpose(posterior.std, (0, 3, 1, 2)), expected.std) < TOLERANCE
    image = decode(variables, to_jax(expected.mode())).sample
    assert image.shape == (2, 3, height, width)
    assert error(image, decoded) < TOLERANCE


def test_vae_refuses_wrong_inputs():
    _, ours, params = vae_pair({})
    with pytest.raises(ValueError, match="32x30 is not divisible by 4"):
        ours.apply({"params": params}, jnp.zeros((1, 3, 30, 32)), method=ours.encode)
    with pytest.raises(ValueError, match=r"this VAE encodes \(batch, 3"):
        ours.apply({"params": params}, jnp.zeros((1, 32, 32, 3)), method=ours.encode)
    with pytest.raises(ValueError, match="vae_tile=24 is not a multiple of 16 pixels"):
        with_tile(ours, 24)
    with pytest.raises(ValueError, match="only DownEncoderBlock2D and Up"):
        FlaxAutoencoderKL(down_block_types=("AttnDownEncoderBlock2D",)).init_weights(
            jax.random.key(0)
        )


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("sd15_unet", FlaxUNet2DConditionModel(cross_attention_dim=768)),
        pytest.param(
            "sdxl_unet",
            FlaxUNet2DConditionModel(
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                block_out_channels=(320, 640, 1280),
                attention_head_dim=(5, 10, 20),
                transformer_layers_per_block=(1, 2, 10),
                cross_attention_dim=2048,
                use_linear_projection=True,
                addition_embed_type="text_time",
                addition_time_embed_dim=256,
                projection_class_embeddings_input_dim=2816,
            ),
            marks=pytest.mark.slow,
        ),
        (
            "vae",
            FlaxAutoencoderKL(
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
                block_out_channels=(128, 256, 512, 512),
                layers_per_block=2,
            ),
        ),
        (
            "clip_l_text",
            FlaxCLIPTextModule(hidden_size=768, intermediate_size=3072, num_attention_heads=12),
        ),
        pytest.param(
            "clip_bigg_text_with_projection",
            FlaxCLIPTextModelWithProjectionModule(
                hidden_size=1280,
                intermediate_size=5120,
                num_hidden_layers=32,
                num_attention_heads=20,
                projection_dim=1280,
                hidden_act="gelu",
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_parameter_trees_are_the_published_ones(name, module):
    shapes = jax.eval_shape(module.init_weights, jax.random.key(0))
    tree = {key: list(x.shape) for key, x in flatten_dict(shapes, sep="/").items()}
    assert tree == json.loads(PUBLISHED_SHAPES.read_text())[name]


def test_posterior_equals_pytorch():
    moments = np.random.default_rng(0).standard_normal((2, 3, 5, 8), np.float32) * 9
    other = np.random.default_rng(1).standard_normal((2, 3, 5, 8), np.float32)
    sample = np.random.default_rng(2).standard_normal((2, 3, 5, 4), np.float32)

    def both(x):
        return FlaxDiagonalGaussianDistribution(jnp.asarray(x)), TorchPosterior(to_torch(x))

    def to_torch(x):
        return torch.from_numpy(x.transpose(0, 3, 1, 2).copy())

    ours, theirs = both(other)
    wide, torch_wide = both(moments)
    for name in ("mean", "logvar", "std", "var"):
        expected = getattr(torch_wide, name).permute(0, 2, 3, 1)
        np.testing.assert_allclose(getattr(wide, name), expected, rtol=1e-5)
    np.testing.assert_allclose(ours.kl(), theirs.kl(), rtol=1e-5)
    np.testing.assert_allclose(ours.kl(wide), theirs.kl(torch_wide), rtol=1e-5)
    np.testing.assert_allclose(ours.nll(sample), theirs.nll(to_torch(sample)), rtol=1e-5)
    certain = FlaxDiagonalGaussianDistribution(jnp.asarray(moments), deterministic=True)
    np.testing.assert_array_equal(certain.sample(jax.random.key(0)), certain.mode())
    assert certain.kl() == 0 and certain.nll(sample) == 0 and not certain.var.any()
    doubled = jax.jit(lambda posterior: jax.tree.map(lambda x: 2 * x, posterior))(certain)
    assert doubled.deterministic
    np.testing.assert_array_equal(doubled.mean, 2 * certain.mean)
