"""Make or edit an image with a folder of export_model.py, without jax, PyTorch and diffusers.

    python examples/run_onnx.py --model exported --prompt "a red panda" --output panda.png
    python examples/run_onnx.py --model edits --prompt "make it red" --input in.png --output out.png

Needs NumPy, tokenizers, Pillow, and onnxruntime or, for --format openvino, openvino. Stable
Diffusion and SDXL, text to image and InstructPix2Pix. The scheduler is DDIM, Euler or DPM-Solver++,
as scheduler/scheduler_config.json or --scheduler says. An image to edit is scaled until its longer
side is the model's; --height and --width choose other sides, to which it is cropped.
"""

import json
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from math import expm1
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tokenizers import Tokenizer

FILES = ("model.onnx", "openvino_model.xml")
TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(int64)": "int64"}
# Of models without sampling_defaults.json.
DEFAULTS = dict(num_inference_steps=20, guidance_scale=7.5, image_guidance_scale=1.5)

SCHEDULERS = {
    "ddim": "DDIMScheduler",
    "euler": "EulerDiscreteScheduler",
    "dpmsolver++": "DPMSolverMultistepScheduler",
}
# Values of scheduler_config.json that this example has, the default first.
SUPPORTED = {
    "beta_schedule": ("linear", "scaled_linear"),
    "prediction_type": ("epsilon", "v_prediction"),
    "trained_betas": (None,),
}
SUPPORTED_SIGMAS = {  # of Euler and DPM-Solver++
    "use_karras_sigmas": (False,),
    "use_exponential_sigmas": (False,),
    "use_beta_sigmas": (False,),
    "final_sigmas_type": ("zero",),
    "algorithm_type": ("dpmsolver++",),
    "solver_order": (2,),
}


class Model:
    """A model: a file that onnxruntime or OpenVINO runs, and the config beside it."""

    def __init__(self, folder):
        self.config = read(folder, "config.json")
        file = next((folder / name for name in FILES if (folder / name).is_file()), None)
        if file is None:
            raise ValueError(f"{folder.parent} has no {folder.name}/{FILES[0]}; export with onnx")
        if file.suffix == ".onnx":
            import onnxruntime as ort

            session = ort.InferenceSession(file, providers=ort.get_available_providers())
            self.types = {x.name: TYPES[x.type] for x in session.get_inputs()}
            self.names = [x.name for x in session.get_outputs()]
            self.run = lambda given: session.run(None, given)
        else:
            os.environ.setdefault("CI", "true")  # else the import sends telemetry
            import openvino

            model = openvino.compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
            self.types = {x.any_name: x.element_type.to_dtype() for x in model.inputs}
            self.names = [x.any_name for x in model.outputs]
            self.run = lambda given: model(given).values()

    def __call__(self, **inputs):
        """Outputs by name, in float32; inputs are cast to the file's types."""
        given = {name: np.asarray(x).astype(self.types[name]) for name, x in inputs.items()}
        return {n: x.astype(np.float32) for n, x in zip(self.names, self.run(given))}


def read(folder, name):
    """The content of a JSON file."""
    return json.loads((folder / name).read_text("utf-8"))


def read_scheduler(folder, name=None):
    """(key of SCHEDULERS, content of scheduler_config.json) of an export; name: of --scheduler."""
    config = read(folder / "scheduler", "scheduler_config.json")
    own = {cls: key for key, cls in SCHEDULERS.items()}.get(config["_class_name"])
    if "Flow" in config["_class_name"]:
        raise ValueError("the model is a flow, whose steps this example does not have")
    key = name or own or "dpmsolver++"
    if not (name or own):  # it has the same noise levels
        print(f"dpmsolver++ takes the place of {config['_class_name']}")
    for entry, values in (SUPPORTED if key == "ddim" else SUPPORTED | SUPPORTED_SIGMAS).items():
        if config.setdefault(entry, values[0]) not in values:
            raise ValueError(
                f"scheduler_config.json has {entry}={config[entry]!r}; this example has "
                f"{' or '.join(map(repr, values))}; choose another --scheduler, or export again"
            )
    config.setdefault("timestep_spacing", "leading" if key == "ddim" else "linspace")
    # Latents are not in [-1, 1]: in the place of another class, DDIM clips only as the file says.
    config.setdefault("clip_sample", own == "ddim")
    return key, config


