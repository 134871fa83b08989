"""What a training run writes: checkpoints, metrics, validation images, a model card.

Checkpoints are written in the background by orbax-checkpoint:

    checkpoints = Checkpoints("out/checkpoints", total_limit=2)
    if (step := checkpoints.latest()) is not None:
        run, state = checkpoints.read_run(step), checkpoints.read_state(step)
    checkpoints.save(step, state, run)      # returns before the files are written
    checkpoints.close()                     # waits for the last save

A checkpoint is a dict of whole NumPy arrays, however they were sharded, and a dict that identifies
the run. An incomplete checkpoint is never read. On a slice process 0 alone writes. Tokens are
handled by huggingface_hub and wandb.
"""

import contextlib
import ctypes
import json
import os
import shlex
import shutil
import textwrap
import zlib
from pathlib import Path

import httpx2
import jax
import numpy as np
import orbax.checkpoint as ocp
from huggingface_hub import HfApi, ModelCardData, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from PIL import Image, ImageDraw, ImageFont, ImageOps

from command_line import one_line
from processes_flax import from_process_0, wait_for_all
from sharding_flax import TrainState, replicate, shard, shard_axes
from training_flags import fixed_flags

ARRAYS_AT_ONCE = 32  # arrays of a checkpoint that the host holds while it reads one


class Checkpoints:
    """The checkpoints of one run; one process uses it, the others need not know.

    Args:
        folder: they lie in FOLDER/STEP.
        total_limit: so many are kept, the oldest go; None keeps all.
        first_step: steps the run has done; checkpoints of later ones, which are of another run or
            made anew, are removed when the first is saved. None keeps them.
    """

    def __init__(self, folder, total_limit=None, first_step=None):
        self.folder = Path(folder).absolute()
        self.first_step = first_step
        self.folder.mkdir(parents=True, exist_ok=True)
        # Arrays are handed over, not copied: their memory may be a good part of the host's.
        arrays = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
        registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, arrays))
        this_process = ocp.options.MultiprocessingOptions(
            primary_host=jax.process_index(), active_processes={jax.process_index()}
        )
        self.manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=total_limit,
                cleanup_tmp_directories=first_step is not None,  # of starts that were killed
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
        """Write a checkpoint in the background; waits for the one before.

        Args:
            step: optimizer steps done.
            state: dict of NumPy arrays; not to be changed before `wait` has returned.
            run: what identifies the run, for JSON.

        Raises:
            OSError: it, or the one before, cannot be written; older ones are as they were.
        """
        try:
            if self.first_step is not None:
                for later in [s for s in self.manager.all_steps() if s > self.first_step]:
                    self.manager.delete(later)
                self.first_step = None
            needed = sum(x.nbytes for x in state.values())
            free = shutil.disk_usage(self.folder).free
            if free < needed:  # before it starts: a write that fails half-way is noisy
                raise OSError(f"it takes {needed / 1e9:.3g} GB, {free / 1e9:.3g} GB are free")
            self.manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(state), run=ocp.args.JsonSave(run)
                ),
            )
        except Exception as error:
            raise self._fault(error) from error

    def read_run(self, step):
        """What identifies the run, as it was saved.

        Raises:
            ValueError: there is no such checkpoint, or it is damaged.
        """
        return self._read(step, run=ocp.args.JsonRestore())["run"]

    def read_state(self, step, names=None):
        """The arrays as they were saved.

        Args:
            step: of the checkpoint.
            names: of some of them, so that not all are held at once; None reads all.

        Raises:
            ValueError: as for read_run.
        """
        some = {}
        if names is not None:
            as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
            some = dict(
                item=dict.fromkeys(names, 0),
                restore_args=dict.fromkeys(names, as_numpy),
                partial_restore=True,
            )
        return self._read(step, state=ocp.args.PyTreeRestore(**some))["state"]

    def _read(self, step, **items):
        try:
            return self.manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            raise ValueError(
                f"checkpoint {self.folder / str(step)} cannot be read "
                f"({one_line(error, 200)}); remove it, and the one before is taken"
            ) from error

    def wait(self):
        """Wait until everything is written.

        Raises:
            OSError: as for save.
        """
        try:
            self.manager.wait_until_finished()
        except Exception as error:
            raise self._fault(error) from error

    def close(self):
        """Wait, and let go of the threads."""
        self.wait()
        self.manager.close()

    def _fault(self, error):
        whole = [step for step in self.manager.all_steps() if (self.folder / str(step)).exists()]
        with contextlib.suppress(Exception):  # what failed once fails again
            self.manager.close()
        return OSError(
            f"a checkpoint cannot be written to {self.folder} "
            f"({one_line(error, 200)}); "
            + (f"that of step {max(whole)} is complete" if whole else "there is none yet")
        )


