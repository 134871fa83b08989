"""Cost and benefit of averages of the weights (EMA).

    python -m benchmarks.ema

Quality (--parts quality), on the demo's task (demo/run_demo.py): runs of several seeds, each with
a constant learning rate and with one that falls to zero. Each run tracks all averages at once, of
the same weights, with the trainer's own programs:

    none                    the last weights
    full 0.9999             from the first step
    full 0.9999, scaled     0.9999 ^ (15000 / steps): as long a share of this run as 0.9999 is of
                            the 15000 steps of Hugging Face's trainer
    full 0.9999, warm-up    Hugging Face's, (1 + n) / (10 + n) at first (--ema full --ema_warmup)
    late 3.6%, late 20%     over that share of the run at its end, with the decay 1 - 5 / window:
                            the trainer's default, and the demo's
    ... 0.9999              the same with that decay
    post-hoc S              rebuilt after training with the length sigma_rel S (ema_posthoc.py)

and measured on photographs that were not trained on: the denoising loss at fixed noise and
timesteps, and the demo's edit error, L1 to the true edit over L1 of the unedited image to it.
"post-hoc, best" is the length with the least loss of each run, on the same images.

Cost (--parts cost), on four forced CPU devices: time of a step with each kind of average,
alternating in several rounds, and the compiler's figures of memory and bytes. tpu_compile.py gives
these figures for Stable Diffusion on TPUs.

A tiny run, in minutes:

    python -m benchmarks.ema --seeds 0 --lr_schedulers constant --max_train_steps 8 \\
        --num_pairs 64 --crops_per_photograph 1 --loss_draws 1 --sigma_rels 0.05 0.1 \\
        --cost_rounds 1 --cost_steps 1 --output quick.json --plot quick.png

Replaces the measured rows of benchmarks/results/ema.json, draws benchmarks/results/ema.png and
prints tables. Needs an otherwise idle CPU; on two cores quality takes more than an hour, cost takes
minutes.

Papers: EDM2 (arXiv 2312.02696); the late EMA is MosaicML's for Stable Diffusion 2.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import tqdm

import flax_train_instruct_pix2pix as trainer
from benchmarks.harness import in_new_process
from benchmarks.rows import (
    ROOT,
    describe_machine,
    read_rows,
    report,
    rows_of,
    run_benchmark,
    write_rows,
)
from demo.evaluate import load_edits, measure, read_edits, read_image
from parquet_processing import ParquetImagePairs
from training.ema import (
    SIGMA_RELS,
    ema_plan,
    make_update_average,
    posthoc_weights,
    sigma_rel_to_gamma,
    start_average,
)
from training.models import encode_batch, load_models
from training.sharding import Batches, replicate, shard_axes, start_state, to_host

RESOLUTION = 64  # of the demo
REFERENCE_STEPS = 15000  # of Hugging Face's trainer, whose decay is 0.9999
NUM_SNAPSHOTS = 8  # of a run with --ema power
COST_DEVICES = 4
RATIO_TICKS = (0.5, 0.7, 1, 1.4, 2, 3, 5)  # of the plot
MEASURES = ("loss", "edit_error_ratio", "instruction_accuracy")

COST_PLANS = {
    "none": ema_plan("none", 10**6),
    "late, before its start": ema_plan("late", 10**6, start_step=10**6 - 6),
    "late, after its start": ema_plan("late", 10**6, start_step=0),
    "full": ema_plan("full", 10**6, decay=0.9999),
}


@dataclass(frozen=True)
class Config:
    parts: tuple[Literal["cost", "quality"], ...] = ("cost", "quality")
    # quality
    seeds: tuple[int, ...] = (0, 1, 2)  # of the order of the data, noise and dropout
    lr_schedulers: tuple[Literal["constant", "cosine"], ...] = ("constant", "cosine")
    max_train_steps: int = 1000  # at least 8
    train_batch_size: int = 16
    learning_rate: float = 1e-3
    num_pairs: int = 8000  # to train on
    crops_per_photograph: int = 2  # of each of three photographs, for eight edits each
    loss_draws: int = 24  # noises and timesteps of each held-out pair
    sigma_rels: tuple[float, ...] = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25)  # lengths to rebuild
    # cost
    cost_rounds: int = 10  # each measures every kind of step once
    cost_steps: int = 5  # steps of a measurement
    # output
    output: str = "benchmarks/results/ema.json"
    plot: str = "benchmarks/results/ema.png"


class Programs(NamedTuple):
    """The trainer's programs for a model and an optimizer, shared by all runs."""

    train_step: Callable
    update_average: Callable
    tx: optax.GradientTransformation
    axes: Any  # shard_axes of the parameters


