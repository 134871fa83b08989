"""Make or edit an image with a folder of export_model.py, without jax, PyTorch and diffusers.

    python examples/run_onnx.py --model exported --prompt "a red panda" --output panda.png
    python examples/run_onnx.py --model edits --prompt "make it red" --input in.png --output out.png

Needs NumPy, tokenizers, Pillow, and onnxruntime or, for --format openvino, openvino. Stable
Diffusion and SDXL, text to image and InstructPix2Pix. --scheduler is ddim or euler, by default the
model's own if it is one of them, else ddim. --noise is an .npy of normal noise, (1, 4, h, w) of the
latents, else of --seed, not edit_cli.py's. An --output that ends in .npy gets floats in [0, 1].
"""

import json
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tokenizers import Tokenizer

FILES = ("model.onnx", "openvino_model.xml")
TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(int64)": "int64"}
FLAGS = dict(model=Path, prompt=str, input=Path, output=Path("image.png"), negative_prompt="")
FLAGS |= dict(num_inference_steps=20, guidance_scale=7.5, image_guidance_scale=1.5, height=int)
FLAGS |= dict(width=int, scheduler=str, seed=0, noise=Path)  # types or defaults


class Part:
    """A part of the model: a file that onnxruntime or OpenVINO runs, and the config beside it."""

    def __init__(self, folder):
        self.config = read(folder, "config.json")
        file = next(folder / name for name in FILES if (folder / name).is_file())
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
        """Outputs by name, in float32; inputs are cast to the types that the file has."""
        given = {name: np.asarray(x).astype(self.types[name]) for name, x in inputs.items()}
        return {n: x.astype(np.float32) for n, x in zip(self.names, self.run(given))}


def read(folder, name):
    """The content of a JSON file."""
    return json.loads((folder / name).read_text("utf-8"))


def open_folder(folder):
    """(content of model_index.json, {name: Part}) of an export."""
    if not (folder / "model_index.json").is_file():
        raise ValueError(f"--model {folder} is no complete export; make one with export_model.py")
    kind = (index := read(folder, "model_index.json"))["_class_name"]
    names = ["unet", "vae_decoder", "text_encoder", *["text_encoder_2"] * ("XL" in kind)]
    names += ["vae_encoder"] * ("Pix2Pix" in kind)
    if missing := [x for x in names if not any((folder / x / y).is_file() for y in FILES)]:
        raise ValueError(f"{folder} has no {missing[0]}/model.onnx; export with onnx or openvino")
    try:
        parts = {name: Part(folder / name) for name in names}
    except Exception as error:  # both packages have exceptions of their own
        raise ValueError(f"--model {folder} cannot be opened: {error}") from error
    if "Inpaint" in kind or "timestep_cond" in parts["unet"].types:
        raise ValueError(f"{folder} is a {kind} or embeds its guidance, which this example lacks")
    return index, parts


def encode_texts(folder, index, parts, texts):
    """(states (B, 77, D), SDXL's pooled states (B, D) or None) of texts."""
    names, found = [x for x in ("text_encoder", "text_encoder_2") if x in parts], []
    for name in names:
        files = folder / name.replace("text_encoder", "tokenizer")
        tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))
        pad = tokenizer.token_to_id(read(files, "tokenizer_config.json")["pad_token"])
        tokenizer.enable_truncation(77)
        tokenizer.enable_padding(length=77, pad_id=pad)
        ids = [row.ids for row in tokenizer.encode_batch(texts)]
        found.append(parts[name](input_ids=ids))
    if len(names) == 1:
        return found[0]["last_hidden_state"], None
    last = [parts[name].config["num_hidden_layers"] - 1 for name in names]  # but one
    states = [out[f"hidden_states.{i}"] for out, i in zip(found, last)]
    states, pooled = np.concatenate(states, axis=-1), found[1]["text_embeds"]
    if index.get("force_zeros_for_empty_prompt", True):
        is_text = np.array([i == 0 or text != "" for i, text in enumerate(texts)])
        states, pooled = states * is_text[:, None, None], pooled * is_text[:, None]
    return states, pooled