def tree_checksum(tree):
    """A number that two trees of arrays share if they are alike, bit for bit."""
    checksum = 0
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        checksum = zlib.crc32(jax.tree_util.keystr(path).encode(), checksum)
        checksum = zlib.crc32(np.ascontiguousarray(x).view(np.uint8), checksum)
    return checksum


def run_identity(config, max_train_steps, dataset, models, params, frozen):
    """What makes two starts the same run, a flat dict for JSON: flags, data, models' weights."""
    data = dataset.state_dict()
    modules = models._asdict() | {"text_encoder": models.text_encoder.module}
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


def find_checkpoint(output_dir, which, identity):
    """Where a run has to go on.

    Args:
        output_dir: of the run; its checkpoints are in OUTPUT_DIR/checkpoints.
        which: "latest" of them, "none", or the folder of one.
        identity: what makes the run this run, a flat dict for JSON.

    Returns:
        (Checkpoints, step, what was saved as `run`), or (None, 0, {}) if it has to begin.

    Raises:
        ValueError: no such checkpoint, a damaged one, or one of another run.
    """
    if which == "none":
        return None, 0, {}
    if which == "latest":
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
            return None, 0, {}  # that run is finished, its model is written: it is to be replaced
    else:
        path = Path(which)
        if not (path.is_dir() and path.name.isdecimal()):
            raise ValueError(
                f"resume_from_checkpoint={which} is no checkpoint; give the folder of one, such "
                "as OUTPUT_DIR/checkpoints/500, or latest or none"
            )
        checkpoints, step = Checkpoints(path.parent), int(path.name)
        run = checkpoints.read_run(step)

    saved = run["identity"]
    current = json.loads(json.dumps(identity))  # tuples are lists there
    different = [
        f"{name} was {saved.get(name)} and is {current.get(name)}"
        for name in sorted(saved.keys() | current.keys())
        if saved.get(name) != current.get(name)
    ]
    if different:
        raise ValueError(
            f"checkpoint {checkpoints.folder / str(step)} is of another run: "
            f"{'; '.join(different)}. Change that back, name another --output_dir, or start anew "
            "with --resume_from_checkpoint none"
        )
    return checkpoints, step, run


def by_name(tree):
    """A tree as a flat dict: names such as "opt_state/0/mu/conv_in/kernel" -> arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def checkpoint_shapes(params, tx, num_averages):
    """Shapes of all arrays of a checkpoint, not sharded, given those of the UNet's parameters."""
    opt_state = jax.eval_shape(tx.init, params)
    return {"params": params, "opt_state": opt_state, "ema": [params] * num_averages}


def read_state(checkpoints, step, shapes):
    """Read a checkpoint onto the devices: process 0 reads it, in parts, and sends it to all.

    Args:
        checkpoints: Checkpoints on process 0, None on the others.
        step: of the checkpoint.
        shapes: checkpoint_shapes.

    Returns:
        (TrainState, list of averages).
    """
    shape_of, axis_of = by_name(shapes), by_name(shard_axes(shapes, jax.device_count()))
    names, arrays = list(shape_of), []
    for start in range(0, len(names), ARRAYS_AT_ONCE):
        part = names[start : start + ARRAYS_AT_ONCE]
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
    """Return freed memory to the system; glibc keeps gigabytes of it otherwise."""
    if malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        malloc_trim(0)


