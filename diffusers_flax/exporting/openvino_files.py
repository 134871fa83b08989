"""OpenVINO files of a pipeline's components, made from ONNX files, compared in its runtime."""

import openvino

from diffusers_flax.exporting.folders import BIN, ONNX, ONNX_DATA, XML, quiet, write_components
from diffusers_flax.exporting.onnx_files import NOTE, write_onnx


def export_openvino(pipeline, params, output_dir, dtype, quantize):
    """Write a pipeline's OpenVINO files.

    Args:
        pipeline, params, output_dir: as for write_components.
        dtype: "float32" or "float16", of the weights; inputs and outputs are float32.
        quantize: "int8", of all weights, or None.
    """

    def write(component, saved, folder):
        with quiet():
            write_onnx(component, pipeline, saved, folder)
            model = openvino.Core().read_model(folder / ONNX)
            if quantize:
                import nncf  # seconds

                model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
            save(model, folder, dtype)
        for name in (ONNX, ONNX_DATA):
            (folder / name).unlink(missing_ok=True)

        def note(agreement):
            model = openvino.Core().read_model(folder / XML)
            for name, value in ({"note": NOTE} | agreement).items():
                model.set_rt_info(value, ["export", name])
            written = folder / "noted"
            save(model, written, "float32")
            for name in (XML, BIN):
                (written / name).replace(folder / name)
            written.rmdir()

        return open_openvino(folder / XML), note, quantize or dtype

    write_components(pipeline, params, output_dir, write)


def save(model, folder, dtype):
    """Write a model; dtype "float16" stores weights in half the bytes, computed in float32."""
    openvino.save_model(model, folder / XML, compress_to_fp16=dtype == "float16")


def open_openvino(file):
    """A function {input: array} -> list of outputs that runs a file on the CPU in float32."""
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(file, "CPU", exact)

    def run(inputs):
        found = compiled(inputs)
        return [found[output] for output in compiled.outputs]

    return run
