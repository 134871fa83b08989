"""Make or edit an image with a folder of export_model.py, without jax, PyTorch and diffusers.

    python examples/run_onnx.py --model exported --prompt "a red panda" --output panda.png
    python examples/run_onnx.py --model edits --prompt "make it red" --input in.png --output out.png

Needs NumPy, tokenizers, Pillow, and onnxruntime or, for --format openvino, openvino. Stable
Diffusion and SDXL, text to image and InstructPix2Pix. The steps are those of the scheduler in
scheduler/scheduler_config.json, or of --scheduler with the same noise levels; an entry of that file
that this example lacks is refused by name. An image to edit is scaled until its longer side is the
model's; --height and --width choose other sides, to which it is cropped.
"""

import json
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from math import expm1, inf
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tokenizers import Tokenizer

FILES = ("model.onnx", "openvino_model.xml")
TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(int64)": "int64"}
# Of models without sampling_defaults.json.
DEFAULTS = dict(num_inference_steps=20, guidance_scale=7.5, image_guidance_scale=1.5)

# Entries of scheduler_config.json by PyTorch diffusers' classes, with defaults. A class ignores the
# entries of other classes.
COMMON = dict(num_train_timesteps=1000, beta_start=0.0001, beta_end=0.02, beta_schedule="linear")
COMMON |= dict(trained_betas=None, prediction_type="epsilon", steps_offset=0)
COMMON |= dict(timestep_spacing="linspace", rescale_betas_zero_snr=False)
DDIM = dict(timestep_spacing="leading", clip_sample=True, clip_sample_range=1.0, thresholding=False)
DDIM |= dict(set_alpha_to_one=True)
PNDM = dict(timestep_spacing="leading", skip_prk_steps=False, set_alpha_to_one=False)
SIGMAS = dict(use_karras_sigmas=False, sigma_min=None, sigma_max=None, final_sigmas_type="zero")
SIGMAS |= dict(use_exponential_sigmas=False, use_beta_sigmas=False)
EULER = SIGMAS | dict(interpolation_type="linear", timestep_type="discrete")
SOLVER = SIGMAS | dict(algorithm_type="dpmsolver++", solver_order=2, thresholding=False)
SOLVER |= dict(lower_order_final=True, euler_at_final=False, lambda_min_clipped=-inf)
SOLVER |= dict(use_lu_lambdas=False, use_flow_sigmas=False)
SCHEDULERS = {
    "ddim": ("DDIMScheduler", COMMON | DDIM),
    "pndm": ("PNDMScheduler", COMMON | PNDM),
    "euler": ("EulerDiscreteScheduler", COMMON | EULER),
    "euler_ancestral": ("EulerAncestralDiscreteScheduler", COMMON),
    "dpmsolver++": ("DPMSolverMultistepScheduler", COMMON | SOLVER),
}
SUPPORTED = dict(  # values that this example has; all values of entries that are not here
    beta_schedule=("linear", "scaled_linear", "squaredcos_cap_v2"),
    prediction_type=("epsilon", "v_prediction", "sample"),
    timestep_spacing=("leading", "linspace", "trailing"),
    skip_prk_steps=(True,),
    final_sigmas_type=("zero", "sigma_min"),
    interpolation_type=("linear",),
    timestep_type=("discrete",),
    algorithm_type=("dpmsolver++",),
    solver_order=(1, 2),  # in diffusers all types of solvers are midpoint
    lambda_min_clipped=(-inf,),
)
SUPPORTED |= dict.fromkeys(("use_exponential_sigmas", "use_beta_sigmas"), (False,))
SUPPORTED |= dict.fromkeys(("use_lu_lambdas", "use_flow_sigmas", "thresholding"), (False,))
# PNDM's weights of the latest outputs, the newest first, by how many there are
PNDM_WEIGHTS = [[1], [3 / 2, -1 / 2], [23 / 12, -16 / 12, 5 / 12]]
PNDM_WEIGHTS += [[55 / 24, -59 / 24, 37 / 24, -9 / 24]]


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
    """(key of SCHEDULERS, all entries of its class) of an export; name: of --scheduler."""
    config = read(folder / "scheduler", "scheduler_config.json")
    own_class = config.get("_class_name")
    own = {cls: key for key, (cls, _) in SCHEDULERS.items()}.get(own_class)
    if own is None and not (name and "beta_schedule" in config):
        names = ", ".join(SCHEDULERS)
        raise ValueError(f"this example lacks {own_class}; --scheduler has {names} with its noise")
    key = name or own
    cls, entries = SCHEDULERS[key]
    # Latents are not in [-1, 1]: in the place of another class, DDIM clips only as the file says.
    entries = entries | ({} if key == own else {"clip_sample": False})
    entries = entries | {entry: config[entry] for entry in entries if entry in config}
    for entry, values in SUPPORTED.items():
        if entry in entries and entries[entry] not in values:
            raise ValueError(
                f"scheduler_config.json has {entry}={entries[entry]!r} for {cls}; this example has "
                f"{' or '.join(map(repr, values))}; choose another --scheduler, or export again"
            )
    return key, entries


