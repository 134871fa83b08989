"""Previews: the clean latents that a step predicts, against PyTorch."""

import dataclasses

import jax
import numpy as np
import pytest
import torch
from flax.jax_utils import replicate
from helpers import psnr, slow
from references import images_of, images_of_theirs, open_ours, open_theirs
from tiny_models import make_tiny_pipeline, save_tiny_vae

from diffusers_flax.acceleration.previews import Preview
from diffusers_flax.pipelines.sampling import keys_per_image

# of torch.Tensor.__array__, called by diffusers' schedulers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
STEPS = 5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(directory of a TAESD for images four times as wide as latents, PyTorch's)."""
    folder = tmp_path_factory.mktemp("tiny")
    return folder, save_tiny_vae(folder, (8, 8, 8))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_pipeline(tmp_path_factory.mktemp("sd"), in_channels=4)


def open_with_previews(model, scheduler, tiny, every=2):
    """(pipeline, params, {step: (keys, images)} of the previews)."""
    seen = {}

    def show(step, keys, images):
        seen.setdefault(step, []).extend(zip(keys.tolist(), images))

    preview = Preview(every, show, str(tiny[0]))
    return *open_ours(model, scheduler, preview=preview), seen


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["ddim", *slow("euler")])
def test_previews_are_pytorchs(model, tiny, scheduler):
    pipeline, params, seen = open_with_previews(model, scheduler, tiny)
    image = images_of(pipeline, params, steps=STEPS)
    jax.effects_barrier()
    assert sorted(seen) == [2, 4]  # not after the last step
    plain = images_of(dataclasses.replace(pipeline, preview=None), params, steps=STEPS)
    np.testing.assert_array_equal(image, plain)

    theirs, clean = open_theirs(model, pipeline.scheduler), []
    step = theirs.scheduler.step

    def keep(*args, return_dict=True, **options):
        out = step(*args, **options)
        clean.append(out.pred_original_sample)
        return out if return_dict else out[:1]

    theirs.scheduler.step = keep
    images_of_theirs(theirs, steps=STEPS, guidance_scale=7.5)
    for number in seen:
        with torch.no_grad():
            decoded = tiny[1].decode(clean[number - 1]).sample
        expected = (decoded / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
        assert psnr(np.stack([image for _, image in seen[number]]), expected) > 60


@pytest.mark.slow
def test_each_image_of_each_device_has_its_key(model, tiny):
    keys = keys_per_image(jax.random.key(7), 4)
    pipeline, params, seen = open_with_previews(model, "ddim", tiny)
    ids = np.repeat(pipeline.prepare_inputs("make it red"), 4, axis=0)
    options = dict(num_inference_steps=STEPS, height=32, width=32)
    pipeline(ids, params, keys, **options)
    jax.effects_barrier()
    alone = {step: dict((tuple(key), image) for key, image in rows) for step, rows in seen.items()}
    seen.clear()
    devices = jax.local_devices()[:2]
    pipeline(
        ids.reshape(2, 2, -1), replicate(params, devices), keys.reshape(2, 2), jit=True, **options
    )
    jax.effects_barrier()
    assert {step: len(rows) for step, rows in seen.items()} == {2: 4, 4: 4}
    for step, rows in seen.items():
        for key, image in rows:
            np.testing.assert_allclose(image, alone[step][tuple(key)], atol=1e-4)
