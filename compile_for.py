"""Compile a program for a TPU slice or NVIDIA GPUs that one need not have: does it fit, how fast?

    python compile_for.py train --gpu h100 --train_batch_size 16 --mixed_precision bf16
    python compile_for.py train --tpu v5e-16 --train_batch_size 256 --mixed_precision bf16
    python compile_for.py unet --tpu v5e-1 --batch_size 8
    python compile_for.py sdxl --gpu a100_40 --num_images auto
    python compile_for.py edit --gpu h100x8 --resolution 512 --scheduler ddim
    python compile_for.py pairs --tpu v5e-1

`train` takes all flags of the trainer, so that a training command can be pasted; flags of data,
logging, validation and upload have no effect. --aspect_ratio_buckets compiles the step of every
size; with an "auto" batch only the largest. `unet` is a UNet with its gradient, `sdxl` and `edit`
are images and edits, `pairs` the pairs of make_pairs.py and their scores. Only the config.json
files of the models are read; without a model it is Stable Diffusion 1.5 or SDXL. With the demo's
model, in about a minute:

    python compile_for.py train --gpu rtx4090 --pretrained_model_name_or_path demo/base_model \\
        --resolution 64 --train_batch_size 64 --output /tmp/compile_for.json

A batch of "auto" is the largest that fits: --train_batch_size, --batch_size or --num_images auto.
With a cache, a step counts only what it computes; fbcache decides at run time, so its steps count
in full. Needs a CPU and the compiler of the target: `pip install "jax[tpu]"`, or for GPUs, unless
jax[cuda13] or jax[cuda12] is installed,

    pip install --target .venv/gpu -r requirements-gpu-compiler.txt

Prints memory, verdict and times of the step that needs most, and writes them as JSON into the
current directory. docs/compile.md explains the figures, options of XLA, and how long it takes.
"""

import math
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from tqdm import tqdm

import flax_train_instruct_pix2pix as trainer
from diffusers_flax.command_line import AtLeast, check_writable, run_main
from diffusers_flax.compiling.cards import traced_for
from diffusers_flax.compiling.costs import GIB, num_bytes, program_costs, replicated_shapes
from diffusers_flax.compiling.pairs import (
    PairProgramFlags,
    count_clip_flops,
    pair_program,
)
from diffusers_flax.compiling.programs import (
    DTYPES,
    FAMILIES,
    EditProgramFlags,
    ImageProgramFlags,
    Program,
    SdxlFlags,
    TargetFlags,
    UnetFlags,
    find_target,
    image_program,
    param_shapes,
    read_configs,
    target_devices,
    unet_program,
)
from diffusers_flax.compiling.report import (
    BATCH_FLAGS,
    changed_flags,
    make_report,
    print_report,
    verdict,
)
from diffusers_flax.flops import matmul_flops
from diffusers_flax.generating.flags import check_pair_ranges
from diffusers_flax.generating.single_files import with_single_files
from diffusers_flax.loading.files import save_whole, write_json
from diffusers_flax.models.clip import FlaxCLIPTextModel, FlaxCLIPTextModelWithProjection
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.models.vae import FlaxAutoencoderKL
from diffusers_flax.published_configs import PUBLISHED_CONFIGS
from diffusers_flax.schedulers.ddpm import FlaxDDPMScheduler
from diffusers_flax.schedulers.factory import check_scheduler, training_scheduler
from diffusers_flax.training.batches import MAX_STEPS_IN_FLIGHT
from diffusers_flax.training.ema import ema_flags, ema_plan, make_update_average
from diffusers_flax.training.flags import (
    COMPONENT_FLAGS,
    check_batch,
    check_combinations,
    chosen_sizes,
    named_buckets,
)
from diffusers_flax.training.lora import add_lora
from diffusers_flax.training.models import (
    Models,
    check_models,
    encode_text,
    is_sdxl,
    lora_options,
    store_frozen,
)
from diffusers_flax.training.sharding import cast_kernels, frozen_shapes, shard_axes, state_shapes


