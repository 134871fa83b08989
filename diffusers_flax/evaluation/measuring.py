"""Measuring models on held-out pairs: baselines, the VAE alone, edits and their costs."""

import sys
from collections import defaultdict
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from diffusers_flax.acceleration.caches import switch_fractions
from diffusers_flax.acceleration.plans import plan_steps
from diffusers_flax.data.images import load_image
from diffusers_flax.devices.memory import peak_memory
from diffusers_flax.devices.precision import choose_dtype
from diffusers_flax.evaluation.judging import save_source
from diffusers_flax.evaluation.metrics import METRICS, ResultScorer
from diffusers_flax.evaluation.protocols import PROTOCOLS
from diffusers_flax.evaluation.results import save_results, save_values
from diffusers_flax.flops import matmul_flops
from diffusers_flax.generating.batches import (
    FileWriter,
    check_finite_images,
    devices_for,
    largest_round,
)
from diffusers_flax.generating.flags import from_flags
from diffusers_flax.generating.models import (
    EDIT,
    ModelOptions,
    load_weights,
    open_model,
    plan_images,
)
from diffusers_flax.generating.requests import Request
from diffusers_flax.generating.runner import Models, make_images
from diffusers_flax.generating.sizes import fit_image
from diffusers_flax.images import prepare_images, save_image
from diffusers_flax.parameters import replicate_params
from diffusers_flax.pipelines.base import MODULES
from diffusers_flax.pipelines.sampling import decode, make_schedule

RUN = ("guidance_scale", "image_guidance_scale", "seed")  # of a row of results.json
BASELINES = {"original": "copied input", "edited": "truth"}
VAE_BASELINES = {"original": "VAE round trip of the input", "edited": "VAE round trip of the truth"}


class Evaluation:
    """Measures models on the same pairs.

    Args:
        config: Config of evaluate_edits.py.
        pairs: list of HeldOutPair.
        sizes: (width, height) of each pair's edit.
        results: content of results.json, which gets the rows.
    """

    def __init__(self, config, pairs, sizes, results):
        self.config, self.pairs, self.sizes, self.results = config, pairs, sizes, results
        self.is_masked = [config.use_masks and pair.mask is not None for pair in pairs]
        self.protocol = PROTOCOLS[config.protocol]
        sizes = None if self.protocol.is_benchmark else sizes
        networks = {"clip": config.clip_model, "dino": config.dino_model}  # "": none
        metrics = []  # of METRICS; a judge's scores come later
        for name in dict.fromkeys((*config.metrics, *self.protocol.metrics)):
            if name in METRICS and networks.get(METRICS[name].network, True):
                metrics.append(name)
        self.measure = ResultScorer(pairs, metrics, sizes, *networks.values()).measure

    def add_baselines(self, names, model=None, change=lambda image: image):
        """Add the rows of baselines to the results, if they are not there.

        Args:
            names: {"original" or "edited": name of the row}.
            model: name of a model, or None.
            change: PIL image of a pair -> PIL image that counts as result.
        """
        rows = self.results["baselines"]
        done = {(row["baseline"], row["model"]) for row in rows}
        for what, name in names.items():
            metrics = defaultdict(list)
            for place, (pair, size) in enumerate(zip(self.pairs, self.sizes)):
                image = pair.decoded(what, size)
                if image is not None and (name, model) not in done:
                    for metric, value in self.measure(place, change(image)).items():
                        metrics[metric].append(value)
            if metrics:
                rows.append({"baseline": name, "model": model} | averages(metrics))

    def measure_model(self, model, pipeline_type, scheduler, todo, bar):
        """Measure a model at scales and seeds; add a row to the results for each.

        Args:
            model: its name.
            pipeline_type: class of its pipeline.
            scheduler: of check_sampling.
            todo: {values of RUN: Sampling}, not empty.
            bar: progress bar, in units of edits.
        """
        config, pairs = self.config, self.pairs
        devices = devices_for(largest_round(pairs))
        peak_memory(devices, reset=True)
        bar.set_description(model)
        options = from_flags(ModelOptions, config, dtype=choose_dtype(config.dtype))
        pipeline = open_model(model, pipeline_type, scheduler, config.accelerate, options)
        of_batches = len(pairs), config.batch_size, (), self.sizes
        pipeline, planned = plan_images(pipeline, devices, *of_batches)
        tqdm.write(planned, file=sys.stderr)
        params = load_weights(pipeline, model, options)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        modules = sorted(MODULES.keys() & params.keys())
        self.results["models"][model] |= {
            "pipeline": pipeline_type.torch_class_name,
            "parameters": {x: sum(y.size for y in jax.tree.leaves(params[x])) for x in modules},
        }
        vae, vae_params = pipeline.compute_vae, jax.device_put(params["vae"], devices[0])

        def through_vae(image):
            decoded = vae_round_trip(vae, vae_params, prepare_images(image))
            return pipeline.numpy_to_pil(decoded)[0]

        self.add_baselines(VAE_BASELINES, model, through_vae)
        replicate_params(params, devices)
        models = Models({EDIT: pipeline}, params)
        number, flops = list(self.results["models"]).index(model), {}  # FLOPs by the branches
        for values, sampling in todo.items():
            branches, compile_seconds = sampling.branches(pipeline_type), 0.0
            if branches not in flops:
                # One edit with every program before the clock starts
                programs = {x: i for i, x in enumerate(zip(self.sizes, self.is_masked))}
                no_bar = tqdm(disable=True)
                batches = self._edit_batches(models, sampling, programs.values(), None, no_bar)
                compile_seconds = sum(seconds for *_, seconds in batches)
                shape = pipeline, shapes, branches, sampling.steps(pipeline_type)
                of_size = {size: count_edit_flops(*shape, size) for size in set(self.sizes)}
                flops[branches] = float(np.mean([of_size[size] for size in self.sizes]))
            folder = "_".join(map(str, (number, *values)))
            metrics, seconds = self.measure_edits(models, sampling, folder, bar)
            save_values(config.output_dir, folder, metrics)
            memory, memory_of = peak_memory(devices)
            row = {"model": model, **dict(zip(RUN, values)), "num_pairs": len(pairs)}
            row |= averages(metrics) | {
                "seconds_per_edit": seconds / len(pairs),
                "compile_seconds": compile_seconds,
                "flops_per_edit": flops[branches],
                "peak_memory_bytes": memory,
                "peak_memory_of": memory_of,
                "images": folder,
            }
            self.results["rows"].append(row)
            save_results(config.output_dir, self.results)

    def _edit_batches(self, models, sampling, places, load_result, bar):
        """Edit the pairs at these places over all devices; yields as make_images does.

        load_result: place -> PIL result of an edit; None: edits of results get the original.
        """

        takes_reference = models.pipeline.unet.takes_reference

        def load(place):
            pair, size = self.pairs[place], self.sizes[place]
            mask = pair.decoded_mask(size) if self.is_masked[place] else None
            reference = pair.decoded("reference", size) if takes_reference else None
            if pair.after is None or load_result is None:
                return pair.decoded("original", size), mask, reference
            return fit_image(load_result(pair.after), size), mask, reference

        requests = []
        for pair, is_masked in zip(self.pairs, self.is_masked):
            mask, after = Path() if is_masked else None, pair.after
            of_pair = dict(prompt=pair.instruction, mask=mask, index=pair.index, after=after)
            of_pair["reference"] = Path() if pair.reference and takes_reference else None
            requests.append(from_flags(Request, sampling, **of_pair))
        size = self.config.batch_size
        return make_images(models, requests, self.sizes, places, load, size, bar, in_flight=1)

    def measure_edits(self, models, sampling, folder, bar):
        """Edit and measure all pairs.

        Returns:
            ({metric: one float per pair, (n,)}, seconds of the pipeline's calls).

        Raises:
            ValueError: a result is not finite.
        """
        pairs, images_dir = self.pairs, self.config.output_dir / "images" / folder
        metrics, total_seconds = defaultdict(lambda: np.full(len(pairs), np.nan)), 0.0

        with FileWriter() as files:

            def load_result(place):
                files.wait()
                return load_image(images_dir / pairs[place].result_file(place))

            batches = self._edit_batches(models, sampling, range(len(pairs)), load_result, bar)
            for places, images, seconds in batches:
                check_finite_images(images, f"the edit of {pairs[places[0]].input} and others")
                total_seconds += seconds
                for place, image in zip(places, models.pipelines[EDIT].numpy_to_pil(images)):
                    pair = pairs[place]
                    for name, value in self.measure(place, image).items():
                        metrics[name][place] = value
                    files.write(save_image, image, images_dir / pair.result_file(place))
                    if self.protocol.is_judged:
                        source = images_dir / pair.result_file(place, "_SRCIMG")
                        files.write(save_source, pair, self.config.protocol, source)
        return metrics, total_seconds


