"""The output directory of a run: check and lock it, write the final model and its card, publish.

huggingface_hub handles its own token.
"""

import contextlib
import json
import math
import shlex
import shutil
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import jax
import numpy as np
from flax.traverse_util import flatten_dict
from huggingface_hub import HfApi, ModelCardData, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from diffusers_flax.command_line import ask_before_replacing
from diffusers_flax.generating.defaults import write_defaults
from diffusers_flax.loading.directories import COMPONENTS, CONV_IN_FILE, INDEX_NAME, LORA_FILE
from diffusers_flax.loading.files import read_json, write_text
from diffusers_flax.messages import differences, one_line
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.training.checkpoints import CHECKPOINTS_DIR, check_goes_on
from diffusers_flax.training.flags import FINAL_FILES, Config, final_file, fixed_flags, flag
from diffusers_flax.training.lora import fold_lora, read_lora, read_record, save_conv_in, save_lora
from diffusers_flax.training.metrics import LOSS_PLOT, lines_until_step
from diffusers_flax.training.models import (
    WEIGHTS,
    checksums,
    is_sdxl,
    load_models,
    load_text_encoder,
    lora_options,
    mixed_precision_dtype,
    params_beside_unet,
    to_float32,
)
from diffusers_flax.training.processes import lock_folder, on_process_0
from diffusers_flax.training.validation import NUM_INFERENCE_STEPS, guidance_scales, step_images

# Files of a run that do not belong to the model: checkpoints, other weights, logs, hidden files.
UNPUBLISHED_PATTERNS = (
    f"{CHECKPOINTS_DIR}/*",
    "ema_snapshots/*",
    "unet_raw/*",
    "profile/*",
    "wandb/*",
    "wandb_run_id",
    ".*",
    "*/.*",
)


# Flags that differ between starts of one command.
OF_A_START = {"output_dir", "compilation_cache_dir", "coordinator_address", "num_processes"}
OF_A_START |= {"process_id", "dataloader_num_workers"}
UPLOADED = ".uploaded"  # marks a finished run whose model is on the hub


def check_run_dir(config: Config) -> None:
    """Raise a ValueError if output_dir cannot be written or its content would be lost."""
    if not config.output_dir:
        raise ValueError("--output_dir is empty; name a directory")
    output_dir, given = Path(config.output_dir), flag(config, "output_dir")
    if output_dir.is_file():
        raise ValueError(f"{given} is a file; name a directory")
    sources = ("pretrained_model_name_or_path", "unet_model_name_or_path")
    for name in (*sources, "pretrained_vae_model_name_or_path"):
        value = getattr(config, name)
        if value and Path(value).resolve().is_relative_to(output_dir.resolve()):
            raise ValueError(f"{given} is or contains {flag(config, name)}; name another directory")
    if output_dir.resolve() in [Path(directory).resolve() for directory in config.train_data_dir]:
        raise ValueError(f"{given} is --train_data_dir too; name another directory")
    has_model = any((output_dir / name).exists() for name in FINAL_FILES)
    # A run that crashed while it wrote its final files leaves this file, too, and checkpoints.
    if not any(output_dir.glob(f"{CHECKPOINTS_DIR}/*")):
        has_model = has_model or (output_dir / CONV_IN_FILE).exists()
    if has_model and not (config.overwrite_output_dir or merges_finished_run(config)):
        check_goes_on(config, None if config.num_train_epochs else config.max_train_steps)
    files = (*FINAL_FILES, CONV_IN_FILE, CHECKPOINTS_DIR, "metrics.jsonl", "wandb")
    is_run = any((output_dir / name).exists() for name in files)
    others = (config.cache_latents, config.compilation_cache_dir, *config.train_data_dir)
    others = [Path(path).expanduser() for path in others if path]
    replaces = config.overwrite_output_dir or is_run
    # Only process 0 writes to its directory.
    on_process_0(lambda: ask_before_replacing("output_dir", output_dir, replaces, others=others))


