"""Export a model of Stable Diffusion or SDXL, also for edits, to run it without jax and this code.

    python export_model.py --model MODEL --output_dir exported
    python export_model.py --model MODEL --output_dir exported --dtype float16
    python export_model.py --model MODEL --output_dir exported --quantize int8

On a CPU within two minutes, with the demo's model; examples/run_onnx.py makes an image with it:

    python export_model.py --model demo/output/model --output_dir /tmp/exported
    python examples/run_onnx.py --model /tmp/exported --prompt "invert the colors" \\
        --input demo/output/held_out/chelsea_0.png --output inverted.png \\
        --guidance_scale 2 --image_guidance_scale 1.2

With another --format:

    python export_model.py --model MODEL --output_dir exported --format openvino --dtype float16
    python export_model.py --model MODEL --output_dir exported --format coreml --quantize palette6
    python export_model.py --model MODEL --output_dir programs --format stablehlo --height 512
    python export_model.py --run programs/image-batch1-512x512-20steps-cpu.jaxexport \\
        --prompt "a red panda" --output panda.png

onnx: text encoders, UNet, VAE encoder and VAE decoder for any batch and size, in the folders and
with the names of Optimum's exports. Graphs are of PyTorch's classes with this model's weights.
Every file is run by onnxruntime and compared with the Flax model, at two sizes and batches, before
it gets its name; the largest difference is printed and stays in the file's metadata.

openvino: the same components for OpenVINO, compared in its runtime; examples/run_onnx.py runs
them too. --dtype float16 halves the weights, --quantize int8 has them in 8 bits.

coreml: the same components for one --batch_size, --height and --width, as .mlpackage.
Experimental: they are converted and never run here. --quantize palette8 or palette6 stores 256 or
64 values a matrix.

stablehlo: the whole run as one program of jax.export, for one --batch_size, --height, --width and
--num_inference_steps, which its name has; a file for each --platform. --run makes an image with it
in a process that has no model code, with guidance the same to the last bit as the pipeline makes.
jax refuses such files after about six months; weights.safetensors beside them stays.

Needs the packages of a format, pip install ".[onnx]", and no accelerator. Measured peaks of memory
of --format onnx in float32: 7.4 GiB for Stable Diffusion 1.5, 17.3 GiB for SDXL.
"""

import dataclasses
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from diffusers_flax.command_line import (
    ask_before_replacing,
    check_image_file,
    check_scale,
    check_seed,
    print_files,
    run_main,
)

ONNX = ("onnx", "onnxscript", "onnxruntime", "torch", "diffusers")
PACKAGES = {  # that a format needs, by the names of their modules
    "onnx": ONNX,
    "openvino": (*ONNX, "openvino", "nncf"),
    "coreml": ("coremltools", "torch", "diffusers"),
    "stablehlo": ("flatbuffers",),
}
DTYPES = {  # of weights, the default first
    "onnx": ("float32", "float16"),
    "openvino": ("float32", "float16"),
    "coreml": ("float16", "float32"),
    "stablehlo": ("float32", "bfloat16"),
}
QUANTIZED = {"onnx": ("int8",), "openvino": ("int8",), "coreml": ("palette8", "palette6")}
# Flags that other formats do not have.
ONE_SHAPE = ("batch_size", "height", "width")
OF_FORMATS = {
    **dict.fromkeys(ONE_SHAPE, ("coreml", "stablehlo")),
    **dict.fromkeys(("num_inference_steps", "platform"), ("stablehlo",)),
}
OF_RUN = (
    *("prompt", "negative_prompt", "input", "output", "seed"),
    *("guidance_scale", "image_guidance_scale"),
)


