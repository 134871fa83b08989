"""Comparison of exported components with our models."""

import numpy as np

from diffusers_flax.exporting.components import CHECKED_SIZES, random_inputs, run_flax

# Largest allowed difference, relative to a component's largest output.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "int8": 0.15}


def references(component, pipeline, params):
    """[(inputs, our model's outputs)] of a component at every checked size."""
    inputs = [random_inputs(component, pipeline, *checked) for checked in CHECKED_SIZES]
    return [(x, run_flax(component, pipeline, params, x)) for x in inputs]


def compare_with_flax(component, found_by, expected, precision):
    """Compare an exported component with our model.

    Args:
        component: Component.
        found_by: function {input: array} -> list of outputs.
        expected: from references.
        precision: key of TOLERANCES.

    Returns:
        {"largest_difference", "largest_output": numbers of the output that differs most;
        "compared_at": sizes}, texts.

    Raises:
        ArithmeticError: a difference exceeds the tolerance or is not finite.
    """
    worst = 0.0, 0.0, 1.0
    for inputs, outputs in expected:
        for found, wanted in zip(found_by(inputs), outputs):
            difference = float(np.abs(np.asarray(found, np.float32) - wanted).max())
            scale = float(np.abs(wanted).max())
            worst = max(worst, (difference / scale, difference, scale), key=relative_difference)
    share, difference, scale = worst
    if not share <= TOLERANCES[precision]:
        raise ArithmeticError(
            f"{component.name} in {precision} differs from the Flax model by {difference:.2e}, "
            f"with outputs up to {scale:.2e}; nothing was written"
        )
    sizes = [f"batch {batch}, latents {h} x {w}" for batch, (h, w) in CHECKED_SIZES]
    return {
        "largest_difference": f"{difference:.2e}",
        "largest_output": f"{scale:.2e}",
        "compared_at": "; ".join(sizes),
    }


def relative_difference(row):
    """Key for max: the difference relative to the largest output, infinite for NaN."""
    return float("inf") if np.isnan(row[0]) else row[0]