def says_finished(config: Config, flags: Any = None) -> bool:
    """Whether output_dir has the model of a finished run of the same command; if so, say it.

    Args:
        config: Config.
        flags: another program's flags that identify the run instead of config.
    """
    folder, flags = Path(config.output_dir), flags or config
    record, files = folder / "config.json", [folder / final_file(config)]
    files += [folder / INDEX_NAME] if config.merge_lora else []
    files += [folder / UPLOADED] if config.push_to_hub else []
    if config.overwrite_output_dir or not all(path.exists() for path in (record, *files)):
        return False
    # A run writes its flags at the start, its model at the end.
    if max(path.stat().st_mtime_ns for path in files) < record.stat().st_mtime_ns:
        return False
    saved, now = read_json(record), json.loads(json.dumps(asdict(flags), default=str))
    if any(saved.get(name) != now[name] for name in now.keys() - OF_A_START):
        return False
    if jax.process_index() == 0:
        print(f"{folder} has the model of this run, which is finished; nothing is left to do")
    return True


def merges_finished_run(config: Config) -> bool:
    """Whether only --merge_lora is left to do: output_dir has the LoRA of a run of this length."""
    file, pipeline = (Path(config.output_dir, name) for name in FINAL_FILES)
    is_replaced = config.overwrite_output_dir or pipeline.exists()
    if not config.merge_lora or is_replaced or not file.exists():
        return False
    saved = read_record(file)
    if saved is None:
        return True  # merge_lora says what is wrong with the file
    if config.num_train_epochs is not None:  # without the data the number of steps is unknown
        return config.num_train_epochs == saved.get("num_train_epochs")
    return config.max_train_steps == saved.get("max_train_steps")


@contextlib.contextmanager
def lock_output_dir(config: Config):
    """A context that locks --output_dir for this run; all processes enter it together.

    Raises:
        ValueError: another run uses the directory or has just written a model to it.
    """
    output_dir = Path(config.output_dir)
    final = output_dir / final_file(config)
    model_before = modified_at(final)
    with contextlib.ExitStack() as stack:

        def lock():
            stack.enter_context(lock_folder(output_dir))
            # --overwrite_output_dir replaces only a model from before the lock was requested.
            if modified_at(final) != model_before:
                raise ValueError(
                    f"a run that has just ended has written a model to --output_dir {output_dir}; "
                    "name another directory, or replace the model with --overwrite_output_dir"
                )

        on_process_0(lock)
        yield


def modified_at(path):
    """Modification time of a file in ns, or None."""
    return path.stat().st_mtime_ns if path.exists() else None


def write_flags(folder, flags):
    """Write the flags of a run, a dataclass, to FOLDER/config.json."""
    write_text(Path(folder, "config.json"), json.dumps(asdict(flags), indent=2) + "\n")


