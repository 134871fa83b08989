"""Output files of a training run: checkpoints, metrics, validation images, a model card.

Checkpoints are written in the background by orbax-checkpoint:

    checkpoints = Checkpoints("out/checkpoints", total_limit=2)
    if (step := checkpoints.latest()) is not None:
        run, state = checkpoints.read_run(step), checkpoints.read_state(step)
    checkpoints.save(step, state, run)      # returns before the files are written
    checkpoints.close()                     # waits for the last save

A checkpoint contains unsharded NumPy arrays and a dict that identifies the run. Incomplete
checkpoints are never read. With several processes, only process 0 writes. huggingface_hub and wandb
handle their own tokens.
"""

import contextlib
import ctypes
import json
import shlex
import shutil
import textwrap
import zlib
from functools import partial
from pathlib import Path

import httpx2
import jax
import numpy as np
import orbax.checkpoint as ocp
from huggingface_hub import HfApi, ModelCardData, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from PIL import Image, ImageDraw, ImageFont, ImageOps

from command_line import differences, one_line, save_whole
from processes_flax import from_process_0, wait_for_all
from sharding_flax import TrainState, replicate, shard, shard_axes
from training_flags import fixed_flags

ARRAYS_PER_READ = 32  # limits the host memory for reading a checkpoint


class Checkpoints:
    """The checkpoints of one run; one process reads and writes them.

    Args:
        folder: directory; a checkpoint is in FOLDER/STEP.
        total_limit: number of newest checkpoints to keep; None: all.
        first_step: step at which the run starts. Checkpoints of later steps, which are outdated,
            are removed at the first save. None keeps them.
    """

    def __init__(self, folder, total_limit=None, first_step=None):
        self.folder = Path(folder).absolute()
        self.first_step = first_step
        self.folder.mkdir(parents=True, exist_ok=True)
        # No copies: the arrays may take a large part of the host's memory.
        arrays = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
        registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, arrays))
        this_process = ocp.options.MultiprocessingOptions(
            primary_host=jax.process_index(), active_processes={jax.process_index()}
        )
        self.manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=total_limit,
                cleanup_tmp_directories=first_step is not None,  # of killed processes
                multiprocessing_options=this_process,
                create=False,
            ),
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(
                    type_handler_registry=registry, multiprocessing_options=this_process
                ),
                "run": ocp.JsonCheckpointHandler(multiprocessing_options=this_process),
            },
        )

    def latest(self):
        """Step of the newest complete checkpoint, or None."""
        return self.manager.latest_step()

    def save(self, step, state, run):
        """Write a checkpoint in the background, after the previous one is complete.

        Args:
            step: number of completed optimizer steps.
            state: dict of NumPy arrays; must not change until `wait` returns.
            run: JSON-serialisable dict that identifies the run.

        Raises:
            OSError: this checkpoint or the previous one cannot be written; older ones are intact.
        """
        try:
            if self.first_step is not None:
                for later in [s for s in self.manager.all_steps() if s > self.first_step]:
                    self.manager.delete(later)
                self.first_step = None
            needed = sum(x.nbytes for x in state.values())
            free = shutil.disk_usage(self.folder).free
            if free < needed:  # checked first, as orbax logs tracebacks when a write fails
                raise OSError(f"it takes {needed / 1e9:.3g} GB, {free / 1e9:.3g} GB are free")
            self.manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(state), run=ocp.args.JsonSave(run)
                ),
            )
        except Exception as error:
            raise self._close_and_explain(error) from error

    def read_run(self, step):
        """Read the dict that identifies the run.

        Raises:
            ValueError: the checkpoint is missing or damaged.
        """
        return self._read(step, run=ocp.args.JsonRestore())["run"]

    def read_state(self, step, names=None):
        """Read the arrays.

        Args:
            step: step of the checkpoint.
            names: names of the arrays to read; None: all.

        Raises:
            ValueError: the checkpoint is missing or damaged.
        """
        options = {}
        if names is not None:
            as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
            options = dict(
                item=dict.fromkeys(names, 0),
                restore_args=dict.fromkeys(names, as_numpy),
                partial_restore=True,
            )
        return self._read(step, state=ocp.args.PyTreeRestore(**options))["state"]

    def _read(self, step, **items):
        try:
            return self.manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            raise ValueError(
                f"checkpoint {self.folder / str(step)} cannot be read "
                f"({one_line(error, 200)}); remove it to resume from the previous one"
            ) from error

    def wait(self):
        """Wait until the checkpoint is written.

        Raises:
            OSError: the checkpoint cannot be written.
        """
        try:
            self.manager.wait_until_finished()
        except Exception as error:
            raise self._close_and_explain(error) from error

    def close(self):
        """Wait, then stop the threads."""
        self.wait()
        self.manager.close()

    def _close_and_explain(self, error):
        steps = self.manager.all_steps()
        complete = [step for step in steps if (self.folder / str(step)).exists()]
        with contextlib.suppress(Exception):  # close() raises the same error again
            self.manager.close()
        return OSError(
            f"a checkpoint cannot be written to {self.folder} "
            f"({one_line(error, 200)}); "
            + (
                f"the one of step {max(complete)} is complete"
                if complete
                else "none is complete yet"
            )
        )


