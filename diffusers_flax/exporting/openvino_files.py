"""OpenVINO files of a pipeline's components, made from ONNX files, compared in its runtime."""

import os

from diffusers_flax.exporting.folders import quiet, write_components
from diffusers_flax.exporting.onnx_files import ONNX, ONNX_DATA, write_onnx

os.environ.setdefault("CI", "true")  # else the import of openvino starts its telemetry
import openvino

XML = "openvino_model.xml"  # its weights are in a .bin beside it


def export(pipeline, params, output_dir, config, size):
    """Write a pipeline's OpenVINO files, for all sizes; returns [output_dir].

    pipeline, params, output_dir: as for write_components; config: flags. Their dtype, "float32" or
    "float16", is that of the weights; inputs and outputs are float32.
    """

    def write(component, saved, folder):
        with quiet():
            write_onnx(component, pipeline, saved, folder)
            model = openvino.Core().read_model(folder / ONNX)
            if config.quantize:
                import nncf  # seconds

                model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
            is_half = config.dtype == "float16"  # half the bytes, computed in float32
            openvino.save_model(model, folder / XML, compress_to_fp16=is_half)
        for name in (ONNX, ONNX_DATA):
            (folder / name).unlink(missing_ok=True)
        return open_openvino(folder / XML), config.quantize or config.dtype

    return write_components(pipeline, params, output_dir, write)


def open_openvino(file):
    """A function {input: array} -> list of outputs that runs a file on the CPU in float32."""
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(file, "CPU", exact)

    def run(inputs):
        found = compiled(inputs)
        return [found[output] for output in compiled.outputs]

    return run
