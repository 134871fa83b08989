"""The models of a training run: loading, checking, encoding text and images, latents kept on disk.

cache_latents.py and the trainer's --cache_latents call write_latents().
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

from images import load_image, num_usable_cores
from kernels_flax import by_platform
from modeling_flax_clip import FlaxCLIPTextModel
from modeling_flax_unet import FlaxUNet2DConditionModel
from modeling_flax_vae import FlaxAutoencoderKL
from parquet_dataset import MIN_ROWS_FOR_BAD_FRACTION
from parquet_shards import (
    LATENTS,
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
COLUMNS = ("original_image", "edited_image", "edit_prompt")
PIXELS_AT_ONCE = 8 * 256 * 256  # of the pairs that a device encodes at once
UNFINISHED = ".unfinished-"  # what the folders are called in which shards are being written
LEFT_SECONDS = 24 * 3600  # without a batch until such a folder counts as a killed process's
SOURCE_BYTES_READ = 1 << 16  # of the end of a shard, where its footer is


class Models(NamedTuple):
    """The modules of a training step; parameters travel separately."""

    unet: FlaxUNet2DConditionModel
    vae: FlaxAutoencoderKL
    text_encoder: FlaxCLIPTextModel
    scheduler: FlaxDDPMScheduler


def encode_text(text_encoder, params, input_ids):
    """The states of a text encoder, as a pytree that dropout and loss take.

    Args:
        text_encoder, params: FlaxCLIPTextModel and its parameters.
        input_ids: integers (B, T).

    Returns:
        {"states": (B, T, D)}.
    """
    return {"states": text_encoder(input_ids, params=params)[0]}


def encode_images(vae, params, images):
    """The VAE's posterior of images; CPUs encode one image after the other.

    Args:
        vae, params: FlaxAutoencoderKL and its parameters.
        images: uint8 (B, R, R, 3).

    Returns:
        A distribution with mean and std, float32 (B, h, w, C), not scaled.
    """

    def encode(params, images):
        return vae.apply({"params": params}, images, method=vae.encode).latent_dist

    def encode_one_by_one(params, images):  # keeps the activations in a CPU's caches
        posteriors = jax.lax.map(partial(encode, params), images[:, None])
        return jax.tree.map(lambda x: x[:, 0], posteriors)

    images = jnp.transpose(images.astype(jnp.float32) / 127.5 - 1, (0, 3, 1, 2))
    return by_platform(params, images, cpu=encode_one_by_one, default=encode)


def encode_batch(batch, frozen, models):
    """Latents and text states of a batch.

    Args:
        batch: original_pixel_values and edited_pixel_values, uint8 (B, R, R, 3), or instead the
            latents of cache_latents.py, original_latents (B, h, w, C) and edited_latents
            (B, h, w, 2 C); input_ids (B, T).
        frozen: {"vae", "text_encoder"} parameters; no VAE for latents.
        models: Models.

    Returns:
        mean and std of the edited images' posterior, float32 (B, h, w, C); mode of the original
        images', (B, h, w, C); text, see encode_text.
    """
    text = encode_text(models.text_encoder, frozen["text_encoder"], batch["input_ids"])
    if "edited_latents" in batch:
        mean, std = jnp.split(batch["edited_latents"].astype(jnp.float32), 2, axis=-1)
        return mean, std, batch["original_latents"].astype(jnp.float32), text
    images = jnp.concatenate((batch["edited_pixel_values"], batch["original_pixel_values"]))
    posterior = encode_images(models.vae, frozen["vae"], images)  # (2B, h, w, C)
    B = len(images) // 2
    return posterior.mean[:B], posterior.std[:B], posterior.mode()[B:], text


def load_models(config: Config, dtype: Any):
    """Load the models of a run and check that they go together; weights stay on the host.

    Args:
        config: Config.
        dtype: compute dtype of the modules.

    Returns:
        (Models; the pipeline to save at the end; the frozen parameters that train_step takes, in
        float32; the UNet's parameters, float32).

    Raises:
        ValueError: files are missing or damaged, or the models do not fit each other.
    """
    source, revision = config.pretrained_model_name_or_path, config.revision
    files = dict(revision=revision, variant=config.variant, dtype=dtype)
    unet, unet_params = FlaxUNet2DConditionModel.from_pretrained(
        config.unet_model_name_or_path, dtype=dtype
    )
    if unet.addition_embed_type is not None:
        raise ValueError(
            f"{config.unet_model_name_or_path} is the UNet of an SDXL, which is not trained here; "
            "give a Stable Diffusion 1.x or 2.x that create_modified_unet.py has widened"
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
    """Raise a ValueError for models that do not fit each other or the resolution."""
    unet, vae, text_encoder, scheduler = models
    source = config.pretrained_model_name_or_path
    if scheduler.config.prediction_type == "sample":
        raise ValueError(
            f"the scheduler of {source} has prediction_type=sample; epsilon and v_prediction can "
            "be trained"
        )
    if unet.in_channels != 2 * vae.latent_channels:
        raise ValueError(
            f"the UNet in {config.unet_model_name_or_path} has {unet.in_channels} input channels, "
            f"InstructPix2Pix needs {2 * vae.latent_channels}; widen it: create_modified_unet.py"
        )
    if unet.cross_attention_dim != text_encoder.module.hidden_size:
        raise ValueError(
            f"the UNet in {config.unet_model_name_or_path} reads text states "
            f"{unet.cross_attention_dim} wide, the text encoder of {source} makes "
            f"{text_encoder.module.hidden_size}; take both from the same Stable Diffusion"
        )
    factor = 2 ** (len(vae.block_out_channels) + len(unet.block_out_channels) - 2)
    if config.resolution % factor:
        raise ValueError(
            f"{flag(config, 'resolution')} is not a multiple of {factor}; "
            f"try {nearest_multiples(config.resolution, factor)}"
        )


# Validation


def load_validation_images(config: Config):
    """The images to edit while training: PIL, RGB, cropped to squares of the run's resolution."""
    side = (config.resolution, config.resolution)
    try:
        return [
            ImageOps.fit(load_image(path), side, Image.Resampling.LANCZOS)
            for path in config.validation_image
        ]
    except ValueError as error:
        raise ValueError(f"--validation_image {error}") from error


def edit_images(pipeline, p_params, images, prompts, seed):
    """Edit images on the devices of this process; all processes make the same call.

    Args:
        pipeline: FlaxStableDiffusionInstructPix2PixPipeline.
        p_params: its parameters, on every device; those of the scheduler are not used.
        images: N PIL images of one size.
        prompts: N instructions.
        seed: of the noise.

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


# Latents on disk


def encode_pairs(vae, params, originals, edits):
    """Latents of pairs and of their mirror images.

    Args:
        vae, params: FlaxAutoencoderKL and its parameters.
        originals, edits: uint8 (B, R, R, 3).

    Returns:
        float16 (B, 2, h, w, C), the modes of the originals, and (B, 2, h, w, 2 C), mean and
        standard deviation of the edits; the second of two is of the image mirrored.
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
    """What tells a VAE's float32 parameters from those of others, hexadecimal."""
    return f"{tree_checksum(params):08x}"


def check_kept(path: Path, what: dict) -> None:
    """Raise a ValueError if a shard of latents is not what it should be."""
    try:
        kept = latents_metadata(pq.read_metadata(path))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}); remove it") from error
    if kept is None:
        raise ValueError(
            f"{path} holds no latents; name a folder of its own for them, not that of the data"
        )
    if changes := [
        f"{name} was {kept.get(name)} and is {value}"
        for name, value in what.items()
        if kept.get(name) != value
    ]:
        raise ValueError(f"{path} was made otherwise ({'; '.join(changes)}); name another folder")