def tree_checksum(tree):
    """A CRC-32 of the names and bytes of all arrays of a tree."""
    checksum = 0
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        checksum = zlib.crc32(jax.tree_util.keystr(path).encode(), checksum)
        checksum = zlib.crc32(np.ascontiguousarray(x).view(np.uint8), checksum)
    return checksum


def run_identity(config, max_train_steps, dataset, models, params, frozen):
    """A flat JSON dict of all flags, data and weights that must not change on resume."""
    data = dataset.state_dict()
    encoders = models.text_encoder
    first, *second = encoders if isinstance(encoders, tuple) else [encoders]
    modules = models._asdict() | {"text_encoder": first.module}
    modules |= {f"text_encoder_{i}": encoder.module for i, encoder in enumerate(second, 2)}
    configs = {name: dict(module.config) for name, module in modules.items()}
    return fixed_flags(config, "may_change") | {
        "max_train_steps": max_train_steps,
        "configs of the models": zlib.crc32(json.dumps(configs, default=str).encode()),
        "columns of train_data_dir": data["columns"],
        "shards of train_data_dir": data["data"],
        "weights of unet_model_name_or_path": tree_checksum(params),
        "weights of pretrained_model_name_or_path": tree_checksum(
            [frozen["vae"], frozen["text_encoder"]]
        ),
    }


def find_checkpoint(output_dir, resume_from, identity):
    """Find the checkpoint to resume from.

    Args:
        output_dir: the run's directory; its checkpoints are in OUTPUT_DIR/checkpoints.
        resume_from: "latest", "none", or the directory of a checkpoint.
        identity: the run's run_identity.

    Returns:
        (Checkpoints, step, run), with run as it was saved; (None, 0, {}) to start from step 0.

    Raises:
        ValueError: the checkpoint is missing, damaged, or belongs to another run.
    """
    if resume_from == "none":
        return None, 0, {}
    if resume_from == "latest":
        folder = Path(output_dir, "checkpoints")
        if not folder.is_dir():
            return None, 0, {}
        checkpoints = Checkpoints(folder)
        step = checkpoints.latest()
        if step is None:
            return None, 0, {}
        run = checkpoints.read_run(step)
        model = Path(output_dir, "model_index.json")
        is_last = step == run["identity"]["max_train_steps"]
        if (
            is_last
            and model.exists()
            and model.stat().st_mtime > (folder / str(step)).stat().st_mtime
        ):
            return None, 0, {}  # the run is finished; --overwrite_output_dir starts a new one
    else:
        path = Path(resume_from)
        if not (path.is_dir() and path.name.isdecimal()):
            raise ValueError(
                f"--resume_from_checkpoint {resume_from} is not a checkpoint; give latest, none or "
                "its directory, such as OUTPUT_DIR/checkpoints/500"
            )
        checkpoints, step = Checkpoints(path.parent), int(path.name)
        run = checkpoints.read_run(step)

    saved = run["identity"]
    current = json.loads(json.dumps(identity))  # tuples become lists
    if different := differences(saved, dict.fromkeys(saved) | current):
        raise ValueError(
            f"checkpoint {checkpoints.folder / str(step)} belongs to another run: "
            f"{'; '.join(different)}. Change that back, name another --output_dir, or start again "
            "with --resume_from_checkpoint none"
        )
    return checkpoints, step, run


