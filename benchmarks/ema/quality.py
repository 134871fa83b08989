"""Quality with averages of the weights: runs on the demo's task, and their measures."""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import flax_train_instruct_pix2pix as trainer
from benchmarks.ema.runs import AveragedRun, make_programs, trainer_config
from demo.evaluate import load_edits, read_held_out_edits, read_pixels, summarize_edits
from diffusers_flax.data.options import Reading, Transform
from diffusers_flax.training.batches import Batches
from diffusers_flax.training.ema import SIGMA_RELS, ema_plan, posthoc_weights, sigma_rel_to_gamma
from diffusers_flax.training.models import encode_batch, load_models
from diffusers_flax.training.sharding import replicate, to_host
from parquet_processing import ParquetImagePairs

REFERENCE_STEPS = 15000  # of Hugging Face's trainer, whose decay is 0.9999
NUM_SNAPSHOTS = 8  # of a run with --ema power
MEASURES = ("loss", "edit_error_ratio", "instruction_accuracy")


def study_plans(num_steps):
    """The averages of a run, {name: EmaPlan}."""
    scaled = 0.9999 ** (REFERENCE_STEPS / num_steps)
    return {
        "none": ema_plan("none", num_steps),
        "full 0.9999": ema_plan("full", num_steps, decay=0.9999),
        "full 0.9999, scaled": ema_plan("full", num_steps, decay=scaled),
        "full 0.9999, warm-up": ema_plan("full", num_steps, decay=0.9999, warmup=True),
        "late 3.6%": ema_plan("late", num_steps),
        "late 3.6%, 0.9999": ema_plan("late", num_steps, decay=0.9999),
        "late 20%": ema_plan("late", num_steps, fraction=0.2),
        "late 20%, 0.9999": ema_plan("late", num_steps, fraction=0.2, decay=0.9999),
        "power": ema_plan("power", num_steps),
    }


