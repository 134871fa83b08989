"""FlaxAutoencoderTiny against PyTorch's AutoencoderTiny with the same random weights."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderTiny
from helpers import psnr
from references import flax_params, to_jax

from diffusers_flax.models.tiny_vae import FlaxAutoencoderTiny
from diffusers_flax.published_configs import PUBLISHED_CONFIGS

FLOAT32_PSNR = 100  # dB
BFLOAT16_PSNR = 30
SMALL = dict(
    encoder_block_out_channels=(16, 16, 16),
    decoder_block_out_channels=(16, 16, 16),
    num_encoder_blocks=(1, 2, 1),
    num_decoder_blocks=(2, 1, 1),
)
OTHER_VALUES = dict(
    in_channels=1,
    out_channels=4,
    latent_channels=5,
    encoder_block_out_channels=(8, 8),
    decoder_block_out_channels=(16, 16, 16),
    num_encoder_blocks=(0, 2),
    num_decoder_blocks=(1, 0, 1),
    upsampling_scaling_factor=3,
    latent_magnitude=2.5,
    latent_shift=0.4,
    scaling_factor=0.5,
)
# name: (config of both, batch, size of the latents)
CASES = {
    "one image": (SMALL, 1, (3, 5)),
    "three images": (SMALL, 3, (7, 4)),
    "published config": ({}, 2, (3, 5)),
    "other values": (OTHER_VALUES, 3, (5, 3)),
}


def torch_vae(config):
    """A PyTorch model whose activations keep their size from layer to layer."""
    torch.manual_seed(0)
    model = AutoencoderTiny(**config).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight)
            if module.bias is not None:
                torch.nn.init.normal_(module.bias, std=0.2)
    return model


def pair(config):
    theirs = torch_vae(config)
    return theirs, FlaxAutoencoderTiny(**config), {"params": flax_params(theirs)}


@pytest.mark.variants
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_equals_pytorch(name):
    config, batch, (h, w) = CASES[name]
    theirs, ours, variables = pair(config)
    factor = 2 ** (len(ours.num_encoder_blocks) - 1)
    images = torch.rand(batch, ours.in_channels, h * factor, w * factor) * 2 - 1
    latents = 3 * torch.randn(batch, ours.latent_channels, h, w)  # beyond 3 they are clamped
    encoded, decoded = theirs.encode(images).latents, theirs.decode(latents).sample

    for dtype, least in ((jnp.float32, FLOAT32_PSNR), (jnp.bfloat16, BFLOAT16_PSNR)):
        vae = ours.clone(dtype=dtype)
        result = jax.jit(partial(vae.apply, method=vae.encode))(variables, to_jax(images)).latents
        assert result.dtype == dtype
        assert psnr(result, encoded, np.ptp(encoded.numpy())) > least
        result = jax.jit(partial(vae.apply, method=vae.decode))(variables, to_jax(latents)).sample
        assert result.dtype == dtype
        assert psnr(result, decoded, np.ptp(decoded.numpy())) > least


@pytest.mark.parametrize("safe_serialization", [True, False])
def test_files_of_pytorch_and_back(tmp_path, safe_serialization):
    theirs = torch_vae(OTHER_VALUES)
    theirs.save_pretrained(tmp_path / "theirs", safe_serialization=safe_serialization)
    module, params = FlaxAutoencoderTiny.from_pretrained(tmp_path / "theirs")
    module.save_pretrained(tmp_path / "ours", params)

    reopened, report = AutoencoderTiny.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, reopened.state_dict()[key]), key
    reopened.save_pretrained(tmp_path / "reopened")
    wrote, rewrote = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "reopened")
    )
    rewrote.pop("_name_or_path")
    assert rewrote == wrote


def test_published_configs_have_the_published_sizes():
    """TAESD's encoder has 1,222,532 parameters, its decoder 1,222,531."""
    config = PUBLISHED_CONFIGS["taesd"]["vae"]
    assert config == PUBLISHED_CONFIGS["taesdxl"]["vae"]
    vae = FlaxAutoencoderTiny.from_config(config)
    shapes = jax.eval_shape(vae.init_weights, jax.random.key(0))
    sizes = {k: sum(x.size for x in jax.tree.leaves(tree)) for k, tree in shapes.items()}
    assert sizes == {"encoder": 1_222_532, "decoder": 1_222_531}
    theirs = AutoencoderTiny(**config).config
    ours = vae.config | vae.fixed_config
    assert ours == {k: theirs[k] for k in ours}