def flatten_by_name(tree):
    """Flatten a tree into a dict with names such as "opt_state/0/mu/conv_in/kernel"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def checkpoint_shapes(params, tx, num_averages):
    """Unsharded shapes of a checkpoint's arrays; params: shapes of the UNet's parameters."""
    opt_state = jax.eval_shape(tx.init, params)
    return {"params": params, "opt_state": opt_state, "ema": [params] * num_averages}


def read_state(checkpoints, step, shapes):
    """Read a checkpoint onto the devices; process 0 reads it in parts and broadcasts them.

    Args:
        checkpoints: Checkpoints on process 0, None on other processes.
        step: step of the checkpoint.
        shapes: see checkpoint_shapes.

    Returns:
        (TrainState, list of averages).
    """
    shape_of, axis_of = (
        flatten_by_name(shapes),
        flatten_by_name(shard_axes(shapes, jax.device_count())),
    )
    names, arrays = list(shape_of), []
    for start in range(0, len(names), ARRAYS_PER_READ):
        part = names[start : start + ARRAYS_PER_READ]
        saved = checkpoints.read_state(step, part) if checkpoints else {}
        wait_for_all("process 0 has read")
        for name in part:
            shape = shape_of[name]
            x = saved.pop(name) if checkpoints else np.zeros(shape.shape, shape.dtype)
            arrays.append(shard(from_process_0(x), axis_of[name]))
        release_memory()
    tree = jax.tree.unflatten(jax.tree.structure(shapes), arrays)
    return TrainState(replicate(np.int32(step)), tree["params"], tree["opt_state"]), tree["ema"]


def release_memory():
    """Return freed memory to the system, of which glibc otherwise retains gigabytes."""
    if malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        malloc_trim(0)


# Metrics, validation images, model card

FONT_SIZE = 14  # pixels
LINE_HEIGHT = 20
CHARACTER_WIDTH = 7  # on average

# Files of a run that are not part of the model: checkpoints, other weights, logs, hidden files.
UNPUBLISHED_PATTERNS = (
    "checkpoints/*",
    "ema_snapshots/*",
    "unet_raw/*",
    "profile/*",
    "wandb/*",
    "wandb_run_id",
    ".*",
    "*/.*",
)


def write_text(path, text):
    """Write a text file so that no reader sees a partial file."""
    save_whole(path, partial(Path.write_text, data=text, encoding="utf-8"))


class MetricsLog:
    """Write metrics to FOLDER/metrics.jsonl, one JSON object per line, and optionally to wandb.

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
        self.path = folder / "metrics.jsonl"
        write_text(self.path, "".join(lines_until_step(self.path, first_step)))

    def write(self, row):
        """Append a row, a dict of numbers or None that contains "step"."""
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if self.wandb_run is not None:
            self.wandb_run.log(row)

    def images(self, name, path, caption, step):
        """Log the image file at path to wandb, if it is used."""
        if self.wandb_run is not None:
            import wandb

            self.wandb_run.log({name: wandb.Image(str(path), caption=caption), "step": step})

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


