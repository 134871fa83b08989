"""Comparison of exported components with our models."""

import numpy as np

# (batch, (height, width) of latents) at which every component is compared. The second has an odd
# side, which the UNet halves and has to restore.
CHECKED_SIZES = ((1, (16, 16)), (3, (13, 24)))
# Largest allowed difference, relative to a component's largest output.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "int8": 0.15}


def compare_with_flax(component, run, inputs, expected, precision):
    """Compare an exported component with our model.

    Args:
        component: Component.
        run: function {input: array} -> list of outputs.
        inputs: list of {input: array}, of CHECKED_SIZES.
        expected: our model's outputs for each.
        precision: key of TOLERANCES.

    Returns:
        {"largest_difference", "largest_output": numbers of the output that differs most;
        "compared_at": sizes}, texts.

    Raises:
        ArithmeticError: a difference exceeds the tolerance or is not finite.
    """
    differences = []  # (relative to the output's largest number, absolute, largest number)
    for arrays, outputs in zip(inputs, expected):
        for found, wanted in zip(run(arrays), outputs):
            difference = np.abs(np.asarray(found, np.float32) - wanted).max()
            scale = np.abs(wanted).max()
            differences.append((np.nan_to_num(difference / scale, nan=np.inf), difference, scale))
    share, difference, scale = max(differences)
    if share > TOLERANCES[precision]:
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