def train_with_averages(config, programs, plans, pipeline, frozen, params):
    """A run of the trainer, with all plans' averages.

    Args:
        config: trainer.Config; its flags of averages are ignored.
        programs: Programs.
        plans: {name: EmaPlan}, with "power" the plan of that kind.
        pipeline, frozen, params: from load_models.

    Returns:
        ({name: the UNet's parameters at the end, averaged by the plan if it has one};
        snapshots of the power averages: [(step, sigma_rel, float16 parameters)]).
    """
    dataset = ParquetImagePairs(
        *config.train_data_dir,
        batch_size=config.train_batch_size,
        transform=Transform(
            config.resolution,
            random_crop=config.random_crop,
            random_flip=config.random_flip,
            resample=config.image_interpolation_mode,
        ),
        seed=config.seed,
        reading=Reading(shuffle_buffer=config.shuffle_buffer),
    )
    batches = Batches(dataset, pipeline.prepare_text_inputs)
    host = partial(to_host, axes=programs.axes)
    p_frozen, base_rng = replicate((frozen, np.asarray(jax.random.PRNGKey(config.seed))))
    run, snapshots = AveragedRun(programs, plans, params), []
    with tqdm(total=config.max_train_steps, desc="train", unit="step", mininterval=5) as bar:
        while run.num_steps < config.max_train_steps:
            run.step(p_frozen, next(batches), base_rng)
            run.wait()
            bar.update()
            if run.num_steps % (config.max_train_steps // NUM_SNAPSHOTS) == 0:
                for sigma_rel, average in zip(SIGMA_RELS, run.averages["power"]):
                    half = jax.tree.map(lambda x: x.astype(np.float16), host(average))
                    snapshots.append((run.num_steps, sigma_rel, half))
    batches.close()
    ends = {"none": host(run.state.params)}
    ends |= {name: host(a[0]) for name, a in run.averages.items() if len(a) == 1}
    return ends, snapshots


def rebuild(snapshots, sigma_rel):
    """The average of length sigma_rel at the last snapshot, as ema_posthoc.py rebuilds it."""
    times = [step for step, _, _ in snapshots]
    gammas = [sigma_rel_to_gamma(length) for _, length, _ in snapshots]
    weights = posthoc_weights(times, gammas, times[-1], sigma_rel_to_gamma(sigma_rel))

    def total(*arrays):
        return sum(np.multiply(x, w, dtype=np.float32) for x, w in zip(arrays, weights))

    return jax.tree.map(total, *(params for _, _, params in snapshots))


def read_held_out(folder):
    """The held-out edits: lists of instructions, images to edit and true edits, uint8 (N,...)."""
    instructions, images, edited = [], [], []
    for row in read_held_out_edits(folder):
        instructions.append(row["edit_prompt"])
        images.append(np.uint8(np.rint(read_pixels(row["original_image"]) * 255)))
        edited.append(np.uint8(np.rint(read_pixels(row["edited_image"]) * 255)))
    return instructions, np.stack(images), np.stack(edited)


def make_loss(models, pipeline, frozen, held_out, num_draws):
    """The denoising loss on held-out pairs as a program of the UNet's parameters.

    Without dropout, of the posterior's mode; noises and timesteps are the same at every call, the
    timesteps evenly spread over all.
    """
    instructions, images, edited = held_out
    batch = {
        "original_pixel_values": images,
        "edited_pixel_values": edited,
        "input_ids": pipeline.prepare_text_inputs(instructions),
    }
    mean, _, mode, text = jax.jit(partial(encode_batch, models=models))(batch, frozen)
    x_0 = jnp.transpose(mean * models.vae.config.scaling_factor, (0, 3, 1, 2))  # (N, C, h, w)
    condition = jnp.transpose(mode, (0, 3, 1, 2))
    shape = (num_draws, len(images))
    count = num_draws * len(images)
    timesteps = (np.arange(count) + 0.5) / count * models.scheduler.config.num_train_timesteps
    timesteps = np.random.default_rng(0).permutation(np.int32(timesteps)).reshape(shape)
    keys = jax.random.split(jax.random.key(0), num_draws)

    @jax.jit
    def loss(params):
        def of_draw(draw):
            key, t = draw
            noise = jax.random.normal(key, x_0.shape)
            args = (models.unet, models.scheduler, frozen["scheduler"])
            return trainer.diffusion_loss(params, *args, x_0, condition, text, noise, t)

        return jax.lax.map(of_draw, (keys, timesteps)).mean()

    return loss


def edit_and_measure(pipeline, params, held_out, folder):
    """Edit the held-out images with the demo's settings, and measure as the demo does.

    Args:
        pipeline: FlaxStableDiffusionInstructPix2PixPipeline.
        params: its parameters.
        held_out: from read_held_out.
        folder: of the demo.

    Returns:
        demo.evaluate.summarize_edits' numbers.
    """
    instructions, images, _ = held_out
    prompt_ids, image = pipeline.prepare_inputs(instructions, list(images))
    images = pipeline(prompt_ids, image, params, jax.random.key(0), 20, 2.0, 1.2).images
    for row, image in zip(read_held_out_edits(folder), pipeline.numpy_to_pil(images)):
        row["output"].parent.mkdir(exist_ok=True)
        image.save(row["output"])
    return summarize_edits(load_edits(folder))


def study_quality(config, folder):
    """All runs: [{"seed", "seconds", "variants": {name: {measure: number}}, "best_sigma_rel"}]."""
    plans = study_plans(config.max_train_steps)
    flags = partial(
        trainer_config,
        folder,
        train_batch_size=config.train_batch_size,
        max_train_steps=config.max_train_steps,
        learning_rate=config.learning_rate,
        lr_warmup_steps=config.max_train_steps // 20,
    )
    models, pipeline, frozen, params = load_models(flags(), jnp.float32)
    held_out = read_held_out(folder)
    loss = make_loss(models, pipeline, frozen, held_out, config.loss_draws)
    others = {name: frozen[name] for name in ("vae", "text_encoder")}
    others["scheduler"] = pipeline.scheduler.create_state()
    programs, results = make_programs(flags(), models, params), []
    for seed in config.seeds:
        started = time.perf_counter()
        args = (programs, plans, pipeline, frozen, params)
        ends, snapshots = train_with_averages(flags(seed=seed), *args)
        trained = time.perf_counter() - started
        ends |= {f"post-hoc {s}": rebuild(snapshots, s) for s in config.sigma_rels}
        variants = {}
        for name, unet in tqdm(ends.items(), desc="measure", unit="variant"):
            unet = jax.device_put(unet, jax.devices()[0])
            edits = edit_and_measure(pipeline, {"unet": unet, **others}, held_out, folder)
            variants[name] = {"loss": float(loss(unet))} | {m: edits[m] for m in MEASURES[1:]}
        best = min(config.sigma_rels, key=lambda s: variants[f"post-hoc {s}"]["loss"])
        variants["post-hoc, best"] = variants[f"post-hoc {best}"]
        results.append(
            {
                "seed": seed,
                "seconds_training": trained,
                "seconds": time.perf_counter() - started,
                "best_sigma_rel": best,
                "variants": variants,
            }
        )
    return results
