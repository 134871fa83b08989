"""Models of a training run: load, check, encode text and images, cache latents on disk.

write_latents() implements cache_latents.py and the trainer's --cache_latents.
"""

import contextlib
import json
import logging
import math
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageOps
from tqdm import tqdm

from command_line import differences
from images import load_image, num_usable_cores
from kernels_flax import by_platform
from modeling_flax_clip import FlaxCLIPTextModel
from modeling_flax_unet import FlaxUNet2DConditionModel
from modeling_flax_vae import FlaxAutoencoderKL
from parquet_dataset import MIN_ROWS_FOR_BAD_FRACTION
from parquet_shards import (
    LATENTS,
    TIME_IDS,
    RowGroup,
    decode_pair,
    latents_metadata,
    list_row_groups,
    pair_at,
    read_row_group,
    take_first_rows,
)
from pipeline_flax_stable_diffusion_instruct_pix2pix import (
    FlaxStableDiffusionInstructPix2PixPipeline,
)
from pipeline_flax_utils import load_tokenizer
from scheduling_flax import FlaxDDPMScheduler, scheduler_from_pretrained
from sharding_flax import local_rows, replicate
from training_flags import Config, flag, nearest_multiples
from training_output import tree_checksum

logger = logging.getLogger(__name__)

VALIDATION_INFERENCE_STEPS = 20
LATENT_COLUMNS = ("original_image", "edited_image", "edit_prompt", TIME_IDS)
PIXELS_PER_BATCH = 8 * 256 * 256  # of original images, per device
UNFINISHED_PREFIX = ".unfinished-"  # of temporary directories for shards
STALE_SECONDS = 24 * 3600  # age at which an unfinished directory is removed
FOOTER_BYTES = 1 << 16  # at the end of a shard, for its checksum


class Models(NamedTuple):
    """The modules of a training step, without parameters."""

    unet: FlaxUNet2DConditionModel
    vae: FlaxAutoencoderKL
    text_encoder: FlaxCLIPTextModel
    scheduler: FlaxDDPMScheduler


def encode_text(text_encoder, params, input_ids, time_ids=None):
    """Encode token ids as the dict that conditioning_dropout and diffusion_loss take.

    Args:
        text_encoder, params: FlaxCLIPTextModel and its parameters; for SDXL a tuple of
            FlaxCLIPTextModel and FlaxCLIPTextModelWithProjection, and a tuple of their parameters.
        input_ids: integers (B, T); for SDXL (B, 2, T).
        time_ids: micro-conditioning of SDXL, (B, 6).

    Returns:
        {"states": (B, T, D)}; for SDXL the states of both encoders before their last layer, and
        also "pooled" (B, P) and "time_ids".

    Source: SDXL (arXiv 2307.01952), section 2.1.
    """
    if not isinstance(text_encoder, tuple):
        return {"states": text_encoder(input_ids, params=params)[0]}
    outputs = [
        encoder(input_ids[:, i], params=params[i], output_hidden_states=True)
        for i, encoder in enumerate(text_encoder)
    ]
    states = jnp.concatenate([output.hidden_states[-2] for output in outputs], axis=-1)
    return {"states": states, "pooled": outputs[1].text_embeds, "time_ids": time_ids}


def encode_images(vae, params, images):
    """Encode images with the VAE; CPUs encode them one at a time.

    Args:
        vae, params: FlaxAutoencoderKL and its parameters.
        images: uint8 (B, R, R, 3).

    Returns:
        The posterior, a distribution with mean and std, float32 (B, h, w, C), unscaled.
    """

    def encode(params, images):
        return vae.apply({"params": params}, images, method=vae.encode).latent_dist

    def encode_one_by_one(params, images):  # activations fit into a CPU's caches
        posteriors = jax.lax.map(partial(encode, params), images[:, None])
        return jax.tree.map(lambda x: x[:, 0], posteriors)

    images = jnp.transpose(images.astype(jnp.float32) / 127.5 - 1, (0, 3, 1, 2))
    return by_platform(params, images, cpu=encode_one_by_one, default=encode)


