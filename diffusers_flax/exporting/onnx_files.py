"""ONNX files of a pipeline's components, compared with our models in onnxruntime.

Names, folders and opset are as in Optimum's exports.
"""

from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir
import onnxruntime
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from onnx_ir.tensor_adapters import TorchTensor
from onnxruntime.quantization import QuantType, quantize_dynamic
from safetensors import safe_open

from diffusers_flax.exporting.components import random_inputs
from diffusers_flax.exporting.folders import quiet, write_components
from diffusers_flax.exporting.torch_models import open_torch_model

ONNX, ONNX_DATA = "model.onnx", "model.onnx_data"  # a component's files
OPSET = 18
# Protocol buffers end at 2 GB; the graph itself takes a few MB.
LARGEST_FILE = 1_900_000_000
# With int8 convolutions the demo's image has 35 dB to the Flax pipeline's, instead of 41.
QUANTIZED_OPERATORS = ["MatMul", "Gemm"]


def export(pipeline, params, output_dir, config, size):
    """Write a pipeline's ONNX files, for all sizes; returns [output_dir].

    pipeline, params, output_dir: as for write_components; config: flags. Their dtype, "float32" or
    "float16", is that of weights, inputs and outputs; timesteps, time_ids and a VAE whose
    activations exceed float16 stay in float32.
    """

    def write(component, saved, folder):
        is_upcast = component.module == "vae" and pipeline.vae.config.force_upcast
        own = "float32" if is_upcast else config.dtype
        with quiet():
            write_onnx(component, pipeline, saved, folder, own, config.quantize is not None)
        return open_onnx(folder / ONNX), config.quantize or own

    return write_components(pipeline, params, output_dir, write)


def write_onnx(component, pipeline, saved, folder, dtype="float32", int8=False):
    """Write a component's ONNX file; weights above LARGEST_FILE get a file of their own.

    Args:
        component: Component.
        pipeline: the component's pipeline.
        saved: directory that the module's save_pretrained wrote.
        folder: Path of the component's folder, which exists.
        dtype: name of the weights' dtype.
        int8: quantize the weights of matrix products.
    """
    file = folder / ONNX
    axes = tuple(
        {i: axis for i, axis in enumerate(shape) if isinstance(axis, str)}
        for shape, _ in component.inputs.values()
    )
    # Weights would double the peak memory of the UNet's trace; other components are small.
    device = "meta" if component.name == "unet" else "cpu"
    # torch.export takes a length of 1 for a constant, so the batch is 2. For sides that it cannot
    # halve, a UNet computes the upsampled size of each level, which is right for all sizes.
    factor = max(3, 2 ** (len(pipeline.unet.config.block_out_channels) - 1))
    inputs = random_inputs(component, pipeline, 2, (2 * factor + 1, 4 * factor - 1))
    tensors = []
    for name, array in inputs.items():
        is_kept = name in ("input_ids", "timestep", "time_ids")  # keep their dtypes
        tensor = torch.from_numpy(array).to(device)
        tensors.append(tensor if is_kept else tensor.to(getattr(torch, dtype)))
    program = torch.onnx.export(
        open_torch_model(component, saved, dtype, device),
        tuple(tensors),
        dynamo=True,
        optimize=False,
        verbose=False,
        opset_version=OPSET,
        external_data=False,
        input_names=list(component.inputs),
        output_names=list(component.outputs),
        dynamic_shapes=(axes,),  # of *arrays, one argument
    )
    if device == "meta":
        add_weights(program.model.graph, saved, dtype)
    program.optimize()
    ClearMetadataAndDocStringPass()(program.model)  # lines of PyTorch's code
    save(program.model, file)
    if int8:
        del program
        quantize_file(file)


def add_weights(graph, folder, dtype):
    """Give the initializers of a graph their weights, which are read when needed.

    Args:
        graph: of onnx_ir.
        folder: as for open_torch_model.
        dtype: name of the weights' dtype.
    """
    files = {}
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            files |= dict.fromkeys(opened.keys(), file)

    def read(name):
        with safe_open(files[name], "pt") as opened:
            return TorchTensor(opened.get_tensor(name).to(getattr(torch, dtype)))

    for name, value in graph.initializers.items():
        like, key = value.const_value, name.removeprefix("model.")
        value.const_value = onnx_ir.LazyTensor(
            partial(read, key), dtype=like.dtype, shape=like.shape, name=name
        )


def save(model, file):
    """Write a model of onnx_ir; weights above LARGEST_FILE get a file of their own."""
    weights = [value.const_value for value in model.graph.initializers.values()]
    if sum(array.nbytes for array in weights if array is not None) > LARGEST_FILE:
        onnx_ir.save(model, file, external_data=ONNX_DATA)
    else:
        onnx_ir.save(onnx_ir.external_data.load_to_model(model), file)


def quantize_file(file):
    """Quantize the weights of matrix products in an ONNX file to int8."""
    whole, quantized = file.with_name("float.onnx"), file.with_name("int8.onnx")
    file.rename(whole)
    quantize_dynamic(
        whole,
        quantized,
        op_types_to_quantize=QUANTIZED_OPERATORS,
        per_channel=True,
        weight_type=QuantType.QInt8,
        use_external_data_format=True,  # under another name than Optimum's
    )
    for old in (whole, file.with_name(ONNX_DATA)):
        old.unlink(missing_ok=True)
    save(onnx_ir.load(quantized), file)
    for old in file.parent.glob(f"{quantized.name}*"):
        old.unlink()


def open_onnx(file):
    """A function {input: array} -> list of outputs that runs a file in onnxruntime on the CPU."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(file, options, ["CPUExecutionProvider"])
    types = {x.name: np.float16 if "float16" in x.type else None for x in session.get_inputs()}

    def run(inputs):
        cast = {name: array.astype(types[name] or array.dtype) for name, array in inputs.items()}
        return session.run(None, cast)

    return run