def make_programs(config, models, params):
    """Programs with these flags of the trainer."""
    tx, _ = trainer.make_optimizer(config, config.max_train_steps)
    axes = shard_axes(params, jax.device_count())
    options = trainer.train_step_options(config)
    step = partial(trainer.train_step, models=models, tx=tx, axes=axes, **options)
    p_train_step = jax.pmap(step, axis_name="batch", donate_argnums=0)
    return Programs(p_train_step, make_update_average(), tx, axes)


class Run:
    """The trainer's loop, one step per call, with the averages of several plans.

    Args:
        programs: Programs.
        plans: {name: EmaPlan}.
        params: the UNet's, NumPy arrays.
    """

    def __init__(self, programs, plans, params):
        self.programs, self.plans = programs, plans
        self.state = start_state(params, programs.tx, programs.axes)
        self.averages = {name: [] for name in plans}
        self.num_steps = 0

    def step(self, frozen, batch, base_rng):
        """One optimizer step, and the updates that are due after it; arguments on the devices."""
        for name, plan in self.plans.items():
            if self.num_steps == plan.first_step:
                params = self.state.params
                self.averages[name] = [start_average(params) for _ in range(plan.num_averages)]
        self.state, _ = self.programs.train_step(self.state, frozen, batch, base_rng)
        self.num_steps += 1
        for name, plan in self.plans.items():
            if num_updates := plan.update_of(self.num_steps):
                update, params = self.programs.update_average, self.state.params
                self.averages[name] = [
                    update(average, params, replicate(np.float32(decay)))
                    for average, decay in zip(self.averages[name], plan.decays(num_updates))
                ]

    def wait(self):
        """Wait until the devices are done."""
        jax.block_until_ready((self.state, self.averages))


# ---------------------------------------------------------------------------- quality


def make_demo(folder, num_pairs, crops_per_photograph):
    """The demo's data and its widened UNet, by their command lines."""
    dataset = ["demo/make_dataset.py", "--output_dir", str(folder), "--num_pairs", str(num_pairs)]
    dataset += ["--crops_per_photograph", str(crops_per_photograph)]
    widen = ["create_modified_unet.py", "--pretrained_model_name_or_path", "demo/base_model"]
    widen += ["--output_dir", str(folder / "unet"), "--overwrite_output_dir"]
    for command in (dataset, widen):
        done = subprocess.run([sys.executable, *command], cwd=ROOT)
        if done.returncode:
            raise ChildProcessError(f"{command[0]} failed; it says why above")


def trainer_config(folder, **flags):
    """The trainer's flags for the demo in a directory."""
    flags = {"lr_warmup_steps": 0, "resolution": RESOLUTION} | flags
    return trainer.Config(
        pretrained_model_name_or_path=str(ROOT / "demo" / "base_model"),
        unet_model_name_or_path=str(folder / "unet"),
        train_data_dir=str(folder / "data"),
        **flags,
    )


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


def train(config, programs, plans, pipeline, frozen, params):
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
        config.train_data_dir,
        batch_size=config.train_batch_size,
        resolution=config.resolution,
        seed=config.seed,
        random_crop=config.random_crop,
        random_flip=config.random_flip,
        resample=config.image_interpolation_mode,
        shuffle_buffer=config.shuffle_buffer,
    )
    batches = Batches(dataset, pipeline.prepare_text_inputs)
    host = partial(to_host, axes=programs.axes)
    p_frozen, base_rng = replicate((frozen, np.asarray(jax.random.PRNGKey(config.seed))))
    run, snapshots = Run(programs, plans, params), []
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
    instructions, images, truths = [], [], []
    for row in read_edits(folder):
        instructions.append(row["edit_prompt"])
        images.append(np.uint8(np.rint(read_image(row["original_image"]) * 255)))
        truths.append(np.uint8(np.rint(read_image(row["edited_image"]) * 255)))
    return instructions, np.stack(images), np.stack(truths)