@dataclass(frozen=True)
class Config:
    """Flags of the script."""

    model: str | None = None  # directory, hub id or file of a model
    output_dir: Path | None = None  # directory of the export
    format: Literal["onnx", "openvino", "coreml", "stablehlo"] = "onnx"  # of the files
    # configs of a one-file model: a directory or hub id; default: its family's
    config_name_or_path: str | None = None
    use_ema_weights: bool = False  # of a one-file model: the averages of the UNet's weights
    lora: tuple[str, ...] = ()  # LoRA files or hub ids to fold into the model: FILE or FILE:WEIGHT
    # of the weights; default: float32, coreml float16
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    # onnx: int8, of matrix products; openvino: int8, of all weights; coreml: palette8, palette6
    quantize: Literal["int8", "palette8", "palette6"] | None = None
    scheduler: str | None = None  # ddim, euler, ...; default: the model's own
    batch_size: int | None = None  # stablehlo, coreml: images at once; default: 1
    height: int | None = None  # stablehlo, coreml: pixels; default: the model's
    width: int | None = None  # likewise
    # stablehlo: denoising steps; default: the model's, or 20
    num_inference_steps: int | None = None
    # stablehlo: where programs run, each with a file of its own; default: cpu cuda
    platform: tuple[Literal["cpu", "cuda", "tpu"], ...] | None = None
    overwrite_output_dir: bool = False  # replace an export in output_dir
    run: Path | None = None  # program of --format stablehlo to make images with
    prompt: str | None = None  # of --run: what to show, or what to change
    negative_prompt: str | None = None  # of --run: what to avoid
    input: Path | None = None  # of --run: image to edit
    output: Path = Path("image.png")  # of --run: image, or .npy of floats in [0, 1]
    seed: int | None = None  # of --run: of the noise; default: 0
    # of --run: weight of the prompt; default: the model's, or 7.5
    guidance_scale: float | None = None
    image_guidance_scale: float | None = None  # of --run: similarity to the input; likewise, or 1.5


def given_flags(config):
    """Names of flags that differ from their defaults."""
    fields = dataclasses.fields(config)
    return [field.name for field in fields if getattr(config, field.name) != field.default]


def is_installed(package):
    """Whether a package is installed; package: its module's name."""
    return find_spec(package) is not None


def require_packages(config):
    """Raise a ValueError if packages that the format needs are not installed."""
    if missing := [name for name in PACKAGES[config.format] if not is_installed(name)]:
        raise ValueError(
            f'--format {config.format} needs {", ".join(missing)}: pip install ".[{config.format}]"'
        )


def check_flags(config):
    """Raise a ValueError for flags that do not go together or for missing packages."""
    if not config.model or not config.output_dir:
        raise ValueError("give --model and --output_dir to export, or --run and --prompt")
    if given := [name for name in given_flags(config) if name in OF_RUN]:
        raise ValueError(f"--{given[0]} goes with --run; leave it out, or give --run")
    name = config.format
    for flag, formats in OF_FORMATS.items():
        if (value := getattr(config, flag)) is not None and name not in formats:
            given = " ".join(map(str, value)) if isinstance(value, tuple) else value
            raise ValueError(
                f"--{flag} {given} is for --format {' and '.join(formats)}; leave "
                f"it out, a file of {name} takes any"
            )
    for flag in ("batch_size", "height", "width", "num_inference_steps"):
        if (value := getattr(config, flag)) is not None and value < 1:
            raise ValueError(f"--{flag} {value} must be at least 1")
    if config.dtype not in (None, *DTYPES[name]):
        raise ValueError(
            f"--dtype {config.dtype} is not for --format {name}; choose from "
            f"{', '.join(DTYPES[name])}"
        )
    if config.quantize not in (None, *QUANTIZED.get(name, ())):
        allowed = ", ".join(QUANTIZED.get(name, ())) or "none: leave it out"
        raise ValueError(
            f"--quantize {config.quantize} is not for --format {name}, which has {allowed}"
        )
    if config.quantize and config.dtype and name != "coreml":
        raise ValueError(
            f"--quantize {config.quantize} and --dtype {config.dtype} are both given; give one"
        )
    if any((config.output_dir / "unet").glob("diffusion_pytorch_model*")):
        raise ValueError(
            f"--output_dir {config.output_dir} is a model, not an export; name another directory"
        )
    require_packages(config)
    # A directory takes programs of several sizes, with one file of weights.
    continues = "weights.safetensors" if name == "stablehlo" else ""
    ask_before_replacing("output_dir", config.output_dir, config.overwrite_output_dir, continues)