def open_folder(folder, scheduler=None):
    """(content of model_index.json, read_scheduler's result, {name: Model}) of an export."""
    if not (folder / "model_index.json").is_file():
        raise ValueError(f"--model {folder} is no complete export; make one with export_model.py")
    index = read(folder, "model_index.json")
    pipeline, found = index["_class_name"], read_scheduler(folder, scheduler)
    names = ["unet", "vae_decoder", "text_encoder", *["text_encoder_2"] * ("XL" in pipeline)]
    names += ["vae_encoder"] * ("Pix2Pix" in pipeline)
    models = {name: Model(folder / name) for name in names}
    return index, found, models


def encode_texts(folder, index, models, texts):
    """(states (B, 77, D), SDXL's pooled states (B, D) or None) of [prompt, negative prompt]."""
    names, found = [x for x in ("text_encoder", "text_encoder_2") if x in models], []
    for name in names:
        files = folder / name.replace("text_encoder", "tokenizer")
        tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))
        pad = tokenizer.token_to_id(read(files, "tokenizer_config.json")["pad_token"])
        tokenizer.enable_truncation(77)
        tokenizer.enable_padding(length=77, pad_id=pad)
        ids = [row.ids for row in tokenizer.encode_batch(texts)]
        found.append(models[name](input_ids=ids))
    if len(names) == 1:
        return found[0]["last_hidden_state"], None
    last = [models[name].config["num_hidden_layers"] - 1 for name in names]  # but one
    states = [out[f"hidden_states.{i}"] for out, i in zip(found, last)]
    states, pooled = np.concatenate(states, axis=-1), found[1]["text_embeds"]
    if index.get("force_zeros_for_empty_prompt", True):
        is_text = np.array([i == 0 or text != "" for i, text in enumerate(texts)])
        states, pooled = states * is_text[:, None, None], pooled * is_text[:, None]
    return states, pooled


