"""The model card of a run, and its upload to the hub.

huggingface_hub handles its own token.
"""

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData

from diffusers_flax.loading.directories import CONV_IN_FILE, LORA_FILE
from diffusers_flax.messages import one_line
from diffusers_flax.training.checkpoints import CHECKPOINTS_DIR
from diffusers_flax.training.flags import final_file
from diffusers_flax.training.reports import LOSS_PLOT, step_images

# Files of a run that do not belong to the model: checkpoints, other weights, logs, hidden files.
UNPUBLISHED_FOLDERS = (CHECKPOINTS_DIR, "ema_snapshots", "unet_raw", "profile", "wandb")
UNPUBLISHED_PATTERNS = [*(f"{x}/*" for x in UNPUBLISHED_FOLDERS), "wandb_run_id", ".*", "*/.*"]


def write_card(config, pipeline, metrics, scales):
    """Write the model card of a finished run, with its last images and plot.

    Args:
        config: flags of the run.
        pipeline: the pipeline that the run trained.
        metrics: last row of metrics.jsonl, or None.
        scales: of guidance_scales.
    """
    name = config.hub_model_id if config.push_to_hub else config.output_dir
    base_model, R = config.pretrained_model_name_or_path, config.resolution
    datasets = ", ".join(f"`{directory}`" for directory in config.train_data_dir)
    # SDXL's class otherwise resizes images to 1024 pixels
    cls = pipeline.torch_class_name
    size = f", height={R}, width={R}" if "XL" in cls else ""
    s_T, s_I = (f"{scale:g}" for scale in scales)
    images = list(step_images(Path(config.output_dir, "validation")).values())
    shown = ""
    if images:
        shown = f"![before and after, with the instruction](validation/{images[-1].name})\n"
    reference = " --reference reference.jpg" * pipeline.unet.takes_reference
    if final_file(config) == LORA_FILE:
        opening = open_with_lora(name, pipeline, config)
        with_jax = "With `--merge_lora` the command below writes a pipeline for `edit_cli.py`.\n"
    else:
        opening = f"pipeline = {cls}.from_pretrained({json.dumps(name)}, dtype=torch.float16)"
        with_jax = f"""\
On TPU, GPU or CPU, with `edit_cli.py` from the scripts that trained the model:

```sh
python edit_cli.py --model {shlex.quote(name)} --resolution {R} \\
    --guidance_scale {s_T} --image_guidance_scale {s_I} \\
    --input in.jpg{reference} --edit "make it red" --output out.png
```
"""
    with_torch = f"""\
With PyTorch diffusers:

```python
import torch
from diffusers import {cls}
from diffusers.utils import load_image

{opening}
pipeline.to("cuda")
image = load_image("in.jpg")
edited = pipeline(
    "make it red", image{size}, guidance_scale={s_T}, image_guidance_scale={s_I}
).images[0]
edited.save("out.png")
```
"""
    if reference:
        with_torch = "PyTorch's InstructPix2Pix pipeline refuses a UNet for two images.\n"
    elif pipeline.scheduler.is_flow:
        with_torch = "PyTorch's InstructPix2Pix pipeline refuses the scheduler of a flow.\n"
    introduction = f"""\
Edits images by instruction: an InstructPix2Pix of `{base_model}`, trained on {datasets} with JAX.

{shown}
## Use

{with_torch}
{with_jax}"""
    write_readme(config, name, introduction, metrics)


def open_with_lora(name, pipeline, config):
    """Python code that opens the base model with PyTorch and adds conv_in and the LoRA file."""
    base_model, conv_in = json.dumps(config.pretrained_model_name_or_path), f"{name}/{CONV_IN_FILE}"
    conv_in = json.dumps(conv_in)
    if config.push_to_hub:
        conv_in = f'hf_hub_download({json.dumps(name)}, "{CONV_IN_FILE}")'
    return f"""\
from diffusers import UNet2DConditionModel
from huggingface_hub import hf_hub_download
from safetensors.torch import load_file

# The 4-channel UNet that create_modified_unet.py widened.
unet = UNet2DConditionModel.from_pretrained(
    {base_model},
    subfolder="unet",
    in_channels={pipeline.unet.in_channels},
    ignore_mismatched_sizes=True,
    low_cpu_mem_usage=False,
    dtype=torch.float16,
)
unet.load_state_dict(load_file({conv_in}), strict=False)
pipeline = {pipeline.torch_class_name}.from_pretrained(
    {base_model}, unet=unet, dtype=torch.float16
)
pipeline.load_lora_weights({json.dumps(name)})"""


def write_readme(config, name, introduction, metrics, tags=()):
    """Write a model card with command, last metrics and all flags of a run.

    Args:
        config: flags of the run, a dataclass.
        name: title, the hub id of the model or its directory.
        introduction: Markdown: what the model does and how to use it.
        metrics: last row of metrics.jsonl, or None.
        tags: for the hub, besides the tags of every edit model.

    Source: hub documentation, "Model Cards". The license field is empty: the base model's applies.
    """
    folder, base_model = config.output_dir, config.pretrained_model_name_or_path
    data = ModelCardData(
        base_model=None if Path(base_model).exists() else base_model,  # a hub id
        library_name="diffusers",
        pipeline_tag="image-to-image",
        tags=["stable-diffusion", "instruct-pix2pix", "image-to-image", "diffusers", "jax", *tags],
        inference=True,
    )
    plot = f"![loss of the steps]({LOSS_PLOT})\n" if Path(folder, LOSS_PLOT).exists() else ""
    text = f"""
# {name}

{introduction}
## Training

```sh
{shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])}
```

{plot}
Last metrics and flags:

```json
{json.dumps({"metrics": metrics, "flags": asdict(config)}, indent=2)}
```
"""
    ModelCard(f"---\n{data}\n---\n{text}").save(Path(folder, "README.md"))


# The hub


def check_hub(config):
    """Create the hub repository before training, to check that an upload is possible.

    Args:
        config: flags of the run, with hub_model_id NAME or OWNER/NAME; None: output_dir's name.

    Returns:
        OWNER/NAME.

    Raises:
        ValueError: no or insufficient token, or no answer from the hub.
    """
    repo_id = config.hub_model_id or Path(config.output_dir).resolve().name
    try:
        return HfApi().create_repo(repo_id, exist_ok=True).repo_id
    except Exception as error:
        raise ValueError(
            f"--push_to_hub: {repo_id} cannot be made: {one_line(error)}; run `hf auth login` or "
            "set HF_TOKEN, with a token with write access, or leave out --push_to_hub"
        ) from error


def push_to_hub(folder, repo_id):
    """Upload a trained model, without the files of UNPUBLISHED_PATTERNS.

    Args:
        folder: pipeline directory with its README.md.
        repo_id: OWNER/NAME, from check_hub.

    Returns:
        URL of the model.

    Raises:
        ValueError: the upload failed; the message gives the command to upload the model by hand.
    """
    try:
        commit = HfApi().upload_folder(
            folder_path=folder,
            repo_id=repo_id,
            commit_message="Model trained with flax_train_instruct_pix2pix.py",
            ignore_patterns=UNPUBLISHED_PATTERNS,
        )
    # Any error: the user must learn that training succeeded and where the model is.
    except Exception as error:
        by_hand = ["hf", "upload", repo_id, str(folder), "."]
        by_hand += [word for pattern in UNPUBLISHED_PATTERNS for word in ("--exclude", pattern)]
        raise ValueError(
            f"the model is in {folder} but was not uploaded: {one_line(error)}; to upload it "
            f"later: {shlex.join(by_hand)}"
        ) from error
    return str(commit.repo_url)
