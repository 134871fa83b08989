"""Measuring models on held-out pairs: baselines, the VAE alone, edits and their costs."""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from diffusers_flax.acceleration.caches import switch_fractions
from diffusers_flax.acceleration.plans import plan_steps
from diffusers_flax.data.images import load_image
from diffusers_flax.devices.memory import peak_memory
from diffusers_flax.devices.precision import choose_dtype
from diffusers_flax.evaluation.edits import EditList, edit_batches, plan_edits
from diffusers_flax.evaluation.intervals import save_values
from diffusers_flax.evaluation.metrics import (
    MASK_METRICS,
    clip_metrics,
    features_or_nan,
    mask_metrics,
    pixel_metrics,
)
from diffusers_flax.evaluation.protocols import PROTOCOLS, Scorer, load_networks, metrics_of
from diffusers_flax.evaluation.report import grid_rows
from diffusers_flax.evaluation.results import find_row
from diffusers_flax.evaluation.scores import NUM_EXTREMES, RANKED, ranking_metric
from diffusers_flax.flops import matmul_flops
from diffusers_flax.generating.batches import FileWriter, check_finite_images, rounds_of
from diffusers_flax.generating.clip import Clip
from diffusers_flax.generating.flags import from_flags
from diffusers_flax.generating.models import ModelOptions, Sampling, load_model
from diffusers_flax.generating.sizes import fit_image, result_size
from diffusers_flax.images import prepare_images, save_image
from diffusers_flax.parameters import replicate_params
from diffusers_flax.pipelines.base import MODULES
from diffusers_flax.pipelines.sampling import decode, make_schedule

IMAGES = "images"  # directory of results: of the report's images, or all of a protocol's
BASELINES = ("copied input", "truth")
VAE_BASELINES = ("VAE round trip of the input", "VAE round trip of the truth")


@dataclass(frozen=True)
class References:
    """What results are compared with."""

    pairs: list  # of HeldOutPair
    sizes: list  # (width, height) of each edit
    clip: Clip | None
    # {"original", "edited", "original_text", "edited_text"}, each (n, D), NaN where unknown
    features: dict | None
    scorer: Scorer | None = None  # of a protocol's metrics, or of more metrics
    is_protocol: bool = False  # whether the scorer's metrics are all

    @property
    def has_metrics(self):
        """False if only a judge scores the results."""
        return self.scorer is not None or not self.is_protocol


def load_references(pairs, clip, resolution, factor, config, is_needed=True):
    """The References for pairs at a resolution.

    Args:
        pairs: list of HeldOutPair.
        clip: Clip or None.
        resolution, factor: of the edits' sizes, see result_size.
        config: Config of evaluate_edits.py.
        is_needed: whether anything is to be measured; else no network is loaded.
    """
    sizes = [result_size(pair.size(), resolution, factor) for pair in pairs]
    is_protocol, metrics = config.protocol in PROTOCOLS, metrics_of(config)
    scorer = None
    if metrics and is_needed:
        networks = clip, *load_networks(metrics, config.dino_model)
        scorer = Scorer(pairs, metrics, *networks, sizes=None if is_protocol else sizes)
    if clip is None or is_protocol:
        return References(pairs, sizes, None, None, scorer, is_protocol)
    with tqdm(total=2 * len(pairs), desc="CLIP of the pairs", unit="image") as bar:

        def encode(images):
            bar.update(len(images))
            return clip.image_features(images)

        originals, edited_images = [], []
        for pair, size in zip(pairs, sizes):
            originals.append(encode([pair.fitted_original(size)])[0])
            edited = pair.fitted_edited(size)
            bar.update(edited is None)
            unknown = np.full(clip.dim, np.nan)
            edited_images.append(unknown if edited is None else encode([edited])[0])
    features = {"original": np.stack(originals), "edited": np.stack(edited_images)}
    for name in ("original", "edited"):
        captions = [getattr(pair, f"{name}_caption") for pair in pairs]
        features[f"{name}_text"] = features_or_nan(clip.text_features, captions, clip.dim)
    return References(pairs, sizes, clip, features, scorer)


