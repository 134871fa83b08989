"""Adaptive projected guidance against diffusers' guider of that name."""

import numpy as np
import pytest
import torch
from diffusers.guiders.adaptive_projected_guidance import MomentumBuffer, normalized_guidance

from diffusers_flax.pipelines.guidance import ProjectedGuidance


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
