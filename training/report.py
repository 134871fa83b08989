"""Reports of a training run: metrics and their plot, validation images, the model card.

wandb handles its own token.
"""

import json
import logging
import math
import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from huggingface_hub import ModelCardData
from PIL import Image, ImageOps

from dataloading.images import load_image
from dataloading.order import nearest_sizes
from diffusers_flax.loading.directories import CONV_IN_FILE
from diffusers_flax.loading.files import save_whole, write_text
from diffusers_flax.messages import one_line
from generating.captions import GRID_IMAGE_SIZE, GRID_MARGIN, captioned, tile_grid
from training.flags import Config
from training.models import params_beside_unet
from training.sharding import combine, local_rows, replicate

logger = logging.getLogger(__name__)

LOSS_PLOT = "loss.png"
LOSS_SPAN = 20  # the smoothed loss averages over about this fraction, 1 / 20, of the rows
LOSS_ROWS = 5  # but over this number of rows at least
VALIDATION_INFERENCE_STEPS = 20
SHORT_RUN = 100_000  # samples, steps times batch; such a model edits well at low scales only
GIF_SIDE = 1024  # pixels of a frame's longer side, at most
GIF_FRAMES = 100  # at most
GIF_SECONDS = 0.5  # per frame; four times as long for the last


class MetricsLog:
    """Write metrics to FOLDER/metrics.jsonl, one JSON object per line, and optionally to wandb.

    FOLDER/loss.png is a plot of the losses, if matplotlib is installed.

    Args:
        folder: the run's directory; must exist.
        config: dict of the run's flags, for wandb.
        report_to: "none" or "wandb".
        project: name of the wandb project.
        first_step: step at which the run starts; later rows are removed from metrics.jsonl. A value
            above 0 continues the wandb run of the previous start.

    Raises:
        ValueError: wandb cannot start, e.g. because nobody is logged in.
    """

    def __init__(self, folder, config, report_to="none", project="instruct-pix2pix", first_step=0):
        folder = Path(folder)
        self.wandb_run = None
        if report_to == "wandb":
            self.wandb_run = start_wandb(folder, config, project, resume=first_step > 0)
        self.plotter, self.plot, self.plot_failed = ThreadPoolExecutor(1), None, False
        if first_step == 0:
            (folder / LOSS_PLOT).unlink(missing_ok=True)
        self.path = folder / "metrics.jsonl"
        lines = lines_until_step(self.path, first_step)
        self.last_row = json.loads(lines[-1]) if lines else None
        write_text(self.path, "".join(lines))

    def write(self, row):
        """Append a row, a dict of numbers or None that contains "step"."""
        self.last_row = row
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if self.wandb_run is not None:
            self.wandb_run.log(row)

    def images(self, name, path, caption, step):
        """Log the image file at path to wandb, if it is used."""
        if self.wandb_run is not None:
            import wandb

            self.wandb_run.log({name: wandb.Image(str(path), caption=caption), "step": step})

    def draw(self):
        """Draw the losses in another thread; skipped while the last plot is not finished."""
        if self.plot is None or self.plot.done():
            self.plot = self.plotter.submit(self._draw)

    def finish_plot(self):
        """Draw the losses of all rows and wait."""
        self.plotter.shutdown()
        self._draw()

    def _draw(self):
        try:
            draw_losses(self.path)
        except Exception as error:  # the run is worth more than its plot
            if not self.plot_failed:
                logger.warning("%s cannot be drawn: %s", LOSS_PLOT, one_line(error, 200))
            self.plot_failed = True

    def close(self):
        """Finish the wandb run, which wandb otherwise marks as failed."""
        if self.wandb_run is not None:
            self.wandb_run.finish()