class FinalModel:
    """The model that a run writes at its end, with its card, and uploads.

    Args:
        config: Config of the run.
        models, pipeline, frozen: of load_models.
        identity: run_identity of the run.

    Raises:
        ValueError: the model cannot be uploaded.
    """

    def __init__(self, config, models, pipeline, frozen, identity):
        self.config, self.unet, self.pipeline = config, models.unet, pipeline
        self.identity, self.output_dir = identity, Path(config.output_dir)
        # With LoRA, --merge_lora reads the files again.
        self.frozen_params = {} if config.lora_rank is not None else params_beside_unet(frozen)
        check = partial(check_hub, config.hub_model_id, self.output_dir)
        self.repo_id = on_process_0(check) if config.push_to_hub else None

    def save(self, weights, metrics):
        """Write the model and its card; final_file(config) comes last and marks a finished run.

        Args:
            weights: of TrainRun.final_weights.
            metrics: last row of metrics.jsonl, or None.
        """
        config, output_dir = self.config, self.output_dir
        if "unet_raw" in weights:
            params = weights["unet_raw"]
            if config.lora_rank is not None:
                params = merged_unet(config, params)
            self.unet.save_pretrained(output_dir / "unet_raw", params=params)
        write_card(config, self.pipeline, metrics, self.repo_id)
        write_scales(config, self.pipeline, metrics)
        remove_replaced_model(config, self.pipeline)
        if config.lora_rank is not None:
            save_conv_in(output_dir / CONV_IN_FILE, weights["unet"])
            sums = {name: self.identity[name] for name in WEIGHTS}
            run = lora_record(config, self.identity["max_train_steps"], sums)
            save_lora(output_dir / LORA_FILE, weights["unet"], **lora_options(config), run=run)
            if config.merge_lora:
                merge_lora(config, self.unet.dtype)
        else:
            params = {"unet": weights["unet"], **self.frozen_params}
            self.pipeline.save_pretrained(output_dir, params)

    def upload(self):
        """Upload output_dir to the hub, with --push_to_hub."""
        if self.repo_id:
            print(f"uploaded {push_to_hub(self.output_dir, self.repo_id)}")
            (self.output_dir / UPLOADED).touch()


def remove_replaced_model(config, pipeline):
    """Remove the files of a replaced model that the new model lacks.

    Args:
        config: Config of the run.
        pipeline: the pipeline that the run trains.
    """
    output_dir, is_lora_only = Path(config.output_dir), final_file(config) == LORA_FILE
    components = {} if is_lora_only else pipeline.components
    index = output_dir / INDEX_NAME
    if index.exists():  # without it, directories of these names are not components
        for name in COMPONENTS:
            if components.get(name) is None:
                folder = output_dir / name
                if folder.is_symlink():
                    folder.unlink()
                else:
                    shutil.rmtree(folder, ignore_errors=True)  # a mount point stays, empty
    for file in [index] if is_lora_only else [output_dir / LORA_FILE, output_dir / CONV_IN_FILE]:
        file.unlink(missing_ok=True)


def merge_lora(config: Config, dtype):
    """Write the merged pipeline of a finished run with LoRA, read from its files, to output_dir.

    Args:
        config: as for load_models, with the output_dir of the run.
        dtype: compute dtype of the run.

    Returns:
        The pipeline, without its parameters.

    Raises:
        ValueError: the run had other flags or models.
    """
    file, is_xl = Path(config.output_dir, LORA_FILE), is_sdxl(config)
    trained, saved = read_lora(file, file.with_name(CONV_IN_FILE))
    flags = lora_identity(config, {})
    if different := differences(saved, flags):
        raise ValueError(
            f"{file} belongs to another run: {'; '.join(different)}. Change that back, or start "
            "again with --overwrite_output_dir"
        )
    _, pipeline, frozen, params = load_models(config, dtype)
    for name, checksum in checksums(frozen, params).items():
        if saved.get(name) != checksum:
            raise ValueError(
                f"{file} belongs to another run: the {name} are not those it was trained from; "
                "give the models named in its config.json"
            )
    shapes, expected = (
        {name: x.shape for name, x in flatten_dict(tree, sep="/").items()}
        for tree in (trained, params)
    )
    if different := sorted(dict(shapes.items() ^ expected.items())):
        raise ValueError(
            f"{file} or {CONV_IN_FILE} next to it is damaged: missing, unexpected or of the wrong "
            f"shape: {', '.join(different)}; copy both files again"
        )
    others = {"vae": frozen["vae"]}  # in float32 already
    del frozen, params  # free memory
    _, others["text_encoder"] = load_text_encoder(config, np.float32, is_xl, to_float32)
    others = params_beside_unet(others)
    pipeline.save_pretrained(config.output_dir, {"unet": merged_unet(config, trained), **others})
    return pipeline


