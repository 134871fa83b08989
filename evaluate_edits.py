"""Measure and compare InstructPix2Pix models on held-out pairs, over all devices of this machine.

    python evaluate_edits.py --model MODEL_A MODEL_B --data_dir held_out_shards \\
        --guidance_scale 7.5 --image_guidance_scale 1.0 1.2 1.4 1.6 1.8 2.0 2.2 --seeds 0 1 2 \\
        --output_dir evaluation

With the model of `make demo`, on a CPU, in a minute and without CLIP:

    python evaluate_edits.py --model demo/output/model \\
        --pairs_jsonl demo/output/held_out/edits.jsonl --num_inference_steps 20 \\
        --guidance_scale 2 --image_guidance_scale 1.2 --batch_size 18 --clip_model ""

Every model edits every pair at every combination of the two scales and every seed. --data_dir is a
directory of parquet shards as for training. --pairs_jsonl has lines {"input": "a.jpg",
"instruction": "make it red", "truth": "a_red.jpg", "input_caption": "an apple",
"output_caption": "a red apple"}, of which the last three are optional, with paths relative to the
list; docs/data.md has the table of keys.

Writes to --output_dir: results.json, one row per model, scales and seed; results.md, a table;
curve.png, the two CLIP similarities over image_guidance_scale; grid.png, images. The same command
continues after an interruption; more models, scales and seeds add rows. docs/evaluation.md defines
the metrics. Runs on TPU, GPU and CPU; CLIP runs on the CPU.

Source: InstructPix2Pix (arXiv 2211.09800), section 4.1.
"""

import itertools
import json
import os
import zlib
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from tqdm import tqdm

from command_line import ask_before_replacing, differences, run_main
from diffusers_flax.acceleration.plans import parse
from diffusers_flax.images import prepare_images, save_image
from diffusers_flax.loading.directories import INDEX_NAME, PARTS
from diffusers_flax.loading.files import write_text
from diffusers_flax.loading.hub import fetch_file
from diffusers_flax.loading.lora import find_lora, split_weight
from diffusers_flax.memory import peak_memory
from diffusers_flax.messages import one_line
from diffusers_flax.pipelines.base import MODULES
from diffusers_flax.pipelines.instruct_pix2pix import guidance_branches
from diffusers_flax.programs import step_options, use_compilation_cache
from editing.edits import (
    check_model,
    check_scale,
    check_scheduler,
    check_seed,
    compute_dtype,
    edit_batches,
    edit_size,
    load_model,
    plan_edits,
    replicate_params,
)
from editing.metrics import (
    CLIP_METRICS,
    Clip,
    checksum_of_pairs,
    clip_metrics,
    count_flops,
    features_or_nan,
    num_parameters,
    pairs_of_jsonl,
    pairs_of_shards,
    pixel_metrics,
    vae_round_trip,
)
from editing.report import write_report

RESULTS = "results.json"
IMAGES = "images"  # directory of the images of grid.png
GRID_PAIRS = 8  # rows of grid.png, at most
BASELINES = ("copied input", "truth")
VAE_BASELINES = ("VAE round trip of the input", "VAE round trip of the truth")


