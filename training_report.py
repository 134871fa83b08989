"""What a training run tells: metrics, pictures, a model card, the finished model on the Hub.

Nothing here knows of the training loop; on a slice process 0 alone calls it. Tokens are
huggingface_hub's and wandb's own business: none is taken, kept or printed here.
"""

import json
import os
import shlex
import textwrap
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, ModelCardData, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from PIL import Image, ImageDraw, ImageFont, ImageOps

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

    def pictures(self, name, path, caption, step):
        """Show the picture file at path under name in wandb; without wandb, nothing is done."""
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
    """One picture of several edits, under each other: before, after, and the instruction below.

    Args:
        pairs: list of (before, after), PIL pictures; all are fitted into the first one's size.
        prompts: as many instructions.

    Returns:
        PIL picture, RGB.
    """
    from diffusers.utils import make_image_grid  # seconds to import

    W, H = pairs[0][0].size
    texts = [textwrap.fill(prompt, max(1, 2 * W // CHARACTER_WIDTH)) for prompt in prompts]
    text_height = LINE_HEIGHT * (1 + max(text.count("\n") for text in texts))
    font = ImageFont.load_default(FONT_SIZE)
    tiles = []
    for pair, text in zip(pairs, texts):
        fitted = [ImageOps.pad(picture.convert("RGB"), (W, H), color="white") for picture in pair]
        tile = Image.new("RGB", (2 * W, H + text_height), "white")
        tile.paste(make_image_grid(fitted, rows=1, cols=2))
        ImageDraw.Draw(tile).text((0, H), text, fill="black", font=font)
        tiles.append(tile)
    return make_image_grid(tiles, rows=len(tiles), cols=1)


def write_model_card(
    folder, *, name, base_model, dataset, command, config, metrics=None, picture=None
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
        picture: path of a validation grid, relative to folder, if there is one.

    Source: Hub documentation, "Model Cards". No license is claimed: the base model's binds.
    """
    data = ModelCardData(
        base_model=None if Path(base_model).exists() else base_model,
        library_name="diffusers",
        pipeline_tag="image-to-image",
        tags=["stable-diffusion", "instruct-pix2pix", "image-to-image", "diffusers", "jax"],
        inference=True,
    )
    shown = f"![before and after, with the instruction]({picture})\n" if picture else ""
    last_metrics = f"### Last metrics\n\n{table(metrics)}\n" if metrics else ""
    text = f"""
# {name}

Edits pictures as told: an InstructPix2Pix fine-tuned from `{base_model}` on `{dataset}`, with JAX.

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
picture = load_image("in.jpg")
edited = pipeline("make it red", picture, guidance_scale=7.5, image_guidance_scale=1.5).images[0]
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


def one_line(error):
    """An error's text with its line breaks made spaces and no full stop."""
    return " ".join(str(error).split()).rstrip(".")


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