def lines_until_step(path, last_step):
    """The lines of a metrics.jsonl up to a step, without a line that a crash truncated."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    valid_lines = []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and row.get("step", last_step + 1) <= last_step:
            valid_lines.append(f"{line}\n")
    return valid_lines


def draw_losses(metrics):
    """Draw the losses of a metrics.jsonl, a Path, over the steps; without matplotlib do nothing."""
    try:
        from matplotlib.figure import Figure  # seconds to import; without pyplot no display is used
    except ImportError:
        return
    rows = [json.loads(line) for line in lines_until_step(metrics, math.inf)]
    points = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    if not points:
        return
    steps, losses = zip(*points)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    plot = figure.add_subplot()
    plot.plot(steps, losses, ".-", color="C0", alpha=0.35, label="loss")
    plot.plot(steps, smoothed(losses), color="C0", linewidth=2, label="smoothed")
    plot.set(xlabel="step", ylabel="loss")
    plot.grid(alpha=0.3)
    plot.legend()
    save_whole(metrics.with_name(LOSS_PLOT), partial(figure.savefig, format="png", dpi=110))


def smoothed(values):
    """The exponential average of the values up to each of them, unbiased, over 1 / LOSS_SPAN."""
    decay = 1 - 1 / max(LOSS_ROWS, len(values) / LOSS_SPAN)
    average, averages = 0.0, []
    for n, value in enumerate(values, start=1):
        average = decay * average + (1 - decay) * value
        averages.append(average / (1 - decay**n))
    return averages


def start_wandb(folder, config, project, resume):
    """Start a wandb run, or resume the one whose id is in folder/wandb_run_id."""
    import wandb

    id_file = folder / "wandb_run_id"
    run_id = id_file.read_text() if resume and id_file.exists() else None
    try:
        run = wandb.init(project=project, config=config, dir=folder, id=run_id, resume="allow")
    except wandb.Error as error:
        raise ValueError(
            f"wandb: {one_line(error)}; run `wandb login`, set WANDB_MODE=offline, or leave out "
            "--report_to wandb"
        ) from error
    # wandb drops rows whose own step decreases, as after a resume; "step" may repeat.
    run.define_metric("*", step_metric="step")
    write_text(id_file, run.id)
    return run


def guidance_scales(config, pipeline, num_steps):
    """The scales for a run's model: the flags', or the ones of its row in docs/editing.md.

    Args:
        config: Config.
        pipeline: InstructPix2Pix.
        num_steps: of the run.

    Returns:
        (guidance_scale, image_guidance_scale).
    """
    scales = (7.5, 1.5)
    if num_steps * config.train_batch_size < SHORT_RUN:
        scales = (2.0, 1.2)
    elif pipeline.is_cosxl_edit:
        scales = (7.0, 1.5)
    elif "XL" in pipeline.torch_class_name:
        scales = (3.0, 1.5)
    given = (config.validation_guidance_scale, config.validation_image_guidance_scale)
    return tuple(scale if flag is None else flag for flag, scale in zip(given, scales))


class Validation:
    """The images that a run edits while it trains, to OUTPUT_DIR/validation/step-N.png.

    Args:
        config: Config.
        pipeline: InstructPix2Pix.
        images: of fit_validation_images.
        num_steps: of the run.
    """

    def __init__(self, config, pipeline, images, num_steps):
        self.pipeline = replace(pipeline, storage=config.storage) if config.storage else pipeline
        self.images, self.seed = images, config.seed
        self.scales = guidance_scales(config, pipeline, num_steps)
        prompts = list(config.validation_prompt)  # one for each image, or one for all
        self.prompts = prompts * (len(images) if len(prompts) == 1 else 1)
        self.folder = Path(config.output_dir, "validation")

    def edit(self, p_unet, p_frozen):
        """Edit the images on this process's devices; all processes call this together.

        Images of one size are edited together.

        Args:
            p_unet: the UNet's trained parameters, replicated.
            p_frozen: train_step's frozen parameters, replicated.

        Returns:
            List of PIL images.
        """
        pipeline = self.pipeline
        p_params = {
            "unet": combine(p_frozen.get("unet", {}), p_unet),
            **params_beside_unet(p_frozen),
            "scheduler": replicate(pipeline.scheduler.create_state()),
        }
        edits = [None] * len(self.images)
        for size in dict.fromkeys(image.size for image in self.images):
            places = [i for i, image in enumerate(self.images) if image.size == size]
            for place, edit in zip(places, self._edit_alike(places, p_params)):
                edits[place] = edit
        return edits

    def _edit_alike(self, places, p_params):
        """Edit the images at these places, which have one size; p_params: of the pipeline."""
        pipeline, num_devices = self.pipeline, jax.local_device_count()
        padded = places + places[-1:] * (-len(places) % num_devices)
        prompt_ids, image = pipeline.prepare_inputs(
            [self.prompts[i] for i in padded], [self.images[i] for i in padded]
        )
        images = pipeline(
            prompt_ids.reshape(num_devices, -1, *prompt_ids.shape[1:]),
            image.reshape(num_devices, -1, *image.shape[1:]),
            p_params,
            jax.random.key(self.seed),
            VALIDATION_INFERENCE_STEPS,
            *self.scales,
            jit=True,
        ).images
        return pipeline.numpy_to_pil(local_rows(images))[: len(places)]

    def write(self, step, edits):
        """Write the grid of images before and after, and the animation; return the grid's path."""
        path = self.folder / f"step-{step:06d}.png"
        save_whole(path, validation_grid(list(zip(self.images, edits)), self.prompts).save)
        write_progress(self.folder)
        return path


