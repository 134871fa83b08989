"""Core ML packages of a pipeline's components, converted here and never run here.

Running them needs macOS or iOS. Each package is for one batch and size.
"""

import coremltools
import numpy as np
import torch

from diffusers_flax.exporting.components import random_inputs
from diffusers_flax.exporting.folders import quiet, write_components
from diffusers_flax.exporting.torch_models import open_torch_model

BITS = {"palette8": 8, "palette6": 6}  # of an index into a matrix's palette


def export(pipeline, params, output_dir, config, size):
    """Write a pipeline's Core ML packages; returns [output_dir].

    Args:
        pipeline, params, output_dir: as for write_components.
        config: flags. Their dtype, "float16" or "float32", is to compute in; the UNet has
            batch_size rows for each branch of guidance.
        size: (height, width) of images, pixels.
    """
    num_branches = 3 if "image_guidance_scale" in pipeline.branch_scales else 2
    latent_size = tuple(side // pipeline.vae_scale_factor for side in size)

    def write(component, saved, folder):
        batch = config.batch_size * (1 if component.module == "vae" else num_branches)
        inputs = random_inputs(component, pipeline, batch, latent_size)
        with quiet():
            counterpart = open_torch_model(component, saved, "float32")
            model = to_coreml(counterpart, component, inputs, config.dtype)
            if config.quantize:  # 2^bits values per matrix, chosen by k-means
                optimize = coremltools.optimize.coreml
                options = optimize.OpPalettizerConfig(mode="kmeans", nbits=BITS[config.quantize])
                options = optimize.OptimizationConfig(global_config=options)
                model = optimize.palettize_weights(model, options)
        model.save(str(folder / "model.mlpackage"))

    return write_components(pipeline, params, output_dir, write, is_run=False)


def to_coreml(torch_model, component, inputs, dtype):
    """A PyTorch counterpart as a model of coremltools, with the component's names."""
    inputs = {  # Core ML has no int64
        name: array.astype(np.int32) if array.dtype == np.int64 else array
        for name, array in inputs.items()
    }
    program = torch.export.export(torch_model, tuple(map(torch.from_numpy, inputs.values())))
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
        # Core ML allows no dots in names.
        outputs=[coremltools.TensorType(x.replace(".", "_")) for x in component.outputs],
        minimum_deployment_target=coremltools.target.iOS18,
        compute_precision=getattr(coremltools.precision, dtype.upper()),
        skip_model_load=True,
    )
