"""Images and masks of the page."""

import numpy as np
import pytest
from helpers import photo
from PIL import Image

from diffusers_flax.app.images import image_to_paint_on, middle_of_change, painted_mask, read_upload


def test_images_and_masks_of_the_page(tmp_path):
    photo(8, 6).save(tmp_path / "a.png")
    np.testing.assert_array_equal(
        np.asarray(read_upload(tmp_path / "a.png")), np.asarray(photo(8, 6))
    )
    (tmp_path / "broken.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "large.png").write_bytes(b"P5 15000 10001 255\n")
    for name, message in (
        ("broken", "this image cannot be read: "),
        ("text", "this image cannot be read: no known image format"),
        ("large", "this image cannot be read: 15000x10001 pixels are more than 150 megapixels"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            read_upload(tmp_path / f"{name}.png")
    assert image_to_paint_on(photo(100, 70), (64, 44)).size == (512, 352)
    assert image_to_paint_on(photo(2000, 1500), (768, 576)).size == (768, 576)
    layer = Image.new("RGBA", (6, 4))
    with pytest.raises(ValueError, match="no part is painted"):
        painted_mask([layer])
    layer.paste((20, 184, 166, 255), (2, 0, 6, 4))
    mask = np.asarray(painted_mask([Image.new("RGBA", (6, 4)), layer]))
    np.testing.assert_array_equal(mask, np.arange(6) >= np.full((4, 1), 2))


@pytest.mark.parametrize(
    ("box", "middle"),
    [((0, 0, 80, 10), 50), ((0, 0, 8, 10), 5), ((60, 2, 64, 4), 77.5), ((0, 0, 0, 0), 50)],
)
def test_the_slider_begins_where_the_edit_is(box, middle):
    """Half of the change is on each side, whatever the noise of the rest."""
    before, after = photo(80, 10), photo(80, 10)
    after.paste(Image.eval(after.crop(box), lambda x: (x + 128) % 256), box)
    assert middle_of_change(before, after) == pytest.approx(middle, abs=1)
    if any(box):
        noisy = Image.eval(after, lambda x: min(x + 1, 255))
        assert middle_of_change(before, noisy) == pytest.approx(middle, abs=1)