@dataclass(frozen=True, kw_only=True)
class TrainFlags(trainer.Config, TargetFlags):
    """The training step."""

    # global batch: pairs per optimizer step; "auto": the largest one that fits
    train_batch_size: Annotated[int, AtLeast(1)] | Literal["auto"] = 16
    family: Literal["sd15", "sdxl"] = "sd15"  # model without --pretrained_model_name_or_path
    # report; "" is compile_for_CHIPS_train.json in the current directory
    output: str = ""
    pretrained_model_name_or_path: str = ""  # directory, hub id or file; "" is --family
    # the 8-channel UNet, directory or file; "" is the pretrained one, widened
    unet_model_name_or_path: str = ""


def training_model_shapes(config):
    """Modules and parameter shapes of a training step, as in the trainer's train().

    Args:
        config: TrainFlags.

    Returns:
        (Models, train_step's `frozen`, trained parameters); arrays are ShapeDtypeStructs.

    Raises:
        ValueError: a config file is missing, or models do not fit together or to the resolution.
    """
    configs = PUBLISHED_CONFIGS[FAMILIES[config.family]]
    if source := config.pretrained_model_name_or_path:
        names = [] if config.unet_model_name_or_path else ["unet"]
        names += [] if config.pretrained_vae_model_name_or_path else ["vae"]
        names += ["text_encoder"] + ["text_encoder_2"] * is_sdxl(config)
        configs = read_configs(source, config.revision, *names)
        configs["scheduler"] = FlaxDDPMScheduler.load_config(
            source, subfolder="scheduler", revision=config.revision
        )
    dtype = DTYPES[config.mixed_precision]
    if vae_source := config.pretrained_vae_model_name_or_path:
        configs = configs | {"vae": FlaxAutoencoderKL.load_config(vae_source)}
    vae = FlaxAutoencoderKL.from_config(configs["vae"], dtype=dtype)
    if "text_encoder_2" in configs and vae.force_upcast:
        vae = vae.clone(dtype=jnp.float32)  # as in load_vae
    text_encoder = FlaxCLIPTextModel.from_config(configs["text_encoder"], dtype=dtype)
    scheduler, _ = training_scheduler(configs["scheduler"], source)
    if config.unet_model_name_or_path:
        unet_config = FlaxUNet2DConditionModel.load_config(config.unet_model_name_or_path)
    else:
        unet_config = {**configs["unet"], "in_channels": 2 * vae.latent_channels}
    unet = FlaxUNet2DConditionModel.from_config(
        unet_config, dtype=dtype, gradient_checkpointing=config.gradient_checkpointing
    )

    text_params = param_shapes(text_encoder, dtype)
    ids = jax.ShapeDtypeStruct((1, text_encoder.module.max_position_embeddings), jnp.int32)
    time_ids = None
    if "text_encoder_2" in configs:
        second = FlaxCLIPTextModelWithProjection.from_config(configs["text_encoder_2"], dtype=dtype)
        text_encoder = (text_encoder, second)
        text_params = (text_params, param_shapes(second, dtype))
        ids = jax.ShapeDtypeStruct((1, 2, ids.shape[-1]), jnp.int32)
        time_ids = jax.ShapeDtypeStruct((1, 6), jnp.float32)
    models = Models(unet, vae, text_encoder, scheduler)
    check_models(replace(config, pretrained_model_name_or_path=source or config.family), models)
    null_text = jax.eval_shape(partial(encode_text, text_encoder), text_params, ids, time_ids)
    null_text.pop("time_ids", None)  # they are not dropped
    frozen = {
        "vae": param_shapes(vae, vae.dtype),
        "text_encoder": text_params,
        "null_text": null_text,
        "scheduler": jax.eval_shape(scheduler.create_state),
    }
    params = param_shapes(unet, jnp.float32)
    if config.lora_rank is not None:
        params, base = jax.eval_shape(lambda *x: x, *add_lora(params, **lora_options(config)))
        frozen["unet"] = jax.eval_shape(partial(cast_kernels, dtype=dtype), base)
        frozen = jax.eval_shape(partial(store_frozen, storage=config.storage), frozen)
    return models, frozen, params


def largest_size(config):
    """Width and height of the largest images; config: TrainFlags."""
    return max(chosen_sizes(config) or [(config.resolution,) * 2], key=math.prod)


