"""Models of a training run: load, check, encode text and images, cache latents on disk.

write_latents() implements cache_latents.py and the trainer's --cache_latents.
"""

import contextlib
import json
import logging
import math
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageOps
from tqdm import tqdm

from config_flax import has, read_index
from images import load_image, num_usable_cores
from kernels_flax import by_platform
from modeling_flax_clip import FlaxCLIPTextModel, FlaxCLIPTextModelWithProjection
from modeling_flax_unet import FlaxUNet2DConditionModel
from modeling_flax_vae import FlaxAutoencoderKL
from parquet_dataset import MIN_ROWS_FOR_BAD_FRACTION
from parquet_shards import (
    LATENTS,
    TIME_IDS,
    UNFINISHED_PREFIX,
    check_existing_shard,
    decode_pair,
    describe_source,
    group_by_shard,
    latents_metadata,
    list_row_groups,
    pair_at,
    read_row_group,
    remove_leftovers,
    take_first_rows,
)
from pipeline_flax_stable_diffusion_instruct_pix2pix import (
    FlaxStableDiffusionInstructPix2PixPipeline,
)
from pipeline_flax_stable_diffusion_xl_instruct_pix2pix import (
    FlaxStableDiffusionXLInstructPix2PixPipeline,
)
from pipeline_flax_utils import load_tokenizer
from scheduling_flax import FlaxDDPMScheduler, scheduler_from_pretrained
from sharding_flax import local_rows, replicate
from training_flags import Config, flag, nearest_multiples
from training_output import tree_checksum

logger = logging.getLogger(__name__)

VALIDATION_INFERENCE_STEPS = 20
SD_SCALING_FACTOR = 0.18215  # of the VAE's latents; SDXL has 0.13025
TEXT_ENCODERS = (("", FlaxCLIPTextModel), ("_2", FlaxCLIPTextModelWithProjection))  # by suffix
LATENT_COLUMNS = ("original_image", "edited_image", "edit_prompt", TIME_IDS)
PIXELS_PER_BATCH = 8 * 256 * 256  # of original images, per device


class Models(NamedTuple):
    """The modules of a training step, without parameters."""

    unet: FlaxUNet2DConditionModel
    vae: FlaxAutoencoderKL
    text_encoder: FlaxCLIPTextModel | tuple  # for SDXL a tuple of two
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
    is_xl = is_sdxl(config)
    unet, unet_params = FlaxUNet2DConditionModel.from_pretrained(
        config.unet_model_name_or_path, dtype=dtype
    )
    unet = unet.clone(gradient_checkpointing=config.gradient_checkpointing)
    vae, vae_params = load_vae(config, dtype, is_xl)
    encoders, tokenizers = [], []
    for suffix, encoder_class in TEXT_ENCODERS[: 2 if is_xl else 1]:
        encoder, encoder_params = encoder_class.from_pretrained(
            source,
            subfolder=f"text_encoder{suffix}",
            revision=revision,
            variant=config.variant,
            dtype=dtype,
            _do_init=False,
        )
        encoders.append((encoder, encoder_params))
        tokenizers.append(load_tokenizer(source, encoder, revision, f"tokenizer{suffix}"))
    text_encoder, text_params = zip(*encoders) if is_xl else encoders[0]
    scheduler, scheduler_state = FlaxDDPMScheduler.from_pretrained(
        source, subfolder="scheduler", revision=revision
    )
    sampler, _ = scheduler_from_pretrained(source, revision=revision)
    models = Models(unet, vae, text_encoder, scheduler)
    check_models(config, models)

    float32 = partial(jax.tree.map, lambda x: np.asarray(x, np.float32))
    if is_xl:
        pipeline = FlaxStableDiffusionXLInstructPix2PixPipeline(
            *text_encoder, vae, *tokenizers, unet, sampler
        )
    else:
        pipeline = FlaxStableDiffusionInstructPix2PixPipeline(
            vae, text_encoder, *tokenizers, unet, sampler
        )
    null_ids = pipeline.prepare_text_inputs("")
    null_text = jax.jit(partial(encode_text, text_encoder))(text_params, null_ids)
    if is_xl:  # trained and sampled with zeros, see force_zeros_for_empty_prompt
        null_text = {name: jnp.zeros_like(null_text[name]) for name in ("states", "pooled")}
    frozen = {
        "vae": float32(vae_params),
        "text_encoder": float32(text_params),
        "null_text": jax.tree.map(np.asarray, null_text),  # (1, T, D) and, for SDXL, (1, P)
        "scheduler": scheduler_state,
    }
    return models, pipeline, frozen, float32(unet_params)