def measure_images(references, places, images):
    """Metrics of results.

    Args:
        references: References.
        places: index of each result's pair, int.
        images: results, PIL images of the edits' sizes.

    Returns:
        {metric: list of floats}, NaN where it is not defined.
    """
    metrics = defaultdict(list)
    if references.scorer is not None:
        metrics |= references.scorer.measure(places, images)
    if references.is_protocol:
        return metrics
    has_masks = any(pair.mask is not None for pair in references.pairs)
    for place, image in zip(places, images):
        pair, size = references.pairs[place], references.sizes[place]
        arrays = [
            None if x is None else np.asarray(x, np.float32) / 255
            for x in (image, pair.fitted_original(size), pair.fitted_edited(size))
        ]
        values = pixel_metrics(*arrays)
        if (mask := pair.fitted_mask(size)) is not None:
            values |= mask_metrics(np.asarray(mask), *arrays)
        elif has_masks:
            values |= dict.fromkeys(MASK_METRICS, np.nan)
        for name, value in values.items():
            metrics[name].append(value)
    if references.clip is not None:
        known = {name: features[places] for name, features in references.features.items()}
        found = clip_metrics(references.clip.image_features(images), **known)
        metrics |= {name: values.tolist() for name, values in found.items()}
    return metrics


def measure_baseline(references, make_image):
    """Metrics of make_image(pair, size), a PIL image or None, over all pairs."""
    metrics, used = defaultdict(list), 0
    for place, (pair, size) in enumerate(zip(references.pairs, references.sizes)):
        image = make_image(pair, size)
        if image is None:
            continue
        used += 1
        for name, values in measure_images(references, [place], [image]).items():
            metrics[name] += values
    return {"num_pairs": used} | averages(metrics)


def measure_baselines(references, results):
    """Add the rows of the copied original and of the edited image, which need no model.

    The first row of a model saves them too: a model that cannot be loaded changes no file.
    """
    for name in BASELINES if references.has_metrics else ():
        if find_row(results["baselines"], baseline=name) is None:
            make = {
                "copied input": lambda pair, size: pair.fitted_original(size),
                "truth": lambda pair, size: pair.fitted_edited(size),
            }[name]
            row = measure_baseline(references, make)
            if row["num_pairs"]:
                results["baselines"].append({"baseline": name, "model": None} | row)


def measure_vae(references, results, save, model, pipeline, params):
    """Add the rows of a model's VAE: original and edited image, encoded and decoded."""

    def through_vae(image):
        decoded = vae_round_trip(pipeline.compute_vae, params, prepare_images(image))
        return pipeline.numpy_to_pil(decoded)[0]

    def of_edited(pair, size):
        edited = pair.fitted_edited(size)
        return None if edited is None else through_vae(edited)

    params = jax.device_put(params, jax.local_devices()[0])
    makes = (lambda pair, size: through_vae(pair.fitted_original(size)), of_edited)
    for name, make in zip(VAE_BASELINES, makes) if references.has_metrics else ():
        if find_row(results["baselines"], baseline=name, model=model) is None:
            row = measure_baseline(references, make)
            if row["num_pairs"]:
                results["baselines"].append({"baseline": name, "model": model} | row)
                save()


@partial(jax.jit, static_argnums=0)
def vae_round_trip(vae, params, image):
    """Images (B, 3, H, W) in [-1, 1], encoded and decoded: (B, H, W, 3) in [0, 1]."""
    mode = vae.apply({"params": params}, image, method=vae.encode).latent_dist.mode()
    latents = jnp.transpose(mode, (0, 3, 1, 2)) * vae.config.scaling_factor
    return decode(vae, params, latents)