def encode_batch(batch, frozen, models):
    """Encode the images and the text of a batch; cached latents replace the images.

    Args:
        batch: {"input_ids"} integers (B, T), for SDXL (B, 2, T) and {"time_ids"} (B, 6); and either
            {"original_pixel_values", "edited_pixel_values"} uint8 (B, R, R, 3), or from
            cache_latents.py {"original_latents"} (B, h, w, C), {"edited_latents"} (B, h, w, 2 C).
        frozen: {"vae", "text_encoder"} parameters; cached latents need no "vae".
        models: Models.

    Returns:
        (mean, std, mode, text): mean and std of the edited images' posterior, mode of the original
        images' posterior, float32 (B, h, w, C); text as from encode_text.
    """
    text = encode_text(
        models.text_encoder, frozen["text_encoder"], batch["input_ids"], batch.get("time_ids")
    )
    if "edited_latents" in batch:
        mean, std = jnp.split(batch["edited_latents"].astype(jnp.float32), 2, axis=-1)
        return mean, std, batch["original_latents"].astype(jnp.float32), text
    images = jnp.concatenate((batch["edited_pixel_values"], batch["original_pixel_values"]))
    posterior = encode_images(models.vae, frozen["vae"], images)  # (2B, h, w, C)
    B = len(images) // 2
    return posterior.mean[:B], posterior.std[:B], posterior.mode()[B:], text


def load_models(config: Config, dtype: Any):
    """Load the models of a run onto the host and check that they fit together.

    Args:
        config: Config.
        dtype: compute dtype of the modules.

    Returns:
        (models, pipeline, frozen, params): Models; the pipeline to save at the end; train_step's
        frozen parameters, float32; the UNet's parameters, float32.

    Raises:
        ValueError: files are missing or damaged, or the models do not fit together.
    """
    source, revision = config.pretrained_model_name_or_path, config.revision
    files = dict(revision=revision, variant=config.variant, dtype=dtype)
    unet, unet_params = FlaxUNet2DConditionModel.from_pretrained(
        config.unet_model_name_or_path, dtype=dtype
    )
    if unet.addition_embed_type is not None:
        raise ValueError(
            f"{flag(config, 'unet_model_name_or_path')} is an SDXL UNet, which cannot be trained "
            "here; give a Stable Diffusion 1.x or 2.x UNet widened by create_modified_unet.py"
        )
    unet = unet.clone(gradient_checkpointing=config.gradient_checkpointing)
    vae, vae_params = FlaxAutoencoderKL.from_pretrained(source, subfolder="vae", **files)
    text_encoder, text_params = FlaxCLIPTextModel.from_pretrained(
        source, subfolder="text_encoder", _do_init=False, **files
    )
    scheduler, scheduler_state = FlaxDDPMScheduler.from_pretrained(
        source, subfolder="scheduler", revision=revision
    )
    sampler, _ = scheduler_from_pretrained(source, revision=revision)
    tokenizer = load_tokenizer(source, text_encoder, revision)
    models = Models(unet, vae, text_encoder, scheduler)
    check_models(config, models)

    float32 = partial(jax.tree.map, lambda x: np.asarray(x, np.float32))
    pipeline = FlaxStableDiffusionInstructPix2PixPipeline(
        vae, text_encoder, tokenizer, unet, sampler
    )
    null_ids = pipeline.prepare_text_inputs("")
    null_text = jax.jit(partial(encode_text, text_encoder))(text_params, null_ids)
    frozen = {
        "vae": float32(vae_params),
        "text_encoder": float32(text_params),
        "null_text": jax.tree.map(np.asarray, null_text),  # {"states": (1, T, D)}
        "scheduler": scheduler_state,
    }
    return models, pipeline, frozen, float32(unet_params)


def check_models(config: Config, models: Models):
    """Raise a ValueError for models that do not fit together or do not fit the resolution."""
    unet, vae, text_encoder, scheduler = models
    source = config.pretrained_model_name_or_path
    if scheduler.config.prediction_type == "sample":
        raise ValueError(
            f"the scheduler of {source} has prediction_type sample; use a model with epsilon or "
            "v_prediction"
        )
    if unet.in_channels != 2 * vae.latent_channels:
        raise ValueError(
            f"the UNet in {config.unet_model_name_or_path} has {unet.in_channels} input channels, "
            f"InstructPix2Pix needs {2 * vae.latent_channels}; widen it with "
            "create_modified_unet.py"
        )
    if unet.cross_attention_dim != text_encoder.module.hidden_size:
        raise ValueError(
            f"the UNet in {config.unet_model_name_or_path} has cross_attention_dim "
            f"{unet.cross_attention_dim}, but the text encoder of {source} has hidden_size "
            f"{text_encoder.module.hidden_size}; take both from the same Stable Diffusion model"
        )
    factor = 2 ** (len(vae.block_out_channels) + len(unet.block_out_channels) - 2)
    if config.resolution % factor:
        raise ValueError(
            f"{flag(config, 'resolution')} is not a multiple of {factor}; "
            f"try {nearest_multiples(config.resolution, factor)}"
        )


