"""Make pairs of images for training InstructPix2Pix from lines of captions, with any text-to-image
model.

    python make_pairs.py --captions captions.jsonl --model MODEL --output_dir data

A line is {"input": "a photo of a cat", "edit": "make it a tiger", "output": "a photo of a tiger"}.
Both images of a sample start from the same noise and get the same noise in each step, and in the
first part of the steps their self-attention is shared, so that both have one layout. CLIP scores
the samples of a line, and the best ones become rows of parquet shards, which
flax_train_instruct_pix2pix.py reads: --train_data_dir data. With the demo's model on a CPU:

    python make_pairs.py --model demo/base_model --output_dir night --num_samples 4 \\
        --template "a photo of {x}" "turn day into night" "a photo of {x} at night" \\
        --fill "x=the moon,a flower" --clip_model ""

Each sample depends on --seed, its line and its number alone. The same command gives the same shards
on any number of equal devices and workers; started again after an interruption, it keeps finished
shards. On a pod run it on every worker; workers divide the lines by shards.
--preview draws the pairs of each line, report.json has counts. docs/pairs.md says how to write
captions and how many samples they need.

Runs on TPU, GPU and CPU.

Source: InstructPix2Pix (arXiv 2211.09800), section 3.1.
"""

import hashlib
import json
import shlex
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import jax
from tqdm import tqdm

from diffusers_flax.command_line import AtLeast, Between, Seed, check_writable, run_main
from diffusers_flax.compilation_cache import use_compilation_cache
from diffusers_flax.data.archives.flags import Cosine, check_workers
from diffusers_flax.devices.precision import choose_dtype
from diffusers_flax.generating.clip import Clip
from diffusers_flax.generating.flags import (
    SamplingFlags,
    check_guidance_range,
    check_pair_ranges,
    from_flags,
    with_single_files,
)
from diffusers_flax.generating.models import (
    ModelOptions,
    Sampling,
    check_sampling,
    check_tasks,
    load_weights,
    open_model,
    pipeline_for,
    plan_images,
)
from diffusers_flax.loading.files import write_text
from diffusers_flax.pairing.caption_lists import (
    Caption,
    captions_of_template,
    check_lengths,
    read_captions,
    text_of,
)
from diffusers_flax.pairing.maker import PairMaker
from diffusers_flax.pairing.pair_scores import PairScorer
from diffusers_flax.pairing.pair_shards import PairShards, choose_pairs, write_preview, write_report
from diffusers_flax.schedulers.factory import check_scheduler

NUM_SHARDS = 64  # of a short list; a long one has more
MAX_PAIRS_PER_SHARD = 400
MIN_SAMPLES_PER_SHARD = 32  # lines with few samples share batches, which do not cross shards
SAME_PAIRS = (  # flags that may differ when a run is continued
    *("captions", "template", "fill", "output_dir", "batch_size", "preview"),
    *("worker", "num_workers", "compilation_cache_dir"),
)
# Messages of run_main
INTERRUPTED = "finished shards are kept; the same command makes the others"
LESS_MEMORY = "lower --batch_size or the size, or use --dtype bfloat16"


