"""A page to edit images on, in the browser, with an InstructPix2Pix model.

    python edit_app.py --model timbrooks/instruct-pix2pix
    python edit_app.py --model MODEL --lora style.safetensors --preview_decoder madebyollin/taesd
    python edit_app.py --model MODEL --host 0.0.0.0 --username anna --password_file password.txt

With the model of `make demo`, on a CPU, also started by `make app`:

    python edit_app.py --model demo/output/model --examples demo/output/held_out/edits.jsonl \\
        --guidance_scale 2 --image_guidance_scale 1.2 --num_inference_steps 20

It prints the address to open, http://127.0.0.1:7860, and runs until Ctrl-C. edit_cli.py makes
the same image from the same settings. Text-to-image models of Stable Diffusion and SDXL have two
tabs: text to image, and image to image with or without a mask; inpainting models have the second.

The program of the first size is compiled at the start; another size, number of steps or scheduler
compiles when first used, and the page says so. Requests of all pages run one after another.
The page loads nothing from other hosts and is open to this machine only; others need --host, a
--username and a password, which is in a file or in the environment variable EDIT_APP_PASSWORD.
Results are deleted when a page is closed, uploads and painted masks a day later. docs/editing.md
has the API for other programs.

Needs gradio: pip install ".[app]". Runs on TPU, GPU and CPU.
"""

import logging
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from diffusers_flax.app import server
from diffusers_flax.app.editor import Editor, NoStops
from diffusers_flax.app.images import read_examples
from diffusers_flax.command_line import AtLeast, Between, Seed, run_main
from diffusers_flax.compilation_cache import use_compilation_cache
from diffusers_flax.generating.flags import DeviceFlags, layout_of_flags, with_single_files
from diffusers_flax.schedulers.factory import check_scheduler

# Messages of run_main
INTERRUPTED = "nothing was served"
LESS_MEMORY = "lower --resolution, or use --dtype bfloat16"


@dataclass(frozen=True)
class AppFlags:
    """The model, what the page begins with, and who may open it."""

    model: str  # directory, hub id or file of an edit, text-to-image or inpainting model
    # configs of a one-file model: a directory or hub id; default: its family's
    config_name_or_path: str | None = None
    use_ema_weights: bool = False  # of a one-file model: the averages of the UNet's weights
    host: str = "127.0.0.1"  # address to listen on; 0.0.0.0: all of this machine
    port: Annotated[int, Between(1, 65535)] = 7860  # to listen on
    username: str | None = None  # who may open the page, with a password
    password_file: Path | None = None  # file with the password; default: EDIT_APP_PASSWORD
    open_browser: bool = False  # open the page in a browser
    # list of edits, as for edit_cli.py --edits_jsonl; the page offers its images and instructions
    examples: Path | None = None
    # denoising steps, the page's initial value; default: the model's, or 50
    num_inference_steps: Annotated[int, AtLeast(1)] | None = None
    # weight of the instruction, likewise, or 7.5
    guidance_scale: Annotated[float, AtLeast(0)] | None = None
    # similarity to the original image, likewise, or 1.5
    image_guidance_scale: Annotated[float, AtLeast(0)] | None = None
    seed: Seed = 0  # of the noise, likewise
    resolution: int | None = None  # pixels, longer side, likewise; default: the model's
    max_resolution: int | None = None  # the largest choice; default: twice the resolution
    scheduler: str | None = None  # ddim, euler, ..., likewise; default: the model's own
    # NAME or NAME:PARAMETER=VALUE,..., likewise; names: see docs/acceleration.md
    accelerate: tuple[str, ...] = ()
    # LoRA files or hub ids, FILE or FILE:WEIGHT, folded into the model; the page can leave them out
    lora: tuple[str, ...] = ()
    # textual-inversion files or hub ids; texts may contain their tokens: FILE or FILE:TOKEN
    embedding: tuple[str, ...] = ()
    # DISTILLED BASE or DISTILLED BASE:WEIGHT, adds the difference of two UNets to the model's; each
    # is a directory, hub id or file
    unet_delta: tuple[str, ...] = ()
    # directory or hub id of a TAESD, which shows images while they are made; default: a bar only
    preview_decoder: str | None = None
    # shows the steps of an image; Cancel ends it after a step; without it later starts are faster:
    # programs that show steps are never in the compilation cache
    progress: bool = True
    max_queue: Annotated[int, AtLeast(1)] = 16  # requests that may wait, of all pages
    max_upload_mb: Annotated[int, AtLeast(1)] = 20  # size of an image's file
    # default: float32 on a CPU, float16 on NVIDIA GPUs before Ampere, else bfloat16
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    compilation_cache_dir: str = "~/.cache/jax"  # saves programs; "": no cache


@dataclass(frozen=True)
class Config(DeviceFlags, AppFlags):
    """Flags of the script. tyro lists the flags of the last base class first."""


def run(config):
    """Check the flags, load the model, serve the page until Ctrl-C."""
    check_scheduler(config.scheduler)
    password = server.read_password(config.username, config.password_file, config.host)
    server.check_port(config.host, config.port)

    layout = layout_of_flags(config)
    use_compilation_cache(config.compilation_cache_dir)
    editor = Editor(with_single_files(config, "model"), layout)
    examples = read_examples(config.examples)
    if find_spec("gradio") is None:
        raise ValueError(
            'the package gradio is missing; install it in a clone: pip install ".[app]"'
        )
    logging.getLogger("jax._src.debugging").addFilter(NoStops())
    print(f"loading {config.model}", file=sys.stderr)
    editor.open()
    with server.files_of_sessions() as folder:
        blocks, address = server.serve(editor, examples, config, password, folder)
        print(f"open {address} in a browser; Ctrl-C ends", flush=True)
        editor.compile_first(examples[0])
        with suppress(KeyboardInterrupt):  # also SIGTERM, see files_of_sessions
            threading.Event().wait()
        blocks.close(verbose=False)  # before the files of its requests are deleted
    raise KeyboardInterrupt("the page is closed, and its images are deleted")


def main(args=None):
    """Command line."""
    run_main(Config, __doc__, run, args, interrupted=INTERRUPTED, out_of_memory=LESS_MEMORY)


if __name__ == "__main__":
    main()
