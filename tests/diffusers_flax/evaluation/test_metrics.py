"""Metrics of edits in closed form."""

import numpy as np
import pytest

from diffusers_flax.evaluation.measuring import averages
from diffusers_flax.evaluation.metrics import mask_metrics, pixel_metrics


def test_pixel_metrics_in_closed_form():
    def full(value):
        return np.full((4, 6, 3), value, np.float32)

    assert pixel_metrics(full(0.5), full(0), full(0.75)) == {
        "l1": 0.25,
        "mse": 0.0625,
        "error_ratio": pytest.approx(1 / 3),
        "l1_to_input": 0.5,
    }
    copied = pixel_metrics(full(0.25), full(0.25), full(0.75))
    assert (copied["error_ratio"], copied["l1_to_input"]) == (1, 0)
    unknown = pixel_metrics(full(0.5), full(0), None)
    assert unknown.pop("l1_to_input") == 0.5
    assert np.isnan(list(unknown.values())).all()
    assert np.isnan(pixel_metrics(full(0.5), full(0), full(0))["error_ratio"])


def test_means_leave_out_undefined_values():
    row = averages({"a": [1.0, float("nan"), 4.0], "b": [float("nan")] * 3})
    assert row == {"a": 2.5, "a_std": pytest.approx(1.5 * 2**0.5), "b": None, "b_std": None}


def test_mask_metrics_in_closed_form():
    """An edit of half of the way inside, and of a quarter of the pair's change outside."""
    inside = np.zeros((4, 6), bool)
    inside[:, :2] = True
    result, edited = (
        np.where(inside[..., None], *values) * np.ones(3) for values in ((0.5, 0.1), (1.0, 0.4))
    )
    found = mask_metrics(inside, result, np.zeros((4, 6, 3)), edited)
    expected = {"l1_inside": 0.5, "mse_inside": 0.25, "error_ratio_inside": 0.5}
    expected |= {"l1_to_input_inside": 0.5, "l1_to_input_outside": 0.1}
    expected |= {"l1_outside": 0.3, "mse_outside": 0.09, "error_ratio_outside": 0.75}
    assert found == pytest.approx(expected)