@dataclass(frozen=True)
class PairFlags:
    """Which pairs to make."""

    model: str  # directory, hub id or file of Stable Diffusion 1.x, 2.x or SDXL
    # configs of a one-file model: a directory or hub id; default: its family's
    config_name_or_path: str | None = None
    use_ema_weights: bool = False  # of a one-file model: the averages of the UNet's weights
    captions: Path | None = None  # lines {"input", "edit", "output"}
    # instead: caption, instruction and caption after the edit, with {words} of --fill
    template: tuple[str, str, str] | None = None
    fill: tuple[str, ...] = ()  # words of the template: animal=cat,dog or animal=@FILE
    output_dir: Path = Path("data")  # directory for the shards
    num_samples: Annotated[int, AtLeast(1)] = 100  # pairs to make of each line
    num_kept: Annotated[int, AtLeast(1)] = 4  # pairs to keep of each line, at most
    min_clip_text: Cosine = 0.2  # least similarity of each image and its caption
    min_clip_image: Cosine = 0.7  # least similarity of both images
    min_clip_direction: Cosine = 0.2  # of the change of images and the change of captions
    keep_all: bool = False  # keep all samples, with their scores
    early_stop: bool = False  # keep the first good samples of a line, and make no more
    # weight of the captions, drawn for each sample between these; both up to 1: no guidance
    guidance_scale: Annotated[tuple[float, float], AtLeast(0)] = (7.5, 15.0)
    # fraction of the steps with shared self-attention, drawn between these
    attention_sharing: Annotated[tuple[float, float], Between(0, 1)] = (0.1, 0.9)
    num_inference_steps: Annotated[int, AtLeast(1)] = 100  # denoising steps
    negative_prompt: str = ""  # what to avoid, in both images
    # 0 to 1: reduces the contrast that guidance adds; 0: off
    guidance_rescale: Annotated[float, Between(0, 1)] = 0.0
    width: int | None = None  # pixels; default: the model's
    height: int | None = None  # likewise
    seed: Seed = 0  # seed of all samples
    batch_size: Annotated[int, AtLeast(1)] = 4  # pairs per device at once
    # default: a 64th of the list, at most 400 pairs, at least 32 samples
    lines_per_shard: Annotated[int, AtLeast(1)] | None = None
    preview: bool = False  # draw the pairs of each line, into OUTPUT_DIR/previews
    # directory or hub id; "": keep all samples, without scores
    clip_model: str = "openai/clip-vit-large-patch14"
    # this worker's index, from 0, with --num_workers
    worker: Annotated[int, AtLeast(0)] | None = None
    # workers that divide the lines; default: as jax knows them
    num_workers: Annotated[int, AtLeast(1)] | None = None
    # what the UNet predicts; default: the scheduler's config
    prediction_type: Literal["epsilon", "v_prediction", "sample"] | None = None
    storage: Literal["float8", "int8"] | None = None  # of the kernels of UNet and text encoders
    vae_dtype: Literal["float32", "bfloat16", "float16"] | None = None  # default: --dtype
    compilation_cache_dir: str = "~/.cache/jax"  # saves programs; "": no cache


@dataclass(frozen=True)
class Config(SamplingFlags, PairFlags):
    """Flags of the script. tyro lists the flags of the last base class first."""

    scheduler: str | None = "euler_ancestral"  # ddim, lcm, ...


def check_flags(config):
    """Raise a ValueError for flags that do not fit together."""
    if (config.captions is None) == (config.template is None):
        raise ValueError("give one of --captions FILE and --template INPUT EDIT OUTPUT")
    check_pair_ranges(config)
    check_scheduler(config.scheduler)
    if config.keep_all and (config.early_stop or config.num_kept != Config.num_kept):
        keeping = "--keep_all" if config.clip_model else '--clip_model ""'
        raise ValueError(f"{keeping} makes and keeps all samples; leave --early_stop or --num_kept")
    check_workers(config)


