"""Images and masks of the page."""

import numpy as np
import pytest
from helpers import photo
from PIL import Image

from diffusers_flax.app.images import image_to_paint_on, painted_mask, read_upload


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "the file of the image is deleted"),
        (b"no image", "this image cannot be read: no known image format"),
    ],
)
def test_an_upload_that_cannot_be_read(tmp_path, data, message):
    if data:
        (tmp_path / "a.png").write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        read_upload(tmp_path / "a.png")
    assert str(tmp_path) not in str(error.value)


def test_paint_is_a_mask():
    assert image_to_paint_on(photo(100, 70), (64, 44)).size == (512, 352)
    assert image_to_paint_on(photo(2000, 1500), (768, 576)).size == (768, 576)
    empty = layer = Image.new("RGBA", (6, 4))
    assert painted_mask([]) is painted_mask([empty]) is None
    layer = empty.copy()
    layer.paste((20, 184, 166, 255), (2, 0, 6, 4))
    mask = np.asarray(painted_mask([empty, layer]))
    np.testing.assert_array_equal(mask, np.arange(6) >= np.full((4, 1), 2))