def lora_identity(config: Config, checksums):
    """The flags and checksums, as JSON, that must be the same when --merge_lora is given later.

    For the length of the run see merges_finished_run.
    """
    flags = fixed_flags(config, "may_change")
    del flags["max_train_steps"]
    flags["lora_alpha"] = config.lora_alpha or config.lora_rank
    return json.loads(json.dumps(flags | checksums))


def lora_record(config: Config, max_train_steps, checksums):
    """The record of a run in its LoRA file: lora_identity and the length in steps and epochs."""
    length = {"max_train_steps": max_train_steps, "num_train_epochs": config.num_train_epochs}
    return lora_identity(config, checksums) | length


def merged_unet(config: Config, trained):
    """Read the UNet's files again and merge the LoRA; returns float32 parameters.

    Args:
        config: as for load_models.
        trained: the UNet's trained parameters.
    """
    fold = partial(fold_lora, trained=trained, rank=config.lora_rank, alpha=config.lora_alpha)
    return FlaxUNet2DConditionModel.from_pretrained(config.unet_model_name_or_path, convert=fold)[1]


def merge_finished_run(config: Config):
    """Write the merged pipeline of a finished run with LoRA; all processes call it together."""
    output_dir = Path(config.output_dir)

    def merge():
        repo_id = check_hub(config.hub_model_id, output_dir) if config.push_to_hub else None
        pipeline = merge_lora(config, mixed_precision_dtype(config))
        rows = lines_until_step(output_dir / "metrics.jsonl", math.inf)
        write_card(config, pipeline, json.loads(rows[-1]) if rows else None, repo_id)
        write_flags(output_dir, config)
        (output_dir / INDEX_NAME).touch()  # see says_finished
        print(f"merged {output_dir / LORA_FILE} without training; saved {output_dir}")
        if repo_id:
            print(f"uploaded {push_to_hub(output_dir, repo_id)}")

    on_process_0(merge)


# The model card


def scales_of_run(config, pipeline, metrics):
    """guidance_scales of a run; metrics: last row of metrics.jsonl, or None."""
    num_steps = metrics["step"] if metrics else config.max_train_steps
    return guidance_scales(config, pipeline, num_steps)


def write_scales(config, pipeline, metrics):
    """Write the scales and steps that programs take for the model of a run."""
    s_T, s_I = scales_of_run(config, pipeline, metrics)
    scales = dict(guidance_scale=s_T, image_guidance_scale=s_I)
    write_defaults(config.output_dir, **scales, num_inference_steps=NUM_INFERENCE_STEPS)


