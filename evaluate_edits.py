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
"a_red.jpg", "input_caption": "an apple", "output_caption": "a red apple", "mask": "apple.png",
"reference": "red.jpg"}; the last five are optional, paths are relative to the list, and
docs/data.md has the table of keys. A model with 12 input channels sees the reference.
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
from pathlib import Path
from typing import Annotated

from tqdm import tqdm

from diffusers_flax.command_line import AtLeast, Seed, ask_before_replacing, run_main
from diffusers_flax.compilation_cache import use_compilation_cache
from diffusers_flax.data.images import encoded_size
from diffusers_flax.data.options import Columns
from diffusers_flax.evaluation.benchmark_sets import read_benchmark
from diffusers_flax.evaluation.held_out import pairs_of_jsonl, pairs_of_one_shape, pairs_of_shards
from diffusers_flax.evaluation.judging import JudgeFlags, judge_rows, load_prompts
from diffusers_flax.evaluation.measuring import BASELINES, RUN, Evaluation
from diffusers_flax.evaluation.protocols import PROTOCOLS, ScoreFlags
from diffusers_flax.evaluation.results import RESULTS, load_results, settings_of_results
from diffusers_flax.evaluation.results_report import write_report
from diffusers_flax.generating.flags import (
    SamplingFlags,
    from_flags,
    with_defaults,
    with_single_files,
)
from diffusers_flax.generating.models import (
    EDIT,
    Sampling,
    check_sampling,
    check_tasks,
    factor_and_resolution,
    pipeline_for,
)
from diffusers_flax.generating.sizes import result_size

# Messages of run_main
INTERRUPTED = "the rows finished so far are in --output_dir; the same command continues"
LESS_MEMORY = "lower --batch_size or --resolution, or use --dtype bfloat16"


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
    max_pairs: Annotated[int, AtLeast(1)] | None = None  # use the first N pairs only; default: all
    original_image_column: str = ""  # image to edit; "": as in a known set, docs/data.md
    edited_image_column: str = ""  # image after the edit, the truth; "": likewise
    edit_prompt_column: str = ""  # instruction; "": likewise
    # mask, white where the truth may differ; "": mask_img, mask_image or mask, if there is one
    mask_column: str = ""
    # image that models with 12 input channels see too; "": reference_image, if there is one
    reference_image_column: str = ""
    use_masks: bool = False  # edit inside of the masks only, as edit_cli.py --mask does
    wrong_reference: bool = False  # each pair gets the next one's reference, to compare
    # edits; all combinations of the three lists
    # weights of the instruction, >= 0; default: the model's, or 7.5
    guidance_scale: tuple[Annotated[float, AtLeast(0)], ...] = ()
    # similarity to the input, >= 0; likewise, or 1.5
    image_guidance_scale: tuple[Annotated[float, AtLeast(0)], ...] = ()
    seeds: tuple[Seed, ...] = (0,)  # seeds of the noise
    # denoising steps; default: the model's, or 50
    num_inference_steps: Annotated[int, AtLeast(1)] | None = None
    resolution: int | None = None  # pixels, longer side; default: the models'
    batch_size: Annotated[int, AtLeast(1)] = 1  # images per device at once
    # metrics
    clip_model: str | None = None  # directory, hub id, or "" for none; default: the protocol's
    # files
    output_dir: Path = Path("evaluation")  # of results.json, the table, the curve and images
    overwrite_output_dir: bool = False  # replace earlier results in output_dir
    compilation_cache_dir: str = "~/.cache/jax"  # saves programs; "": no cache


@dataclass(frozen=True)
class Config(SamplingFlags, JudgeFlags, ScoreFlags, EvaluationFlags):
    """Flags of the script. tyro lists the flags of the last base class first."""


def read_pairs(config):
    """The pairs of --data_dir or --pairs_jsonl."""
    if PROTOCOLS[config.protocol].is_benchmark:
        folder, language = Path(config.data_dir), config.instruction_language
        return read_benchmark(config.protocol, folder, config.max_pairs, language)
    if config.pairs_jsonl:
        if named := [name for name in vars(config) if "_column" in name and getattr(config, name)]:
            raise ValueError(f"--{named[0]} is for --data_dir; leave it out")
        pairs = pairs_of_jsonl(config.pairs_jsonl, config.max_pairs)
    else:
        columns = Columns(
            original_image=config.original_image_column,
            edited_image=config.edited_image_column,
            edit_prompt=config.edit_prompt_column,
            mask=config.mask_column,
            reference_image=config.reference_image_column or None,
        )
        pairs = pairs_of_shards(config.data_dir, columns, config.max_pairs)
    return pairs_of_one_shape(pairs)