# Metrics, validation images, model card

FONT_SIZE = 14  # pixels
LINE_HEIGHT = 20
CHARACTER_WIDTH = 7  # about

# In a run's folder, and not of the model: what it resumes from, other weights, logs, hidden files.
NOT_PUBLISHED = (
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
    """Write a file; it appears under its name when it is complete."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


class MetricsLog:
    """Folder/metrics.jsonl, one JSON object a line, and wandb if asked for.

    Args:
        folder: of the run; must exist.
        config: the run's flags, a dict, which wandb shows.
        report_to: "none" or "wandb".
        project: of wandb.
        first_step: steps done so far. Rows of later steps, which a resumed run repeats, are dropped
            from metrics.jsonl; 0 drops all. A resumed run goes on as the same run of wandb.

    Raises:
        ValueError: wandb cannot start, e.g. nobody is logged in.
    """

    def __init__(self, folder, config, report_to="none", project="instruct-pix2pix", first_step=0):
        folder = Path(folder)
        self.wandb_run = None
        if report_to == "wandb":
            self.wandb_run = start_wandb(folder, config, project, resume=first_step > 0)
        self.path = folder / "metrics.jsonl"
        write_text(self.path, "".join(kept_lines(self.path, first_step)))

    def write(self, row):
        """Append a row, a dict of numbers and None with "step" in it."""
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if self.wandb_run is not None:
            self.wandb_run.log(row)

    def images(self, name, path, caption, step):
        """Show the image file at path under name in wandb; without wandb, nothing is done."""
        if self.wandb_run is not None:
            import wandb

            self.wandb_run.log({name: wandb.Image(str(path), caption=caption), "step": step})

    def close(self):
        """Wait until wandb has sent everything; it takes a run that ends without for a failure."""
        if self.wandb_run is not None:
            self.wandb_run.finish()


def kept_lines(path, last_step):
    """The lines of a metrics.jsonl up to a step, without one that a crash has torn."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    kept = []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and row.get("step", last_step + 1) <= last_step:
            kept.append(f"{line}\n")
    return kept


def start_wandb(folder, config, project, resume):
    """Start a run of wandb, or go on with the one whose id folder/wandb_run_id holds."""
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
    # wandb's own step never goes back, and would swallow what a resumed run repeats.
    run.define_metric("*", step_metric="step")
    write_text(id_file, run.id)
    return run


def validation_grid(pairs, prompts):
    """One image of several edits, under each other: before, after, and the instruction below.

    Args:
        pairs: list of (before, after), PIL images; all are fitted into the first one's size.
        prompts: as many instructions.

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
    folder, *, name, base_model, dataset, command, config, metrics=None, image=None
):
    """Write folder/README.md: what the model is, how it was made, how it is used.

    Args:
        folder: pipeline folder.
        name: Hub id of the model, or its folder where it is not published.
        base_model: Hub id or folder that training started from; only an id goes into the metadata.
        dataset: what it was trained on, in a word.
        command: the command that made it, as shlex.join gives it.
        config: all flags, a dict.
        metrics: the last row of metrics.jsonl, a dict, if there is one.
        image: path of a validation grid, relative to folder, if there is one.

    Source: Hub documentation, "Model Cards". No license is claimed: the base model's binds.
    """
    data = ModelCardData(
        base_model=None if Path(base_model).exists() else base_model,
        library_name="diffusers",
        pipeline_tag="image-to-image",
        tags=["stable-diffusion", "instruct-pix2pix", "image-to-image", "diffusers", "jax"],
        inference=True,
    )
    shown = f"![before and after, with the instruction]({image})\n" if image else ""
    last_metrics = f"### Last metrics\n\n{table(metrics)}\n" if metrics else ""
    text = f"""
# {name}

Edits images as told: an InstructPix2Pix fine-tuned from `{base_model}` on `{dataset}`, with JAX.

{shown}
## Use

With PyTorch diffusers:

```python
import torch
from diffusers import StableDiffusionInstructPix2PixPipeline
from diffusers.utils import load_image

pipeline = StableDiffusionInstructPix2PixPipeline.from_pretrained(
    {json.dumps(name)}, torch_dtype=torch.float16
)
pipeline.to("cuda")
image = load_image("in.jpg")
edited = pipeline("make it red", image, guidance_scale=7.5, image_guidance_scale=1.5).images[0]
edited.save("out.png")
```

On TPU, GPU or CPU, with the `edit_cli.py` of the scripts that trained it:

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

{table(config)}
"""
    write_text(Path(folder, "README.md"), f"---\n{data.to_yaml()}\n---\n{text}")


def table(values):
    """A dict as a Markdown table of two columns."""
    cells = {name: repr(value).replace("|", r"\|") for name, value in values.items()}
    return "\n".join(["| | |", "|-|-|", *(f"| {name} | `{cells[name]}` |" for name in cells)])


def check_hub(repo_id, folder):
    """Make sure, before training, that the model can be published after it; makes the repository.

    Args:
        repo_id: NAME or OWNER/NAME; None takes the name of folder.
        folder: where the model will lie.

    Returns:
        OWNER/NAME.

    Raises:
        ValueError: nobody is logged in, the token does not suffice, the Hub does not answer.
    """
    log_in = (
        "run `hf auth login` or set HF_TOKEN, with a token that may write, or leave out "
        "--push_to_hub"
    )
    token = get_token()
    if token is None:
        raise ValueError(f"--push_to_hub: nobody is logged in to the Hub; {log_in}")
    if not (token.isascii() and token.isprintable()):  # the HTTP library's error would quote it
        raise ValueError(f"--push_to_hub: the Hub's token holds a character none has; {log_in}")
    repo_id = repo_id or Path(folder).resolve().name
    hub = HfApi()
    try:
        user = hub.whoami()
        if "/" not in repo_id:
            repo_id = f"{user['name']}/{repo_id}"
        hub.create_repo(repo_id, exist_ok=True)
    except HFValidationError as error:
        raise ValueError(f"--hub_model_id {repo_id}: {one_line(error)}") from error
    # httpx2's own errors are no OSErrors; a ValueError is an answer that is not the Hub's.
    except (httpx2.HTTPError, OSError, ValueError) as error:
        refused = isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403)
        way_out = log_in if refused else "check network and HF_ENDPOINT, or leave out --push_to_hub"
        raise ValueError(
            f"--push_to_hub: the Hub at {hub.endpoint}: {one_line(error)}; {way_out}"
        ) from error
    # With such a token the repository is found, if it exists, and the upload would fail.
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ValueError(f"--push_to_hub: the token of {user['name']} may only read; {log_in}")
    return repo_id


def push_to_hub(folder, repo_id):
    """Upload a finished model, without what a run keeps for itself (NOT_PUBLISHED).

    Args:
        folder: pipeline folder with its README.md.
        repo_id: OWNER/NAME, as check_hub gave it.

    Returns:
        The model's address.

    Raises:
        ValueError: it failed; says where the model is and how to upload it by hand.
    """
    try:
        commit = HfApi().upload_folder(
            folder_path=folder,
            repo_id=repo_id,
            commit_message="Model trained with flax_train_instruct_pix2pix.py",
            ignore_patterns=list(NOT_PUBLISHED),
        )
    # Whatever it was: the training before it has not failed, and its result must not seem lost.
    except Exception as error:
        # huggingface_hub wraps what stopped one file in a RuntimeError that does not tell it.
        reason = error.__cause__ if type(error) is RuntimeError and error.__cause__ else error
        by_hand = ["hf", "upload", repo_id, str(folder), "."]
        by_hand += [word for pattern in NOT_PUBLISHED for word in ("--exclude", pattern)]
        raise ValueError(
            f"the model is safe in {folder} but was not uploaded: {one_line(reason)}; to upload "
            f"it later: {shlex.join(by_hand)}"
        ) from error
    return str(commit.repo_url)