@partial(jax.jit, static_argnums=0)
def vae_round_trip(vae, params, image):
    """Images (B, 3, H, W) in [-1, 1], encoded and decoded: (B, H, W, 3) in [0, 1]."""
    mode = vae.apply({"params": params}, image, method=vae.encode).latent_dist.mode()
    latents = jnp.transpose(mode, (0, 3, 1, 2)) * vae.config.scaling_factor
    return decode(vae, params, latents)


def averages(metrics):
    """{name: mean, NAME_std: sample standard deviation} over the pairs with a defined metric.

    metrics: {name: one float per pair, NaN where it is not defined}; None for too few pairs.
    """
    row = {}
    for name, values in metrics.items():
        values = np.asarray(values)[np.isfinite(values)]
        row[name] = float(values.mean()) if len(values) else None
        row[f"{name}_std"] = float(values.std(ddof=1)) if len(values) > 1 else None
    return row


def count_edit_flops(pipeline, params, branches, steps, size):
    """FLOPs of the matmuls and convolutions of one edit, whose size is (width, height).

    params: jax.ShapeDtypeStructs. A step of a cache counts what it computes; fbcache decides during
    the run: all its steps count in full.
    """
    width, height = size
    image = jax.ShapeDtypeStruct((1, 3, height, width), jnp.float32)
    latents = pipeline.latent_shape(1, height, width)
    num_steps, timesteps = steps["num_inference_steps"], steps["timesteps"]
    schedule = make_schedule(pipeline.scheduler, latents, num_steps, timesteps)
    edit = partial(pipeline._generate, branches=branches, **steps)
    references = {"reference": image} if pipeline.unet.takes_reference else {}
    arguments = pipeline.prepare_text_inputs(""), image, params, jax.random.key(0)
    program = jax.make_jaxpr(edit)(*arguments, **references)
    switches = switch_fractions(plan_steps(pipeline.accelerate, branches, schedule.scales))
    return matmul_flops(program.jaxpr, switches)[0]
