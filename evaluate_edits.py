"""Measure and compare InstructPix2Pix models on held-out pairs, over all devices of this machine.

    python evaluate_edits.py --model MODEL_A MODEL_B --data_dir held_out_shards \\
        --guidance_scale 7.5 --image_guidance_scale 1.0 1.2 1.4 1.6 1.8 2.0 2.2 --seeds 0 1 2 \\
        --output_dir evaluation

With the model of `make demo`, on a CPU, in a minute and without CLIP:

    python evaluate_edits.py --model demo/output/model \\
        --pairs_jsonl demo/output/held_out/edits.jsonl --num_inference_steps 20 \\
        --guidance_scale 2 --image_guidance_scale 1.2 --batch_size 18 --clip_model ""

Every model edits every pair at every combination of scales and seeds. --data_dir has parquet shards
as for training. --pairs_jsonl has lines {"input": "a.jpg", "instruction": "make it red", "truth":
"a_red.jpg", "input_caption": "an apple", "output_caption": "a red apple", "mask": "apple.png"}; the
last four are optional, paths are relative to the list, and docs/data.md has the table of keys.
For pairs with masks, pixel metrics are also computed inside and outside of the mask.

--protocol magicbrush, emu_edit, gedit or imgedit scores as the papers of these benchmarks do, on
their test sets. The last two have a judge, a model behind the API that --judge names:

    python evaluate_edits.py --model MODEL --protocol magicbrush --data_dir MagicBrush/test

Writes to --output_dir: results.json, one row per model, scales and seed; results.md, tables with
95% intervals; curve.png, the two CLIP similarities over image_guidance_scale; grid.png, images;
best_and_worst.png. The same command continues after an interruption; more models, scales and seeds
add rows. docs/evaluation.md defines the metrics. Runs on TPU, GPU and CPU.

Source: InstructPix2Pix (arXiv 2211.09800), section 4.1.
"""

import itertools
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from diffusers_flax.command_line import ask_before_replacing, check_scale, check_seed, run_main
from diffusers_flax.compilation_cache import use_compilation_cache
from diffusers_flax.evaluation.benchmark_sets import add_final_turns, read_benchmark
from diffusers_flax.evaluation.edits import check_model
from diffusers_flax.evaluation.held_out import (
    Columns,
    check_pairs,
    left_out,
    pairs_of_jsonl,
    pairs_of_shards,
    require_masks,
)
from diffusers_flax.evaluation.judging import (
    JudgeFlags,
    check_judge_flags,
    judge_rows,
    load_prompts,
)
from diffusers_flax.evaluation.measuring import (
    IMAGES,
    load_references,
    measure_baselines,
    measure_model,
)
from diffusers_flax.evaluation.protocols import PROTOCOLS, VIT_L_14, ScoreFlags, left_out_scores
from diffusers_flax.evaluation.report import grid_rows, write_report
from diffusers_flax.evaluation.results import (
    RESULTS,
    find_row,
    load_results,
    model_checksum,
    save_results,
    settings_of_results,
)
from diffusers_flax.evaluation.scores import draw_extremes, score_tables
from diffusers_flax.generating.clip import Clip
from diffusers_flax.generating.defaults import with_defaults
from diffusers_flax.generating.flags import SamplingFlags, from_flags
from diffusers_flax.generating.models import Sampling
from diffusers_flax.generating.single_files import with_single_files
from diffusers_flax.images import save_image
from diffusers_flax.pipelines.instruct_pix2pix import edit_branches
from diffusers_flax.schedulers.factory import check_scheduler

FLAGS_OF_SHARDS = (
    *("original_image_column", "edited_image_column", "edit_prompt_column"),
    *("original_prompt_column", "edited_prompt_column", "mask_column"),
)