def describe_source(path: Path, groups: list[RowGroup]) -> dict:
    """What tells a shard of images from others: its size, end, rows and columns."""
    with path.open("rb") as file:
        file.seek(-min(SOURCE_BYTES_READ, path.stat().st_size), os.SEEK_END)
        end = zlib.crc32(file.read())
    return {
        "source_bytes": path.stat().st_size,
        "source_end": f"{end:08x}",
        "rows": groups[0].metadata.num_rows,
        "columns": list(groups[0].columns),
    }


def shards_of(groups: list[RowGroup]) -> Iterator[tuple[Path, list[RowGroup]]]:
    """Row groups, which are in the order of shards, by shard."""
    for path, of_shard in groupby(groups, key=lambda group: group.path):
        yield path, list(of_shard)


def write_shard(path, groups, encode, what, batch_size, config, bar, bad):
    """Encode a shard, row group by row group; it appears under its name when it is complete.

    Args:
        path: of the file to write.
        groups: the shard's row groups.
        encode: two uint8 (B, R, R, 3) -> arrays as of encode_pairs, maybe still on their way.
        what: to be kept in the file.
        batch_size: pairs that go to encode at once.
        config: Config.
        bar: tqdm that counts pairs.
        bad: list to which pairs that cannot be decoded are added.

    Raises:
        ValueError: there are more of those than config.max_bad_fraction allows.
    """
    kinds = pa.binary(), pa.binary(), pa.string()
    schema = pa.schema(zip(COLUMNS, kinds), {LATENTS: json.dumps(what)})
    R = config.resolution

    def decode(group, cells, position, out):
        """The instruction, and why the pair is broken, or None; its pixels go to out."""
        prompt = None
        try:
            pair = pair_at(cells, position)
            prompt = pair.prompt
            decode_pair(pair, out, group.columns, config.image_interpolation_mode, 0.5, False)
        except ValueError as error:
            return prompt, f"{path.name} row {group.first_row + position}: {error}"
        return prompt, None

    def finish(encoded, decoded):
        """Cells of a batch that was encoded meanwhile."""
        originals, edits = (np.asarray(x) for x in encoded)
        bar.update(len(decoded))
        for _, reason in decoded:
            if reason:
                logger.warning("%s; it gets no latents", reason)
                bad.append(reason)
        if len(bad) > config.max_bad_fraction * max(bar.n, MIN_ROWS_FOR_BAD_FRACTION):
            raise ValueError(
                f"{len(bad)} of the first {bar.n} pairs of {config.train_data_dir} cannot be "
                f"decoded, more than max_bad_fraction={config.max_bad_fraction} allows; for one "
                f"{bad[-1]}"
            )
        return [
            (None, None, prompt) if reason else (original.tobytes(), edited.tobytes(), prompt)
            for original, edited, (prompt, reason) in zip(originals, edits, decoded)
        ]

    threads = ThreadPoolExecutor(config.dataloader_num_workers or num_usable_cores())
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=UNFINISHED) as folder:
        unfinished = Path(folder, path.name)
        with pq.ParquetWriter(unfinished, schema, compression="none") as writer, threads:
            for group in groups:
                cells, rows, waiting = read_row_group(group), [], None
                for start in range(0, group.num_rows, batch_size):
                    positions = range(start, min(start + batch_size, group.num_rows))
                    pixels = np.zeros((2, batch_size, R, R, 3), np.uint8)
                    decoded = [
                        threads.submit(decode, group, cells, position, tuple(pixels[:, i]))
                        for i, position in enumerate(positions)
                    ]
                    decoded = [future.result() for future in decoded]
                    if waiting:  # the devices were at work while the next images were decoded
                        rows += finish(*waiting)
                    waiting = encode(*pixels), decoded
                    with contextlib.suppress(OSError):  # not every file system can
                        os.utime(folder)  # tells remove_leftovers that this process is at work
                rows += finish(*waiting)
                columns = [pa.array(column, kind) for column, kind in zip(zip(*rows), kinds)]
                writer.write_table(pa.table(columns, schema), row_group_size=len(rows))
        unfinished.replace(path)