def load_validation_images(config: Config):
    """Load the images to edit during training: PIL, RGB."""
    try:
        return [load_image(path) for path in config.validation_image]
    except ValueError as error:
        raise ValueError(f"--validation_image {error}") from error


def fit_validation_images(images, sizes):
    """Crop images, PIL, to the sizes nearest to their shapes; sizes: (height, width) of batches."""
    nearest = nearest_sizes(np.reshape([image.size[::-1] for image in images], (-1, 2)), sizes)
    return [
        ImageOps.fit(image, sizes[size][::-1], Image.Resampling.LANCZOS)
        for image, size in zip(images, nearest)
    ]


def validation_grid(pairs, prompts):
    """Draw a tile per edit: before and after, with the instruction below.

    Args:
        pairs: list of (before, after) PIL images; all are fitted into the size of the first, small
            ones enlarged.
        prompts: list of instructions of equal length.

    Returns:
        PIL image, RGB.
    """
    side = max(GRID_IMAGE_SIZE, *pairs[0][0].size)
    size = ImageOps.contain(pairs[0][0], (side, side)).size
    tiles = []
    for pair, prompt in zip(pairs, prompts):
        images = [ImageOps.pad(image, size, color="white") for image in pair]
        tiles.append(captioned(images, prompt))
    # A tile is about twice as wide as high.
    return tile_grid(tiles, max(1, round(math.sqrt(len(tiles) / 2))), GRID_MARGIN)


def step_images(folder):
    """The images FOLDER/step-N.png, sorted, as {N: path}."""
    steps = {}
    for path in Path(folder).glob("step-*.png"):
        if match := re.fullmatch(r"step-(\d+)\.png", path.name):
            steps[int(match[1])] = path
    return dict(sorted(steps.items()))


def drop_step_images(folder, last_step):
    """Remove the images of steps after last_step, and the animation, from a directory."""
    for step, path in step_images(folder).items():
        if step > last_step:
            path.unlink()
    write_progress(folder)


def write_progress(folder):
    """Write FOLDER/progress.gif, an animation of step_images(folder) with the step below each.

    Long runs show GIF_FRAMES evenly spaced images, with the first and the last. Without images
    the file is removed.
    """
    steps, path = step_images(folder), Path(folder, "progress.gif")
    if not steps:
        path.unlink(missing_ok=True)
        return
    shown = np.linspace(0, len(steps) - 1, min(len(steps), GIF_FRAMES)).round().astype(int)
    images = [(step, load_image(steps[step])) for step in np.array(list(steps))[shown]]
    for _, image in images:
        image.thumbnail((GIF_SIDE, GIF_SIDE))
    W, H = np.max([image.size for _, image in images], axis=0)  # resuming may change the images
    frames = []
    for step, image in images:
        frame = Image.new("RGB", (W, H), "white")
        frame.paste(image)
        frames.append(captioned([frame], f"step {step}"))
    milliseconds = [1000 * GIF_SECONDS] * (len(frames) - 1) + [4000 * GIF_SECONDS]
    first, *others = frames
    save_whole(
        path,
        partial(first.save, save_all=True, append_images=others, duration=milliseconds, loop=0),
    )