def write_card(config, pipeline, metrics, repo_id=None):
    """Write the model card of a finished run, with its last images and plot.

    Args:
        config: Config of the run.
        pipeline: the pipeline that the run trained.
        metrics: last row of metrics.jsonl, or None.
        repo_id: hub id, if the model is published.
    """
    name, pipeline_class = repo_id or config.output_dir, pipeline.torch_class_name
    datasets = ", ".join(f"`{directory}`" for directory in config.train_data_dir)
    R = config.resolution  # SDXL's class otherwise resizes images to 1024 pixels
    size = f", height={R}, width={R}" if "XL" in pipeline_class else ""
    s_T, s_I = (f"{scale:g}" for scale in scales_of_run(config, pipeline, metrics))
    images = list(step_images(Path(config.output_dir, "validation")).values())
    shown = ""
    if images:
        shown = f"![before and after, with the instruction](validation/{images[-1].name})\n"
    if final_file(config) == LORA_FILE:
        opening = open_with_lora(name, pipeline, config)
        with_jax = (
            "The training command below with `--merge_lora` writes a complete pipeline, for "
            "`edit_cli.py`.\n"
        )
    else:
        opening = open_directory(name, pipeline_class)
        with_jax = f"""\
On TPU, GPU or CPU, with `edit_cli.py` from the scripts that trained the model:

```sh
python edit_cli.py --model {shlex.quote(name)} --resolution {R} \\
    --guidance_scale {s_T} --image_guidance_scale {s_I} \\
    --input in.jpg --edit "make it red" --output out.png
```
"""
    base_model = config.pretrained_model_name_or_path
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
    write_readme(config, name, introduction, metrics)


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
{shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])}
```

{last_metrics}
### Hyperparameters

{table_of_values(asdict(config))}
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


def open_with_lora(name, pipeline, config):
    """Python code that opens the base model with PyTorch and adds conv_in and the LoRA file."""
    base_model, pipeline_class = config.pretrained_model_name_or_path, pipeline.torch_class_name
    is_file, base_model = Path(base_model).is_file(), json.dumps(base_model)
    in_channels = pipeline.unet.in_channels
    place = "".join(
        f"{name}={json.dumps(getattr(config, name))}, "
        for name in ("revision", "variant")
        if getattr(config, name)
    )
    vae_class = vae_code = vae_argument = ""
    if vae := config.pretrained_vae_model_name_or_path:
        vae_class, vae_argument = ", AutoencoderKL", "vae=vae, "
        vae_code = f"vae = AutoencoderKL.from_pretrained({json.dumps(vae)}, dtype=torch.float16)\n"
    conv_in, hub_import = json.dumps(f"{name}/{CONV_IN_FILE}"), ""
    if config.push_to_hub:
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
    if is_file:
        opens, place = "from_single_file", ""
        if configs := config.config_name_or_path:
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


# The hub


def check_hub(repo_id, folder):
    """Create the hub repository before training, to check that an upload is possible.

    Args:
        repo_id: NAME or OWNER/NAME; None: the name of folder.
        folder: directory of the model.

    Returns:
        OWNER/NAME.

    Raises:
        ValueError: no or insufficient token, or no answer from the hub.
    """
    log_in = (
        "run `hf auth login` or set HF_TOKEN, with a token with write access, or leave "
        "out --push_to_hub"
    )
    token = get_token()
    if token is None:
        raise ValueError(f"--push_to_hub: nobody is logged in to the hub; {log_in}")
    # The HTTP library's error would quote the token.
    if not (token.isascii() and token.isprintable()):
        raise ValueError(f"--push_to_hub: the token contains an invalid character; {log_in}")
    repo_id = repo_id or Path(folder).resolve().name
    hub = HfApi()
    try:
        user = hub.whoami()
        if "/" not in repo_id:
            repo_id = f"{user['name']}/{repo_id}"
        hub.create_repo(repo_id, exist_ok=True)
    except HFValidationError as error:
        raise ValueError(f"--hub_model_id {repo_id}: {one_line(error)}") from error
    # httpx2's errors are not OSErrors; a ValueError means that the response is not from the hub.
    except (httpx2.HTTPError, OSError, ValueError) as error:
        refused = isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403)
        remedy = log_in if refused else "check network and HF_ENDPOINT, or leave out --push_to_hub"
        raise ValueError(
            f"--push_to_hub: the hub at {hub.endpoint}: {one_line(error)}; {remedy}"
        ) from error
    # A read-only token passes the calls above if the repository exists, but the upload would fail.
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ValueError(f"--push_to_hub: the token of {user['name']} is read-only; {log_in}")
    return repo_id


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
            ignore_patterns=list(UNPUBLISHED_PATTERNS),
        )
    # Any error: the user must learn that training succeeded and where the model is.
    except Exception as error:
        # huggingface_hub wraps the error of one file in a RuntimeError without its text.
        reason = error.__cause__ if type(error) is RuntimeError and error.__cause__ else error
        by_hand = ["hf", "upload", repo_id, str(folder), "."]
        by_hand += [word for pattern in UNPUBLISHED_PATTERNS for word in ("--exclude", pattern)]
        raise ValueError(
            f"the model is in {folder} but was not uploaded: {one_line(reason)}; to upload it "
            f"later: {shlex.join(by_hand)}"
        ) from error
    return str(commit.repo_url)