@dataclass(frozen=True)
class Config:
    """Flags of the script."""

    model: tuple[str, ...]  # directories or hub ids of InstructPix2Pix pipelines, SD or SDXL
    # data: one of the two
    data_dir: str = ""  # directory of *.parquet shards of pairs that were not trained on
    pairs_jsonl: Path | None = None  # lines {"input", "instruction", "truth", ...}, see above
    max_pairs: int | None = None  # use the first N pairs only; default: all
    original_image_column: str = ""  # image to edit; "": original_image or input_image
    edited_image_column: str = ""  # image after the edit, the truth; "": edited_image
    edit_prompt_column: str = ""  # instruction; "": edit_prompt
    original_prompt_column: str = ""  # caption of the image to edit; "": original_prompt
    edited_prompt_column: str = ""  # caption of the truth; "": edited_prompt
    # edits; all combinations of the three lists
    guidance_scale: tuple[float, ...] = (7.5,)  # weight of the instruction, >= 0
    image_guidance_scale: tuple[float, ...] = (1.5,)  # similarity to the input, >= 0
    seeds: tuple[int, ...] = (0,)  # seeds of the noise
    num_inference_steps: int = 50  # denoising steps
    # timesteps to run instead of --num_inference_steps, for distilled models: 999 749 499 249
    timesteps: tuple[int, ...] = ()
    eta: float | None = None  # noise per step, 0 to 1, for ddim (default 0) and tcd (default 0.3)
    resolution: int | None = None  # pixels, longer side; default: the models'
    scheduler: str | None = None  # ddim, euler_ancestral, ...; default: each model's own
    # how timesteps are spaced; default: the scheduler's config
    timestep_spacing: Literal["leading", "linspace", "trailing"] | None = None
    lora: tuple[str, ...] = ()  # LoRA files or hub ids to fold into all models: FILE or FILE:WEIGHT
    # NAME or NAME:PARAMETER=VALUE,...; names: guidance, deepcache, spectrum, fbcache, tome, int8,
    # taesd; see docs/acceleration.md
    accelerate: tuple[str, ...] = ()
    batch_size: int = 1  # images per device at once
    dtype: Literal["float32", "bfloat16"] | None = None  # default: float32 on CPU, else bfloat16
    # metrics
    clip_model: str = "openai/clip-vit-large-patch14"  # directory or hub id; "": no CLIP
    # files
    output_dir: Path = Path("evaluation")  # of results.json, the table, the curve and images
    overwrite_output_dir: bool = False  # replace earlier results in output_dir
    compilation_cache_dir: str = "~/.cache/jax"  # saves programs; "": no cache


@dataclass(frozen=True)
class References:
    """What results are compared with, and the sizes (width, height) of the edits.

    features: {"original", "truth", "input_text", "output_text"}, each (n, D), NaN where unknown;
    None without CLIP.
    """

    pairs: list
    sizes: list
    clip: Clip | None
    features: dict | None


# Settings and earlier results