def run(config):
    """Check the flags, read the pairs, measure what is missing, write the report."""
    protocol = PROTOCOLS[config.protocol]
    if bool(config.data_dir) == bool(config.pairs_jsonl):
        raise ValueError("give one of --data_dir and --pairs_jsonl")
    if protocol.is_benchmark and config.pairs_jsonl:
        raise ValueError(f"--protocol {config.protocol} reads --data_dir, not --pairs_jsonl")
    if not config.model or not config.seeds:
        raise ValueError("--model and --seeds need at least one value")
    if config.judge and not (protocol.is_judged and config.judge_model):
        raise ValueError("--judge goes with --judge_model and --protocol gedit or imgedit")
    if protocol.is_judged and (config.metrics or config.clip_model):
        raise ValueError(
            f"--protocol {config.protocol} has no true images; leave --metrics and --clip_model out"
        )
    ask_before_replacing("output_dir", config.output_dir, config.overwrite_output_dir, RESULTS)
    use_compilation_cache(config.compilation_cache_dir)
    if config.clip_model is None:
        config = replace(config, clip_model=protocol.clip_model)
    pairs = read_pairs(config)
    if config.use_masks and not any(pair.mask for pair in pairs):
        raise ValueError("--use_masks: no pair has a mask; give masks, or leave the flag out")
    if config.wrong_reference:
        references = [pair.reference for pair in pairs]
        if None in references:
            raise ValueError("--wrong_reference: a pair has no reference; leave the flag out")
        wrong = references[1:] + references[:1]
        pairs = [replace(pair, reference=x) for pair, x in zip(pairs, wrong)]
    if protocol.is_judged:
        groups = {pair.group for pair in pairs}
        prompts = load_prompts(config.judge_prompts, config.protocol, groups)
    config = with_single_files(config, "model")
    config = with_defaults(config, config.model, config.lora)
    runs, lists = {}, (config.guidance_scale, config.image_guidance_scale, config.seeds)
    for values in itertools.product(*lists):
        runs[values] = from_flags(Sampling, config, **dict(zip(RUN, values)))
    opened = {}  # {model: (class of the pipeline, scheduler)}
    factors, resolutions = set(), set()
    for model in config.model:
        is_xl, configs = check_tasks(model, [EDIT])
        unet = configs["unet"]
        if config.wrong_reference and unet["in_channels"] != 3 * unet["out_channels"]:
            raise ValueError(f"--wrong_reference: {model} sees no reference; leave the flag out")
        factor, resolution = factor_and_resolution(configs, config.resolution)
        factors.add(factor)
        resolutions.add(resolution)
        pipeline_type = pipeline_for(EDIT, is_xl)
        for sampling in runs.values():  # an acceleration may not fit the branches of all scales
            scheduler = check_sampling(pipeline_type, configs["scheduler"], model, sampling)
        opened[model] = pipeline_type, scheduler
    if len(resolutions) > 1:
        raise ValueError(f"the models are for sizes {sorted(resolutions)}; give --resolution")
    sizes = [result_size(encoded_size(pair.original), resolution, max(factors)) for pair in pairs]
    settings = settings_of_results(config, pairs, resolution)
    results = load_results(config.output_dir, settings, config.model, config.overwrite_output_dir)
    done = {tuple(row[name] for name in ("model", *RUN)) for row in results["rows"]}
    todo = {}
    for model in config.model:
        todo[model] = {key: x for key, x in runs.items() if (model, *key) not in done}
    if any(todo.values()):
        evaluation = Evaluation(config, pairs, sizes, results)
        evaluation.add_baselines(BASELINES)
        with tqdm(total=len(pairs) * sum(map(len, todo.values())), unit="edit") as bar:
            for model in filter(todo.get, todo):
                evaluation.measure_model(model, *opened[model], todo[model], bar)
    sentences = judge_rows(config, pairs, results, prompts) if protocol.is_judged else []
    write_report(config.output_dir, results, pairs, sizes, sentences)
    print((config.output_dir / "results.md").read_text(encoding="utf-8"), end="")


def main(args=None):
    """Command line."""
    run_main(Config, __doc__, run, args, interrupted=INTERRUPTED, out_of_memory=LESS_MEMORY)


if __name__ == "__main__":
    main()
