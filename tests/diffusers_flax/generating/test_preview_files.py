"""Files of previews."""

import jax
import numpy as np
import pytest
from PIL import Image

from diffusers_flax.generating.previews import PreviewFiles
from diffusers_flax.pipelines.sampling import keys_per_image


def test_files_of_previews(tmp_path):
    keys, output = keys_per_image(jax.random.key(0), 1), tmp_path / "a.png"
    previews = PreviewFiles(4, None)
    previews.add([output], [(8, 8)], keys, num_steps=6)
    preview = tmp_path / "a-step-004.png"
    images = np.zeros((1, 4, 4, 3), np.float32)
    previews.preview.show(4, np.asarray(jax.random.key_data(keys)), images)
    with Image.open(preview) as image:
        assert image.size == (8, 8)

    with pytest.raises(ValueError, match="--preview 4 of 4 steps makes no preview"):
        previews.add([output], [(8, 8)], keys, num_steps=4)