@dataclass(frozen=True)
class EvaluationFlags:
    """Models, held-out pairs, metrics and files."""

    model: tuple[str, ...]  # directories, hub ids or files of InstructPix2Pix models, SD or SDXL
    # configs of one-file models: a directory or hub id; default: their family's
    config_name_or_path: str | None = None
    use_ema_weights: bool = False  # of one-file models: the averages of the UNet's weights
    # data: one of the two
    data_dir: str = ""  # directory of *.parquet shards of pairs that were not trained on
    pairs_jsonl: Path | None = None  # lines {"input", "instruction", "truth", ...}, see above
    max_pairs: int | None = None  # use the first N pairs only; default: all
    original_image_column: str = ""  # image to edit; "": as in a known set, docs/data.md
    edited_image_column: str = ""  # image after the edit, the truth; "": likewise
    edit_prompt_column: str = ""  # instruction; "": likewise
    original_prompt_column: str = ""  # caption of the image to edit; "": original_prompt
    edited_prompt_column: str = ""  # caption of the truth; "": edited_prompt
    # mask, white where the truth may differ; "": mask_img, mask_image or mask, if there is one
    mask_column: str = ""
    use_masks: bool = False  # edit inside of the masks only, as edit_cli.py --mask does
    mask_feather: int = 0  # of --use_masks: pixels inside of the white part to fade the edit in
    # edits; all combinations of the three lists
    # weights of the instruction, >= 0; default: the model's, or 7.5
    guidance_scale: tuple[float, ...] = ()
    image_guidance_scale: tuple[float, ...] = ()  # similarity to the input, >= 0; likewise, or 1.5
    seeds: tuple[int, ...] = (0,)  # seeds of the noise
    num_inference_steps: int | None = None  # denoising steps; default: the model's, or 50
    resolution: int | None = None  # pixels, longer side; default: the models'
    batch_size: int = 1  # images per device at once
    # metrics
    clip_model: str | None = None  # directory, hub id, or "" for none; default: the protocol's
    # what computes CLIP: flax, on the first device, or torch, on the CPU; both in float32
    clip_backend: Literal["flax", "torch"] = "flax"
    # files
    output_dir: Path = Path("evaluation")  # of results.json, the table, the curve and images
    overwrite_output_dir: bool = False  # replace earlier results in output_dir
    compilation_cache_dir: str = "~/.cache/jax"  # saves programs; "": no cache


@dataclass(frozen=True)
class Config(SamplingFlags, JudgeFlags, ScoreFlags, EvaluationFlags):
    """Flags of the script. tyro lists the flags of the last base class first."""