def make_loss(models, pipeline, frozen, held_out, num_draws):
    """The denoising loss on held-out pairs as a program of the UNet's parameters.

    Without dropout, of the posterior's mode; noises and timesteps are the same at every call, the
    timesteps evenly spread over all.
    """
    instructions, images, truths = held_out
    batch = {
        "original_pixel_values": images,
        "edited_pixel_values": truths,
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


def edit(pipeline, params, held_out, folder):
    """Edit the held-out images with the demo's settings, and measure as the demo does.

    Args:
        pipeline: FlaxStableDiffusionInstructPix2PixPipeline.
        params: its parameters.
        held_out: from read_held_out.
        folder: of the demo.

    Returns:
        demo.evaluate.measure's numbers.
    """
    instructions, images, _ = held_out
    prompt_ids, image = pipeline.prepare_inputs(instructions, list(images))
    images = pipeline(prompt_ids, image, params, jax.random.key(0), 20, 2.0, 1.2).images
    for row, image in zip(read_edits(folder), pipeline.numpy_to_pil(images)):
        row["output"].parent.mkdir(exist_ok=True)
        image.save(row["output"])
    return measure(load_edits(folder))


def study_quality(config, folder):
    """All runs.

    Yields:
        (schedule, [{"seed", "seconds", "variants": {name: {measure: number}}, "best_sigma_rel"}]),
        as soon as all seeds of a schedule are done.
    """
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

    for lr_scheduler in config.lr_schedulers:
        results = []
        programs = make_programs(flags(lr_scheduler=lr_scheduler), models, params)
        for seed in config.seeds:
            started = time.perf_counter()
            run_config = flags(lr_scheduler=lr_scheduler, seed=seed)
            ends, snapshots = train(run_config, programs, plans, pipeline, frozen, params)
            trained = time.perf_counter() - started
            ends |= {f"post-hoc {s}": rebuild(snapshots, s) for s in config.sigma_rels}
            variants = {}
            for name, unet in tqdm(ends.items(), desc="measure", unit="variant"):
                unet = jax.device_put(unet, jax.devices()[0])
                edits = edit(pipeline, {"unet": unet, **others}, held_out, folder)
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
        yield lr_scheduler, results


# ---------------------------------------------------------------------------- cost


def bytes_held(tree):
    """Bytes of a tree on the first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def compiled_figures(compiled):
    """The compiler's figures of a program, per device."""
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "bytes_accessed": cost["bytes accessed"],
    }


