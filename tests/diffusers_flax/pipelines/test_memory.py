"""The lower bound on memory, against what XLA allocates."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.pipelines import memory


@pytest.mark.slow
def test_the_bound_on_memory_is_below_what_xla_allocates():
    """A UNet of three levels, so that features of all sizes wait for the up blocks."""
    unet = FlaxUNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        attention_head_dim=2,
        cross_attention_dim=24,
        norm_num_groups=8,
    )
    params = jax.eval_shape(lambda: unet.init_weights(jax.random.key(0)))
    compiled = (
        jax.jit(unet.apply)
        .lower({"params": params}, np.zeros((2, 4, 16, 16)), np.zeros(2), np.zeros((2, 77, 24)))
        .compile()
    )
    pipeline = SimpleNamespace(unet=unet, vae_scale_factor=8, dtype=np.dtype(np.float32))
    bound = memory.bytes_per_image(pipeline, 2, 128, 128)
    features = 16 * 16 * 16 * 2 + 8 * 8 * (16 + 32) + 4 * 4 * (32 + 64)
    assert memory.bytes_per_image(pipeline, 20, 128, 128) == 20 * features * 4
    assert bound == 128 * 128 * 3 * 4
    assert 2 * features * 4 < compiled.memory_analysis().temp_size_in_bytes