def write_card(config, pipeline, metrics, repo_id=None):
    """Write the model card of a finished run, OUTPUT_DIR/README.md, with its last images and plot.

    Args:
        config: Config of the run.
        pipeline: that the run trained.
        metrics: last row of metrics.jsonl, or None.
        repo_id: hub id, if the model is published.
    """
    images = list(step_images(Path(config.output_dir, "validation")).values())
    num_steps = metrics["step"] if metrics else config.max_train_steps
    write_model_card(
        config.output_dir,
        name=repo_id or config.output_dir,
        command=this_command(),
        config=asdict(config),
        pipeline_class=pipeline.torch_class_name,
        in_channels=pipeline.unet.in_channels,
        scales=guidance_scales(config, pipeline, num_steps),
        metrics=metrics,
        image=f"validation/{images[-1].name}" if images else None,
    )


def this_command():
    """The shell command that started this program."""
    return shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])


def write_model_card(
    folder,
    *,
    name,
    command,
    config,
    pipeline_class="StableDiffusionInstructPix2PixPipeline",
    in_channels=8,
    scales=(7.5, 1.5),
    metrics=None,
    image=None,
):
    """Write the card of an edit model, FOLDER/README.md.

    Args:
        folder: pipeline directory.
        name: hub id of the model, or its directory if it is not published.
        command: shell command that trained the model.
        config: dict of all flags.
        pipeline_class: the PyTorch class that opens folder.
        in_channels: of the UNet.
        scales: (guidance_scale, image_guidance_scale) to edit with.
        metrics: last row of metrics.jsonl, or None.
        image: path of a validation grid relative to folder, or None.
    """
    base_model = config["pretrained_model_name_or_path"]
    datasets = ", ".join(f"`{directory}`" for directory in config["train_data_dir"])
    is_lora = config.get("lora_rank") is not None and not config["merge_lora"]
    if is_lora:
        opening = open_with_lora(name, pipeline_class, in_channels, config)
    else:
        opening = open_directory(name, pipeline_class)
    R = config["resolution"]  # SDXL's class otherwise resizes images to 1024 pixels
    size = f", height={R}, width={R}" if "XL" in pipeline_class else ""
    s_T, s_I = (f"{scale:g}" for scale in scales)
    shown = f"![before and after, with the instruction]({image})\n" if image else ""
    with_jax = f"""\
On TPU, GPU or CPU, with `edit_cli.py` from the scripts that trained the model:

```sh
python edit_cli.py --model {shlex.quote(name)} --resolution {R} \\
    --guidance_scale {s_T} --image_guidance_scale {s_I} \\
    --input in.jpg --edit "make it red" --output out.png
```
"""
    if is_lora:
        with_jax = (
            "The training command below with `--merge_lora` writes a complete pipeline, for "
            "`edit_cli.py`.\n"
        )
    introduction = f"""\
Edits images by instruction: an InstructPix2Pix of `{base_model}`, trained on {datasets} with JAX.

{shown}
## Use

With PyTorch diffusers:

```python
{opening}
pipeline.to("cuda")
image = load_image("in.jpg")
edited = pipeline(
    "make it red", image{size}, guidance_scale={s_T}, image_guidance_scale={s_I}
).images[0]
edited.save("out.png")
```

{with_jax}"""
    write_readme(folder, name, [], introduction, command, config, metrics)


