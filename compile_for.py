"""Compile a program for a TPU slice or NVIDIA GPUs that one need not have: does it fit, how fast?

    python compile_for.py train --gpu h100 --train_batch_size 16 --mixed_precision bf16
    python compile_for.py train --tpu v5e-16 --train_batch_size 256 --mixed_precision bf16
    python compile_for.py sdxl --gpu a100_40 --num_images auto
    python compile_for.py edit --gpu h100x8 --resolution 512 --scheduler ddim
    python compile_for.py pairs --tpu v5e-1

`train` takes all flags of the trainer, so that a training command can be pasted; flags of data,
logging, validation and upload have no effect, nor have a LoRA or embeddings on images. With
--aspect_ratio_buckets the step is of the largest size. `sdxl` and `edit` are images and edits,
`pairs` the pairs of make_pairs.py and their scores. Only the config.json files of the models are
read; without a model it is Stable Diffusion 1.5 or SDXL. With the demo's model, in a minute:

    python compile_for.py train --gpu rtx4090 --pretrained_model_name_or_path demo/base_model \\
        --resolution 64 --train_batch_size 64 --output /tmp/compile_for.json

A batch of "auto" is the largest that fits: --train_batch_size, --batch_size or --num_images auto.
With a cache, a step counts only what it computes; fbcache decides at run time, so its steps count
in full. A program of full size takes 1 to 10 minutes for a GPU, 5 to 75 for a TPU, or 10 with
--optimization_level O1. Needs a CPU and the compiler of the target, which docs/compile.md installs.
Prints memory, verdict and times, and writes them as JSON into the current directory.
"""

import math
import tempfile
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

import flax_train_instruct_pix2pix as trainer
from diffusers_flax.command_line import AtLeast, check_writable, run_main
from diffusers_flax.compiling.chips import find_target, target_devices, traced_for
from diffusers_flax.compiling.programs import (
    EditProgramFlags,
    PairProgramFlags,
    SdxlFlags,
    TargetFlags,
    image_program,
    param_shapes,
    write_published_model,
)
from diffusers_flax.compiling.report import (
    Part,
    Program,
    compile_program,
    num_bytes,
    print_report,
    replicated_shapes,
    verdict,
)
from diffusers_flax.generating.flags import with_single_files
from diffusers_flax.loading.files import save_whole, write_json
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.models.vae import FlaxAutoencoderKL
from diffusers_flax.training.batches import MAX_STEPS_IN_FLIGHT
from diffusers_flax.training.ema import ema_plan, make_update_average
from diffusers_flax.training.flags import (
    COMPONENT_FLAGS,
    check_batch,
    check_combinations,
    chosen_sizes,
)
from diffusers_flax.training.lora import add_lora
from diffusers_flax.training.models import (
    encode_text,
    lora_options,
    mixed_precision_dtype,
    open_modules,
    store_frozen,
)
from diffusers_flax.training.sharding import (
    WholeArrays,
    cast_kernels,
    frozen_shapes,
    shard_axes,
    state_shapes,
)


@dataclass(frozen=True, kw_only=True)
class TrainFlags(trainer.Config, TargetFlags):
    """The training step."""

    # global batch: pairs per optimizer step; "auto": the largest one that fits
    train_batch_size: Annotated[int, AtLeast(1)] | Literal["auto"] = 16
    family: Literal["sd15", "sdxl"] = "sd15"  # model without --pretrained_model_name_or_path
    pretrained_model_name_or_path: str = ""  # directory, hub id or file; "" is --family
    # the 8-channel UNet, directory or file; "" is the pretrained one, widened
    unet_model_name_or_path: str = ""


SUBCOMMANDS = {
    "train": TrainFlags,
    "sdxl": SdxlFlags,
    "edit": EditProgramFlags,
    "pairs": PairProgramFlags,
}
# Flags of the batch; of a program the one that it has.
BATCH_FLAGS = ("train_batch_size", "batch_size", "num_images")