def denoise(predict, x, config, is_euler, num_steps):
    """Scaled latents from noise x, by DDIM (arXiv 2010.02502) or Euler; predict(x, t) is guided."""
    power = {"linear": 1, "scaled_linear": 0.5}.get(config.get("beta_schedule"))
    lacks = ("trained_betas", "use_karras_sigmas", "rescale_betas_zero_snr")
    if not power or any(map(config.get, lacks)):
        raise ValueError("this example lacks options of the model's scheduler_config.json")
    if (T := config["num_train_timesteps"]) < num_steps or num_steps < 1:
        raise ValueError(f"--num_inference_steps {num_steps} must be from 1 to {T}")
    ends = config["beta_start"] ** power, config["beta_end"] ** power
    alpha_bar = np.cumprod(1 - np.linspace(*ends, T, dtype=np.float32) ** (1 / power), dtype=float)
    spacing = config.get("timestep_spacing", "linspace" if is_euler else "leading")
    steps = np.round(np.arange(T, 0, -T / num_steps)[:num_steps]) - 1  # trailing
    if spacing == "linspace":
        steps = np.linspace(0, T - 1, num_steps)[::-1]
    elif spacing == "leading":
        steps = (np.arange(num_steps) * (T // num_steps) + config.get("steps_offset", 0))[::-1]
    if is_euler:
        ratio = np.append(np.interp(steps, np.arange(T), np.sqrt(1 / alpha_bar - 1)), 0)
        levels, limit = 1 / (1 + ratio**2), np.inf
        x, next_levels = x * (1 if spacing == "leading" else np.sqrt(1 - levels[0])), levels[1:]
    else:
        limit = config.get("clip_sample_range", 1.0) if config.get("clip_sample", True) else np.inf
        end = 1.0 if config.get("set_alpha_to_one", True) else alpha_bar[0]
        levels, later = alpha_bar[steps := steps.round().astype(int)], steps - T // num_steps
        next_levels = np.where(later < 0, end, alpha_bar[later])
    for t, level, next_level in zip(steps, levels, next_levels):
        alpha, sigma, out = level**0.5, (1 - level) ** 0.5, predict(x, t)
        x_0, eps = (x - sigma * out) / alpha, out
        if config.get("prediction_type") == "v_prediction":
            x_0, eps = alpha * x - sigma * out, alpha * out + sigma * x
        x = next_level**0.5 * x_0.clip(-limit, limit) + (1 - next_level) ** 0.5 * eps
    return x


def make_image(options, index, parts):
    """The image that the flags ask for, float32 (H, W, 3) in [0, 1]; the rest is of open_folder."""
    folder = options.model
    vae, unet = (parts[name].config for name in ("vae_decoder", "unet"))
    factor, is_edit = 2 ** (len(vae["block_out_channels"]) - 1), "vae_encoder" in parts
    if is_edit != (options.input is not None):
        raise ValueError(f"--model {folder} {'needs' if is_edit else 'takes no'} --input")
    near = [unet["sample_size"] * factor] * 2
    if is_edit:
        image = ImageOps.exif_transpose(Image.open(options.input)).convert("RGB")
        near = [max(1, round(side / factor)) * factor for side in image.size[::-1]]
    size = [a if b is None else b for a, b in zip(near, (options.height, options.width))]
    if bad := [x for x in size if x < 1 or x % factor]:
        raise ValueError(f"{bad[0]} pixels are not a multiple of {factor}; choose another size")
    shape = (1, vae["latent_channels"], *(side // factor for side in size))
    noise = np.random.default_rng(options.seed).standard_normal(shape, np.float32)
    if options.noise and (noise := np.load(options.noise)).shape != shape:
        raise ValueError(f"--noise has shape {noise.shape}, this size needs {shape}")
    # Branches of guidance: text and image, for edits image alone, and neither (arXiv 2211.09800)
    texts = [options.prompt, *[options.negative_prompt] * (2 if is_edit else 1)]
    states, pooled = encode_texts(folder, index, parts, texts)
    inputs, scale = {"encoder_hidden_states": states}, options.guidance_scale
    weights, image_scale = [scale, 1 - scale], options.image_guidance_scale
    if pooled is not None:
        inputs |= {"text_embeds": pooled, "time_ids": [[*size, 0, 0, *size]] * len(texts)}
    condition = np.zeros((len(texts), 0, *shape[2:]))
    if is_edit:
        image = np.float32(ImageOps.fit(image, size[::-1], Image.Resampling.LANCZOS)) / 127.5 - 1
        encoded = parts["vae_encoder"](sample=image.transpose(2, 0, 1)[None])["latent_parameters"]
        latents = encoded[:, : shape[1]]
        condition = np.concatenate([latents, latents, np.zeros_like(latents)])
        weights = [scale, image_scale - scale, 1 - image_scale]

    def predict(x, t):
        sample = np.concatenate([np.repeat(x, len(texts), 0), condition], axis=1)
        out = parts["unet"](sample=sample, timestep=[t], **inputs)["out_sample"]
        return np.tensordot(weights, out, 1)[None]

    config = read(folder / "scheduler", "scheduler_config.json")
    is_euler = (options.scheduler or config["_class_name"]).lower().startswith("euler")
    x_0 = denoise(predict, noise, config, is_euler, options.num_inference_steps)
    decoded = parts["vae_decoder"](latent_sample=x_0 / vae["scaling_factor"])["sample"]
    return (decoded[0].transpose(1, 2, 0) / 2 + 0.5).clip(0, 1)


def main():
    """Command line."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    for name, x in FLAGS.items():
        kind, default = (x, None) if isinstance(x, type) else (type(x), x)
        more = dict(choices=("ddim", "euler")) if name == "scheduler" else {"default": default}
        parser.add_argument(f"--{name}", type=kind, required=name in ("model", "prompt"), **more)
    parser.error = lambda message: parser.exit(2, f"error: {message}\n")  # one line
    options = parser.parse_args()
    try:
        image = make_image(options, *open_folder(options.model))
        if options.output.suffix == ".npy":
            return np.save(options.output, image)
        Image.fromarray(np.uint8((image * 255).round())).save(options.output)
    except Exception as error:  # tokenizers raises plain Exceptions
        sys.exit(print("error:", *str(error).split(), file=sys.stderr) or 2)


if __name__ == "__main__":
    main()