def remove_leftovers(output_dir):
    """Remove the folders of killed processes; one touched within a day may be at work."""
    for folder in output_dir.glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError):  # it was finished meanwhile, or is somebody else's
            if time.time() - folder.stat().st_mtime > LEFT_SECONDS:
                shutil.rmtree(folder)


def write_latents(config, output_dir, batch_size=None):
    """Write all shards of latents that are missing.

    Args:
        config: the Config of cache_latents.py, or the trainer's.
        output_dir: directory of the shards.
        batch_size: pairs at once on each device; None: as many as have 8 images of 256 pixels.

    Raises:
        ValueError: data or VAE cannot be used, or the directory contains something else.
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
        raise ValueError(f"{output_dir} is the folder of the data; name another for the latents")
    groups = list_row_groups(
        config.train_data_dir,
        config.original_image_column,
        config.edited_image_column,
        config.edit_prompt_column,
    )
    if latents_metadata(groups[0].metadata) is not None:
        raise ValueError(f"{config.train_data_dir} holds latents already; train on it as it is")
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
        raise ValueError(f"--resolution {config.resolution} must be a multiple of {factor}")
    side = config.resolution // factor
    made_with = {
        "vae": vae_checksum(params),
        "mixed_precision": config.mixed_precision,
        "resolution": config.resolution,
        "image_interpolation_mode": config.image_interpolation_mode,
        "shape": [side, side, vae.latent_channels],
    }
    names = {group.path.name for group in groups}
    for stranger in sorted(output_dir.glob("*.parquet")):
        if stranger.name not in names:
            raise ValueError(
                f"{stranger} is of no shard in {config.train_data_dir}; name another folder"
            )
    if config.max_train_samples is not None:
        wanted = {group.path for group in take_first_rows(groups, config.max_train_samples)}
        groups = [group for group in groups if group.path in wanted]
    missing = []
    for path, of_shard in shards_of(groups):
        kept = output_dir / path.name
        what = made_with | describe_source(path, of_shard)
        if kept.exists():
            check_kept(kept, what)
        else:
            missing.append((kept, of_shard, what))
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{output_dir} cannot be a folder of latents ({error}); name another"
        ) from error
    remove_leftovers(output_dir)
    if not missing:
        return
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("batch",))
    whole, shares = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in ((), ("batch",)))
    params = jax.device_put(jax.tree.map(lambda x: np.asarray(x, dtype), params), whole)
    # Every device its own pairs, which XLA would not see in a loop over images.
    program = jax.jit(
        jax.shard_map(
            partial(encode_pairs, vae),
            mesh=mesh,
            in_specs=(whole.spec, shares.spec, shares.spec),
            out_specs=shares.spec,
            check_vma=False,
        )
    )

    def encode(originals, edits):
        return program(params, *jax.device_put((originals, edits), shares))

    per_device = batch_size or max(1, PIXELS_AT_ONCE // config.resolution**2)
    most = max(group.num_rows for _, of_shard, _ in missing for group in of_shard)
    batch_size = min(per_device, math.ceil(most / mesh.size)) * mesh.size
    # Processes that share the folder begin at different shards, and find what others have done.
    first = jax.process_index() * len(missing) // jax.process_count()
    missing, bad = missing[first:] + missing[:first], []
    num_pairs = sum(group.num_rows for _, of_shard, _ in missing for group in of_shard)
    with tqdm(total=num_pairs, desc="encoding", unit="pair") as bar:
        for path, of_shard, what in missing:
            if path.exists():
                bar.update(sum(group.num_rows for group in of_shard))
            else:
                write_shard(path, of_shard, encode, what, batch_size, config, bar, bad)


def check_vae(dataset, vae_params, source):
    """Raise a ValueError if a dataset's latents, if it has any, are of another VAE.

    Args:
        dataset: ParquetImagePairs.
        vae_params: NumPy arrays, float32.
        source: where the VAE is from, for the error.
    """
    if dataset.latents and dataset.latents["vae"] != vae_checksum(vae_params):
        raise ValueError(
            f"{dataset.train_data_dir} has latents of another VAE than that of {source}; make new "
            "ones in another directory"
        )