def training_model_shapes(config):
    """Modules and parameter shapes of a training step, as in the trainer's run.

    Args:
        config: TrainFlags.

    Returns:
        (Models, train_step's `frozen`, trained parameters); arrays are ShapeDtypeStructs.

    Raises:
        ValueError: a config file is missing, or models do not fit together or to the resolution.
    """
    dtype = mixed_precision_dtype(config)
    models = open_modules(config, dtype)
    unet = models.unet.clone(gradient_checkpointing=config.gradient_checkpointing)
    vae, encoders = models.vae, models.text_encoder
    first = encoders[0] if isinstance(encoders, tuple) else encoders
    length, time_ids = first.module.max_position_embeddings, None
    text_params, ids = param_shapes(first, dtype), (1, length)
    if isinstance(encoders, tuple):  # SDXL
        if vae.force_upcast:
            vae = vae.clone(dtype=jnp.float32)  # as in load_vae
        text_params = text_params, param_shapes(encoders[1], dtype)
        ids, time_ids = (1, 2, length), jax.ShapeDtypeStruct((1, 6), jnp.float32)
    ids = jax.ShapeDtypeStruct(ids, jnp.int32)
    null_text = jax.eval_shape(partial(encode_text, encoders), text_params, ids, time_ids)
    null_text.pop("time_ids", None)  # they are not dropped
    frozen = {
        "vae": param_shapes(vae, vae.dtype),
        "text_encoder": text_params,
        "null_text": null_text,
        "scheduler": jax.eval_shape(models.scheduler.create_state),
    }
    params = param_shapes(unet, jnp.float32)
    if config.lora_rank is not None:
        params, base = jax.eval_shape(lambda *x: x, *add_lora(params, **lora_options(config)))
        frozen["unet"] = jax.eval_shape(partial(cast_kernels, dtype=dtype), base)
        frozen = jax.eval_shape(partial(store_frozen, storage=config.storage), frozen)
    return models._replace(unet=unet, vae=vae), frozen, params


