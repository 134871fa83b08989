"""Adaptive projected guidance: guidance at high scales without burnt colors.

A guided prediction adds scale * difference, where difference = conditional - unconditional. Of the
difference, the part that is parallel to the conditional prediction raises contrast and saturation;
eta weakens it. The rest is bounded in norm and, by a negative momentum, moved away from the
differences of earlier steps.

Source: Sadat et al. (arXiv 2410.02416).
"""

from typing import NamedTuple

import jax.numpy as jnp

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
