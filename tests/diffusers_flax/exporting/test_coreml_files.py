"""Core ML packages: names, shapes and palettes."""

import numpy as np
import pytest
from exported import MODELS, export, needs

from diffusers_flax.pipelines.base import pipeline_class


@needs("coreml")
@pytest.mark.parametrize(
    ("name", "flags", "num_values"),
    [
        ("xl", (), None),
        ("edit", ("--quantize", "palette8"), 256),
        ("xl_edit", ("--quantize", "palette6"), 64),
    ],
)
def test_coreml(tmp_path, name, flags, num_values):
    """coremltools opens the packages; matrices have tables of so many values."""
    import coremltools
    from coremltools.optimize.coreml import get_weights_metadata

    model, num_branches = MODELS[name](tmp_path / "model"), 3 if "edit" in name else 2
    size = ["--height", "64", "--width", "32", "--batch_size", "2"]
    export(model, folder := tmp_path / "export", "--format", "coreml", *size, *flags)
    factor = pipeline_class(model).from_pretrained(model)[0].vae_scale_factor
    h, w = 64 // factor, 32 // factor
    shapes = {
        "vae_encoder": {"sample": [2, 3, 64, 32], "latent_parameters": [2, 8, h, w]},
        "vae_decoder": {"latent_sample": [2, 4, h, w], "sample": [2, 3, 64, 32]},
        "text_encoder": {"input_ids": [2 * num_branches, 77]},
        "unet": {"timestep": [1], "out_sample": [2 * num_branches, 4, h, w]},
    }
    for part, wanted in shapes.items():
        file = folder / part / "model.mlpackage"
        opened = coremltools.models.MLModel(str(file), skip_model_load=True)
        description = opened.get_spec().description
        found = {
            x.name: list(x.type.multiArrayType.shape)
            for x in (*description.input, *description.output)
        }
        assert found.items() >= wanted.items()
        operations = [
            operation.type
            for function in opened.get_spec().mlProgram.functions.values()
            for block in function.block_specializations.values()
            for operation in block.operations
        ]
        assert ("constexpr_lut_to_dense" in operations) == (num_values is not None)
    if num_values is not None:
        weights = get_weights_metadata(opened, weight_threshold=2049)
        assert max(len(np.unique(x.val)) for x in weights.values()) <= num_values
