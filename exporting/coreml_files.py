"""Core ML packages of the parts of a pipeline, converted here and never run here.

Predictions need macOS or iOS. Each package is for one batch and size.
"""

import coremltools
import numpy as np
import torch

from exporting.folders import PACKAGE, quiet, write_parts
from exporting.parts import output_shapes, random_inputs
from exporting.twins import open_twin

BITS = {"palette8": 8, "palette6": 6}  # of the index of a weight in its matrix's palette
PRECISIONS = {
    "float16": coremltools.precision.FLOAT16,
    "float32": coremltools.precision.FLOAT32,
}
NOTE = (
    "Converted from PyTorch's model of the same architecture with the weights of the Flax model; "
    "not run by the program that wrote it."
)


def export_coreml(pipeline, params, output_dir, dtype, quantize, batch_size, size):
    """Write the Core ML packages of a pipeline.

    Args:
        pipeline, params, output_dir: as for write_parts.
        dtype: "float16" or "float32", to compute in.
        quantize: key of BITS, or None.
        batch_size: images at once; the UNet has this many rows for each branch of guidance.
        size: (height, width) of images, pixels.
    """
    num_branches = 3 if pipeline.unet.in_channels == 2 * pipeline.vae.latent_channels else 2
    latent_size = tuple(side // pipeline.vae_scale_factor for side in size)

    def write(part, saved, folder):
        batch = batch_size if part.module == "vae" else num_branches * batch_size
        inputs = random_inputs(part, pipeline, batch, latent_size)
        shapes = output_shapes(part, pipeline, inputs)
        with quiet():
            model = to_coreml(open_twin(part, saved, "float32"), part, inputs, dtype)
            if quantize:
                model = palettize(model, BITS[quantize])
        check_description(model, part, inputs, shapes)
        model.short_description = NOTE
        model.save(str(folder / PACKAGE))
        return None, None

    write_parts(pipeline, params, output_dir, write, None)


def to_coreml(twin, part, inputs, dtype):
    """The coremltools model of a twin, with the names of the part's inputs and outputs."""
    inputs = {  # Core ML has no int64
        name: array.astype(np.int32) if array.dtype == np.int64 else array
        for name, array in inputs.items()
    }
    program = torch.export.export(twin, tuple(map(torch.from_numpy, inputs.values())))
    program = program.run_decompositions({})
    for node in list(program.graph.nodes):  # coremltools does not know aliases
        if node.target is torch.ops.aten.alias.default:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
    return coremltools.convert(
        program,
        inputs=[
            coremltools.TensorType(name=name, shape=array.shape, dtype=array.dtype.type)
            for name, array in inputs.items()
        ],
        outputs=[coremltools.TensorType(name=name) for name in output_names(part)],
        minimum_deployment_target=coremltools.target.iOS18,
        compute_precision=PRECISIONS[dtype],
        skip_model_load=True,
    )


def output_names(part):
    """The outputs of a part; names of Core ML have no dots."""
    return [name.replace(".", "_") for name in part.outputs]


def palettize(model, bits):
    """A model whose matrices have 2^bits values each, chosen by k-means."""
    optimize = coremltools.optimize.coreml
    options = optimize.OpPalettizerConfig(mode="kmeans", nbits=bits)
    config = optimize.OptimizationConfig(global_config=options)
    return optimize.palettize_weights(model, config)


def check_description(model, part, inputs, outputs):
    """Raise an ArithmeticError unless a model has the names and shapes of the part's outputs too.

    Args:
        model: coremltools' model.
        part: Part.
        inputs: {name: array}.
        outputs: shapes of our model's outputs.
    """
    description = model.get_spec().description
    wanted = {name: array.shape for name, array in inputs.items()}
    wanted |= dict(zip(output_names(part), outputs))
    found = {
        x.name: tuple(x.type.multiArrayType.shape)
        for x in (*description.input, *description.output)
    }
    if found != wanted:
        raise ArithmeticError(
            f"Core ML's {part.name} has {found}, not {wanted}; nothing was written"
        )