def is_sdxl(config) -> bool:
    """Whether --pretrained_model_name_or_path is SDXL.

    Raises:
        ValueError: it is not a pipeline, or an SDXL refiner.
    """
    source = config.pretrained_model_name_or_path
    index = read_index(source, config.revision)
    if not has(index, "text_encoder_2"):
        if "XL" in str(index.get("_class_name")):
            raise ValueError(f"{source} is SDXL without text_encoder_2; copy or download it again")
        return False
    if not has(index, "text_encoder"):
        raise ValueError(
            f"{source} is SDXL's refiner, which lacks the first text encoder; give the base model"
        )
    return True


def load_vae(config, dtype, is_xl):
    """Load the VAE of a training run or of cache_latents.py; returns (module, params).

    SDXL's own VAE overflows in half precision. It computes in float32, as its config asks for
    (force_upcast).
    """
    source, options = config.pretrained_vae_model_name_or_path, {}
    if not source:
        source = config.pretrained_model_name_or_path
        options = dict(subfolder="vae", revision=config.revision, variant=config.variant)
    vae, params = FlaxAutoencoderKL.from_pretrained(source, dtype=dtype, **options)
    return vae.clone(dtype=jnp.float32) if is_xl and vae.force_upcast else vae, params


def pipeline_params(frozen):
    """The pipeline's parameters other than the UNet's, of train_step's frozen ones."""
    encoders = frozen["text_encoder"]
    if not isinstance(encoders, tuple):
        return {"vae": frozen["vae"], "text_encoder": encoders}
    return {"vae": frozen["vae"], "text_encoder": encoders[0], "text_encoder_2": encoders[1]}


def check_models(config: Config, models: Models):
    """Raise a ValueError for models that do not fit together or do not fit the resolution."""
    unet, vae, text_encoder, scheduler = models
    source, is_xl = config.pretrained_model_name_or_path, isinstance(models.text_encoder, tuple)
    if is_xl != (unet.addition_embed_type == "text_time"):
        families = ("SDXL", "Stable Diffusion 1 or 2")
        family, other = families if is_xl else families[::-1]
        raise ValueError(
            f"{source} is {family}, but the UNet in {config.unet_model_name_or_path} is {other}; "
            "take both from the same model"
        )
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
    encoders = text_encoder if is_xl else (text_encoder,)
    hidden_size = sum(encoder.module.hidden_size for encoder in encoders)
    if unet.cross_attention_dim != hidden_size:
        raise ValueError(
            f"the UNet in {config.unet_model_name_or_path} has cross_attention_dim "
            f"{unet.cross_attention_dim}, but the text of {source} has {hidden_size} features; "
            "take both from the same model"
        )
    if is_xl and vae.scaling_factor == SD_SCALING_FACTOR:
        raise ValueError(
            f"the VAE in {config.pretrained_vae_model_name_or_path or source} has scaling_factor "
            f"{vae.scaling_factor}, so it is Stable Diffusion's; SDXL needs its own"
        )
    if is_xl:
        pooled = encoders[1].module.projection_dim
        expected = pooled + 6 * unet.addition_time_embed_dim
        if unet.projection_class_embeddings_input_dim != expected:
            raise ValueError(
                f"the UNet in {config.unet_model_name_or_path} takes "
                f"{unet.projection_class_embeddings_input_dim} features of pooled text and time "
                f"ids, but {source} gives {expected}; take both from the same model"
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
        pipeline: InstructPix2Pix.
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
        prompt_ids.reshape(n, B, *prompt_ids.shape[1:]),
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
    vae, params = load_vae(config, dtype, is_sdxl(config))
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
    params = jax.tree.map(lambda x: np.asarray(x, vae.dtype), params)
    params = jax.device_put(params, replicated)
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