# Validation


def load_validation_images(config: Config):
    """Load the images to edit during training: PIL, RGB, cropped squares of --resolution."""
    side = (config.resolution, config.resolution)
    try:
        return [
            ImageOps.fit(load_image(path), side, Image.Resampling.LANCZOS)
            for path in config.validation_image
        ]
    except ValueError as error:
        raise ValueError(f"--validation_image {error}") from error


def edit_images(pipeline, p_params, images, prompts, seed):
    """Edit images on this process's devices; all processes must call this together.

    Args:
        pipeline: FlaxStableDiffusionInstructPix2PixPipeline.
        p_params: its replicated parameters without the scheduler's.
        images: N PIL images of equal size.
        prompts: N instructions.
        seed: seed of the noise.

    Returns:
        N PIL images.
    """
    n = jax.local_device_count()
    B = -(-len(images) // n)  # per device
    padding = n * B - len(images)
    prompt_ids, image = pipeline.prepare_inputs(
        prompts + prompts[-1:] * padding, images + images[-1:] * padding
    )
    p_params = p_params | {"scheduler": replicate(pipeline.scheduler.create_state())}
    images = pipeline(
        prompt_ids.reshape(n, B, -1),
        image.reshape(n, B, *image.shape[1:]),
        p_params,
        jax.random.key(seed),
        num_inference_steps=VALIDATION_INFERENCE_STEPS,
        jit=True,
    ).images
    return pipeline.numpy_to_pil(local_rows(images))[: len(prompts)]


# Cached latents


def encode_pairs(vae, params, originals, edits):
    """Encode pairs and their mirror images.

    Args:
        vae, params: FlaxAutoencoderKL and its parameters.
        originals, edits: uint8 (B, R, R, 3).

    Returns:
        (modes, moments), float16: modes of the originals (B, 2, h, w, C); means and standard
        deviations of the edits (B, 2, h, w, 2 C). Index 1 of axis 1 is the mirror image.
    """
    B = len(originals)
    images = jnp.concatenate((originals, edits))
    posterior = encode_images(vae, params, jnp.concatenate((images, images[:, :, ::-1])))
    mean, std = (
        jnp.stack(jnp.split(x, 2), axis=1).astype(jnp.float16)  # (2 B, 2, h, w, C)
        for x in (posterior.mean, posterior.std)
    )
    return mean[:B], jnp.concatenate((mean[B:], std[B:]), -1)


def vae_checksum(params):
    """A hexadecimal checksum of a VAE's float32 parameters."""
    return f"{tree_checksum(params):08x}"


def check_existing_shard(path: Path, metadata: dict) -> None:
    """Raise a ValueError unless a shard of latents has this metadata."""
    try:
        existing = latents_metadata(pq.read_metadata(path))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); remove it, and it is written again"
        ) from error
    if existing is None:
        raise ValueError(
            f"{path} contains no latents; name a directory for latents only, not that of the images"
        )
    if different := differences(existing, metadata):
        raise ValueError(
            f"{path} was made with other settings ({'; '.join(different)}); name another directory"
        )


def describe_source(path: Path, groups: list[RowGroup]) -> dict:
    """Identify a shard of images by its size, end, rows and columns."""
    with path.open("rb") as file:
        file.seek(-min(FOOTER_BYTES, path.stat().st_size), os.SEEK_END)
        end = zlib.crc32(file.read())
    return {
        "source_bytes": path.stat().st_size,
        "source_end": f"{end:08x}",
        "rows": groups[0].metadata.num_rows,
        "columns": list(groups[0].columns),
    }


def group_by_shard(groups: list[RowGroup]) -> Iterator[tuple[Path, list[RowGroup]]]:
    """Yield each shard with its row groups, which must be in the order of the shards."""
    for path, shard_groups in groupby(groups, key=lambda group: group.path):
        yield path, list(shard_groups)