def check_flags(config):
    """Raise a ValueError for invalid flags."""
    if bool(config.data_dir) == bool(config.pairs_jsonl):
        raise ValueError("give one of --data_dir and --pairs_jsonl")
    for name in ("num_inference_steps", "batch_size", "max_pairs"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    for name in ("model", "guidance_scale", "image_guidance_scale", "seeds"):
        values = getattr(config, name)
        if not values:
            raise ValueError(f"--{name} needs at least one value")
        if len(set(values)) < len(values):
            raise ValueError(f"--{name} {' '.join(map(str, values))} has a value twice")
    for name in ("guidance_scale", "image_guidance_scale"):
        for value in getattr(config, name):
            check_scale(name, value)
    for seed in config.seeds:
        check_seed("seeds", seed)
    check_scheduler(config.scheduler)
    ask_before_replacing("output_dir", config.output_dir, config.overwrite_output_dir, RESULTS)


def model_checksum(model):
    """What identifies the weights of a model: CRC-32 of its directory, or the hub's commit."""
    if not Path(model).is_dir():
        return fetch_file(model, INDEX_NAME, None, None).parent.name
    files = [Path(model, INDEX_NAME)]
    for part in sorted(PARTS):
        files += visible_files(Path(model, part))
    return files_checksum(files, model)


def visible_files(folder):
    """The files of a directory that are not hidden, by name; .DS_Store is no part of a model."""
    return sorted(file for file in folder.glob("[!.]*") if file.is_file())


def files_checksum(files, folder="."):
    """CRC-32 of files and their names relative to folder."""
    checksum = 0
    for file in files:
        checksum = zlib.crc32(os.path.relpath(file, folder).encode(), checksum)
        with open(file, "rb") as opened:
            while block := opened.read(1 << 24):
                checksum = zlib.crc32(block, checksum)
    return f"{checksum:08x}"


def lora_checksum(specs):
    """What identifies the weights of LoRA files, CRC-32; None: there are none."""
    files = [find_lora(split_weight(spec)[0]) for spec in specs]
    return files_checksum(files) if files else None


def tiny_vae_checksum(acceleration):
    """What identifies the weights of a TAESD in a directory, CRC-32; None: there is none."""
    source = getattr(acceleration.tiny_decoder, "path", "")
    path = Path(source).expanduser()
    if not source or not path.is_dir():
        return None
    return files_checksum(visible_files(path), path)


def load_results(config, settings, checksums):
    """The results in output_dir to continue from, or empty ones.

    Raises:
        ValueError: they are damaged, or of other settings, pairs or weights.
    """
    file = config.output_dir / RESULTS
    remedy = "name another --output_dir, or give --overwrite_output_dir to measure again"
    results = {"settings": settings, "models": {}, "baselines": [], "rows": []}
    if file.exists() and not config.overwrite_output_dir:
        try:
            saved = json.loads(file.read_text(encoding="utf-8"))
            results = {name: saved[name] for name in results}
            saved_sums = {name: model["checksum"] for name, model in results["models"].items()}
            # An error here means that the rows lack a name or a number.
            for row in results["rows"]:
                row["model"], row["guidance_scale"], row["image_guidance_scale"], row["seed"]
            for row in results["rows"] + results["baselines"]:
                float(row["l1"] or 0), float(row["l1_to_input"] or 0)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is damaged ({one_line(error, 100)}); {remedy}") from error
        changes = differences(
            results["settings"] | {f"--model {name}": x for name, x in saved_sums.items()},
            settings
            | {f"--model {name}": x for name, x in checksums.items() if name in saved_sums},
        )
        if changes:
            raise ValueError(f"{file} has other settings: {'; '.join(changes)}; {remedy}")
    for name, checksum in checksums.items():
        results["models"].setdefault(name, {"checksum": checksum})
    return results


def save_results(config, results):
    """Write results.json."""
    text = json.dumps(results, indent=1) + "\n"
    write_text(config.output_dir / RESULTS, text)


def grid_rows(instructions):
    """The pairs that grid.png shows: of all instructions, or of some at equal distances.

    Args:
        instructions: of each pair.

    Returns:
        Their indices, sorted.
    """
    rows_of = defaultdict(list)
    for row, instruction in enumerate(instructions):
        rows_of[instruction].append(row)
    n = min(GRID_PAIRS, len(instructions))
    groups = list(rows_of.values())
    if len(groups) > n:
        groups = [groups[i * len(groups) // n] for i in range(n)]
    # The instructions take turns until their pairs are used up. Each turn takes a later one of the
    # pairs, at turn / n of them if it can, so that the images differ.
    places = [(i, group) for i in range(n) for group in groups if i < len(group)][:n]
    chosen = []
    for group in groups:
        turns = [turn for turn, (_, other) in enumerate(places) if other is group]
        at = -1
        for i, turn in enumerate(turns):
            last = len(group) - len(turns) + i  # leaves pairs for the later turns
            at = min(max(at + 1, turn * len(group) // n), last)
            chosen.append(group[at])
    return sorted(chosen)


def find_row(rows, **key):
    """The row with these entries, or None."""
    return next((row for row in rows if all(row.get(k) == v for k, v in key.items())), None)


# Measuring


def load_references(pairs, clip, resolution, factor):
    """See References."""
    sizes = [edit_size(pair.size(), resolution, factor) for pair in pairs]
    if clip is None:
        return References(pairs, sizes, None, None)
    with tqdm(total=2 * len(pairs), desc="CLIP of the pairs", unit="image") as bar:

        def encode(images):
            bar.update(len(images))
            return clip.image_features(images)

        originals, truths = [], []
        for pair, size in zip(pairs, sizes):
            originals.append(encode([pair.fitted_original(size)])[0])
            truth = pair.fitted_truth(size)
            bar.update(truth is None)
            truths.append(np.full(clip.dim, np.nan) if truth is None else encode([truth])[0])
    features = {"original": np.stack(originals), "truth": np.stack(truths)}
    for name in ("input", "output"):
        captions = [getattr(pair, f"{name}_caption") for pair in pairs]
        features[f"{name}_text"] = features_or_nan(clip.text_features, captions, clip.dim)
    return References(pairs, sizes, clip, features)


def measure_images(references, rows, images):
    """Metrics of results.

    Args:
        references: References.
        rows: of the pairs that the results belong to, int.
        images: PIL images, of the sizes of the edits.

    Returns:
        {metric: list of floats}, NaN where it is not defined.
    """
    metrics = defaultdict(list)
    for row, image in zip(rows, images):
        pair, size = references.pairs[row], references.sizes[row]
        arrays = [
            None if x is None else np.asarray(x, np.float32) / 255
            for x in (image, pair.fitted_original(size), pair.fitted_truth(size))
        ]
        for name, value in pixel_metrics(*arrays).items():
            metrics[name].append(value)
    if references.clip is not None:
        known = {name: features[rows] for name, features in references.features.items()}
        found = clip_metrics(references.clip.image_features(images), **known)
        metrics |= {name: values.tolist() for name, values in found.items()}
    return metrics


def averages(metrics):
    """Means over pairs and standard deviations, without those for which a metric is undefined.

    Args:
        metrics: {name: one float per pair}.

    Returns:
        {name: mean, NAME_std: sample standard deviation}; None if there are not enough pairs.
    """
    row = {}
    for name, values in metrics.items():
        values = np.asarray(values)[np.isfinite(values)]
        row[name] = float(values.mean()) if len(values) else None
        row[f"{name}_std"] = float(values.std(ddof=1)) if len(values) > 1 else None
    return row


def measure_baseline(references, make_image):
    """Metrics of make_image(pair, size), a PIL image or None, over all pairs."""
    metrics, used = defaultdict(list), 0
    for row, (pair, size) in enumerate(zip(references.pairs, references.sizes)):
        image = make_image(pair, size)
        if image is None:
            continue
        used += 1
        for name, values in measure_images(references, [row], [image]).items():
            metrics[name] += values
    return {"num_pairs": used} | averages(metrics)


def measure_baselines(references, results):
    """Add the rows of what needs no model: the copied input, and the truth itself.

    They are saved with the first row of a model, so that one that cannot be loaded changes nothing.
    """
    for name in BASELINES:
        if find_row(results["baselines"], baseline=name) is None:
            make = {
                "copied input": lambda pair, size: pair.fitted_original(size),
                "truth": lambda pair, size: pair.fitted_truth(size),
            }[name]
            row = measure_baseline(references, make)
            if row["num_pairs"]:
                results["baselines"].append({"baseline": name, "model": None} | row)


def measure_vae(references, results, save, model, pipeline, params):
    """Add the rows of a model's VAE: input and truth, encoded and decoded."""

    def through_vae(image):
        decoded = vae_round_trip(pipeline._vae, params, prepare_images(image))
        return pipeline.numpy_to_pil(decoded)[0]

    def of_truth(pair, size):
        truth = pair.fitted_truth(size)
        return None if truth is None else through_vae(truth)

    params = jax.device_put(params)
    makes = (lambda pair, size: through_vae(pair.fitted_original(size)), of_truth)
    for name, make in zip(VAE_BASELINES, makes):
        if find_row(results["baselines"], baseline=name, model=model) is None:
            row = measure_baseline(references, make)
            if row["num_pairs"]:
                results["baselines"].append({"baseline": name, "model": model} | row)
                save()


def measure_model(references, results, save, model, opened, todo, config, bar):
    """Measure a model at all scales and seeds of todo and add a row to results for each.

    Args:
        references: References.
        results, save: content of results.json, and a function that writes it.
        model: its name.
        opened: what check_model has returned for it.
        todo: list of (guidance_scale, image_guidance_scale, seed), not empty.
        config: Config.
        bar: progress bar, in units of edits.
    """
    pairs, sizes = references.pairs, references.sizes
    devices = jax.local_devices()[: len(pairs)]
    peak_memory(devices, reset=True)
    pipeline_type, _, _, scheduler = opened
    dtype = compute_dtype(config.dtype)
    bar.set_description(f"loading {model}")
    branches = max((guidance_branches(*scales) for *scales, _ in todo), key=len)
    plan = partial(plan_edits, sizes=sizes, batch_size=config.batch_size, branches=branches)
    pipeline, params = load_model(
        model, pipeline_type, scheduler, dtype, config.lora, config.accelerate, plan=plan
    )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    results["models"][model] |= {
        "pipeline": pipeline_type.torch_class_name,
        "parameters": {
            name: num_parameters(params[name]) for name in sorted(MODULES.keys() & params.keys())
        },
    }
    measure_vae(references, results, save, model, pipeline, params["vae"])
    replicate_params(params, devices)

    # The first batch of every size, to compile before the clock starts
    first, rows_of_size = [], defaultdict(list)
    for row, size in enumerate(sizes):
        rows_of_size[size].append(row)
    for rows in rows_of_size.values():
        first += rows[: config.batch_size * len(devices)]

    shown = grid_rows([pair.instruction for pair in pairs])
    row_of_index = {pair.index: row for row, pair in enumerate(pairs)}
    flops, compiled = {}, set()
    number = list(results["models"]).index(model)
    steps = step_options(config.num_inference_steps, config.timesteps, config.eta)
    for guidance_scale, image_guidance_scale, seed in todo:
        scales = {"guidance_scale": guidance_scale, "image_guidance_scale": image_guidance_scale}
        edit_all = partial(
            edit_batches,
            pipeline,
            params,
            devices,
            load=lambda pair, size: pair.fitted_original(size),
            batch_size=config.batch_size,
            seed=seed,
            num_inference_steps=config.num_inference_steps,
            timesteps=config.timesteps,
            eta=config.eta,
            lora=config.lora,
            **scales,
        )
        branches = guidance_branches(**scales)
        compile_seconds = 0.0
        if branches not in compiled:
            silent = tqdm(disable=True)
            bar.set_description(f"compiling {model}")
            batches = edit_all([pairs[i] for i in first], [sizes[i] for i in first], bar=silent)
            compile_seconds = sum(seconds for _, _, seconds in batches)
            compiled.add(branches)
            flops[branches] = float(
                np.average(
                    [count_flops(pipeline, shapes, size, branches, steps) for size in rows_of_size],
                    weights=[len(rows) for rows in rows_of_size.values()],
                )
            )
        folder = f"{number}_{guidance_scale}_{image_guidance_scale}_{seed}"
        metrics, total_seconds = defaultdict(list), 0.0
        for batch, images, seconds in edit_all(pairs, sizes, bar=bar):
            rows = [row_of_index[pair.index] for pair in batch]
            images = pipeline.numpy_to_pil(images)
            total_seconds += seconds
            for name, values in measure_images(references, rows, images).items():
                metrics[name] += values
            for row, image in zip(rows, images):
                if row in shown:
                    save_image(image, config.output_dir / IMAGES / folder / f"{row}.png")
        memory, memory_of = peak_memory(devices)
        results["rows"].append(
            {"model": model, **scales, "seed": seed, "num_pairs": len(pairs)}
            | averages(metrics)
            | {
                "seconds_per_edit": total_seconds / len(pairs),
                "compile_seconds": compile_seconds,
                "flops_per_edit": flops[branches],
                "peak_memory_bytes": memory,
                "peak_memory_of": memory_of,
                "images": folder,
            }
        )
        save()


# What is left out


def left_out(pairs, clip_model):
    """What the pairs and flags do not allow to measure, one sentence each.

    Raises:
        ValueError: nothing can be measured.
    """
    known = {
        "truth": [pair.truth is not None for pair in pairs],
        "both captions": [None not in (pair.input_caption, pair.output_caption) for pair in pairs],
        "the caption of the truth": [pair.output_caption is not None for pair in pairs],
    }
    names = {"truth": ["l1", "mse", "error_ratio"]}
    sentences = []
    if clip_model:
        names["truth"].append("truth_similarity")
        names["both captions"] = ["direction_similarity"]
        names["the caption of the truth"] = ["text_similarity"]
    else:
        if not any(known["truth"]):
            raise ValueError(
                'no metric is possible: the pairs have no "truth" and --clip_model is ""; give one '
                "of the two"
            )
        sentences.append(f'left out, as --clip_model is "": {", ".join(CLIP_METRICS)}')
    for requirement, metrics in names.items():
        missing = known[requirement].count(False)
        if missing:
            which = "all" if missing == len(pairs) else f"{missing} of {len(pairs)}"
            sentences.append(
                f"left out for {which} pairs, without {requirement}: {', '.join(metrics)}"
            )
    return sentences


def run(config):
    """Check the flags, read the pairs, measure what is missing, write the report."""
    check_flags(config)
    use_compilation_cache(config.compilation_cache_dir)
    if config.pairs_jsonl:
        pairs = pairs_of_jsonl(config.pairs_jsonl, config.max_pairs)
    else:
        columns = (
            config.original_image_column,
            config.edited_image_column,
            config.edit_prompt_column,
        )
        captions = (config.original_prompt_column, config.edited_prompt_column)
        pairs = pairs_of_shards(config.data_dir, columns, captions, config.max_pairs)
    sentences = left_out(pairs, config.clip_model)
    for pair in tqdm(pairs, "checking images", unit="pair", disable=len(pairs) < 100):
        pair.check()

    all_scales = list(itertools.product(config.guidance_scale, config.image_guidance_scale))
    # An acceleration may fit the branches of some scales only.
    scales_of_branches = {guidance_branches(*scales): scales for scales in all_scales}
    opened = {}
    for model, scales in itertools.product(config.model, scales_of_branches.values()):
        opened[model] = check_model(
            model,
            config.resolution,
            config.num_inference_steps,
            config.scheduler,
            config.timesteps,
            config.eta,
            config.timestep_spacing,
            config.accelerate,
            scales,
        )
    # All edit images of the same size.
    factor = max(factor for _, factor, _, _ in opened.values())
    resolutions = {model: resolution for model, (_, _, resolution, _) in opened.items()}
    if len(set(resolutions.values())) > 1:
        sizes = ", ".join(f"{model} {resolution}" for model, resolution in resolutions.items())
        raise ValueError(f"the models were made for different sizes ({sizes}); give --resolution")
    resolution = resolutions[config.model[0]]
    devices = jax.local_devices()[: len(pairs)]
    accelerate = parse(config.accelerate)
    settings = {
        "num_pairs": len(pairs),
        "num_truths": sum(pair.truth is not None for pair in pairs),
        "checksum of the pairs": checksum_of_pairs(pairs),
        "num_inference_steps": len(config.timesteps) or config.num_inference_steps,
        "resolution": resolution,
        "multiple of sides": factor,
        "scheduler": config.scheduler,
        "timesteps": list(config.timesteps) or None,
        "eta": config.eta,
        "timestep_spacing": config.timestep_spacing,
        "lora": list(config.lora) or None,
        "checksum of the LoRAs": lora_checksum(config.lora),
        "accelerate": str(accelerate) or None,
        "checksum of the TAESD": tiny_vae_checksum(accelerate),
        "dtype": str(compute_dtype(config.dtype)),
        "batch_size": config.batch_size,
        "clip_model": config.clip_model or "none",
        "devices": f"{len(devices)} x {devices[0].device_kind}",
    }
    results = load_results(
        config, settings, {model: model_checksum(model) for model in config.model}
    )
    save = partial(save_results, config, results)
    keys = [(*map(float, scales), seed) for scales in all_scales for seed in config.seeds]
    names = ("guidance_scale", "image_guidance_scale", "seed")
    todo = {
        model: [
            key
            for key in keys
            if find_row(results["rows"], model=model, **dict(zip(names, key))) is None
        ]
        for model in config.model
    }
    for sentence in sentences:
        print(sentence)

    clip = Clip(config.clip_model) if config.clip_model and any(todo.values()) else None
    references = load_references(pairs, clip, resolution, factor)
    if any(todo.values()):
        measure_baselines(references, results)
    total = len(pairs) * sum(map(len, todo.values()))
    with tqdm(total=total, unit="edit", disable=not total) as bar:
        for model, missing in todo.items():
            if missing:
                measure_model(references, results, save, model, opened[model], missing, config, bar)
    rows = grid_rows([pair.instruction for pair in pairs])
    shown = [(i, pairs[i], references.sizes[i]) for i in rows]
    write_report(config.output_dir, results, shown, sentences)
    print((config.output_dir / "results.md").read_text(encoding="utf-8"), end="")
    print(f"wrote {', '.join(sorted(file.name for file in config.output_dir.glob('*.*')))}")


def main(args=None):
    """Command line."""
    run_main(
        Config,
        __doc__,
        run,
        args,
        interrupted="the rows finished so far are in --output_dir; the same command continues",
        out_of_memory="lower --batch_size or --resolution, or use --dtype bfloat16",
    )


if __name__ == "__main__":
    main()
