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

from exporting.folders import quiet, write_parts
from exporting.twins import example_tensors, open_twin

OPSET = 18
FILE, DATA_FILE = "model.onnx", "model.onnx_data"
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
        return open_onnx(folder / FILE), partial(note_agreement, folder / FILE)

    def precision_of(part):
        return quantize or dtype_of(part, pipeline, dtype)

    write_parts(pipeline, params, output_dir, write, precision_of, (FILE, DATA_FILE))


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
    file, axes = folder / FILE, tuple(part.axes().values())
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
    is_large = sum(parameter.nbytes for parameter in twin.parameters()) > LARGEST_FILE
    onnx_ir.save(program.model, file, external_data=DATA_FILE if is_large else None)
    if int8:
        del program
        quantize(file, is_large)


def quantize(file, is_large):
    """Replace an ONNX file by one with int8 weights in matrix products."""
    whole = file.with_name("float.onnx")
    data = whole.with_name("float.onnx_data") if is_large else None
    model = onnx_ir.load(file)
    onnx_ir.save(model, whole, external_data=data.name if data else None)
    for old in (file, file.with_name(DATA_FILE)):
        old.unlink(missing_ok=True)
    del model
    quantize_dynamic(
        whole,
        file,
        op_types_to_quantize=QUANTIZED_OPERATORS,
        per_channel=True,
        weight_type=QuantType.QInt8,
        use_external_data_format=is_large,
    )
    for old in (whole, data):
        if old is not None:
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