def plan(key, config, num_steps):
    """(timesteps, alpha_bar at them, alpha_bar after each) of a run; key, config: read_scheduler's.

    Source: alpha_bar without signal at the end, arXiv 2305.08891, algorithm 1.
    """
    T, spacing = config.get("num_train_timesteps", 1000), config["timestep_spacing"]
    ends = np.array([config.get("beta_start", 0.0001), config.get("beta_end", 0.02)])
    if config["beta_schedule"] == "scaled_linear":
        betas = np.linspace(*ends**0.5, T) ** 2
    else:
        betas = np.linspace(*ends, T)
    alpha_bar = np.cumprod(1 - betas.astype(np.float32), dtype=float)
    if config.get("rescale_betas_zero_snr"):
        root = alpha_bar**0.5
        alpha_bar = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
        if key != "ddim":
            alpha_bar[-1] = 2.0**-24  # else noise over signal is infinite

    # DPM-Solver++ has one point more, which is the end.
    num_points = num_steps + (key == "dpmsolver++" and spacing != "trailing")
    if spacing == "linspace":
        steps = np.linspace(0, T - 1, num_points)[::-1]
    elif spacing == "leading":
        steps = np.arange(num_points)[::-1] * float(T // num_points) + config.get("steps_offset", 0)
    else:
        steps = np.round(np.arange(T, 0, -T / num_steps)) - 1
    steps = steps[:num_steps]
    if key != "euler":
        steps = steps.round()

    if key == "ddim":  # steps of one length, also where the timesteps differ
        starts = steps.astype(int)
        later = starts - T // num_steps
        end = 1.0 if config.get("set_alpha_to_one", True) else alpha_bar[0]
        return steps, alpha_bar[starts], np.where(later < 0, end, alpha_bar[later])
    ratios = np.interp(steps, np.arange(T), (1 / alpha_bar - 1) ** 0.5)  # noise over signal
    levels = 1 / (1 + np.append(ratios, 0) ** 2)
    return steps, levels[:-1], levels[1:]


def denoise(predict, x, key, config, planned):
    """Latents without noise, by the steps of a scheduler.

    Args:
        predict: (latents, timestep) -> the model's output.
        x: normal noise, of the shape of the latents.
        key, config: of read_scheduler.
        planned: of plan.

    Source: DDIM, arXiv 2010.02502; Euler, 2206.00364; DPM-Solver++, 2211.01095, algorithm 2.
    """
    steps, levels, next_levels = planned
    if key == "euler" and config["timestep_spacing"] != "leading":
        x = x * (1 - levels[0]) ** 0.5
    previous, last = None, len(steps) - 1
    with np.errstate(divide="ignore"):  # no signal at the start, no noise at the end
        h = np.log(next_levels / (1 - next_levels)) / 2 - np.log(levels / (1 - levels)) / 2
    for i, (t, level, next_level) in enumerate(zip(steps, levels, next_levels)):
        print(f"\rstep {i + 1} of {last + 1}", end="", file=sys.stderr, flush=True)
        out = predict(x, t)
        # x is alpha x_0 + sigma eps
        alpha, sigma = level**0.5, (1 - level) ** 0.5
        if config["prediction_type"] == "epsilon":
            x_0, eps = (x - sigma * out) / alpha, out
        else:
            x_0, eps = alpha * x - sigma * out, alpha * out + sigma * x
        if key == "ddim" and config["clip_sample"]:
            largest = config.get("clip_sample_range", 1.0)
            x_0 = x_0.clip(-largest, largest)
        x = next_level**0.5 * x_0 + (1 - next_level) ** 0.5 * eps
        if key == "dpmsolver++" and 0 < i < last:
            slope = (x_0 - previous) / h[i - 1]
            x = x - next_level**0.5 * expm1(-h[i]) * h[i] / 2 * slope
        previous = x_0
    print(file=sys.stderr)
    return x


def read_image(file):
    """The upright image in a file, RGB, on white where it is transparent."""
    image = ImageOps.exif_transpose(Image.open(file)).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def make_image(options, index, scheduler, models):
    """The image of the flags, float32 (H, W, 3) in [0, 1]; other arguments: of open_folder."""
    folder, vae, is_edit = options.model, models["vae_decoder"].config, "vae_encoder" in models
    if is_edit != (options.input is not None):
        does = "edits images and needs" if is_edit else "makes images from text and takes no"
        raise ValueError(f"--model {folder} {does} --input")
    channels = models["unet"].config["in_channels"] - vae["latent_channels"]  # of the condition
    if options.reference and channels != 2 * vae["latent_channels"]:
        raise ValueError(f"--model {folder} sees no second image and takes no --reference")
    images = [read_image(file) for file in (options.input, options.reference) if file]
    factor = 2 ** (len(vae["block_out_channels"]) - 1)
    sides = np.broadcast_to(models["unet"].config["sample_size"], 2) * factor
    if is_edit:  # the longer side is the model's
        size = images[0].size
        sides = np.array(size[::-1]) * sides.max() / max(size) + factor / 2
    height = int(options.height or sides[0]) // factor * factor
    width = int(options.width or sides[1]) // factor * factor
    size = height, width
    shape = (1, vae["latent_channels"], *(side // factor for side in size))
    rng = np.random.default_rng(options.seed)
    noise = np.load(options.noise) if options.noise else rng.standard_normal(shape, np.float32)
    planned = plan(*scheduler, options.num_inference_steps)
    what = "{}, {}x{}, ".format(options.input, *images[0].size) if is_edit else ""
    print(f"{what}at {width}x{height} with {scheduler[0]}", file=sys.stderr)
    states, pooled = encode_texts(folder, index, models, [options.prompt, options.negative_prompt])
    # Branches of guidance by their weights: text and image, for edits image alone, and neither
    # (arXiv 2211.09800). From text, a scale up to 1 is no guidance.
    scale, image_scale = options.guidance_scale, options.image_guidance_scale
    if is_edit:
        weights = [scale, image_scale - scale, 1 - image_scale]
        images = [ImageOps.fit(x, size[::-1], Image.Resampling.LANCZOS) for x in images]
        pixels = np.stack([np.float32(x) / 127.5 - 1 for x in images]).transpose(0, 3, 1, 2)
        encoded = models["vae_encoder"](sample=pixels)["latent_parameters"][:, : shape[1]]
        latents = np.zeros((1, channels, *shape[2:]), np.float32)  # zeros: no reference
        latents[:, : len(images) * shape[1]] = encoded.reshape(1, -1, *shape[2:])
        condition = np.concatenate([latents, latents, np.zeros_like(latents)])
    else:
        weights = [max(scale, 1), 1 - max(scale, 1)]
        condition = np.zeros((2, 0, *shape[2:]))
    branches = [i for i, weight in enumerate(weights) if weight != 0]
    weights, condition = np.take(weights, branches), condition[branches]
    rows = np.minimum(branches, 1)  # the prompt, else the negative one
    inputs = {"encoder_hidden_states": states[rows]}
    if pooled is not None:
        inputs |= {"text_embeds": pooled[rows], "time_ids": [[*size, 0, 0, *size]] * len(rows)}

    def predict(x, t):
        sample = np.concatenate([np.repeat(x, len(rows), 0), condition], axis=1)
        out = models["unet"](sample=sample, timestep=[t], **inputs)["out_sample"]
        return np.tensordot(weights, out, 1)[None]

    x_0 = denoise(predict, noise, *scheduler, planned)
    decoded = models["vae_decoder"](latent_sample=x_0 / vae["scaling_factor"])["sample"]
    return (decoded[0].transpose(1, 2, 0) / 2 + 0.5).clip(0, 1)


def parse_flags():
    """The flags; those of DEFAULTS are None if they are not given."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of export_model.py")
    add("--prompt", required=True, help="text, or how to edit the image")
    add("--negative_prompt", default="", help="what to avoid")
    add("--input", type=Path, help="image to edit")
    add("--reference", type=Path, help="second image, of a model with 12 input channels")
    add("--output", type=Path, default=Path("image.png"), help=".npy: floats in [0, 1]")
    add("--num_inference_steps", type=int)
    add("--guidance_scale", type=float, help="weight of the prompt")
    add("--image_guidance_scale", type=float, help="similarity to the input")
    add("--height", type=int, help="pixels")
    add("--width", type=int, help="pixels")
    add("--scheduler", choices=tuple(SCHEDULERS))
    add("--seed", type=int, default=0, help="not as in edit_cli.py")
    add("--noise", type=Path, help=".npy of normal noise, (1, C, h, w) of the latents")
    return parser.parse_args()


def run(options):
    """Make the image and write it."""
    output, file = options.output, options.model / "sampling_defaults.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    defaults = DEFAULTS | (read(file.parent, file.name) if file.is_file() else {})
    for name in DEFAULTS:
        if getattr(options, name) is None:
            setattr(options, name, defaults[name])
    image = make_image(options, *open_folder(options.model, options.scheduler))
    if output.suffix == ".npy":
        np.save(output, image)
    else:
        Image.fromarray(np.uint8((image * 255).round())).save(output, quality=95)
    print(output)


def main():
    """Command line."""
    options = parse_flags()
    try:
        run(options)
    except Exception as error:  # runtimes and tokenizers have exceptions of their own
        sys.exit(print("error:", *str(error).split(), file=sys.stderr) or 2)


if __name__ == "__main__":
    main()