def check_flags(config):
    """Raise a ValueError for invalid flags."""
    if bool(config.data_dir) == bool(config.pairs_jsonl):
        raise ValueError("give one of --data_dir and --pairs_jsonl")
    for name in FLAGS_OF_SHARDS:
        if getattr(config, name) and (config.pairs_jsonl or config.protocol in PROTOCOLS):
            what = (
                "--pairs_jsonl has keys"
                if config.pairs_jsonl
                else f"not --protocol {config.protocol}"
            )
            raise ValueError(f"--{name} goes with --data_dir; {what}")
    for name in ("num_inference_steps", "batch_size", "max_pairs"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    for name in ("model", "guidance_scale", "image_guidance_scale", "seeds"):
        values = getattr(config, name)
        if not values and name in ("model", "seeds"):
            raise ValueError(f"--{name} needs at least one value")
        if len(set(values)) < len(values):
            raise ValueError(f"--{name} {' '.join(map(str, values))} has a value twice")
    for name in ("guidance_scale", "image_guidance_scale"):
        for value in getattr(config, name):
            check_scale(name, value)
    for seed in config.seeds:
        check_seed("seeds", seed)
    if config.mask_feather < 0:
        raise ValueError(f"--mask_feather {config.mask_feather} must be 0 or more pixels")
    if config.mask_feather and not config.use_masks:
        raise ValueError(
            f"--mask_feather {config.mask_feather} is for --use_masks; give both or none"
        )
    check_scheduler(config.scheduler)
    if config.instruction_language != "en" and config.protocol != "gedit":
        raise ValueError(
            f"--instruction_language {config.instruction_language} is for --protocol gedit"
        )
    if "dino" in config.metrics and not config.dino_model:
        raise ValueError('--metrics dino needs a model, but --dino_model is ""')
    check_judge_flags(config, config.protocol in PROTOCOLS and PROTOCOLS[config.protocol].is_judged)
    ask_before_replacing("output_dir", config.output_dir, config.overwrite_output_dir, RESULTS)


def read_compared_pairs(config):
    """The pairs of --data_dir or --pairs_jsonl."""
    if config.protocol in PROTOCOLS:
        return read_benchmark(config)
    if config.pairs_jsonl:
        return pairs_of_jsonl(config.pairs_jsonl, config.max_pairs)
    columns = Columns(
        original_image=config.original_image_column,
        edited_image=config.edited_image_column,
        edit_prompt=config.edit_prompt_column,
        mask=config.mask_column,
    )
    captions = config.original_prompt_column, config.edited_prompt_column
    return pairs_of_shards(config.data_dir, columns, captions, config.max_pairs)


def check_compared_models(config, all_scales):
    """Check all models without reading their weights.

    Args:
        config: Config.
        all_scales: list of (guidance_scale, image_guidance_scale).

    Returns:
        ({model: CheckedModel}, resolution and factor of all images).
    """
    # An acceleration may not fit the branches of all scales.
    scales_of_branches = {edit_branches(*scales): scales for scales in all_scales}
    checked = {}
    for model, scales in itertools.product(config.model, scales_of_branches.values()):
        scales = dict(zip(("guidance_scale", "image_guidance_scale"), scales))
        sampling = from_flags(Sampling, config, **scales)
        checked[model] = check_model(model, config.resolution, sampling)
    resolutions = {model: found.resolution for model, found in checked.items()}
    if len(set(resolutions.values())) > 1:
        sizes = ", ".join(f"{model} {resolution}" for model, resolution in resolutions.items())
        raise ValueError(f"the models were made for different sizes ({sizes}); give --resolution")
    factor = max(found.factor for found in checked.values())
    return checked, resolutions[config.model[0]], factor


def missing_runs(config, all_scales, rows):
    """{model: list of (guidance_scale, image_guidance_scale, seed) without a row}."""
    runs = [(*map(float, scales), seed) for scales in all_scales for seed in config.seeds]
    names = ("guidance_scale", "image_guidance_scale", "seed")
    return {
        model: [run for run in runs if find_row(rows, model=model, **dict(zip(names, run))) is None]
        for model in config.model
    }


def run(config):
    """Check the flags, read the pairs, measure what is missing, write the report."""
    check_flags(config)
    use_compilation_cache(config.compilation_cache_dir)
    protocol = PROTOCOLS.get(config.protocol)
    if config.clip_model is None:
        config = replace(config, clip_model=protocol.clip_model if protocol else VIT_L_14)
    pairs = read_compared_pairs(config)
    bar = partial(tqdm, desc="checking images", unit="pair", disable=len(pairs) < 100)
    pairs = check_pairs(pairs, config.use_masks, bar, any_shape=protocol is not None)
    if protocol and protocol.is_judged:
        groups = {pair.group for pair in pairs}
        prompts = load_prompts(config.judge_prompts, config.protocol, groups)
    if protocol:
        sentences = left_out_scores(pairs, protocol, config)
    else:
        sentences = left_out(pairs, config.clip_model)
    if config.protocol == "magicbrush":
        pairs = add_final_turns(pairs)
    config = with_single_files(config, "model")
    config = with_defaults(config, config.model, config.lora)
    all_scales = list(itertools.product(config.guidance_scale, config.image_guidance_scale))
    checked, resolution, factor = check_compared_models(config, all_scales)
    results = load_results(
        config.output_dir,
        settings_of_results(config, pairs, resolution, factor),
        {model: model_checksum(model) for model in config.model},
        config.overwrite_output_dir,
    )
    save = partial(save_results, config.output_dir, results)
    todo = missing_runs(config, all_scales, results["rows"])
    for sentence in sentences:
        print(sentence)

    clip, is_needed = None, any(todo.values())
    if config.clip_model and is_needed:
        clip = Clip(config.clip_model, config.clip_backend)
    references = load_references(pairs, clip, resolution, factor, config, is_needed)
    if config.use_masks:
        require_masks(pairs, references.sizes)
    if is_needed:
        measure_baselines(references, results)
    total = len(pairs) * sum(map(len, todo.values()))
    with tqdm(total=total, unit="edit", disable=not total) as bar:
        for model, runs in todo.items():
            if runs:
                measure_model(references, results, save, model, checked[model], runs, config, bar)
    if protocol and protocol.is_judged:
        bar = partial(tqdm, desc="judging", unit="answer")
        images = config.output_dir / IMAGES
        sentences = [*sentences, *judge_rows(results, pairs, config, save, images, prompts, bar)]
    rows = grid_rows([pair.instruction for pair in pairs])
    shown = [(i, pairs[i], references.sizes[i]) for i in rows]
    tables = score_tables(results, pairs, config.output_dir)
    write_report(config.output_dir, results, shown, sentences, tables)
    if image := draw_extremes(results, pairs, config.output_dir, config.output_dir / IMAGES):
        save_image(image, config.output_dir / "best_and_worst.png")
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
