"""What a training run reports: rows of metrics.jsonl, the plot of the losses, wandb, snapshots of
the averages, and edits of validation images.

wandb handles its own token. Only process 0 writes.
"""

import contextlib
import gc
import json
import math
import shutil
import time
from collections import deque
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from PIL import Image, ImageOps
from tqdm import tqdm

from diffusers_flax.data.buckets import nearest_sizes
from diffusers_flax.data.images import load_image
from diffusers_flax.devices.memory import peak_memory
from diffusers_flax.generating.captions import GRID_IMAGE_SIZE, GRID_MARGIN, captioned, tile_grid
from diffusers_flax.loading.files import save_whole, write_text
from diffusers_flax.messages import one_line
from diffusers_flax.training.batches import MAX_STEPS_IN_FLIGHT
from diffusers_flax.training.ema import SIGMA_RELS
from diffusers_flax.training.flags import profiled_steps, snapshot_steps
from diffusers_flax.training.models import params_beside_unet
from diffusers_flax.training.processes import wait_for_all
from diffusers_flax.training.sharding import (
    combine,
    compile_pmapped,
    first_replica,
    gather,
    local_rows,
    replicate,
    to_host,
)

LOSS_PLOT = "loss.png"
LOSS_SPAN = 20  # the smoothed loss averages over about a fraction 1 / 20 of the rows
LOSS_ROWS = 5  # but over at least this number of rows
# Validation images
NUM_INFERENCE_STEPS = 20
SHORT_RUN = 100_000  # steps times batch; after fewer samples a model edits well at low scales only
GIF_SIDE = 1024  # longer side of a frame, pixels, at most
GIF_SECONDS = 0.5  # per frame; four times as long for the last


def is_due(step, every, num_steps):
    """Whether something is due after a step: at every so many steps, and at the last; 0: never."""
    return every > 0 and (step % every == 0 or step == num_steps)