def measure_model(references, results, save, model, checked, todo, config, bar):
    """Measure a model at scales and seeds; add a row to results for each.

    Args:
        references: References.
        results, save: content of results.json, and a function that writes it.
        model: its name.
        checked: of check_model.
        todo: list of (guidance_scale, image_guidance_scale, seed), not empty.
        config: Config of evaluate_edits.py.
        bar: progress bar, in units of edits.
    """
    pairs, sizes = references.pairs, references.sizes
    masks = dict(use_masks=config.use_masks, mask_feather=config.mask_feather)
    edit_list = EditList(pairs, sizes, config.batch_size, rounds_of(pairs), **masks)
    devices = edit_list.devices(None)
    peak_memory(devices, reset=True)
    bar.set_description(f"loading {model}")
    pipeline, params = load_largest(model, checked, todo, edit_list, config)
    pipeline.embeddings.warn_unused([pair.instruction for pair in pairs])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    results["models"][model] |= {
        "pipeline": checked.pipeline_type.torch_class_name,
        "parameters": {
            name: num_parameters(params[name]) for name in sorted(MODULES.keys() & params.keys())
        },
    }
    measure_vae(references, results, save, model, pipeline, params["vae"])
    replicate_params(params, devices)

    number = list(results["models"]).index(model)
    flops = {}  # of an edit, by the branches of guidance for which the program is compiled
    for guidance_scale, image_guidance_scale, seed in todo:
        scales = {"guidance_scale": guidance_scale, "image_guidance_scale": image_guidance_scale}
        sampling = from_flags(Sampling, config, seed=seed, **scales)
        edit_all = partial(edit_batches, pipeline, params, sampling=sampling)
        branches = sampling.branches(checked.pipeline_type)
        compile_seconds = 0.0
        if branches not in flops:
            bar.set_description(f"compiling {model}")
            compile_seconds = warm_up(edit_all, edit_list, len(devices))
            steps = sampling.steps(checked.pipeline_type)
            flops[branches] = mean_flops(pipeline, shapes, sizes, branches, steps)
        folder = f"{number}_{guidance_scale}_{image_guidance_scale}_{seed}"
        metrics, ranked_by, seconds = measure_edits(
            partial(edit_all, edit_list, bar=bar),
            pipeline,
            references,
            config.output_dir / IMAGES / folder,
            config.lora,
        )
        save_values(config.output_dir, folder, metrics)
        memory, memory_of = peak_memory(devices)
        results["rows"].append(
            {"model": model, **scales, "seed": seed, "num_pairs": len(pairs)}
            | averages(metrics)
            | {
                "seconds_per_edit": seconds / len(pairs),
                "compile_seconds": compile_seconds,
                "flops_per_edit": flops[branches],
                "peak_memory_bytes": memory,
                "peak_memory_of": memory_of,
                "images": folder,
                "ranked_by": ranked_by,
            }
        )
        save()


def load_pair(pair, size, is_masked, result_of=None):
    """The original image and mask of a HeldOutPair for edit_batches.

    result_of: place -> the result of that edit, PIL; None: an edit of a result gets the original.
    """
    mask = pair.fitted_mask(size) if is_masked else None
    if pair.after is None or result_of is None:
        return pair.fitted_original(size), mask
    return fit_image(result_of(pair.after), size), mask


def load_largest(model, checked, todo, edit_list, config):
    """Load a model; its program with most branches of guidance must fit into memory.

    Arguments as for measure_model; edit_list: EditList.

    Returns:
        (pipeline, its parameters as NumPy arrays).
    """
    all_sampling = [
        from_flags(Sampling, config, guidance_scale=scale, image_guidance_scale=image_scale)
        for scale, image_scale, _ in todo
    ]
    branches = max((x.branches(checked.pipeline_type) for x in all_sampling), key=len)
    return load_model(
        model,
        checked.pipeline_type,
        checked.scheduler,
        config.accelerate,
        from_flags(ModelOptions, config, dtype=choose_dtype(config.dtype)),
        partial(plan_edits, edit_list=edit_list, branches=branches),
    )


def warm_up(edit_all, edit_list, num_devices):
    """Edit the first batch of every program before the clock starts.

    Args:
        edit_all: edit_batches without edit_list and bar.
        edit_list: EditList.
        num_devices: number of devices.

    Returns:
        Seconds.
    """
    places_of = defaultdict(list)
    for place, (_, kind) in enumerate(edit_list.rounds_and_kinds):
        places_of[kind].append(place)
    at_once = edit_list.batch_size * num_devices
    first = [place for places in places_of.values() for place in places[:at_once]]
    edits, sizes = ([x[place] for place in first] for x in (edit_list.edits, edit_list.sizes))
    few = replace(edit_list, edits=edits, sizes=sizes, rounds=None)
    batches = edit_all(few, load=load_pair, bar=tqdm(disable=True))
    return sum(seconds for _, _, seconds in batches)


