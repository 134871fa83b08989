"""Images and masks of the page."""

import numpy as np
from helpers import photo
from PIL import Image

from diffusers_flax.app.images import image_to_paint_on, painted_mask


def test_paint_is_a_mask():
    assert image_to_paint_on(photo(100, 70), (64, 44)).size == (512, 352)
    assert image_to_paint_on(photo(2000, 1500), (768, 576)).size == (768, 576)
    empty = layer = Image.new("RGBA", (6, 4))
    assert painted_mask([]) is painted_mask([empty]) is None
    layer = empty.copy()
    layer.paste((20, 184, 166, 255), (2, 0, 6, 4))
    mask = np.asarray(painted_mask([empty, layer]))
    np.testing.assert_array_equal(mask, np.arange(6) >= np.full((4, 1), 2))