class Reports:
    """The reports of one run; all processes make the same calls.

    Metrics are fetched when a row is due, so that the host does not wait for each step. As a
    context it shows a progress bar.

    Args:
        config: flags that check_flags has accepted.
        num_steps: length of the run.
        schedule: step from 0 -> learning rate.
        plan: EmaPlan.
        batches: Batches.
        checkpoints: Checkpoints, from which the run starts.

    Attributes:
        snapshot_steps: steps between snapshots of the averages; 0: none.
        rows: of metrics.jsonl, dicts; [] on processes other than 0.
    """

    def __init__(self, config, num_steps, schedule, plan, batches, checkpoints):
        self.config, self.num_steps, self.folder = config, num_steps, Path(config.output_dir)
        self.schedule, self.plan, self.batches = schedule, plan, batches
        self.is_main, start_step = jax.process_index() == 0, checkpoints.start_step
        self.snapshot_steps = snapshot_steps(config, num_steps)
        self.unfetched = deque()  # metrics of steps that may still run on the devices
        # of fetched steps since the last row, dicts of floats
        self.unlogged = list(checkpoints.record.get("metrics", []))
        self.num_bad_before = checkpoints.record.get("num_bad", 0)  # before the run resumed
        self.clock_step = self.clock_start = self.wandb_run = None
        self.rows = []
        if self.is_main:
            if config.report_to == "wandb":
                self.wandb_run = start_wandb(self.folder, config, resume=start_step > 0)
            path = self.folder / "metrics.jsonl"  # marks the directory of a run
            self.rows = rows_until_step(path, start_step)
            write_text(path, "".join(json.dumps(row) + "\n" for row in self.rows))
            flags = json.dumps(asdict(config), indent=2) + "\n"
            write_text(self.folder / "config.json", flags)
            write_progress(self.folder / "validation", start_step)
            if not start_step:
                (self.folder / LOSS_PLOT).unlink(missing_ok=True)
                shutil.rmtree(self.folder / "ema_snapshots", ignore_errors=True)
        options = dict(total=num_steps, initial=start_step, unit="step", desc="train")
        self.bar = tqdm(**options, disable=not self.is_main)

    def __enter__(self):
        gc.freeze()  # else the collector goes through all loaded objects during steps
        return self

    def __exit__(self, *exception):
        gc.unfreeze()
        with contextlib.suppress(RuntimeError):  # no profile
            jax.profiler.stop_trace()
        self.bar.close()
        self.batches.close()

    def log(self, step, metrics):
        """Record a step's metrics, and append a row if one is due.

        Rows are due at the first step, every --logging_steps and at the last step.

        Args:
            step: number of completed steps.
            metrics: {"loss", "grad_norm"}, replicated arrays. A row has the mean loss and the
                last value of everything else, also of entries that a step of your own adds.

        Raises:
            FloatingPointError: a loss or gradient since the last row is not finite.
        """
        self.unfetched.append(metrics)
        if self.clock_step is None:  # the first step includes the start of the devices
            jax.block_until_ready(metrics)
            self._start_clock(step)
        # The host must not run far ahead: the progress bar would show steps that are not done.
        if len(self.unfetched) > MAX_STEPS_IN_FLIGHT:
            jax.block_until_ready(self.unfetched[-1 - MAX_STEPS_IN_FLIGHT])
        self.bar.update()
        row_steps = self.config.logging_steps or min(50, max(1, self.num_steps // 20))
        if step > 1 and not is_due(step, row_steps, self.num_steps):
            return
        reported = self.state(step)
        seconds, work = clock() - self.clock_start
        timed, n = step - self.clock_step, self.plan.num_updates(step)
        row = {
            "step": step,
            "loss": float(np.mean([metrics["loss"] for metrics in self.unlogged])),
            "lr": float(self.schedule(step - 1)),
            **{name: x for name, x in self.unlogged[-1].items() if name != "loss"},
            "pairs_per_second": timed * self.config.train_batch_size / seconds if timed else None,
            "data_wait": self.batches.seconds_waited / seconds if timed else None,  # fraction
            # of this thread's work in a step, without waiting
            "host_seconds": work / timed if timed else None,
            "memory_gb": peak_memory(jax.local_devices())[0] / 1e9,
            "ema_decay": self.plan.decays(n)[0] if n else None,
            "num_bad": reported["num_bad"],
        } | {f"passes/{name}": x for name, x in self.batches.dataset.passes(step).items()}
        self._start_clock(step)
        self.unlogged.clear()
        if self.is_main:
            self.rows.append(row)
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            if self.wandb_run is not None:
                self.wandb_run.log(row)
            rate = row["pairs_per_second"]
            speed = "" if rate is None else f", {rate:.3g} pairs/s"
            self.bar.set_postfix_str(f"loss={row['loss']:.4f}{speed}")

    def _start_clock(self, step):
        self.clock_step, self.clock_start = step, clock()
        self.batches.seconds_waited = 0.0

    def state(self, step):
        """Wait for all steps up to this one; return what a checkpoint keeps of the reports.

        Returns:
            A JSON dict: {"metrics": unlogged, "num_bad": undecodable pairs of all processes}.

        Raises:
            FloatingPointError: a loss or gradient since the last row is not finite.
        """
        while self.unfetched:
            metrics = self.unfetched.popleft()
            self.unlogged.append({name: float(first_replica(x)) for name, x in metrics.items()})
        sums = np.array([sum(metrics.values()) for metrics in self.unlogged])
        bad = np.flatnonzero(~np.isfinite(sums)) + step - len(sums) + 1
        if len(bad):
            raise FloatingPointError(
                f"the loss or gradient is not finite at step {bad[0]} ({len(bad)} of the last "
                f"{len(sums)} steps); nothing was saved since the last checkpoint; start again "
                "with a lower --learning_rate, or without --mixed_precision bf16"
            )
        num_bad = int(process_allgather(np.int32(self.batches.num_bad)).sum())
        return {"metrics": list(self.unlogged), "num_bad": self.num_bad_before + num_bad}

    @contextlib.contextmanager
    def pause(self):
        """A context for work that is not timed; all processes leave it together."""
        pause_start = clock()
        yield
        wait_for_all("process 0 has written")
        self.clock_start += clock() - pause_start

    def profile(self, step):
        """Start and stop the profiler for --profile_steps, which count from 0, before a step."""
        first, last = profiled_steps(self.config.profile_steps)
        if self.is_main and step - 1 == first:
            jax.profiler.start_trace(self.folder / "profile")
        if self.is_main and step - 2 == last:
            jax.block_until_ready(list(self.unfetched))
            with contextlib.suppress(RuntimeError):  # the run resumed after the first step
                jax.profiler.stop_trace()

    def draw(self):
        """Plot the losses of all rows to loss.png; without matplotlib do nothing."""
        if not self.rows:
            return
        try:
            from matplotlib.figure import Figure  # seconds; without pyplot no display is used
        except ImportError:
            return
        steps, losses = ([row[name] for row in self.rows] for name in ("step", "loss"))
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        plot = figure.add_subplot()
        plot.plot(steps, losses, ".-", color="C0", alpha=0.35, label="loss")
        plot.plot(steps, smoothed(losses), color="C0", linewidth=2, label="smoothed")
        plot.set(xlabel="step", ylabel="loss")
        plot.grid(alpha=0.3)
        plot.legend()
        save_whole(self.folder / LOSS_PLOT, partial(figure.savefig, format="png", dpi=110))

    def show(self, path, step):
        """Send an image of a step to wandb."""
        if self.wandb_run is not None:
            import wandb

            image = wandb.Image(str(path), caption=f"before and after, step {step}")
            self.wandb_run.log({"validation": image, "step": step})

    def close(self):
        """Draw the losses, and finish the wandb run, which else counts as failed.

        Returns:
            The last row of metrics.jsonl, or None.
        """
        self.draw()
        if self.wandb_run is not None:
            self.wandb_run.finish()
        return self.rows[-1] if self.rows else None


def clock():
    """Seconds that have passed, and that this thread has worked, an array."""
    return np.array([time.perf_counter(), time.thread_time()])


def describe_run(config, num_steps, dataset, params, plan):
    """Print lines about the size of a run, its devices and its average.

    Args:
        config, num_steps, plan: as for Reports.
        dataset: ParquetImagePairs or Mixture.
        params: that are trained.
    """
    if jax.process_index():
        return
    num_params = sum(x.size for x in jax.tree.leaves(params))
    print(
        f"training {num_params:,} parameters on {dataset.describe_epoch()}: "
        f"{config.train_batch_size} pairs per step on {jax.device_count()} device(s), "
        f"{jax.devices()[0].device_kind}"
    )
    if plan.first_step is not None:
        decays = ", ".join(f"{decay:.6g}" for decay in plan.decays(num_steps))
        print(f"averaging the weights from step {plan.first_step} with decay {decays}")
    elif config.ema != "none":
        print("too few steps for an average of the weights: give more, --ema full or --ema_decay")


def save_snapshots(output_dir, step, averages, plan, axes, unet):
    """Write the averages in float16 to OUTPUT_DIR/ema_snapshots, for ema_posthoc.py.

    Args:
        output_dir: directory of the run.
        step: number of completed steps.
        averages: sharded, one for each of SIGMA_RELS.
        plan: EmaPlan of "power"; with --ema_every the last update may be earlier than step.
        axes: of shard_axes.
        unet: module.
    """
    step = plan.num_updates(step) * plan.every
    for sigma_rel, average in zip(SIGMA_RELS, averages):
        average = to_host(average, axes)
        if jax.process_index() == 0:
            half = jax.tree.map(lambda x: x.astype(np.float16), average)
            save = partial(unet.save_pretrained, params=half)
            save_whole(Path(output_dir, "ema_snapshots", f"{step:08d}-{sigma_rel:.3f}"), save)


def rows_until_step(path, last_step):
    """The rows of a metrics.jsonl up to a step, without a line that a crash truncated."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            if row["step"] <= last_step:
                rows.append(row)
    return rows


def smoothed(values):
    """Bias-corrected exponential averages, over about a fraction 1 / LOSS_SPAN of the values."""
    decay = 1 - 1 / max(LOSS_ROWS, len(values) / LOSS_SPAN)
    from scipy.signal import lfilter  # half a second to import

    averages = lfilter([1 - decay], [1, -decay], values)
    return averages / (1 - decay ** np.arange(1, len(values) + 1))


def start_wandb(folder, config, resume):
    """Start a wandb run, or resume the one whose id is in FOLDER/wandb_run_id."""
    import wandb

    id_file = folder / "wandb_run_id"
    run_id = id_file.read_text() if resume and id_file.exists() else None
    options = dict(project=config.tracker_project_name, config=vars(config), dir=folder)
    try:
        run = wandb.init(**options, id=run_id, resume="allow")
    except wandb.Error as error:
        raise ValueError(
            f"wandb: {one_line(error)}; run `wandb login`, set WANDB_MODE=offline, or leave out "
            "--report_to wandb"
        ) from error
    # wandb drops rows whose own step decreases, as after a resume; "step" may repeat.
    run.define_metric("*", step_metric="step")
    write_text(id_file, run.id)
    return run


# --- Validation images ----------------------------------------------------------------------------


def guidance_scales(config, pipeline, num_steps):
    """Guidance scales for a run's model: the flags, or the defaults of docs/editing.md.

    Args:
        config: flags of the program.
        pipeline: InstructPix2Pix.
        num_steps: length of the run.

    Returns:
        (guidance_scale, image_guidance_scale).
    """
    scales = (7.5, 1.5)
    if num_steps * config.train_batch_size < SHORT_RUN:
        scales = (2.0, 1.2)
    elif pipeline.is_cosxl_edit:
        scales = (7.0, 1.5)
    elif "XL" in pipeline.torch_class_name:
        scales = (3.0, 1.5)
    given = (config.validation_guidance_scale, config.validation_image_guidance_scale)
    return tuple(scale if flag is None else flag for flag, scale in zip(given, scales))


class Validation:
    """Edits images during training and writes them to OUTPUT_DIR/validation/step-N.png.

    Args:
        config: flags of the program.
        pipeline: InstructPix2Pix.
        sizes: (width, height) of the batches' images; an image is cropped to the nearest one.
        num_steps: length of the run.

    Attributes:
        images: PIL images, [] without --validation_image.
    """

    def __init__(self, config, pipeline, sizes, num_steps):
        self.pipeline = replace(pipeline, storage=config.storage) if config.storage else pipeline
        self.images = load_validation_images(config.validation_image, sizes)
        self.references = [load_image(path) for path in config.validation_reference]
        if len(self.references) == 1:
            self.references *= len(self.images)
        self.seed, self.p_gather = config.seed, None
        self.scales = guidance_scales(config, pipeline, num_steps)
        prompts = list(config.validation_prompt)  # one for each image, or one for all
        self.prompts = prompts * (len(self.images) if len(prompts) == 1 else 1)
        self.folder = Path(config.output_dir, "validation")

    def edit(self, step, weights, axes, p_frozen):
        """Edit the images on this process's devices, one batch per size; process 0 writes them.

        All processes call this together.

        Args:
            step: number of completed steps.
            weights: the UNet's trained parameters, sharded.
            axes: of shard_axes.
            p_frozen: train_step's frozen parameters, replicated.

        Returns:
            Path of the grid of images before and after.
        """
        pipeline, num_devices = self.pipeline, jax.local_device_count()
        if self.p_gather is None:
            gather_all = partial(gather, axes=axes, dtype=pipeline.unet.dtype)
            self.p_gather = compile_pmapped(jax.pmap(gather_all, axis_name="batch"), weights)
        # On several hosts the parameters are global arrays, and the inputs this process's.
        p_params = {
            "unet": combine(p_frozen.get("unet", {}), self.p_gather(weights)),
            **params_beside_unet(p_frozen),
            "scheduler": replicate(pipeline.scheduler.create_state()),
        }
        edits = [None] * len(self.images)
        for size in dict.fromkeys(image.size for image in self.images):
            places = [i for i, image in enumerate(self.images) if image.size == size]
            padded = places + places[-1:] * (-len(places) % num_devices)
            references = [ImageOps.fit(self.references[i], size) for i in padded if self.references]
            inputs = pipeline.prepare_inputs(
                [self.prompts[i] for i in padded],
                [self.images[i] for i in padded],
                reference=references or None,
            )
            inputs = [x.reshape(num_devices, -1, *x.shape[1:]) for x in inputs]
            images = pipeline(
                *inputs[:2],
                p_params,
                jax.random.key(self.seed),
                NUM_INFERENCE_STEPS,
                *self.scales,
                jit=True,
                reference=inputs[2] if references else None,
            ).images
            for place, edit in zip(places, pipeline.numpy_to_pil(local_rows(images))):
                edits[place] = edit
        path = self.folder / f"step-{step:06d}.png"
        if jax.process_index() == 0:
            columns = filter(None, (self.images, self.references, edits))
            save_whole(path, validation_grid(list(zip(*columns)), self.prompts).save)
            write_progress(self.folder)
        return path


def load_validation_images(paths, sizes):
    """Load images and crop each to the nearest of the batches' sizes, by aspect ratio."""
    images = [load_image(path) for path in paths]
    nearest = nearest_sizes(np.reshape([image.size for image in images], (-1, 2)), sizes)
    return [
        ImageOps.fit(image, sizes[size], Image.Resampling.LANCZOS)
        for image, size in zip(images, nearest)
    ]


def validation_grid(pairs, prompts):
    """Draw one tile per pair (before, reference if any, after), PIL images, and its instruction."""
    side = max(GRID_IMAGE_SIZE, *pairs[0][0].size)
    size = ImageOps.contain(pairs[0][0], (side, side)).size
    tiles = []
    for pair, prompt in zip(pairs, prompts):
        images = [ImageOps.pad(image, size, color="white") for image in pair]
        tiles.append(captioned(images, prompt))
    # A tile is about twice as wide as high.
    return tile_grid(tiles, max(1, round(math.sqrt(len(tiles) / 2))), GRID_MARGIN)


def step_images(folder):
    """{N: path} of the images FOLDER/step-N.png, sorted by N."""
    found = Path(folder).glob("step-*.png")
    steps = {int(path.stem[5:]): path for path in found if path.stem[5:].isdecimal()}
    return dict(sorted(steps.items()))


def write_progress(folder, last_step=math.inf):
    """Write FOLDER/progress.gif, an animation of step_images(folder); remove later images first."""
    path, frames = Path(folder, "progress.gif"), []
    for step, file in step_images(folder).items():
        if step > last_step:
            file.unlink()
        else:
            image = load_image(file)
            image.thumbnail((GIF_SIDE, GIF_SIDE))
            frames.append(captioned([image], f"step {step}"))
    if not frames:
        path.unlink(missing_ok=True)
        return
    milliseconds = [1000 * GIF_SECONDS] * (len(frames) - 1) + [4000 * GIF_SECONDS]
    options = dict(save_all=True, append_images=frames[1:], duration=milliseconds, loop=0)
    save_whole(path, partial(frames[0].save, **options))
