"""Adaptive projected guidance: guidance at high scales without burnt colors.

A guided prediction is conditional + (scale - 1) * difference, where difference = conditional -
unconditional, of clean samples. The part of the difference that is parallel to the conditional
prediction raises contrast and saturation; eta weakens it. The difference is bounded in norm and, by
a negative momentum, moved away from the differences of earlier steps.

Source: Sadat et al. (arXiv 2410.02416), algorithm 1.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import jax.numpy as jnp

EXAMPLE = "apg:eta=0,norm=15,momentum=-0.5"

AXES = (1, 2, 3)  # of an image: channels, height, width


class ProjectedGuidance(NamedTuple):
    """How differences of predictions are changed before they are scaled.

    Fields:
        eta: weight of the part parallel to the conditional prediction, >= 0; 1: as without.
        norm: largest L2 norm of an image's difference, > 0; 0: any.
        momentum: weight of the earlier differences, from -1 to 1, exclusive; 0: off.
    """

    eta: float = 0.0
    norm: float = 15.0
    momentum: float = -0.5

    def change(self, difference, prediction, earlier):
        """The changed difference, and the running sum of differences.

        Args:
            difference: of the conditional and the unconditional prediction, (B, C, h, w) float32.
            prediction: the conditional one, likewise.
            earlier: the running sum after the step before, likewise; zeros before the first step.

        Returns:
            (changed difference, running sum), like difference.
        """
        difference = total = difference + self.momentum * earlier
        if self.norm:
            length = jnp.linalg.norm(difference.reshape(len(difference), -1), axis=1)
            difference *= jnp.minimum(1, self.norm / length).reshape(-1, 1, 1, 1)
        squared = jnp.square(prediction).sum(AXES, keepdims=True)
        share = (difference * prediction).sum(AXES, keepdims=True) / jnp.maximum(squared, 1e-24)
        return difference - (1 - self.eta) * share * prediction, total


def read_guidance(text, accelerate=None):
    """The ProjectedGuidance of a text such as EXAMPLE, "apg" alone for the defaults; None for "".

    accelerate: of the pipeline; accelerated steps keep no differences.

    Raises:
        ValueError: another name, another option, a value out of range, or an acceleration.
    """
    if not text:
        return None
    name, _, options = text.partition(":")
    try:
        pairs = (option.split("=") for option in options.split(",") if option)
        guidance = ProjectedGuidance(**{key.strip(): float(value) for key, value in pairs})
        eta, norm, momentum = guidance
        fits = 0 <= eta < math.inf and 0 <= norm < math.inf and -1 < momentum < 1
    except (TypeError, ValueError):
        fits = False
    if name != "apg" or not fits:
        raise ValueError(
            f"guidance={text!r} must be apg, or with options {EXAMPLE}: eta >= 0; norm > 0, or 0 "
            "for none; momentum between -1 and 1"
        )
    if accelerate:
        raise ValueError(f"guidance={text} does not go with accelerate; leave one out")
    return guidance


def guide_projected(guidance, predictions, scales, memory):
    """Clean samples of several branches guided by ProjectedGuidance.

    Args:
        guidance: ProjectedGuidance.
        predictions: {branch: (B, C, h, w) float32}, from the one with all conditions to the one
            with none.
        scales: {branch: weight of its difference from the next branch}.
        memory: {branch: running sum of its differences}, zeros before the first step.

    Returns:
        (guided prediction, memory).
    """
    names, sums = list(predictions), {}
    guided = predictions[names[0]]
    for name, other in pairwise(names):
        prediction = predictions[name]
        difference = prediction - predictions[other]
        change, sums[name] = guidance.change(difference, prediction, memory[name])
        guided = guided + (scales[name] - 1) * change
    return guided, sums


def memory_of(guidance, branches, shape):
    """The memory of guide_projected before the first step, () without; shape: of a prediction."""
    if guidance is None:
        return ()
    return {branch: jnp.zeros(shape, jnp.float32) for branch in branches[:-1]}