def write_readme(folder, name, tags, introduction, command, config, metrics):
    """Write a model card, FOLDER/README.md.

    Args:
        folder: directory of the model.
        name: title.
        tags: for the hub, besides the tags of every edit model.
        introduction: Markdown: what the model does and how to use it.
        command, config, metrics: as for write_model_card.

    Source: hub documentation, "Model Cards". The license field is empty: the base model's applies.
    """
    base_model = config["pretrained_model_name_or_path"]
    data = ModelCardData(
        base_model=None if Path(base_model).exists() else base_model,  # a hub id
        library_name="diffusers",
        pipeline_tag="image-to-image",
        tags=["stable-diffusion", "instruct-pix2pix", "image-to-image", "diffusers", "jax", *tags],
        inference=True,
    )
    last_metrics = ""
    if metrics:
        rounded = {
            name: float(f"{value:.4g}") if isinstance(value, float) else value
            for name, value in metrics.items()
        }
        last_metrics = f"### Last metrics\n\n{table_of_values(rounded)}\n"
    if Path(folder, LOSS_PLOT).exists():
        last_metrics = f"![loss of the steps]({LOSS_PLOT})\n\n{last_metrics}"
    text = f"""
# {name}

{introduction}
## Training

```sh
{command}
```

{last_metrics}
### Hyperparameters

{table_of_values(config)}
"""
    write_text(Path(folder, "README.md"), f"---\n{data.to_yaml()}\n---\n{text}")


def open_directory(name, pipeline_class):
    """Python code that opens a pipeline directory or hub id with PyTorch."""
    return f"""\
import torch
from diffusers import {pipeline_class}
from diffusers.utils import load_image

pipeline = {pipeline_class}.from_pretrained(
    {json.dumps(name)}, dtype=torch.float16
)"""


def open_with_lora(name, pipeline_class, in_channels, config):
    """Python code that opens the base model with PyTorch and adds conv_in and the LoRA file."""
    base_model = json.dumps(config["pretrained_model_name_or_path"])
    place = "".join(
        f"{name}={json.dumps(config[name])}, "
        for name in ("revision", "variant")
        if config.get(name)
    )
    vae_class = vae_code = vae_argument = ""
    if vae := config.get("pretrained_vae_model_name_or_path"):
        vae_class, vae_argument = ", AutoencoderKL", "vae=vae, "
        vae_code = f"vae = AutoencoderKL.from_pretrained({json.dumps(vae)}, dtype=torch.float16)\n"
    conv_in, hub_import = json.dumps(f"{name}/{CONV_IN_FILE}"), ""
    if config["push_to_hub"]:
        hub_import = "from huggingface_hub import hf_hub_download\n"
        conv_in = f'hf_hub_download({json.dumps(name)}, "{CONV_IN_FILE}")'
    opens = "from_pretrained"
    unet_code = f"""\
unet = UNet2DConditionModel.from_pretrained(
    {base_model},
    subfolder="unet",
    in_channels={in_channels},
    ignore_mismatched_sizes=True,
    low_cpu_mem_usage=False,
    {place}dtype=torch.float16,
)
unet.load_state_dict(load_file({conv_in}), strict=False)
"""
    if Path(config["pretrained_model_name_or_path"]).is_file():
        opens, place = "from_single_file", ""
        if configs := config["config_name_or_path"]:
            place = f"config={json.dumps(configs)}, "
        unet_code = f"""\
unet = UNet2DConditionModel.from_single_file(
    {base_model}, {place}{'subfolder="unet", ' if place else ""}dtype=torch.float16
)
weights = unet.state_dict() | load_file({conv_in})
unet = UNet2DConditionModel.from_config(unet.config, in_channels={in_channels})
unet.to(torch.float16).load_state_dict(weights)
"""
    return f"""\
import torch
from diffusers import {pipeline_class}, UNet2DConditionModel{vae_class}
from diffusers.utils import load_image
{hub_import}from safetensors.torch import load_file

# The 4-channel UNet that create_modified_unet.py widened.
{unet_code}{vae_code}pipeline = {pipeline_class}.{opens}(
    {base_model}, unet=unet, {vae_argument}{place}dtype=torch.float16
)
pipeline.load_lora_weights({json.dumps(name)})"""


def table_of_values(values):
    """Format a dict as a Markdown table with two columns."""
    cells = {name: repr(value).replace("|", r"\|") for name, value in values.items()}
    return "\n".join(["| | |", "|-|-|", *(f"| {name} | `{cells[name]}` |" for name in cells)])