def write_latent_shard(path, groups, encode, metadata, batch_size, config, bar, bad):
    """Encode a shard into a temporary file, one row group at a time, and rename it to path.

    Args:
        path: file to write.
        groups: the row groups of the shard of images.
        encode: (originals, edits), uint8 (B, R, R, 3) each -> encode_pairs' result on the devices.
        metadata: dict to store in the file.
        batch_size: pairs per call of encode.
        config: Config.
        bar: tqdm bar that counts pairs.
        bad: list of error messages; those of undecodable pairs are appended.

    Raises:
        ValueError: more pairs are undecodable than config.max_bad_fraction allows.
    """
    types = pa.binary(), pa.binary(), pa.string(), pa.binary()
    schema = pa.schema(zip(LATENT_COLUMNS, types), {LATENTS: json.dumps(metadata)})
    R = config.resolution

    def decode(group, cells, position, out):
        """Decode a pair into out; return (instruction, time ids, error message or None)."""
        prompt, mode = None, config.image_interpolation_mode
        try:
            pair = pair_at(cells, position)
            prompt = pair.prompt
            time_ids = decode_pair(pair, out, group.columns, mode, 0.5, False)
        except ValueError as error:
            return prompt, None, f"{path.name} row {group.first_row + position}: {error}"
        return prompt, time_ids.tobytes(), None

    def collect(encoded, decoded):
        """Wait for a batch; return its rows."""
        originals, edits = (np.asarray(x) for x in encoded)
        bar.update(len(decoded))
        for *_, reason in decoded:
            if reason:
                logger.warning("%s; stored without latents", reason)
                bad.append(reason)
        if len(bad) > config.max_bad_fraction * max(bar.n, MIN_ROWS_FOR_BAD_FRACTION):
            raise ValueError(
                f"{len(bad)} of the first {bar.n} pairs of {config.train_data_dir} cannot be "
                f"decoded, more than --max_bad_fraction {config.max_bad_fraction} allows; for "
                f"example {bad[-1]}"
            )
        return [
            (None, None, prompt, None)
            if reason
            else (original.tobytes(), edited.tobytes(), prompt, time_ids)
            for original, edited, (prompt, time_ids, reason) in zip(originals, edits, decoded)
        ]

    threads = ThreadPoolExecutor(config.dataloader_num_workers or num_usable_cores())
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=UNFINISHED_PREFIX) as folder:
        unfinished = Path(folder, path.name)
        with pq.ParquetWriter(unfinished, schema, compression="none") as writer, threads:
            for group in groups:
                cells, rows, in_flight = read_row_group(group), [], None
                for start in range(0, group.num_rows, batch_size):
                    positions = range(start, min(start + batch_size, group.num_rows))
                    pixels = np.zeros((2, batch_size, R, R, 3), np.uint8)
                    decoded = [
                        threads.submit(decode, group, cells, position, tuple(pixels[:, i]))
                        for i, position in enumerate(positions)
                    ]
                    decoded = [future.result() for future in decoded]
                    if in_flight:  # encoded while this batch was decoded
                        rows += collect(*in_flight)
                    in_flight = encode(*pixels), decoded
                    with contextlib.suppress(OSError):  # unsupported by some file systems
                        os.utime(folder)  # for remove_leftovers
                rows += collect(*in_flight)
                columns = [pa.array(column, type_) for column, type_ in zip(zip(*rows), types)]
                writer.write_table(pa.table(columns, schema), row_group_size=len(rows))
        unfinished.replace(path)


def remove_leftovers(output_dir):
    """Remove temporary directories of killed processes: those not touched for a day."""
    for folder in output_dir.glob(f"{UNFINISHED_PREFIX}*"):
        with contextlib.suppress(OSError):  # already removed, or no permission
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder)


