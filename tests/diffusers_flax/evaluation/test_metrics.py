"""Metrics of edits in closed form."""

import numpy as np
import pytest

from diffusers_flax.evaluation.measuring import averages
from diffusers_flax.evaluation.metrics import (
    MASK_METRICS,
    clip_metrics,
    mask_metrics,
    pixel_metrics,
)
from diffusers_flax.evaluation.report import mean_and_spread


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


def test_clip_metrics_in_closed_form():
    """Unit vectors of a plane by their angles; chords of equal arcs are parallel when centred."""

    def at(*degrees):
        return np.stack([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))], -1)

    unknown = np.full(2, np.nan)
    found = clip_metrics(
        result=at(60, 90, 60, 0),
        original=at(0, 30, 0, 0),  # the last is a copy
        edited=np.stack([at(60), at(45), unknown[None], at(90)]).reshape(4, 2),
        original_text=np.stack([at(0), at(120), unknown[None], at(0)]).reshape(4, 2),
        edited_text=at(60, 0, 45, 60),
    )
    chord = [30 + 90, 60 + 90, None, None]  # directions of result - original, at mid-arc + 90
    np.testing.assert_allclose(found["image_similarity"], [0.5, 0.5, 0.5, 1])
    np.testing.assert_allclose(found["truth_similarity"], [1, np.sqrt(0.5), np.nan, 0], atol=1e-9)
    expected = [1, np.cos(np.radians(chord[1] - (60 - 90))), np.nan, 0]
    np.testing.assert_allclose(found["direction_similarity"], expected, atol=1e-9)
    text = np.cos(np.radians([0, 90, 15, 60]))
    np.testing.assert_allclose(found["text_similarity"], text, atol=1e-9)


def test_means_leave_out_undefined_values():
    row = averages({"a": [1.0, float("nan"), 4.0], "b": [float("nan")] * 3})
    assert row == {"a": 2.5, "a_std": pytest.approx(1.5 * 2**0.5), "b": None, "b_std": None}
    assert mean_and_spread([{"a": 1.0}, {"a": 3.0}], "a") == (2, pytest.approx(2**0.5))
    assert mean_and_spread([{"a": None}], "a") == (None, None)


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
    assert tuple(found) == MASK_METRICS
    assert found == pytest.approx(expected)
    everywhere = mask_metrics(np.ones((4, 6), bool), result, edited)
    assert np.isnan(everywhere["l1_to_input_outside"]) and np.isnan(everywhere["l1_inside"])
    assert everywhere["l1_to_input_inside"] == pytest.approx(np.abs(result - edited).mean())
