"""Adaptive projected guidance against diffusers' guider of that name, alone and in pipelines."""

import jax
import numpy as np
import pytest
import torch
from diffusers import StableDiffusionInstructPix2PixPipeline, StableDiffusionPipeline
from diffusers.guiders.adaptive_projected_guidance import MomentumBuffer, normalized_guidance
from helpers import PROMPTS, psnr, random_inputs
from tiny_models import make_tiny_pipeline

from diffusers_flax import FlaxDiffusionPipeline
from diffusers_flax.pipelines.guidance import ProjectedGuidance, read_guidance

APG = "apg:eta=0.2,norm=9,momentum=-0.4"


@pytest.mark.parametrize(("eta", "norm", "momentum"), [(0, 15, -0.5), (0.3, 4, 0), (1, 0, 0.75)])
def test_changed_differences_are_those_of_diffusers(eta, norm, momentum):
    guidance = ProjectedGuidance(eta, norm, momentum)
    buffer, total = MomentumBuffer(momentum), 0.0
    for seed in range(3):
        text, null = np.random.default_rng(seed).standard_normal((2, 2, 4, 8, 8), np.float32)
        expected = normalized_guidance(
            *map(torch.from_numpy, (text, null)), 7.5, buffer, eta, norm_threshold=norm
        )
        change, total = guidance.change(text - null, text, total)
        np.testing.assert_allclose(null + 7.5 * change, expected, atol=2e-5)


def images_by_hand(theirs, prompts, image, latents, scales, num_steps=6):
    """Images (B, H, W, 3) of PyTorch's models; scales: of the text and, for edits, of the image."""
    encoder, tokenizer, unet, vae = theirs.text_encoder, theirs.tokenizer, theirs.unet, theirs.vae

    def encode(texts):
        ids = tokenizer(texts, padding="max_length", return_tensors="pt").input_ids
        return encoder(ids).last_hidden_state

    text, null = encode(prompts), encode([""] * len(prompts))
    x_t, conditions, branches = torch.tensor(latents), {}, {"text": text, "null": null}
    if image is not None:
        pixels = torch.tensor(image).permute(0, 3, 1, 2) * 2 - 1
        latents = vae.encode(pixels).latent_dist.mode()
        branches = {"text": text, "image": null, "null": null}
        conditions = {"text": latents, "image": latents, "null": torch.zeros_like(latents)}
    momentum = [MomentumBuffer(-0.4) for _ in scales]
    theirs.scheduler.set_timesteps(num_steps)
    for t in theirs.scheduler.timesteps:
        predictions = [
            unet(torch.cat([x_t, *([conditions[x]] if conditions else [])], 1), t, states).sample
            for x, states in branches.items()
        ]
        alpha_bar = theirs.scheduler.alphas_cumprod[t]
        alpha, sigma = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
        clean = [(x_t - sigma * eps) / alpha for eps in predictions]
        guided = clean[0] + sum(
            normalized_guidance(x_0, other, scale - 1, buffer, 0.2, 9, True) - x_0
            for x_0, other, scale, buffer in zip(clean, clean[1:], scales, momentum)
        )
        x_t = theirs.scheduler.step((x_t - alpha * guided) / sigma, t, x_t).prev_sample
    images = vae.decode(x_t / vae.config.scaling_factor).sample
    return (images / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()


@torch.no_grad()
@pytest.mark.parametrize("given", [(40.0, 9.0), (20.0, 20.0), (40.0,)])
def test_images_are_those_of_pytorchs_models(given, tmp_path):
    """Edits, also with the scales that need two branches only without projection; images."""
    edits = len(given) == 2
    folder = make_tiny_pipeline(tmp_path / "model", in_channels=8 if edits else 4)
    cls = StableDiffusionInstructPix2PixPipeline if edits else StableDiffusionPipeline
    theirs = cls.from_pretrained(folder, safety_checker=None)
    pipeline, params = FlaxDiffusionPipeline.from_pretrained(folder)
    images, latents = random_inputs(2, 64, 64, 4)
    scales = dict(zip(("guidance_scale", "image_guidance_scale"), given))
    expected = images_by_hand(theirs, PROMPTS[:2], images if edits else None, latents, given)
    arrays = pipeline.prepare_inputs(PROMPTS[:2], *([images] if edits else []))
    arrays = arrays if edits else (arrays,)
    size = {} if edits else dict(height=64, width=64)
    call = [*arrays, params, jax.random.key(0), 6]
    found = pipeline(*call, latents=latents, guidance=APG, **scales, **size).images
    assert psnr(found, expected) > 60
    plain = pipeline(*call, latents=latents, **scales, **size).images
    assert psnr(plain, expected) < 45


@pytest.mark.parametrize("text", ["cfg", "apg:eta", "apg:rho=1", "apg:momentum=-1", "apg:norm=-1"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="must be apg"):
        read_guidance(text)