def open_folder(folder, scheduler=None):
    """(content of model_index.json, read_scheduler's result, {name: Model}) of an export."""
    if not (folder / "model_index.json").is_file():
        raise ValueError(f"--model {folder} is no complete export; make one with export_model.py")
    index = read(folder, "model_index.json")
    pipeline, found = index["_class_name"], read_scheduler(folder, scheduler)
    names = ["unet", "vae_decoder", "text_encoder", *["text_encoder_2"] * ("XL" in pipeline)]
    names += ["vae_encoder"] * ("Pix2Pix" in pipeline)
    models = {name: Model(folder / name) for name in names}
    if "Inpaint" in pipeline or "timestep_cond" in models["unet"].types:
        raise ValueError("this example lacks models that repaint or embed their guidance")
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


def training_levels(key, config):
    """alpha_bar of the training timesteps, falling, float64 (num_train_timesteps,)."""
    T, ends = config["num_train_timesteps"], np.array([config["beta_start"], config["beta_end"]])
    if config["trained_betas"] is not None:
        betas = np.array(config["trained_betas"])
    elif config["beta_schedule"] == "squaredcos_cap_v2":  # arXiv 2102.09672, equation 17
        cosine = np.cos((np.arange(T + 1) / T + 0.008) / 1.008 * np.pi / 2) ** 2
        betas = np.minimum(1 - cosine[1:] / cosine[:-1], 0.999)
    elif config["beta_schedule"] == "scaled_linear":
        betas = np.linspace(*ends**0.5, T) ** 2
    else:
        betas = np.linspace(*ends, T)
    alpha_bar = np.cumprod(1 - betas.astype(np.float32), dtype=float)
    if config["rescale_betas_zero_snr"] and key != "pndm":  # arXiv 2305.08891, algorithm 1
        root = alpha_bar**0.5
        alpha_bar = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
        if key != "ddim":
            alpha_bar[-1] = 2.0**-24  # else noise over signal is infinite
    return alpha_bar


