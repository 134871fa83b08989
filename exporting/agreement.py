"""The comparison of an exported part with our model."""

import numpy as np

from exporting.parts import CHECKED_SIZES, random_inputs, run_flax

# Largest difference of a part, as a share of its largest output.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "int8": 0.15}


def references(part, pipeline, params):
    """Inputs and our model's outputs of a part, [(inputs, outputs)], at every checked size."""
    inputs = [random_inputs(part, pipeline, *checked) for checked in CHECKED_SIZES]
    return [(given, run_flax(part, pipeline, params, given)) for given in inputs]


def compare_with_flax(part, found_by, expected, precision):
    """How far an exported part is from our model.

    Args:
        part: Part.
        found_by: function {input: array} -> list of outputs.
        expected: of references.
        precision: key of TOLERANCES.

    Returns:
        {"largest_difference", "largest_output": floats of the output that differs most;
        "compared_at": text}.

    Raises:
        ArithmeticError: it differs by more than the tolerance, or is not finite.
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
            f"{part.name} in {precision} differs from the Flax model by {difference:.2e}, with "
            f"outputs up to {scale:.2e}; nothing was written"
        )
    sizes = [f"batch {batch}, latents {h} x {w}" for batch, (h, w) in CHECKED_SIZES]
    return {
        "largest_difference": f"{difference:.2e}",
        "largest_output": f"{scale:.2e}",
        "compared_at": "; ".join(sizes),
    }


def relative_difference(row):
    """Key for max: the difference as a share of the largest output; NaN counts as the largest."""
    return float("inf") if np.isnan(row[0]) else row[0]