def measure_edits(edit_all, pipeline, references, folder, lora):
    """Edit all pairs, measure the results and write those that the report may show.

    With a protocol all results are written, by the names that its own evaluation expects.

    Args:
        edit_all: edit_batches without load.
        pipeline: InstructPix2Pix.
        references: References.
        folder: of the images.
        lora: see check_finite_images.

    Returns:
        ({metric: one float per pair, in their order}, the metric that ranks the results or None,
        seconds of the pipeline's calls).

    Raises:
        ValueError: a result is not finite.
    """
    pairs, is_protocol = references.pairs, references.is_protocol
    shown = range(len(pairs)) if is_protocol else grid_rows([pair.instruction for pair in pairs])
    place_of = {pair.index: place for place, pair in enumerate(pairs)}
    files_of = [folder / pair.result_file(place) for place, pair in enumerate(pairs)]
    metrics, order, total_seconds = defaultdict(list), [], 0.0
    extremes, ranked_by = [], None

    with FileWriter() as files:

        def result_of(place):
            files.wait_for(files_of[place])
            return load_image(files_of[place])

        for batch, images, seconds in edit_all(load=partial(load_pair, result_of=result_of)):
            check_finite_images(images, f"the edit of {batch[0].input} and others", lora)
            places = [place_of[pair.index] for pair in batch]
            images = pipeline.numpy_to_pil(images)
            total_seconds += seconds
            order += places
            found = measure_images(references, places, images)
            for name, values in found.items():
                metrics[name] += values
            for place, image in zip(places, images):
                if place in shown:
                    files.write(files_of[place], save_image, image, files_of[place])
            if ranked_by := ranked_by or ranking_metric(found):
                scores = RANKED[ranked_by] * np.asarray(found[ranked_by])
                extremes = keep_extremes(extremes, scores, places, images)
        for _, place, image in extremes:
            if place not in shown:
                files.write(files_of[place], save_image, image, files_of[place])
    metrics = {name: np.asarray(x, float)[np.argsort(order)] for name, x in metrics.items()}
    return metrics, ranked_by, total_seconds


def keep_extremes(kept, scores, places, images):
    """The results with the best and the worst scores, [(score, place, image)], best last.

    Args:
        kept: of the results before.
        scores: of more results, the more the better; NaN is left out.
        places, images: of these results.
    """
    kept = [*kept, *(x for x in zip(scores, places, images) if np.isfinite(x[0]))]
    kept.sort(key=lambda x: x[:2])
    return kept[:NUM_EXTREMES] + kept[NUM_EXTREMES:][-NUM_EXTREMES:]


def averages(metrics):
    """Means and standard deviations over the pairs with a defined metric, which is not NaN.

    Args:
        metrics: {name: one float per pair}.

    Returns:
        {name: mean, NAME_std: sample standard deviation}; None for too few pairs.
    """
    row = {}
    for name, values in metrics.items():
        values = np.asarray(values)[np.isfinite(values)]
        row[name] = float(values.mean()) if len(values) else None
        row[f"{name}_std"] = float(values.std(ddof=1)) if len(values) > 1 else None
    return row


def mean_flops(pipeline, shapes, sizes, branches, steps):
    """Mean of count_edit_flops over edits; sizes: (width, height)."""
    counts = Counter(sizes)
    flops = [count_edit_flops(pipeline, shapes, size, branches, steps) for size in counts]
    return float(np.average(flops, weights=list(counts.values())))


def count_edit_flops(pipeline, params, size, branches, steps):
    """FLOPs of the matmuls and convolutions of one edit.

    A step of a cache counts what it computes. fbcache decides during the run: all its steps count
    in full.

    Args:
        pipeline: InstructPix2Pix.
        params: shapes of its parameters, jax.ShapeDtypeStruct.
        size: (width, height).
        branches: of guidance.
        steps: of timestep_options.

    Returns:
        float.
    """
    width, height = size
    image = jax.ShapeDtypeStruct((1, 3, height, width), jnp.float32)
    latents = pipeline.latent_shape(1, height, width)
    num_steps, timesteps = steps["num_inference_steps"], steps["timesteps"]
    schedule = make_schedule(pipeline.scheduler, latents, num_steps, timesteps)
    edit = partial(pipeline._generate, branches=branches, **steps)
    arguments = pipeline.prepare_text_inputs(""), image, params, jax.random.key(0)
    program = jax.make_jaxpr(edit)(*arguments)
    switches = switch_fractions(plan_steps(pipeline.accelerate, branches, schedule.scales))
    return matmul_flops(program.jaxpr, switches)[0]


def num_parameters(tree):
    """Number of parameters of a tree of arrays."""
    return sum(x.size for x in jax.tree.leaves(tree))
