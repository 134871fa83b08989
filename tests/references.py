"""PyTorch's models and pipelines as references for ours, with the same weights and noise."""

import dataclasses
from functools import partial

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import (
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionXLInstructPix2PixPipeline,
)
from flax.traverse_util import unflatten_dict
from helpers import PROMPTS

from diffusers_flax import FlaxDiffusionPipeline
from diffusers_flax.loading.weights import torch_to_flax
from diffusers_flax.models.base import FlaxModelMixin
from diffusers_flax.pipelines.sampling import decode, keys_per_image, normal
from diffusers_flax.schedulers.factory import make_scheduler


def flax_params(model, module_class=FlaxModelMixin):
    """A PyTorch model's parameters as the tree of our module, host arrays."""
    pairs = [torch_to_flax(key, x.numpy()) for key, x in model.state_dict().items()]
    return unflatten_dict({module_class.path_in_tree(key, {}): x for key, x in pairs}, sep="/")


def to_jax(tensor):
    """A PyTorch tensor as a jax array."""
    return jnp.asarray(tensor.detach().numpy())


def open_ours(folder, scheduler=None, cls=FlaxDiffusionPipeline, **options):
    """(pipeline, params) of ours; scheduler: name of the one that replaces the model's."""
    pipeline, params = cls.from_pretrained(folder, **options)
    if scheduler:
        config = pipeline.scheduler.config | {"skip_prk_steps": True}
        scheduler, params["scheduler"] = make_scheduler(scheduler, config)
        pipeline = dataclasses.replace(pipeline, scheduler=scheduler)
    return pipeline, params


def remove_variance(folder):
    """Make the posterior of a model's VAE a point, from which both draw the same latents."""
    vae = diffusers.AutoencoderKL.from_pretrained(folder / "vae")
    with torch.no_grad():
        vae.quant_conv.weight[4:] = 0
        vae.quant_conv.bias[4:] = -40
    vae.save_pretrained(folder / "vae")


def call_theirs(pipeline, noise, **arguments):
    """The images of a PyTorch call that draws this noise; latents as an array."""
    with pytest.MonkeyPatch.context() as patch:
        module = type(pipeline).__module__
        patch.setattr(f"{module}.randn_tensor", lambda *args, **kwargs: torch.from_numpy(noise))
        images = pipeline(**({"output_type": "np"} | arguments)).images
    return images.numpy() if torch.is_tensor(images) else images


def open_theirs(folder, scheduler, cls=diffusers.DiffusionPipeline):
    """PyTorch's pipeline; scheduler: ours, whose kind and config it takes, or a name."""
    theirs = cls.from_pretrained(folder, safety_checker=None)
    theirs.set_progress_bar_config(disable=True)
    if isinstance(scheduler, str):
        config = dict(theirs.scheduler.config) | {"skip_prk_steps": True}
        scheduler, _ = make_scheduler(scheduler, config)
    name = type(scheduler).__name__.removeprefix("Flax")
    theirs.scheduler = getattr(diffusers, name).from_config(dict(scheduler.config))
    return theirs


def images_of(pipeline, params, key=3, steps=12, size=64, **options):
    """Images (1, size, size, 3) in [0, 1] of our text-to-image pipeline."""
    prompt_ids = pipeline.prepare_inputs("make it red")
    options = dict(num_inference_steps=steps, height=size, width=size) | options
    return pipeline(prompt_ids, params, jax.random.key(key), **options).images


def images_of_theirs(theirs, key=3, steps=12, size=64, call=None, factor=4, **options):
    """Images of PyTorch's text-to-image pipeline with the noise of images_of."""
    shape = (4, size // factor, size // factor)
    noise = normal(keys_per_image(jax.random.key(key), 1), 0, shape)
    latents = torch.from_numpy(np.array(noise))
    options = dict(num_inference_steps=steps, height=size, width=size) | options
    call = call or theirs
    return call("make it red", latents=latents, output_type="np", **options).images


def edit_with_torch(
    folder, prompts, images, latents, negative_prompt=None, output_type="np", **scales
):
    """PyTorch's pipeline, 20 steps; (B, H, W, 3) in [0, 1], or of another output_type."""
    pipeline = StableDiffusionInstructPix2PixPipeline.from_pretrained(folder, safety_checker=None)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompts,
        image=torch.tensor(images).permute(0, 3, 1, 2),
        num_inference_steps=20,
        latents=torch.tensor(latents),
        negative_prompt=negative_prompt,
        output_type=output_type,
        **scales,
    ).images


def edit_with_torch_xl(
    folder, prompts, images, latents, negative_prompt=None, output_type="np", **options
):
    """PyTorch's pipeline, 8 steps; (B, H, W, 3) in [0, 1], or of another output_type."""
    pipeline = StableDiffusionXLInstructPix2PixPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompts,
        image=torch.tensor(images).permute(0, 3, 1, 2),
        height=images.shape[1],
        width=images.shape[2],
        num_inference_steps=8,
        latents=torch.tensor(latents),
        negative_prompt=negative_prompt,
        output_type=output_type,
        **options,
    ).images


def check_output_types(loaded, torch_latents, input_images, latents, **options):
    """np, pil and latent of an edit pipeline; torch_latents: the result's, of PyTorch."""
    pipeline, params = loaded
    inputs = pipeline.prepare_inputs(PROMPTS[: len(input_images)], input_images)
    edit = partial(pipeline, *inputs, params, jax.random.key(0), latents=latents, **options)
    found = edit(output_type="latent").images
    assert found.shape == torch_latents.shape and found.dtype == jnp.float32
    assert np.abs(found - torch_latents.numpy()).max() < 1e-4 * torch_latents.abs().max()
    arrays = edit().images
    decoded = decode(pipeline.compute_vae, params["vae"], found)
    np.testing.assert_allclose(decoded, arrays, atol=1e-5)
    images, *flags = edit(output_type="pil", return_dict=False)  # SDXL has no flags
    assert not any(flags) and len(images) == len(input_images)
    for image, array in zip(images, arrays):
        assert np.abs(np.asarray(image) / 255 - array).max() < 0.6 / 255
    assert (edit(output_type=None).images == arrays).all()
    with pytest.raises(ValueError, match="output_type='pt' is unknown; take np, pil or latent"):
        edit(output_type="pt")