def validation_grid(pairs, prompts):
    """Draw one row per edit: before and after, with the instruction below.

    Args:
        pairs: list of (before, after) PIL images; all are padded to the size of the first.
        prompts: list of instructions of equal length.

    Returns:
        PIL image, RGB.
    """
    from diffusers.utils import make_image_grid  # seconds to import

    W, H = pairs[0][0].size
    texts = [textwrap.fill(prompt, max(1, 2 * W // CHARACTER_WIDTH)) for prompt in prompts]
    text_height = LINE_HEIGHT * (1 + max(text.count("\n") for text in texts))
    font = ImageFont.load_default(FONT_SIZE)
    tiles = []
    for pair, text in zip(pairs, texts):
        fitted = [ImageOps.pad(image.convert("RGB"), (W, H), color="white") for image in pair]
        tile = Image.new("RGB", (2 * W, H + text_height), "white")
        tile.paste(make_image_grid(fitted, rows=1, cols=2))
        ImageDraw.Draw(tile).text((0, H), text, fill="black", font=font)
        tiles.append(tile)
    return make_image_grid(tiles, rows=len(tiles), cols=1)


def write_model_card(
    folder,
    *,
    name,
    command,
    config,
    pipeline_class="StableDiffusionInstructPix2PixPipeline",
    metrics=None,
    image=None,
):
    """Write the model card, FOLDER/README.md.

    Args:
        folder: pipeline directory.
        name: hub id of the model, or its directory if it is not published.
        command: shell command that trained the model.
        config: dict of all flags.
        pipeline_class: the PyTorch class that opens folder.
        metrics: last row of metrics.jsonl, or None.
        image: path of a validation grid relative to folder, or None.

    Source: hub documentation, "Model Cards". The license field is empty: the base model's applies.
    """
    base_model, dataset = config["pretrained_model_name_or_path"], config["train_data_dir"]
    data = ModelCardData(
        base_model=None if Path(base_model).exists() else base_model,  # a hub id
        library_name="diffusers",
        pipeline_tag="image-to-image",
        tags=["stable-diffusion", "instruct-pix2pix", "image-to-image", "diffusers", "jax"],
        inference=True,
    )
    R = config["resolution"]  # SDXL's class otherwise resizes images to 1024 pixels
    size = f", height={R}, width={R}" if "XL" in pipeline_class else ""
    shown = f"![before and after, with the instruction]({image})\n" if image else ""
    last_metrics = f"### Last metrics\n\n{markdown_table(metrics)}\n" if metrics else ""
    text = f"""
# {name}

Edits images by instruction: an InstructPix2Pix of `{base_model}`, trained on `{dataset}` with JAX.

{shown}
## Use

With PyTorch diffusers:

```python
import torch
from diffusers import {pipeline_class}
from diffusers.utils import load_image

pipeline = {pipeline_class}.from_pretrained(
    {json.dumps(name)}, torch_dtype=torch.float16
)
pipeline.to("cuda")
image = load_image("in.jpg")
edited = pipeline(
    "make it red", image{size}, guidance_scale=7.5, image_guidance_scale=1.5
).images[0]
edited.save("out.png")
```

On TPU, GPU or CPU, with `edit_cli.py` from the scripts that trained the model:

```sh
python edit_cli.py --model {shlex.quote(name)} --resolution {config["resolution"]} \\
    --input in.jpg --edit "make it red" --output out.png
```

## Training

```sh
{command}
```

{last_metrics}
### Hyperparameters

{markdown_table(config)}
"""
    write_text(Path(folder, "README.md"), f"---\n{data.to_yaml()}\n---\n{text}")


def markdown_table(values):
    """Format a dict as a Markdown table with two columns."""
    cells = {name: repr(value).replace("|", r"\|") for name, value in values.items()}
    return "\n".join(["| | |", "|-|-|", *(f"| {name} | `{cells[name]}` |" for name in cells)])


def check_hub(repo_id, folder):
    """Create the hub repository before training, to check that the upload will be possible.

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
    if not (
        token.isascii() and token.isprintable()
    ):  # the HTTP library's error would quote the token
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
