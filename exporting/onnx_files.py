"""ONNX files of the parts of a pipeline, compared with our models by onnxruntime.

Names, folders and opset are those of Optimum's exports.
"""

from functools import partial

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from onnxruntime.quantization import QuantType, quantize_dynamic

from exporting.folders import ONNX, ONNX_DATA, quiet, write_parts
from exporting.twins import example_tensors, open_twin

OPSET = 18
# Protocol buffers end at 2 GB; the graph itself takes a few MB.
LARGEST_FILE = 1_900_000_000
# With convolutions in int8 too the demo's image is 35 dB from the Flax pipeline's instead of 41.
QUANTIZED_OPERATORS = ["MatMul", "Gemm"]
NOTE = (
    "The graph is PyTorch's model of the same architecture with the weights of the Flax model; "
    "largest_difference is between outputs of onnxruntime and of the Flax model, and "
    "largest_output is the Flax model's."
)


def export_onnx(pipeline, params, output_dir, dtype, quantize):
    """Write the ONNX files of a pipeline.

    Args:
        pipeline, params, output_dir: as for write_parts.
        dtype: "float32" or "float16", of weights, inputs and outputs; timesteps and numbers of
            pixels are float32, and so is a VAE whose activations exceed float16.
        quantize: "int8", or None.
    """

    def write(part, saved, folder):
        with quiet():
            own = dtype_of(part, pipeline, dtype)
            twin, tensors = open_twin(part, saved, own), example_tensors(part, pipeline, own)
            write_onnx(twin, part, tensors, folder, quantize is not None)
        return open_onnx(folder / ONNX), partial(note_agreement, folder / ONNX)

    def precision_of(part):
        return quantize or dtype_of(part, pipeline, dtype)

    write_parts(pipeline, params, output_dir, write, precision_of)


def dtype_of(part, pipeline, dtype):
    """The dtype of a part's weights, if float16 is wanted."""
    is_vae = part.module == "vae"
    return "float32" if is_vae and pipeline.vae.config.force_upcast else dtype


def write_onnx(twin, part, tensors, folder, int8=False):
    """Write a part's ONNX file, and its weights beside it if they are too many for one file.

    Args:
        twin: of open_twin.
        part: Part.
        tensors: of example_tensors.
        folder: Path of the part's folder, which exists.
        int8: whether to quantize the weights of matrix products.
    """
    file, axes = folder / ONNX, tuple(part.axes().values())
    program = torch.onnx.export(
        twin,
        tuple(tensors),
        dynamo=True,
        verbose=False,
        opset_version=OPSET,
        external_data=False,
        input_names=list(part.inputs),
        output_names=list(part.outputs),
        # The UNet's twin takes its inputs as *arrays, one argument.
        dynamic_shapes=(axes,) if part.name == "unet" else axes,
    )
    ClearMetadataAndDocStringPass()(program.model)  # lines of PyTorch's code
    save(program.model, file)
    if int8:
        del program
        quantize(file)


def save(model, file):
    """Write a model of onnx_ir, with its weights beside it if they are too many for one file."""
    weights = [value.const_value for value in model.graph.initializers.values()]
    if sum(array.nbytes for array in weights if array is not None) > LARGEST_FILE:
        onnx_ir.save(model, file, external_data=ONNX_DATA)
    else:
        onnx_ir.save(onnx_ir.external_data.load_to_model(model), file)


def quantize(file):
    """Replace an ONNX file by one with int8 weights in matrix products."""
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
    """A function {input: array} -> list of outputs, by onnxruntime on the CPU."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(file, options, ["CPUExecutionProvider"])
    types = {x.name: np.float16 if "float16" in x.type else None for x in session.get_inputs()}

    def run(inputs):
        given = {name: array.astype(types[name] or array.dtype) for name, array in inputs.items()}
        return session.run(None, given)

    return run


def note_agreement(file, agreement):
    """Write the result of the comparison into an ONNX file, without reading its weights.

    Args:
        file: Path.
        agreement: {name: value}.
    """
    model = onnx.load(file, load_external_data=False)
    texts = {"note": NOTE} | {name: str(value) for name, value in agreement.items()}
    onnx.helper.set_model_props(model, texts)
    onnx.save(model, file)
