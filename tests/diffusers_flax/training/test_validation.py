"""Validation images: grids, the animation, guidance scales."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from diffusers_flax.generating.captions import LINE_HEIGHT
from diffusers_flax.training import reports
from diffusers_flax.training.reports import validation_grid, write_progress


def image(color, size=(64, 48)):
    return Image.new("RGB", size, color)


def test_validation_grid():
    pairs = [(image("red"), image("lime")), (image("blue", (30, 60)), image("black"))]
    prompts = ["make it green", "a long instruction that does not fit into a single line"]
    grid = np.asarray(validation_grid(pairs, prompts))
    # Enlarged from 64x48 to 256x192, with margins of 8.
    assert grid.shape[1] == 8 + 2 * 256 + 8
    height = (len(grid) - 8) // 2
    assert height >= 192 + LINE_HEIGHT + 8
    margins = (grid[:8], grid[-8:], grid[:, :8], grid[:, -8:], grid[height : height + 8])
    assert all((margin == 255).all() for margin in margins)
    assert (grid[8:200, 8:264] == (255, 0, 0)).all()
    assert (grid[8:200, 264:520] == (0, 255, 0)).all()
    for row in range(2):
        caption = grid[200 + row * height : (row + 1) * height]
        assert (caption < 64).any()
    second = grid[8 + height : 200 + height]
    assert (second[:, 90:182] == (0, 0, 255)).all()  # narrower: white at its sides
    assert (second[:, 8:80] == 255).all()
    assert (second[:, 264:520] == 0).all()


def test_progress_shows_the_images_of_all_steps(tmp_path):
    """Sorted by number, with the step below; frames after a step can be dropped."""
    for step, color in ((5, "red"), (1000, "blue"), (50, "lime")):
        image(color, (80, 80)).save(tmp_path / f"step-{step:02d}.png")
    (tmp_path / "step-best.png").write_bytes(b"not ours")

    def frames():
        with Image.open(tmp_path / "progress.gif") as animation:
            for k in range(animation.n_frames):
                animation.seek(k)
                yield np.asarray(animation.convert("RGB")), animation.info["duration"]

    write_progress(tmp_path)
    shown, durations = zip(*frames())
    assert durations == (500, 500, 2000)
    assert [frame.shape for frame in shown] == [(80 + LINE_HEIGHT, 80, 3)] * 3
    for frame, color in zip(shown, ((255, 0, 0), (0, 255, 0), (0, 0, 255))):
        assert (frame[:80] == color).all() and (frame[80:] < 64).any()
    write_progress(tmp_path, 50)
    assert [tuple(frame[0, 0]) for frame, _ in frames()] == [(255, 0, 0), (0, 255, 0)]
    write_progress(tmp_path, 0)
    assert os.listdir(tmp_path) == ["step-best.png"]


@pytest.mark.parametrize(
    ("family", "num_steps", "flags", "expected"),
    [  # the rows of docs/editing.md
        ("", 10_000, (None, None), (7.5, 1.5)),
        ("XL", 10_000, (None, None), (3.0, 1.5)),
        ("CosXL", 10_000, (None, None), (7.0, 1.5)),
        ("XL", 1_000, (None, None), (2.0, 1.2)),
        ("", 10_000, (None, 1.0), (7.5, 1.0)),
        ("", 1_000, (0.0, None), (0.0, 1.2)),
    ],
)
def test_guidance_scales_of_validation(family, num_steps, flags, expected):
    config = SimpleNamespace(
        train_batch_size=16,
        validation_guidance_scale=flags[0],
        validation_image_guidance_scale=flags[1],
    )
    pipeline = SimpleNamespace(
        torch_class_name=f"StableDiffusion{family[-2:]}InstructPix2PixPipeline",
        is_cosxl_edit=family == "CosXL",
    )
    assert reports.guidance_scales(config, pipeline, num_steps) == expected