def train_program(config, devices):
    """The trainer's step and the update of its averages, under pmap as in training.

    With several sizes, it is the step of the largest.

    Args:
        config: TrainFlags.
        devices: to compile for.

    Returns:
        Program.
    """
    n = len(devices)
    models, frozen, params = training_model_shapes(config)
    plan = ema_plan(*ema_flags(config, config.max_train_steps))
    tx, _ = trainer.make_optimizer(config, config.max_train_steps)
    axes = shard_axes(params, n, devices[0].platform)
    options = trainer.train_step_options(config)
    train_step = partial(trainer.train_step, models=models, tx=tx, axes=axes, **options)

    B, (W, H) = config.train_batch_size // n, largest_size(config)
    T = frozen["null_text"]["states"].shape[1]
    batch = {"input_ids": jax.ShapeDtypeStruct((n, B, T), jnp.int32)}
    if isinstance(models.text_encoder, tuple):  # SDXL
        batch["input_ids"] = jax.ShapeDtypeStruct((n, B, 2, T), jnp.int32)
        batch["time_ids"] = jax.ShapeDtypeStruct((n, B, 6), jnp.float32)
    if config.cache_latents:
        del frozen["vae"]
        C, factor = models.vae.latent_channels, 2 ** (len(models.vae.block_out_channels) - 1)
        for name, channels in (("original_latents", C), ("edited_latents", 2 * C)):
            batch[name] = jax.ShapeDtypeStruct(
                (n, B, H // factor, W // factor, channels), jnp.float16
            )
    else:
        images = jax.ShapeDtypeStruct((n, B, H, W, 3), jnp.uint8)
        batch |= {"original_pixel_values": images, "edited_pixel_values": images}
    if config.mask_loss_weight != 1:
        pixels = batch.get("edited_pixel_values", batch.get("edited_latents"))
        batch["mask"] = jax.ShapeDtypeStruct(pixels.shape[:-1], jnp.uint8)
    frozen = frozen_shapes(frozen, devices)
    state = state_shapes(params, tx, axes, n)
    average = state.params  # an average is sharded like the parameters
    num_averages = plan.num_averages
    return Program(
        step=jax.pmap(train_step, axis_name="batch", donate_argnums=0, devices=devices),
        args=(state, frozen, batch, replicated_shapes(jax.random.PRNGKey(0), n)),
        held={
            "parameters": state.params,
            "optimizer": state.opt_state,
            "ema": [average] * num_averages,
            "frozen models": frozen,
            "batches": [batch] * (1 + MAX_STEPS_IN_FLIGHT),
        },
        batch_per_chip=B,
        update=make_update_average(devices) if num_averages else None,
        update_args=(average, state.params, jax.ShapeDtypeStruct((n,), jnp.float32)),
        updates_per_step=num_averages / plan.every,
    )


SUBCOMMANDS = {
    "train": TrainFlags,
    "unet": UnetFlags,
    "sdxl": SdxlFlags,
    "edit": EditProgramFlags,
    "pairs": PairProgramFlags,
}


def subcommand_of(config):
    """The subcommand of the flags."""
    return next(name for name, flags in SUBCOMMANDS.items() if flags is type(config))


def count_step_flops(config, batch_per_chip, program=None):
    """(FLOPs of a chip's step, how many of them are in int8).

    Attention counts as XLA's own operations, see matmul_flops: a TPU's is a kernel without
    countable matmuls.

    Args:
        config: flags of a subcommand.
        batch_per_chip: pairs, samples or images of a chip.
        program: Program that all chips run on one image; None: a chip's own with this batch.
    """
    if program is None:
        config = replace(config, **{BATCH_FLAGS[subcommand_of(config)]: batch_per_chip})
        program = make_program(config, jax.devices("cpu")[:1])
    traced = jax.make_jaxpr(program.step)(*program.args)
    return matmul_flops(traced.jaxpr, program.switches)


def check_flags(config, num_devices):
    """Raise a ValueError for flags that do not go together, before anything is compiled."""
    for option in config.compiler_options:
        if not re.fullmatch("[^=]+=.*", option):
            raise ValueError(f"--compiler_options {option} is not NAME=VALUE")
    if isinstance(config, TrainFlags):
        check_batch(config, num_devices)
        check_combinations(config)  # no check of --output_dir, as nothing is written there
        return
    if isinstance(config, PairProgramFlags):
        check_pair_ranges(config)
    if not isinstance(config, UnetFlags):
        check_scheduler(config.scheduler)
    if isinstance(config, ImageProgramFlags):
        if config.gpu and config.offload:
            raise ValueError(
                "--offload is not supported with --gpu: the host's memory is not modelled; try "
                "--storage int8"
            )
        if config.devices:
            raise ValueError(
                f"--devices {' '.join(config.devices)} makes several programs, and this compiles "
                "one; leave it out"
            )


def make_program(config, devices):
    """Make the Program for the flags; raise a ValueError if flags or models do not fit together."""
    makers = {"train": train_program, "unet": unet_program, "pairs": pair_program}
    return makers.get(subcommand_of(config), image_program)(config, devices)


def compile_program(config, program, target):
    """Compile a Program for a Slice or Host; returns the report, see make_report."""
    options = dict(option.split("=", 1) for option in config.compiler_options)
    costs = partial(program_costs, chip=target.chip, compiler_options=options)
    held = sum(map(num_bytes, program.held.values()))
    report = partial(make_report, config, subcommand_of(config), target, program)
    if held > target.chip.memory * GIB:  # known without minutes of compilation
        return report({"step": {"needs": held, "compile_seconds": 0.0}}, None)
    found = {"step": costs(program.step, program.args, switches=program.switches)}
    if "needs" in found["step"]:
        return report(found, None)
    is_shared = bool(getattr(config, "parallel", ()))  # the work on an image
    shared = program if is_shared else None
    flops = {"step": count_step_flops(config, program.batch_per_chip, shared)}
    if program.update:
        found["update"] = costs(program.update, program.update_args)
    if program.scoring:
        found["scoring"] = costs(program.scoring, program.scoring_args)
        flops["scoring"] = count_clip_flops(config)
    return report(found, flops)


def compile_sizes(config, target, devices):
    """The report of the size that needs most memory, with a row for each size under "sizes".

    The program of every size stays in memory, so the code of all of them counts.

    Args:
        config: TrainFlags with --aspect_ratio_buckets.
        target: Slice or Host.
        devices: to compile for.
    """
    reports = {}
    for size in named_buckets(config).aspect_ratio_buckets:
        at_size = replace(config, aspect_ratio_buckets=(size,))
        reports[size] = compile_program(at_size, make_program(at_size, devices), target)
        print(f"{size}: {verdict(reports[size])}", flush=True)
    names = ("fits", "memory_total", "flops", "hbm_bytes", "step_seconds", "compile_seconds")
    names += ("images_per_second_per_chip",)
    rows = {size: {x: row[x] for x in names if x in row} for size, row in reports.items()}
    code = {size: row.get("memory", {}).get("code", 0) for size, row in reports.items()}
    largest = max(reports, key=lambda size: reports[size]["memory_total"] - code[size])
    report = reports[largest]
    total = report["memory_total"] + sum(code.values()) - code[largest]
    if "memory" in report:
        report |= {"memory": report["memory"] | {"code": sum(code.values())}}
    return report | {
        "flags": changed_flags(config),
        "size": largest,
        "sizes": rows,
        "memory_total": total,
        "fits": total <= report["memory_usable"] and all(row["fits"] for row in rows.values()),
        "compile_seconds": sum(row["compile_seconds"] for row in rows.values()),
    }


def largest_fitting(fits, start):
    """Find the largest number that fits, to within an eighth: double, then bisect.

    Args:
        fits: number, at least 1 -> bool; slow.
        start: first number to try.

    Returns:
        (number, or 0 if 1 does not fit; the smallest number known not to fit).
    """
    good, bad, number = 0, None, start
    while bad is None or bad - good > max(1, good // 8):
        if fits(number):
            good = number
        else:
            bad = number
        number = 2 * good if bad is None else (good + bad) // 2
    return good, bad


def batch_of(config):
    """The value of the flag that sets the batch, a number or "auto"."""
    return getattr(config, BATCH_FLAGS[subcommand_of(config)])


def batch_unit(config, num_devices):
    """The number of which batches are multiples."""
    is_global = isinstance(config, TrainFlags)
    return num_devices * config.gradient_accumulation_steps if is_global else 1


def with_first_batch(config, num_devices):
    """Flags with a number for the batch: for "auto" the one that is tried first, the default."""
    if batch_of(config) != "auto":
        return config
    flag, unit = BATCH_FLAGS[subcommand_of(config)], batch_unit(config, num_devices)
    default = next(field.default for field in fields(config) if field.name == flag)
    return replace(config, **{flag: max(1, default // unit) * unit})


def find_batch(config, target, devices):
    """The report of the largest batch that fits, or of the smallest if none does.

    With several sizes, only the largest is compiled.

    Args:
        config: flags with the batch that is tried first.
        target: Slice or Host.
        devices: to compile for.
    """
    flag = BATCH_FLAGS[subcommand_of(config)]
    unit, reports = batch_unit(config, target.num_chips), {}

    def fits(number):
        at_number = replace(config, **{flag: number * unit})
        reports[number] = compile_program(at_number, make_program(at_number, devices), target)
        print(verdict(reports[number]), flush=True)
        return reports[number]["fits"]

    good, bad = largest_fitting(fits, getattr(config, flag) // unit)
    return reports[good or bad] | {"smallest_not_fitting": reports[bad]["batch_per_chip"]}


def report_file(config):
    """The file of the report; a ValueError if it cannot be written."""
    name = f"compile_for_{config.tpu or config.gpu}_{subcommand_of(config)}"
    if batch_of(config) == "auto":
        name += "_largest"
    elif isinstance(config, ImageProgramFlags):
        name += f"_{config.num_images}"
    file = Path(config.output or f"{name}.json")
    if file.is_dir():
        raise ValueError(f"--output {file} is a directory; name a file")
    check_writable(f"--output {file}", file.parent)
    return file


def run(config):
    """Compile, print and write the report."""
    jax.config.update("jax_platforms", "cpu")  # leave this machine's accelerators free
    if config.optimization_level:
        jax.config.update("jax_optimization_level", config.optimization_level)
    target = find_target(config)
    first = with_first_batch(config, target.num_chips)
    check_flags(first, target.num_chips)
    output = report_file(config)
    devices = target_devices(target)
    components = COMPONENT_FLAGS if isinstance(config, TrainFlags) else {}
    is_pairs = isinstance(first, PairProgramFlags)
    model = "model" if is_pairs else "pretrained_model_name_or_path"
    first = with_single_files(first, model, **components)
    with traced_for(target.chip if config.gpu else None), showing_time(config, target):
        program = make_program(first, devices)
        if batch_of(config) == "auto":
            report = find_batch(first, target, devices)
        elif isinstance(first, TrainFlags) and first.aspect_ratio_buckets is not None:
            report = compile_sizes(first, target, devices)
        else:
            report = compile_program(first, program, target)
    print_report(report)
    save_whole(output, partial(write_json, content=report))
    print(f"wrote {output}")


@contextmanager
def showing_time(config, target):
    """Print what is compiled, for what, and how long it may take; then show the elapsed time."""
    duration = "5 to 75 minutes, or 10 with --optimization_level O1"
    if config.gpu:
        duration = "1 to 10 minutes"
    place = (
        f"{config.tpu or config.gpu}, {target.num_chips} device(s) in {target.num_hosts} host(s)"
    )
    print(f"compiling {subcommand_of(config)} for {place}", flush=True)
    print(f"a program of full size takes {duration}", flush=True)
    done, pause = Event(), 1 if sys.stderr.isatty() else 60  # seconds

    def tick():
        name = "tracing, then waiting for XLA's compiler: {elapsed}"
        with tqdm(bar_format=name, leave=False, delay=pause) as bar:
            while not done.wait(pause):
                bar.refresh()

    thread = Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def main(args=None):
    """Command line."""
    run_main(SUBCOMMANDS, __doc__, run, args)


if __name__ == "__main__":
    main()