def choose_lines_per_shard(config, num_lines):
    """The default of --lines_per_shard, which depends on nothing that may differ between starts."""
    pairs_per_line = config.num_samples if config.keep_all else config.num_kept
    largest = min(num_lines // NUM_SHARDS, MAX_PAIRS_PER_SHARD // pairs_per_line)
    return max(-(-MIN_SAMPLES_PER_SHARD // config.num_samples), largest)


def open_models(config, captions, num_lines, devices):
    """(pipeline, its parameters on each of the devices, Clip or None) of --model and --clip_model.

    Args:
        config: Config.
        captions: list of Caption.
        num_lines: number of lines whose pairs are to be made.
        devices: list of devices of JAX.

    Raises:
        ValueError: the model does not fit the flags or captions; before weights are read.
    """
    is_xl, configs = check_tasks(config.model, ["text to image"])
    check_guidance_range(config.guidance_scale, configs["unet"])
    scale = max(config.guidance_scale)
    if config.negative_prompt and scale <= 1:
        raise ValueError("--negative_prompt has no effect without guidance; leave it out")
    pipeline_type = pipeline_for("text to image", is_xl)
    sampling = from_flags(Sampling, config, guidance_scale=scale)
    scheduler = check_sampling(pipeline_type, configs["scheduler"], config.model, sampling)
    options = from_flags(ModelOptions, config, dtype=choose_dtype(config.dtype), preview=None)
    pipeline = open_model(config.model, pipeline_type, scheduler, config.accelerate, options)
    given = f"--captions {config.captions}" if config.captions else "--template"
    lengths = [(x, y.module.max_position_embeddings) for _, y, x in pipeline.text_encoders]
    check_lengths(captions, lengths, given)
    check_lengths([Caption(1, config.negative_prompt, "", "")], lengths, "--negative_prompt")
    pipeline, planned = plan_images(
        pipeline,
        devices,
        num_images=2 * config.num_samples * num_lines,
        batch_size=2 * config.batch_size,
        branches=sampling.branches(pipeline_type),
        sizes=[pipeline.image_size(config.height, config.width)[::-1]],
    )
    clip = Clip(config.clip_model, devices=devices) if config.clip_model else None
    params = load_weights(pipeline, config.model, options)
    tqdm.write(planned, file=sys.stderr)
    return pipeline, [jax.device_put(params, device) for device in devices], clip


def run(config):
    """Check flags, captions and models, make the pairs, write shards and the report."""
    if not config.clip_model:
        config = replace(config, keep_all=True)
    check_flags(config)
    check_writable(f"--output_dir {config.output_dir}", config.output_dir)
    if config.captions:
        captions = read_captions(config.captions)
    else:
        captions = captions_of_template(config.template, config.fill)
    use_compilation_cache(config.compilation_cache_dir)
    settings = {name: x for name, x in vars(config).items() if name not in SAME_PAIRS}
    settings["dtype"] = choose_dtype(config.dtype).name
    checksum = hashlib.sha256(json.dumps(captions).encode()).hexdigest()
    settings["checksum of the lines"] = checksum
    config = with_single_files(config, "model")
    worker, num_workers = config.worker, config.num_workers
    if worker is None:
        worker, num_workers = jax.process_index(), jax.process_count()
    per_shard = config.lines_per_shard or choose_lines_per_shard(config, len(captions))
    shards = PairShards(config, captions, per_shard, worker, num_workers)
    shards.check(settings)
    seconds = None
    if shards.unfinished():
        seconds = make_lines(config, captions, shards, settings)
    else:
        shards.start(settings)
    if config.template:
        write_text(config.output_dir / "captions.jsonl", text_of(captions), shared=True)
    shards.end()
    name = "report" if num_workers == 1 else f"report-{worker}"
    report, said = write_report(config, name, shards.counts(), seconds)
    print(said)
    folder = shlex.quote(str(config.output_dir))
    if not shards.own:
        print(f"worker {worker} has no shard of {shards.num_shards}; lower --lines_per_shard")
    elif not report["kept"]:
        print("nothing is kept: lower thresholds, or give --keep_all to see all scores")
    elif config.keep_all and config.clip_model:
        choice = f"--pairs {folder} --output_dir NEW --num_kept {Config.num_kept}"
        print(f"next: python parquet_processing.py {choice}")
    else:
        print(f"next: python parquet_processing.py --train_data_dir {folder}")


def make_lines(config, captions, shards, settings):
    """Make and write the pairs of all unfinished shards.

    Args:
        config: Config.
        captions: list of Caption.
        shards: PairShards.
        settings: of the run, for PairShards.start.

    Returns:
        Seconds for a kept pair, after compiling; None: no pair is kept.
    """
    todo = [len(shards.places(shard)) for shard in shards.unfinished()]
    chunks = sum(-(-lines * config.num_samples // config.batch_size) for lines in todo)
    devices = jax.local_devices()[:chunks]
    pipeline, params, clip = open_models(config, captions, sum(todo), devices)
    shards.start(settings)
    maker = PairMaker(pipeline, params, PairScorer(clip, captions), captions, config)
    num_kept, lines = 0, defaultdict(dict)
    with tqdm(desc="compiling", total=sum(todo) * config.num_samples, unit="sample") as bar:
        for place, pairs in maker.make(shards, bar):
            if config.preview:
                write_preview(config, captions[place], pairs)
            num_kept += len(choose_pairs(pairs, config))
            bar.set_postfix_str(f"{num_kept} pairs kept")
            shard = place // shards.lines_per_shard
            lines[shard][place] = pairs
            if len(lines[shard]) == len(shards.places(shard)):
                shards.write(shard, lines.pop(shard))
    return (time.perf_counter() - maker.started) / num_kept if num_kept else None


def main(args=None):
    """Command line."""
    run_main(Config, __doc__, run, args, interrupted=INTERRUPTED, out_of_memory=LESS_MEMORY)


if __name__ == "__main__":
    main()