def choose_timesteps(key, config, num_steps):
    """Timesteps of a run, falling, float64 (num_steps,); only Euler's may be fractions."""
    T, spacing = config["num_train_timesteps"], config["timestep_spacing"]
    is_solver = key == "dpmsolver++" and spacing != "trailing"  # whose lowest point is the end
    num_points = num_steps + is_solver
    if not 1 <= num_steps <= T - is_solver:
        raise ValueError(f"--num_inference_steps {num_steps} must be from 1 to {T - is_solver}")
    steps = np.round(np.arange(T, 0, -T / num_steps)[:num_steps]) - 1  # trailing
    if spacing == "linspace":
        steps = np.linspace(0, T - 1, num_points)[::-1]
    elif spacing == "leading":
        steps = (np.arange(num_points) * (T // num_points) + config["steps_offset"])[::-1] * 1.0
    if steps[0] > T - 1:
        raise ValueError(f"--num_inference_steps {num_steps} begins above {T - 1}; take fewer")
    return steps[:num_steps] if "euler" in key else steps[:num_steps].round()


def plan(key, config, num_steps):
    """(timesteps, alpha_bar at them, alpha_bar after each) of a run of a scheduler."""
    T, alpha_bar = config["num_train_timesteps"], training_levels(key, config)
    steps = choose_timesteps(key, config, num_steps)
    if key in ("ddim", "pndm"):  # steps of one length, also where the timesteps differ
        if key == "pndm":  # the second step is the first one again, see denoise
            steps = np.concatenate([steps[:2], steps[1:]])
        starts, stride = steps.astype(int), T // num_steps
        starts[1:2] += stride * (key == "pndm")
        later, end = starts - stride, 1.0 if config["set_alpha_to_one"] else alpha_bar[0]
        if alpha_bar[starts[0]] == 0 and config["prediction_type"] == "epsilon":
            raise ValueError("rescale_betas_zero_snr leaves no signal for prediction_type epsilon")
        return steps, alpha_bar[starts], np.where(later < 0, end, alpha_bar[later])
    all_ratios = (1 / alpha_bar - 1) ** 0.5  # noise over signal
    ratios = np.interp(steps, np.arange(T), all_ratios)
    if config.get("use_karras_sigmas"):  # arXiv 2206.00364, equation 5
        ends = ratios[[0, -1]] if key == "euler" else all_ratios[[-1, 0]]
        ends = np.array([config["sigma_max"] or ends[0], config["sigma_min"] or ends[1]])
        ratios = np.linspace(*ends ** (1 / 7), num_steps) ** 7
        steps = np.interp(np.log(ratios), np.log(all_ratios), np.arange(T))
        steps = steps if key == "euler" else steps.round()
    end = all_ratios[0] if config.get("final_sigmas_type") == "sigma_min" else 0
    levels = 1 / (1 + np.append(ratios, end) ** 2)
    return steps, levels[:-1], levels[1:]


def clean_and_noise(prediction_type, x, out, level):
    """(x_0, eps) where x is alpha x_0 + sigma eps, of a model's output; level: alpha**2."""
    alpha, sigma = level**0.5, (1 - level) ** 0.5
    if prediction_type == "epsilon":
        return (x - sigma * out) / alpha, out
    if prediction_type == "v_prediction":
        return alpha * x - sigma * out, alpha * out + sigma * x
    return out, (x - alpha * out) / sigma


def denoise(predict, x, key, config, planned, rng):
    """Latents without noise, by the steps of a scheduler.

    Args:
        predict: (latents, timestep) -> the model's output.
        x: normal noise, of the shape of the latents.
        key, config: of read_scheduler.
        planned: of plan.
        rng: NumPy's generator of the noise that euler_ancestral adds.

    Source: DDIM, arXiv 2010.02502; PNDM, 2202.09778; Euler, 2206.00364; its ancestral form,
    2011.13456, appendix F; DPM-Solver++, 2211.01095, algorithm 2.
    """
    steps, levels, next_levels = planned
    if "euler" in key and config["timestep_spacing"] != "leading":
        x = x * (1 - levels[0]) ** 0.5
    outputs, start, previous, last = [], None, None, len(steps) - 1
    with np.errstate(divide="ignore"):  # no signal at the start, no noise at the end
        h = np.log(next_levels / (1 - next_levels)) / 2 - np.log(levels / (1 - levels)) / 2
    for i, (t, level, next_level) in enumerate(zip(steps, levels, next_levels)):
        print(f"\rstep {i + 1} of {last + 1}", end="", file=sys.stderr, flush=True)
        out = predict(x, t)
        if key == "pndm" and i == 1:  # from where the first step began, by the mean of both
            x, out = start, (outputs[0] + out) / 2
        elif key == "pndm":
            start, outputs = x, [out, *outputs[:3]]
            out = np.tensordot(PNDM_WEIGHTS[len(outputs) - 1], outputs, 1)
        x_0, eps = clean_and_noise(config["prediction_type"], x, out, level)
        if config.get("clip_sample"):
            x_0 = x_0.clip(-config["clip_sample_range"], config["clip_sample_range"])
        if key == "euler_ancestral":
            kept = ((1 / next_level - 1) / (1 / level - 1)) ** 0.5
            eps = kept * eps + (1 - kept**2) ** 0.5 * rng.standard_normal(x.shape, np.float32)
        x = next_level**0.5 * x_0 + (1 - next_level) ** 0.5 * eps
        if key == "dpmsolver++":
            ends = next_level == 1 or config["euler_at_final"]
            ends = ends or (config["lower_order_final"] and last < 14)
            if config["solver_order"] == 2 and i > 0 and not (i == last and ends):
                slope = (x_0 - previous) / h[i - 1]
                x = x - next_level**0.5 * expm1(-h[i]) * h[i] / 2 * slope
            previous = x_0
    print(file=sys.stderr)
    return x / next_levels[-1] ** 0.5 if key == "euler" else x  # Euler's steps are of x / alpha


def read_image(file):
    """The upright image in a file, RGB, on white where it is transparent."""
    image = ImageOps.exif_transpose(Image.open(file)).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def choose_size(options, models, image):
    """(height, width) to make an image at; image: the one to edit, PIL, or None."""
    vae, unet = (models[name].config for name in ("vae_decoder", "unet"))
    factor = 2 ** (len(vae["block_out_channels"]) - 1)
    sides = np.broadcast_to(unet["sample_size"], 2) * factor
    if image is not None:  # the longer side is the model's
        sides = np.array(image.size[::-1]) * sides.max() / max(image.size)
        sides = np.maximum(np.floor(sides / factor + 0.5), 1) * factor
    for i, name in enumerate(("height", "width")):
        if (side := getattr(options, name)) is not None:
            sides[i] = side
            if side < 1 or side % factor:
                raise ValueError(f"--{name} {side} is not a multiple of {factor}")
    return tuple(int(side) for side in sides)


def make_image(options, index, scheduler, models):
    """The image of the flags, float32 (H, W, 3) in [0, 1]; other arguments: of open_folder."""
    folder, vae, is_edit = options.model, models["vae_decoder"].config, "vae_encoder" in models
    if is_edit != (options.input is not None):
        does = "edits images and needs" if is_edit else "makes images from text and takes no"
        raise ValueError(f"--model {folder} {does} --input")
    image = read_image(options.input) if is_edit else None
    height, width = size = choose_size(options, models, image)
    factor = 2 ** (len(vae["block_out_channels"]) - 1)
    shape = (1, vae["latent_channels"], *(side // factor for side in size))
    rng = np.random.default_rng(options.seed)
    noise = np.load(options.noise) if options.noise else rng.standard_normal(shape, np.float32)
    planned = plan(*scheduler, options.num_inference_steps)
    what = f"{options.input}, {image.width}x{image.height}, " if is_edit else ""
    print(f"{what}at {width}x{height} with {scheduler[0]}", file=sys.stderr)
    states, pooled = encode_texts(folder, index, models, [options.prompt, options.negative_prompt])
    # Branches of guidance by their weights: text and image, for edits image alone, and neither
    # (arXiv 2211.09800). From text, a scale up to 1 is no guidance.
    scale, image_scale = options.guidance_scale, options.image_guidance_scale
    if is_edit:
        weights = [scale, image_scale - scale, 1 - image_scale]
        pixels = np.float32(ImageOps.fit(image, size[::-1], Image.Resampling.LANCZOS)) / 127.5 - 1
        encoded = models["vae_encoder"](sample=pixels.transpose(2, 0, 1)[None])["latent_parameters"]
        latents = encoded[:, : shape[1]]
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

    x_0 = denoise(predict, noise, *scheduler, planned, rng)
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
