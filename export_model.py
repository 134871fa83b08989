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

onnx and openvino: text encoders, UNet, VAE encoder and VAE decoder for any batch and size, in the
folders and with the names of Optimum's exports, each compared with the Flax model. coreml: the same
for one --batch_size, --height and --width, converted and never run here. stablehlo: the whole run
as one program of jax.export, for one batch, size and number of steps, a file for each --platform;
--run makes an image with it in a process that has no model code. docs/export.md says more.

Needs the packages of a format, pip install ".[onnx]", and no accelerator. Measured peaks of memory
of --format onnx in float32: 7.4 GiB for Stable Diffusion 1.5, 17.3 GiB for SDXL.
"""

from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from diffusers_flax.command_line import (
    AtLeast,
    Seed,
    ask_before_replacing,
    check_image_file,
    run_main,
)


class Format(NamedTuple):
    """What a --format needs and takes."""

    packages: tuple[str, ...]  # names of modules
    dtype: tuple[str, ...]  # of weights, the default first
    quantize: tuple[str, ...] = ()


ONNX = ("onnx", "onnxscript", "onnxruntime", "torch", "diffusers")
COREML = ("coremltools", "torch", "diffusers")
FORMATS = {
    "onnx": Format(ONNX, ("float32", "float16"), ("int8",)),
    "openvino": Format((*ONNX, "openvino", "nncf"), ("float32", "float16"), ("int8",)),
    "coreml": Format(COREML, ("float16", "float32"), ("palette8", "palette6")),
    "stablehlo": Format(("flatbuffers",), ("float32", "bfloat16")),
}


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
    batch_size: Annotated[int, AtLeast(1)] = 1  # stablehlo, coreml: images at once
    # stablehlo, coreml: pixels; default: the model's
    height: Annotated[int, AtLeast(1)] | None = None
    width: Annotated[int, AtLeast(1)] | None = None  # likewise
    # stablehlo: denoising steps; default: the model's, or 20
    num_inference_steps: Annotated[int, AtLeast(1)] | None = None
    # stablehlo: where programs run, each with a file of its own
    platform: tuple[Literal["cpu", "cuda", "tpu"], ...] = ("cpu", "cuda")
    overwrite_output_dir: bool = False  # replace an export in output_dir
    run: Path | None = None  # program of --format stablehlo to make images with
    prompt: str | None = None  # of --run: what to show, or what to change
    negative_prompt: str = ""  # of --run: what to avoid
    input: Path | None = None  # of --run: image to edit
    reference: Path | None = None  # of --run: second image, of a model with 12 input channels
    output: Path = Path("image.png")  # of --run: image, or .npy of floats in [0, 1]
    seed: Seed = 0  # of --run: of the noise
    # of --run: weight of the prompt; default: the model's, or 7.5
    guidance_scale: Annotated[float, AtLeast(0)] | None = None
    # of --run: similarity to the input; default: the model's, or 1.5
    image_guidance_scale: Annotated[float, AtLeast(0)] | None = None


def check_flags(config):
    """Raise a ValueError for values that a format does not have, or for missing packages."""
    name, form = config.format, FORMATS[config.format]
    if not (config.model and config.output_dir):
        raise ValueError("give --model and --output_dir to export, or --run and --prompt")
    for flag, choices in (("dtype", form.dtype), ("quantize", form.quantize)):
        if (value := getattr(config, flag)) not in (None, *choices):
            choices = ", ".join(choices) or "none"
            raise ValueError(f"--{flag} {value} is not for --format {name}, which has {choices}")
    if config.quantize == "int8" and config.dtype:
        raise ValueError("--quantize int8 and --dtype are both given; give one")
    if missing := [package for package in form.packages if find_spec(package) is None]:
        raise ValueError(f'--format {name} needs {", ".join(missing)}: pip install ".[{name}]"')


def load_model_to_export(config):
    """(pipeline, (height, width) of images, parameters with --lora folded in)."""
    import jax.numpy as jnp

    from diffusers_flax.pipelines.base import pipeline_class
    from diffusers_flax.pipelines.text_to_image import TextToImage
    from diffusers_flax.schedulers.factory import check_scheduler, choose_scheduler

    model, is_program = config.model, config.format == "stablehlo"
    cls = pipeline_class(model)
    is_known = "InstructPix2Pix" in cls.__name__ or issubclass(cls, TextToImage)
    if "ControlNet" in cls.__name__ or (is_program and not is_known):
        raise ValueError(
            f"--model {model} is a {cls.torch_class_name}, which --format {config.format} does not "
            "export; give its base model"
        )
    dtype = jnp.dtype(config.dtype) if is_program else jnp.float32
    check_scheduler(config.scheduler)
    _, configs = cls.check(model)
    scheduler, _ = choose_scheduler(configs["scheduler"], model, config.scheduler)
    pipeline = cls.open(model, dtype=dtype, scheduler=scheduler)
    size = pipeline.image_size(config.height, config.width)
    return pipeline, size, pipeline.load_params(model, lora=config.lora)


def export(config):
    """Load the model and write its files."""
    import jax

    from diffusers_flax.exporting.folders import quiet
    from diffusers_flax.generating.flags import (
        DEFAULTS_FILE,
        read_defaults,
        with_single_files,
        write_defaults,
    )

    output_dir = config.output_dir
    if any((output_dir / "unet").glob("diffusion_pytorch_model*")):
        raise ValueError(
            f"--output_dir {output_dir} is a model, not an export; name another directory"
        )
    # A directory takes programs of several sizes, with one file of weights.
    continues = "weights.safetensors" if config.format == "stablehlo" else ""
    ask_before_replacing("output_dir", output_dir, config.overwrite_output_dir, continues)
    jax.config.update("jax_platforms", "cpu")  # exact float32, and no claim on an accelerator
    config = with_single_files(config, "model")
    defaults = read_defaults(config.model, config.lora)
    steps = config.num_inference_steps or defaults.get("num_inference_steps", 20)
    scheduler = config.scheduler or defaults.get("scheduler")
    dtype = config.dtype or FORMATS[config.format].dtype[0]
    config = replace(config, scheduler=scheduler, num_inference_steps=steps, dtype=dtype)
    pipeline, size, params = load_model_to_export(config)
    with quiet():
        files_of_format = import_module(f"diffusers_flax.exporting.{config.format}_files")
    written = files_of_format.export(pipeline, params, output_dir, config, size)
    (output_dir / DEFAULTS_FILE).unlink(missing_ok=True)  # of an export that is replaced
    if defaults:
        write_defaults(output_dir, **defaults)
    print(*written, sep="\n")


def run_program(config):
    """Run a program of --format stablehlo and write its images."""
    from diffusers_flax.exporting import run_stablehlo
    from diffusers_flax.generating.flags import with_defaults

    if config.prompt is None:
        raise ValueError("--run needs --prompt, a text")
    if config.output.suffix != ".npy":
        check_image_file(config.output)
    config = with_defaults(config, [config.run.parent])
    texts = {"prompt": config.prompt, "negative_prompt": config.negative_prompt}
    scales = config.guidance_scale, config.image_guidance_scale
    files = {"image": config.input, "reference": config.reference}
    images = run_stablehlo.run_program(config.run, texts, files, config.seed, scales)
    print(*run_stablehlo.save_images(images, config.output), sep="\n")


def work(config):
    """Export a model, or run a program."""
    if config.run:
        run_program(config)
    else:
        check_flags(config)
        export(config)


def main(args=None):
    """Command line."""
    run_main(Config, __doc__, work, args)


if __name__ == "__main__":
    main()