def load_model_to_export(config):
    """(pipeline, (height, width) of images, parameters with --lora folded in)."""
    import jax.numpy as jnp

    from diffusers_flax.pipelines.base import pipeline_class
    from diffusers_flax.pipelines.text_to_image import TextToImage
    from diffusers_flax.schedulers.factory import check_scheduler, choose_scheduler

    model = config.model
    cls = pipeline_class(model)
    if "ControlNet" in cls.__name__:
        raise ValueError(
            f"--model {model} is a {cls.torch_class_name}, which is not exported; give its base "
            "model"
        )
    dtype = jnp.float32
    if config.format == "stablehlo":
        if not ("InstructPix2Pix" in cls.__name__ or issubclass(cls, TextToImage)):
            raise ValueError(
                f"--model {model} is a {cls.torch_class_name}; --format stablehlo has text to "
                "image and InstructPix2Pix"
            )
        dtype = jnp.dtype(config.dtype or "float32")
    check_scheduler(config.scheduler)
    _, configs = cls.check(model)
    scheduler, _ = choose_scheduler(configs["scheduler"], model, config.scheduler)
    pipeline = cls.open(model, dtype=dtype, scheduler=scheduler)
    size = pipeline.image_size(config.height, config.width)
    return pipeline, size, pipeline.load_params(model, lora=config.lora)


def export(config):
    """Load the model and write its files."""
    import jax

    from diffusers_flax.generating.defaults import DEFAULTS_FILE, read_defaults, write_defaults
    from diffusers_flax.generating.single_files import with_single_files

    check_flags(config)
    jax.config.update("jax_platforms", "cpu")  # exact float32, and no claim on an accelerator
    config = with_single_files(config, "model")
    defaults = read_defaults(config.model, config.lora)
    config = dataclasses.replace(config, scheduler=config.scheduler or defaults.get("scheduler"))
    pipeline, size, params = load_model_to_export(config)
    output_dir, batch_size = config.output_dir, config.batch_size or 1
    dtype = config.dtype or DTYPES[config.format][0]
    if config.format == "onnx":
        from diffusers_flax.exporting.onnx_files import export_onnx

        export_onnx(pipeline, params, output_dir, dtype, config.quantize)
    elif config.format == "openvino":
        os.environ.setdefault("CI", "true")  # else the import of openvino starts its telemetry
        from diffusers_flax.exporting.openvino_files import export_openvino

        export_openvino(pipeline, params, output_dir, dtype, config.quantize)
    elif config.format == "coreml":
        from diffusers_flax.exporting.folders import quiet

        with quiet():
            from diffusers_flax.exporting.coreml_files import export_coreml

        export_coreml(
            pipeline,
            params,
            output_dir,
            dtype,
            quantize=config.quantize,
            batch_size=batch_size,
            size=size,
        )
    else:
        from diffusers_flax.exporting.stablehlo_files import export_stablehlo

        platforms, steps = config.platform or ("cpu", "cuda"), config.num_inference_steps
        steps = steps or defaults.get("num_inference_steps", 20)
        files = export_stablehlo(
            pipeline,
            params,
            output_dir,
            platforms,
            batch_size=batch_size,
            size=size,
            num_inference_steps=steps,
        )
    (output_dir / DEFAULTS_FILE).unlink(missing_ok=True)  # of an export that is replaced
    if defaults:
        write_defaults(output_dir, **defaults)
    print_files(files) if config.format == "stablehlo" else print(output_dir)


def run_file(config):
    """Run a program of --format stablehlo and write its images."""
    if given := [x for x in given_flags(config) if x not in (*OF_RUN, "run", "format")]:
        raise ValueError(
            f"--{given[0]} does not go with --run, whose file is exported already; leave it out"
        )
    if config.prompt is None:
        raise ValueError("--run needs --prompt, a text")
    check_image_file(config.output) if config.output.suffix != ".npy" else None
    require_packages(dataclasses.replace(config, format="stablehlo"))
    from diffusers_flax.exporting.run_stablehlo import run_program, save_images
    from diffusers_flax.generating.defaults import with_defaults

    config = with_defaults(config, [config.run.parent])
    scales = config.guidance_scale, config.image_guidance_scale
    check_scale("guidance_scale", scales[0])
    check_scale("image_guidance_scale", scales[1])
    check_seed("seed", config.seed or 0)
    images = run_program(
        config.run,
        config.prompt,
        config.negative_prompt or "",
        config.input,
        seed=config.seed or 0,
        guidance_scales=scales,
    )
    print_files(save_images(images, config.output))


def work(config):
    """Export a model, or run a program."""
    if config.run is not None:
        run_file(config)
    else:
        export(config)


def main(args=None):
    """Command line."""
    run_main(Config, __doc__, work, args)


if __name__ == "__main__":
    main()