def write_latents(config, output_dir, batch_size=None):
    """Write all missing shards of latents.

    Args:
        config: Config of cache_latents.py or of the trainer.
        output_dir: directory of the shards.
        batch_size: pairs per device; None: PIXELS_PER_BATCH pixels of original images.

    Raises:
        ValueError: invalid flags, data or VAE, or output_dir contains other files.
    """
    positive = {name: getattr(config, name) for name in ("resolution", "max_train_samples")}
    for name, value in (positive | {"batch_size": batch_size}).items():
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    if config.dataloader_num_workers < 0:
        raise ValueError(
            f"--dataloader_num_workers {config.dataloader_num_workers} must be at least 0"
        )
    if not 0 <= config.max_bad_fraction <= 1:
        raise ValueError(f"--max_bad_fraction {config.max_bad_fraction} must be from 0 to 1")
    output_dir = Path(output_dir)
    if output_dir.resolve() == Path(config.train_data_dir).resolve():
        raise ValueError(
            f"{output_dir} is --train_data_dir; name another directory for the latents"
        )
    groups = list_row_groups(
        config.train_data_dir,
        config.original_image_column,
        config.edited_image_column,
        config.edit_prompt_column,
    )
    if latents_metadata(groups[0].metadata) is not None:
        raise ValueError(
            f"--train_data_dir {config.train_data_dir} already has latents; train on it directly"
        )
    dtype = jnp.bfloat16 if config.mixed_precision == "bf16" else jnp.float32
    vae, params = FlaxAutoencoderKL.from_pretrained(
        config.pretrained_model_name_or_path,
        subfolder="vae",
        revision=config.revision,
        variant=config.variant,
        dtype=dtype,
    )
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), params)
    factor = 2 ** (len(vae.block_out_channels) - 1)
    if config.resolution % factor:
        raise ValueError(
            f"--resolution {config.resolution} is not a multiple of {factor}; try "
            f"{nearest_multiples(config.resolution, factor)}"
        )
    side = config.resolution // factor
    made_with = {
        "vae": vae_checksum(params),
        "mixed_precision": config.mixed_precision,
        "resolution": config.resolution,
        "image_interpolation_mode": config.image_interpolation_mode,
        "shape": [side, side, vae.latent_channels],
    }
    names = {group.path.name for group in groups}
    for path in sorted(output_dir.glob("*.parquet")):
        if path.name not in names:
            raise ValueError(
                f"{path} matches no shard in {config.train_data_dir}; name another directory"
            )
    if config.max_train_samples is not None:
        selected = {group.path for group in take_first_rows(groups, config.max_train_samples)}
        groups = [group for group in groups if group.path in selected]
    missing = []
    for path, shard_groups in group_by_shard(groups):
        latent_path = output_dir / path.name
        metadata = made_with | describe_source(path, shard_groups)
        if latent_path.exists():
            check_existing_shard(latent_path, metadata)
        else:
            missing.append((latent_path, shard_groups, metadata))
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot make the directory {output_dir} ({error}); name another"
        ) from error
    remove_leftovers(output_dir)
    if not missing:
        return
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("batch",))
    replicated, sharded = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in ((), ("batch",)))
    params = jax.device_put(jax.tree.map(lambda x: np.asarray(x, dtype), params), replicated)
    # shard_map, because XLA cannot partition encode_images' loop over images on CPUs.
    program = jax.jit(
        jax.shard_map(
            partial(encode_pairs, vae),
            mesh=mesh,
            in_specs=(replicated.spec, sharded.spec, sharded.spec),
            out_specs=sharded.spec,
            check_vma=False,
        )
    )

    def encode(originals, edits):
        return program(params, *jax.device_put((originals, edits), sharded))

    per_device = batch_size or max(1, PIXELS_PER_BATCH // config.resolution**2)
    largest_group = max(group.num_rows for _, shard_groups, _ in missing for group in shard_groups)
    batch_size = min(per_device, math.ceil(largest_group / mesh.size)) * mesh.size
    # Processes that share output_dir start at different shards and skip existing ones.
    first = jax.process_index() * len(missing) // jax.process_count()
    missing, bad = missing[first:] + missing[:first], []
    num_pairs = sum(group.num_rows for _, shard_groups, _ in missing for group in shard_groups)
    with tqdm(total=num_pairs, desc="encoding", unit="pair") as bar:
        for path, shard_groups, metadata in missing:
            if path.exists():
                bar.update(sum(group.num_rows for group in shard_groups))
            else:
                write_latent_shard(
                    path, shard_groups, encode, metadata, batch_size, config, bar, bad
                )


def check_vae(dataset, vae_params, source):
    """Raise a ValueError if a dataset's cached latents are of another VAE.

    Args:
        dataset: ParquetImagePairs, of latents or images.
        vae_params: float32 NumPy arrays.
        source: name of the VAE's model for the error message.
    """
    if dataset.latents and dataset.latents["vae"] != vae_checksum(vae_params):
        raise ValueError(
            f"{dataset.train_data_dir} has latents of another VAE than that of {source}; name "
            "another directory to make new ones"
        )
