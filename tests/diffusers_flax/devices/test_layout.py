"""Images of several devices by Layout equal images of one device."""

import jax
import numpy as np
import pytest
from flax.jax_utils import replicate
from tiny_models import make_tiny_pipeline

from diffusers_flax.devices.layout import Layout
from diffusers_flax.pipelines.base import FlaxDiffusionPipeline

OPTIONS = dict(num_inference_steps=2, guidance_scale=3.0)


def open_tiny(folder, layout=None):
    pipeline, params = FlaxDiffusionPipeline.from_pretrained(folder, layout=layout)
    if layout is not None:
        layout.place_params(params)
    return pipeline, params


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_pipeline(tmp_path_factory.mktemp("model"), in_channels=4)


def test_images_are_spread_over_devices(model):
    key, prompts = jax.random.key(3), ["red", "it", "blue", "make it red"]
    pipeline, params = open_tiny(model)
    ids = pipeline.prepare_inputs(prompts)
    neg_ids = pipeline.prepare_inputs("green")  # one row for all
    params = replicate(params, jax.devices()[:2])
    halves = dict(prompt_ids=ids.reshape(2, 2, *ids.shape[1:]), neg_prompt_ids=neg_ids)
    halves["neg_prompt_ids"] = np.broadcast_to(neg_ids, (2, *neg_ids.shape))
    pmapped = pipeline(**halves, params=params, prng_seed=key, jit=True, **OPTIONS).images

    pipeline, params = open_tiny(model, Layout(jax.devices()[:2]))
    images = pipeline(ids, params, key, neg_prompt_ids=neg_ids, **OPTIONS).images
    np.testing.assert_array_equal(images, np.concatenate(pmapped))