def measure_cost(folder, rounds, num_steps):
    """Time, memory and bytes of a step with each of COST_PLANS.

    The training step is the same compiled program for every average, which adds its own arrays and
    a program that updates them. Call it in a new process, as it needs COST_DEVICES devices of JAX.

    Returns:
        {"state_bytes", "step" and "update" of compiled_figures, "plans": {name:
        {"average_bytes", "seconds": [of a step, in each round]}}}.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", COST_DEVICES)
    config = trainer_config(folder)
    models, pipeline, frozen, params = load_models(config, jnp.float32)
    dataset = ParquetImagePairs(
        config.train_data_dir,
        batch_size=config.train_batch_size,
        resolution=config.resolution,
    )
    batch = next(Batches(dataset, pipeline.prepare_text_inputs))
    inputs = replicate(frozen), batch, replicate(np.asarray(jax.random.PRNGKey(0)))

    programs = make_programs(config, models, params)
    state = start_state(params, programs.tx, programs.axes)
    average, decay = start_average(state.params), replicate(np.float32(0.9999))
    step = programs.train_step.lower(state, *inputs).compile()
    update = programs.update_average.lower(average, state.params, decay).compile()
    figures = {
        "state_bytes": bytes_held(state),
        "step": compiled_figures(step),
        "update": compiled_figures(update),
        "plans": {},
    }
    programs = programs._replace(train_step=step, update_average=update)
    runs = {}
    for name, plan in COST_PLANS.items():
        runs[name] = Run(programs, {name: plan}, params)
        runs[name].step(*inputs)  # allocates
        runs[name].wait()
        average_bytes = bytes_held(runs[name].averages)
        figures["plans"][name] = {"average_bytes": average_bytes, "seconds": []}

    names = list(runs)
    with tqdm(total=rounds * len(names), desc="step times", unit="run") as bar:
        for number in range(rounds):
            shift = number % len(names)  # none always comes after the same other
            for name in names[shift:] + names[:shift]:
                started = time.perf_counter()
                for _ in range(num_steps):
                    runs[name].step(*inputs)
                    runs[name].wait()
                seconds = (time.perf_counter() - started) / num_steps
                figures["plans"][name]["seconds"].append(seconds)
                bar.update()
    return figures


# ---------------------------------------------------------------------------- results


def spread(values):
    """Mean, median, least and largest."""
    middle = {"mean": float(np.mean(values)), "median": float(np.median(values))}
    return middle | {"min": min(values), "max": max(values)}


def summarize_quality(runs):
    """Spreads over runs with different seeds: {variant: {measure: spread}}.

    measure + "_to_none" is the ratio to "none" in the same run.
    """
    summary = {}
    for name in runs[0]["variants"]:
        summary[name] = {}
        for measured in MEASURES:
            values = [run["variants"][name][measured] for run in runs]
            summary[name][measured] = spread(values)
        for measured in MEASURES[:2]:
            ratios = [
                run["variants"][name][measured] / run["variants"]["none"][measured] for run in runs
            ]
            summary[name][f"{measured}_to_none"] = spread(ratios)
    return summary


def summarize_cost(figures):
    """{"update_share", name: spread of the step's time over that of "none"}.

    The ratios are within a round; update_share is the bytes that the update accesses over those
    of the step.
    """
    update, step = (figures[name]["bytes_accessed"] for name in ("update", "step"))
    none = figures["plans"]["none"]["seconds"]
    return {"update_share": update / step} | {
        name: spread([a / b for a, b in zip(plan["seconds"], none)])
        for name, plan in figures["plans"].items()
    }


def format_tables(results):
    """The figures as Markdown: medians, and least to largest."""

    def cell(figure, form):
        return f"{figure['median']:{form}} ({figure['min']:{form}}-{figure['max']:{form}})"

    lines = []
    for lr_scheduler, study in rows_of(results, "quality").items():
        lines += [
            f"{lr_scheduler} learning rate, {study['max_train_steps']} steps, "
            f"{len(study['runs'])} seeds:\n",
            "| average | held-out loss | to none | edit error | to none | right edit |",
            "|---|---|---|---|---|---|",
        ]
        for name, row in study["summary"].items():
            lines.append(
                f"| {name} | {cell(row['loss'], '.4f')} | {cell(row['loss_to_none'], '.3f')} | "
                f"{cell(row['edit_error_ratio'], '.3f')} | "
                f"{cell(row['edit_error_ratio_to_none'], '.3f')} | "
                f"{row['instruction_accuracy']['median']:.0%} |"
            )
        lines.append("")
    if cost := results.get("cost"):
        lines += ["| cost | step time to none | held by the average, MB |", "|---|---|---|"]
        figures, summary = cost["figures"], cost["summary"]
        for name, plan in figures["plans"].items():
            held = plan["average_bytes"] / 1e6
            lines.append(f"| {name} | {cell(summary[name], '.3f')} | {held:.2f} |")
        lines.append(
            f"\nOn each of {COST_DEVICES} devices the step, the same program with all averages, "
            f"has {figures['step']['temporary_bytes'] / 1e6:.1f} MB of temporaries; an update "
            f"accesses {summary['update_share']:.2%} of its bytes."
        )
    return "\n".join(lines)


def draw(quality, sigma_rels):
    """Plot loss and edit error relative to none, over the post-hoc lengths and per average."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharey="row", width_ratios=(1, 1.3))
    titles = ("held-out loss, to none", "edit error, to none")
    for row, (measured, title) in enumerate(zip(MEASURES[:2], titles)):
        curve, dots = axes[row]
        for i, (lr_scheduler, study) in enumerate(quality.items()):
            summary = study["summary"]
            key, color = f"{measured}_to_none", f"C{i}"
            points = [summary[f"post-hoc {s}"][key] for s in sigma_rels]
            means, least, largest = (
                [point[k] for point in points] for k in ("mean", "min", "max")
            )  # fmt: skip
            curve.plot(sigma_rels, means, "o-", color=color, label=f"{lr_scheduler} rate")
            curve.fill_between(sigma_rels, least, largest, color=color, alpha=0.2)
            others = [n for n in summary if not n.startswith("post-hoc ")]
            for x, name in enumerate(others):
                for run in study["runs"]:
                    ratio = run["variants"][name][measured] / run["variants"]["none"][measured]
                    dots.plot(x + 0.15 * i, ratio, "o", color=color, alpha=0.7)
        curve.axhline(1, color="gray", linewidth=0.8)
        dots.axhline(1, color="gray", linewidth=0.8)
        curve.set(xscale="log", xlabel="post-hoc: sigma_rel", ylabel=title)
        curve.set_xticks(sigma_rels, [str(s) for s in sigma_rels], minor=False)
        curve.set_yscale("log")  # an average that still has the first weights is far from the rest
        curve.set_yticks(RATIO_TICKS, [str(ratio) for ratio in RATIO_TICKS])
        curve.minorticks_off()
        dots.minorticks_off()
        dots.set_xticks(range(len(others)), others, rotation=30, ha="right")
        curve.legend()
    return figure


def check_config(config):
    """Raise a ValueError for invalid flags, before anything is made."""
    for name in ("parts", "seeds", "lr_schedulers", "sigma_rels"):
        if not getattr(config, name):
            raise ValueError(f"{name} is empty; name at least one, or leave the flag out")
    for name, lowest in (
        ("max_train_steps", NUM_SNAPSHOTS),
        ("train_batch_size", 1),
        ("num_pairs", max(config.train_batch_size, trainer.Config.train_batch_size)),
        ("crops_per_photograph", 1),
        ("loss_draws", 1),
        ("cost_rounds", 1),
        ("cost_steps", 1),
    ):
        if getattr(config, name) < lowest:
            raise ValueError(f"--{name} {getattr(config, name)} must be at least {lowest}")
    for sigma_rel in config.sigma_rels:
        sigma_rel_to_gamma(sigma_rel)


def run(config):
    """Study, write, print."""
    check_config(config)
    plot = Path(config.plot)
    results = read_rows(config.output)
    machine = describe_machine(("jax", "jaxlib", "flax", "optax", "numpy"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_demo(folder, config.num_pairs, config.crops_per_photograph)
        if "cost" in config.parts:
            figures = in_new_process(measure_cost, folder, config.cost_rounds, config.cost_steps)
            row = {"figures": figures, "summary": summarize_cost(figures)}
            results = write_rows({"cost": row}, machine, config.output)
        if "quality" in config.parts:
            for lr_scheduler, runs in study_quality(config, folder):
                study = {"max_train_steps": config.max_train_steps, "runs": runs}
                study["summary"] = summarize_quality(runs)
                rows = {f"quality {lr_scheduler}": study}
                results = write_rows(rows, machine, config.output)
    report(format_tables(results), config.output)
    if "quality" in config.parts:
        unfinished = plot.with_name(f".{os.getpid()}-{plot.name}")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        draw(rows_of(results, "quality"), config.sigma_rels).savefig(unfinished, dpi=110)
        unfinished.replace(plot)
        print(f"wrote {plot}")


def main(args=None):
    """Command line."""
    run_benchmark({Config: run}, __doc__, args)


if __name__ == "__main__":
    main()