def train_program(config, devices):
    """The Program of the trainer's step and of the update of its averages, under pmap.

    With several sizes, it is the step of the largest.

    Args:
        config: TrainFlags.
        devices: to compile for.
    """
    n, struct = len(devices), jax.ShapeDtypeStruct
    models, frozen, params = training_model_shapes(config)
    plan = ema_plan(config, config.max_train_steps)
    tx, _ = trainer.make_optimizer(config, config.max_train_steps)
    axes = shard_axes(params, n, devices[0].platform, isinstance(tx, WholeArrays))
    options = trainer.train_step_options(config)
    train_step = partial(trainer.train_step, models=models, tx=tx, axes=axes, **options)

    B = config.train_batch_size // n
    W, H = max(chosen_sizes(config) or [(config.resolution,) * 2], key=math.prod)
    T = frozen["null_text"]["states"].shape[1]
    batch = {"input_ids": struct((n, B, T), jnp.int32)}
    if isinstance(models.text_encoder, tuple):  # SDXL
        batch["input_ids"] = struct((n, B, 2, T), jnp.int32)
        batch["time_ids"] = struct((n, B, 6), jnp.float32)
    if config.cache_latents:
        del frozen["vae"]
        C, factor = models.vae.latent_channels, 2 ** (len(models.vae.block_out_channels) - 1)
        size = (n, B, H // factor, W // factor)
        image = struct((*size, C), jnp.float16)
        moments = struct((*size, 2 * C), jnp.float16)
        batch |= {"original_latents": image, "edited_latents": moments}
    else:
        size = (n, B, H, W)
        image = struct((*size, 3), jnp.uint8)
        batch |= {"original_pixel_values": image, "edited_pixel_values": image}
    if models.unet.takes_reference:
        batch |= {"reference_image": image, "has_reference": struct((n, B), bool)}
    if config.mask_loss_weight != 1:
        batch["mask"] = struct(size, jnp.uint8)
    frozen = frozen_shapes(frozen, devices)
    state = state_shapes(params, tx, axes, n)
    args = state, frozen, batch, replicated_shapes(jax.random.PRNGKey(0), n)
    step = jax.pmap(train_step, axis_name="batch", donate_argnums=0, devices=devices)
    parts, averages = {"step": Part(step, args)}, [state.params] * plan.num_averages
    if averages:
        args = state.params, state.params, struct((n,), jnp.float32)
        held = num_bytes(averages) / num_bytes(args)  # an average is sharded like the parameters
        times = len(averages) / plan.every
        parts["ema"] = Part(make_update_average(devices), args, times, held=held)
    held = {
        "parameters": state.params,
        "optimizer": state.opt_state,
        "ema": averages,
        "frozen models": frozen,
        "batches": [batch] * (1 + MAX_STEPS_IN_FLIGHT),
    }
    return Program(parts, held, B, n, "pairs")


def with_model(config, folder):
    """Flags whose models are directories, hub ids or SingleFiles.

    Args:
        config: of a subcommand.
        folder: Path of an empty directory for config files of published models.
    """
    is_train = isinstance(config, TrainFlags)
    if not config.pretrained_model_name_or_path:
        is_edit = isinstance(config, EditProgramFlags)
        source = write_published_model(folder, config.family, is_edit)
        config = replace(config, pretrained_model_name_or_path=str(source))
    components = COMPONENT_FLAGS if is_train else {}
    config = with_single_files(config, "pretrained_model_name_or_path", **components)
    if is_train and not config.unet_model_name_or_path:
        source, place = config.pretrained_model_name_or_path, dict(revision=config.revision)
        unet = FlaxUNet2DConditionModel.load_config(source, subfolder="unet", **place)
        vae = FlaxAutoencoderKL.load_config(source, subfolder="vae", **place)
        channels = 2 * vae.get("latent_channels", 4)
        write_json(folder / "config.json", unet | {"in_channels": channels})
        config = replace(config, unet_model_name_or_path=str(folder))
    return config


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


def run(config):
    """Compile, print and write the report."""
    jax.config.update("jax_platforms", "cpu")  # leave this machine's accelerators free
    if config.optimization_level:
        jax.config.update("jax_optimization_level", config.optimization_level)
    if bool(config.tpu) == bool(config.gpu):
        raise ValueError("give one of --tpu, such as v5e-4, and --gpu, such as h100")
    target = find_target(config.tpu or config.gpu)
    name = next(name for name, flags in SUBCOMMANDS.items() if flags is type(config))
    given, defaults = asdict(config), {field.name: field.default for field in fields(config)}
    flag = next(flag for flag in BATCH_FLAGS if flag in defaults)
    is_train, is_auto = name == "train", getattr(config, flag) == "auto"
    unit = target.num_chips * config.gradient_accumulation_steps if is_train else 1
    if is_auto:  # begin with the default
        config = replace(config, **{flag: max(1, defaults[flag] // unit) * unit})
    for option in config.compiler_options:
        if "=" not in option:
            raise ValueError(f"--compiler_options {option} is not NAME=VALUE")
    if is_train:
        check_batch(config, target.num_chips)
        check_combinations(config)  # no check of --output_dir, as nothing is written there
    elif config.gpu and getattr(config, "offload", None):
        raise ValueError("--offload is for --tpu: the memory of a GPU's host is not modelled")
    output = Path(config.output or f"compile_for_{config.tpu or config.gpu}_{name}.json")
    check_writable(f"--output {output}", output.parent)
    devices, reports = target_devices(target), {}
    place = f"{config.tpu or config.gpu}, {target.num_chips} device(s)"
    print(f"compiling {name} for {place}, in minutes", flush=True)
    with tempfile.TemporaryDirectory() as folder, traced_for(target.chip):
        config = with_model(config, Path(folder))

        def fits(number):
            at_number = replace(config, **{flag: number * unit})
            program = (train_program if is_train else image_program)(at_number, devices)
            reports[number] = compile_program(at_number, name, program, target.chip)
            print(verdict(reports[number]), flush=True)
            return reports[number]["fits"]

        number = getattr(config, flag) // unit
        if is_auto:
            good, bad = largest_fitting(fits, number)
            number = good or bad
            reports[number]["smallest_not_fitting"] = reports[bad]["batch_per_chip"]
        else:
            fits(number)
    report = reports[number]
    report["flags"] = {k: v for k, v in given.items() if v not in (defaults[k], config.output)}
    print_report(report, target.chip)
    save_whole(output, partial(write_json, content=report))
    print(f"wrote {output}")


def main(args=None):
    """Command line."""
    run_main(SUBCOMMANDS, __doc__, run, args)


if __name__ == "__main__":
    main()
