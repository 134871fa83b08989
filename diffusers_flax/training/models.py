"""Models of a training run: load and check them, encode text and images."""

import zlib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffusers_flax.data.buckets import bucket_sizes, check_sides
from diffusers_flax.devices.precision import warn_if_slow
from diffusers_flax.loading.configs import ConfigMixin
from diffusers_flax.loading.directories import INDEX_NAME, has_component, read_index
from diffusers_flax.loading.tokenizer import load_tokenizer
from diffusers_flax.messages import warn_once
from diffusers_flax.models.clip import FlaxCLIPTextModel, FlaxCLIPTextModelWithProjection
from diffusers_flax.models.quantization import store
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.models.vae import FlaxAutoencoderKL
from diffusers_flax.parameters import replace_leaves
from diffusers_flax.pipelines.instruct_pix2pix import (
    FlaxStableDiffusionInstructPix2PixPipeline,
    pixels_per_latent,
)
from diffusers_flax.pipelines.instruct_pix2pix_xl import (
    FlaxStableDiffusionXLInstructPix2PixPipeline,
    is_cosxl_edit,
)
from diffusers_flax.pipelines.stable_diffusion_xl import SD_SCALING_FACTOR, SDXL_SCALING_FACTOR
from diffusers_flax.schedulers.ddpm import FlaxDDPMScheduler
from diffusers_flax.schedulers.factory import (
    REPLACEABLE,
    class_name,
    scheduler_from_config,
    training_scheduler,
)
from diffusers_flax.training.flags import flag, nearest_multiples
from diffusers_flax.training.lora import add_lora
from diffusers_flax.training.sharding import cast_kernels, combine, replicate_frozen

WEIGHTS = ("weights of unet_model_name_or_path", "weights of pretrained_model_name_or_path")
TEXT_ENCODERS = (("", FlaxCLIPTextModel), ("_2", FlaxCLIPTextModelWithProjection))  # by suffix


class Models(NamedTuple):
    """The modules of a training step, without parameters."""

    unet: FlaxUNet2DConditionModel
    vae: FlaxAutoencoderKL
    text_encoder: FlaxCLIPTextModel | tuple  # for SDXL a tuple of two
    scheduler: FlaxDDPMScheduler
    condition_scale: float = 1.0  # factor of the original image's latents


def encode_text(text_encoder, params, input_ids, time_ids=None):
    """Encode token ids as the dict that conditioning_dropout and diffusion_loss take.

    Args:
        text_encoder, params: FlaxCLIPTextModel and its parameters; for SDXL a tuple of
            FlaxCLIPTextModel and FlaxCLIPTextModelWithProjection, and a tuple of their parameters.
        input_ids: integers (B, T); for SDXL (B, 2, T).
        time_ids: micro-conditioning of SDXL, (B, 6).

    Returns:
        {"states": (B, T, D)}; for SDXL the states before the last layer of both encoders, and also
        "pooled" (B, P) and "time_ids".

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
        The posterior, with mean and std, float32 (B, h, w, C), unscaled.
    """

    def encode(params, images):
        return vae.apply({"params": params}, images, method=vae.encode).latent_dist

    def encode_one_by_one(params, images):  # activations fit into a CPU's caches
        posteriors = jax.lax.map(partial(encode, params), images[:, None])
        return jax.tree.map(lambda x: x[:, 0], posteriors)

    images = jnp.transpose(images.astype(jnp.float32) / 127.5 - 1, (0, 3, 1, 2))
    return jax.lax.platform_dependent(params, images, cpu=encode_one_by_one, default=encode)


def encode_batch(batch, frozen, models):
    """Encode the images and the text of a batch; cached latents replace the images.

    Args:
        batch: {"input_ids"} integers (B, T), for SDXL (B, 2, T) and {"time_ids"} (B, 6); and either
            {"original_pixel_values", "edited_pixel_values"} uint8 (B, R, R, 3), or from
            cache_latents.py {"original_latents"} (B, h, w, C), {"edited_latents"} (B, h, w, 2 C).
            A "mask", see diffusion_loss, is not encoded.
        frozen: {"vae", "text_encoder"} parameters; cached latents need no "vae".
        models: Models.

    Returns:
        (mean, std, condition, text): mean and std of the edited images' posterior; the mode of the
        original images' posterior times models.condition_scale; float32 (B, h, w, C). text as from
        encode_text.
    """

    def scaled(mode):
        return mode if models.condition_scale == 1 else mode * models.condition_scale

    text = encode_text(
        models.text_encoder, frozen["text_encoder"], batch["input_ids"], batch.get("time_ids")
    )
    if "edited_latents" in batch:
        mean, std = jnp.split(batch["edited_latents"].astype(jnp.float32), 2, axis=-1)
        return mean, std, scaled(batch["original_latents"].astype(jnp.float32)), text
    images = jnp.concatenate((batch["edited_pixel_values"], batch["original_pixel_values"]))
    posterior = encode_images(models.vae, frozen["vae"], images)  # (2B, h, w, C)
    B = len(images) // 2
    return posterior.mean[:B], posterior.std[:B], scaled(posterior.mode()[B:]), text


def load_models(config, dtype: Any):
    """Load the models of a run onto the host and check that they fit together.

    Args:
        config: flags of the program.
        dtype: compute dtype of the modules.

    Returns:
        (models, pipeline, frozen, params): Models; the pipeline to save at the end; train_step's
        frozen parameters, float32, or with LoRA in dtype except the VAE's; the UNet's trained
        parameters, float32.

    Raises:
        ValueError: files are missing or damaged, or the models do not fit together.
    """
    source, revision = config.pretrained_model_name_or_path, config.revision
    is_xl, is_lora = is_sdxl(config), config.lora_rank is not None

    def to_frozen(name, x):
        return x.astype(dtype if is_lora else np.float32, copy=False)

    def to_unet(name, x):  # LoRA's frozen kernels in the compute dtype, all else in float32
        is_frozen_kernel = is_lora and x.ndim > 1 and not name.startswith("conv_in/")
        return x.astype(dtype if is_frozen_kernel else np.float32, copy=False)

    check_models(config, open_modules(config, dtype))  # before gigabytes are read
    unet, params = FlaxUNet2DConditionModel.from_pretrained(
        config.unet_model_name_or_path, dtype=dtype, convert=to_unet
    )
    unet = unet.clone(gradient_checkpointing=config.gradient_checkpointing)
    vae, vae_params = load_vae(config, dtype, is_xl)
    text_encoder, text_params = load_text_encoder(config, dtype, is_xl, to_frozen)
    encoders = text_encoder if is_xl else [text_encoder]
    tokenizers = [
        load_tokenizer(source, encoder, revision, f"tokenizer{suffix}")
        for encoder, (suffix, _) in zip(encoders, TEXT_ENCODERS)
    ]
    schedule = FlaxDDPMScheduler.load_config(source, subfolder="scheduler", revision=revision)
    scheduler, scheduler_state = training_scheduler(schedule, source)
    sampler = open_sampler(schedule, source)
    scales_condition = is_xl and is_cosxl_edit(read_index(source, revision))
    condition_scale = vae.scaling_factor if scales_condition else 1.0
    models = Models(unet, vae, text_encoder, scheduler, condition_scale)

    if is_xl:
        pipeline = FlaxStableDiffusionXLInstructPix2PixPipeline(
            *text_encoder, vae, *tokenizers, unet, sampler, is_cosxl_edit=scales_condition
        )
    else:
        pipeline = FlaxStableDiffusionInstructPix2PixPipeline(
            vae, text_encoder, *tokenizers, unet, sampler
        )
    null_ids = pipeline.prepare_text_inputs("")
    encode = jax.jit(partial(encode_text, text_encoder))
    if is_xl:  # trained and sampled with zeros, see force_zeros_for_empty_prompt
        shapes = jax.eval_shape(encode, text_params, null_ids)
        null_text = {name: jnp.zeros_like(shapes[name]) for name in ("states", "pooled")}
    else:
        null_text = encode(jax.device_put(text_params, jax.local_devices()[0]), null_ids)
    frozen = {
        "vae": vae_params,
        "text_encoder": text_params,
        "null_text": jax.tree.map(np.asarray, null_text),  # (1, T, D) and, for SDXL, (1, P)
        "scheduler": scheduler_state,
    }
    if is_lora:
        params, frozen["unet"] = add_lora(params, **lora_options(config), seed=config.seed)
    return models, pipeline, frozen, params


def open_modules(config, dtype):
    """Build the modules of a run from their config files, without weights: Models.

    Args and Raises as for load_models.
    """
    source, of_source = config.pretrained_model_name_or_path, {"revision": config.revision}
    is_xl = is_sdxl(config)

    def open_module(cls, path, **place):
        content = ConfigMixin.load_config(path, **place)
        getattr(cls, "module_class", cls).check_class(content, f"{path}/config.json")
        return cls.from_config(content, dtype=dtype)

    unet_source = config.unet_model_name_or_path
    if is_pipeline(unet_source, "unet"):
        raise ValueError(
            f"--unet_model_name_or_path {unet_source} is a pipeline; give the output of "
            f"create_modified_unet.py, or {Path(unet_source, 'unet')} if its UNet is widened"
        )
    unet = open_module(FlaxUNet2DConditionModel, unet_source)
    if vae_source := config.pretrained_vae_model_name_or_path:
        if is_pipeline(vae_source, "vae"):
            raise ValueError(
                f"--pretrained_vae_model_name_or_path {vae_source} is a pipeline; give its VAE, "
                f"{Path(vae_source, 'vae')}"
            )
        vae = open_module(FlaxAutoencoderKL, vae_source)
    else:
        vae = open_module(FlaxAutoencoderKL, source, subfolder="vae", **of_source)
    encoders = tuple(
        open_module(encoder_class, source, subfolder=f"text_encoder{suffix}", **of_source)
        for suffix, encoder_class in TEXT_ENCODERS[: 2 if is_xl else 1]
    )
    schedule = FlaxDDPMScheduler.load_config(source, subfolder="scheduler", **of_source)
    scheduler, _ = training_scheduler(schedule, source)
    open_sampler(schedule, source)  # raises an error if unsupported
    return Models(unet, vae, encoders if len(encoders) > 1 else encoders[0], scheduler)


def is_pipeline(source, component):
    """Whether a directory is a pipeline with this component.

    A run's output directory also has a config.json, with its flags.
    """
    return Path(source, component).is_dir() and (
        Path(source, INDEX_NAME).exists() or not Path(source, "config.json").exists()
    )


def open_sampler(config, source):
    """The scheduler of validation images and of the saved pipeline.

    It is the model's own, or DPM-Solver++ if its class is not supported: DPM-Solver++ has the same
    noise schedule and, unlike DDIM, clips only if the config asks for it.

    Args:
        config, source: as for schedulers.factory.scheduler_from_config.
    """
    own = class_name(config)
    if own not in REPLACEABLE:
        return scheduler_from_config(config, source)[0]
    warn_once(
        f"{source} has a {own}, which is not supported: DPM-Solver++ takes its place in validation "
        "images and in the saved model"
    )
    return scheduler_from_config(config, source, "dpmsolver++")[0]


def load_text_encoder(config, dtype, is_xl, convert):
    """Load the text encoders; returns (module, params), for SDXL two tuples.

    Args:
        config, dtype: as for load_models.
        is_xl: whether the model is SDXL.
        convert: as for from_pretrained.
    """
    encoders = [
        encoder_class.from_pretrained(
            config.pretrained_model_name_or_path,
            subfolder=f"text_encoder{suffix}",
            revision=config.revision,
            variant=config.variant,
            dtype=dtype,
            convert=convert,
            _do_init=False,
        )
        for suffix, encoder_class in TEXT_ENCODERS[: 2 if is_xl else 1]
    ]
    return tuple(zip(*encoders)) if is_xl else encoders[0]


def to_float32(name, x):
    """Cast a parameter to float32; for convert of from_pretrained."""
    return x.astype(np.float32, copy=False)


def lora_options(config):
    """The arguments of add_lora and save_lora that come from flags."""
    return dict(
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        target_modules=config.lora_target_modules,
    )


def cast_frozen(frozen, models, storage=None):
    """Cast train_step's frozen parameters to the compute dtypes; the UNet's vectors stay float32.

    Args:
        frozen, models: of load_models.
        storage: of UNet and text encoders, see models.quantization.store.
    """
    dtype = models.unet.dtype
    casts = {
        "vae": lambda x: np.asarray(x, models.vae.dtype),
        "text_encoder": lambda x: np.asarray(x, dtype),
    }
    cast = {name: jax.tree.map(casts[name], frozen[name]) for name in casts}
    if "unet" in frozen:  # with LoRA
        cast["unet"] = cast_kernels(frozen["unet"], dtype)
    return frozen | store_frozen(cast, storage)


def store_frozen(frozen, storage):
    """Store the kernels of UNet and text encoders in 8 bits, see store; None: unchanged."""
    encoders = frozen["text_encoder"]
    are_two = isinstance(encoders, tuple)
    encoders = tuple(store(x, storage) for x in (encoders if are_two else (encoders,)))
    stored = {"text_encoder": encoders if are_two else encoders[0]}
    if "unet" in frozen:
        stored["unet"] = store(frozen["unet"], storage)
    return frozen | stored


def mixed_precision_dtype(config):
    """The dtype of --mixed_precision, with a warning if the GPU is slow in it."""
    dtype = jnp.bfloat16 if config.mixed_precision == "bf16" else jnp.float32
    return warn_if_slow(dtype, instead=jnp.float32)


def is_sdxl(config) -> bool:
    """Whether --pretrained_model_name_or_path is SDXL.

    Raises:
        ValueError: it is not a pipeline, or an SDXL refiner.
    """
    source = config.pretrained_model_name_or_path
    index = read_index(source, config.revision)
    if not has_component(index, "text_encoder_2"):
        if "XL" in str(index.get("_class_name")):
            raise ValueError(f"{source} is SDXL without text_encoder_2; copy or download it again")
        return False
    if not has_component(index, "text_encoder"):
        raise ValueError(
            f"{source} is SDXL's refiner, which lacks the first text encoder; give the base model"
        )
    return True


def load_vae(config, dtype, is_xl):
    """Load the VAE of a training run or of cache_latents.py; returns (module, float32 params).

    SDXL's own VAE overflows in half precision. It computes in float32, as its config asks for
    (force_upcast).
    """
    source, options = config.pretrained_vae_model_name_or_path, {}
    if not source:
        source = config.pretrained_model_name_or_path
        options = dict(subfolder="vae", revision=config.revision, variant=config.variant)
    vae, params = FlaxAutoencoderKL.from_pretrained(
        source, dtype=dtype, convert=to_float32, **options
    )
    check_vae_family(config, vae, is_xl)
    return vae.clone(dtype=jnp.float32) if is_xl and vae.force_upcast else vae, params


def check_vae_family(config, vae, is_xl):
    """Raise a ValueError for Stable Diffusion's VAE with SDXL, or SDXL's with Stable Diffusion.

    Args:
        config: flags of the trainer or of cache_latents.py, which name the VAE.
        vae: module.
        is_xl: whether the model is SDXL.
    """
    if vae.scaling_factor != (SD_SCALING_FACTOR if is_xl else SDXL_SCALING_FACTOR):
        return
    kinds = ("Stable Diffusion", "SDXL") if is_xl else ("SDXL", "Stable Diffusion")
    source = config.pretrained_vae_model_name_or_path or config.pretrained_model_name_or_path
    raise ValueError(
        f"the VAE in {source} has scaling_factor {vae.scaling_factor}, so it is {kinds[0]}'s; "
        f"{kinds[1]} needs its own"
    )


def tree_checksum(tree):
    """A CRC-32 of the names and bytes of all arrays of a tree."""
    checksum = 0
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        checksum = zlib.crc32(jax.tree_util.keystr(path).encode(), checksum)
        checksum = zlib.crc32(np.ascontiguousarray(x).view(np.uint8), checksum)
    return checksum


def checksums(frozen, params):
    """Checksums of a run's weights, for run_identity; frozen, params: of load_models."""
    unet = combine(frozen.get("unet", {}), params)
    trees = unet, [frozen["vae"], frozen["text_encoder"]]
    return dict(zip(WEIGHTS, map(tree_checksum, trees)))


def move_to_devices(frozen, models, config, dataset):
    """Put train_step's frozen parameters on every device, in the compute dtypes.

    Args:
        frozen: of load_models; emptied, to free the host's copies one by one.
        models: Models.
        config: flags of the program.
        dataset: ParquetImagePairs or Mixture; with cached latents only validation needs the VAE.
    """
    p_frozen = cast_frozen(frozen, models, config.storage)
    frozen.clear()
    if dataset.latents and not config.validation_image:
        del p_frozen["vae"]
    replace_leaves(replicate_frozen, p_frozen)
    return p_frozen


def params_beside_unet(frozen):
    """Parameters of the pipeline's other components, from train_step's frozen parameters."""
    encoders = frozen["text_encoder"]
    if not isinstance(encoders, tuple):
        return {"vae": frozen["vae"], "text_encoder": encoders}
    return {"vae": frozen["vae"], "text_encoder": encoders[0], "text_encoder_2": encoders[1]}


def check_models(config, models: Models):
    """Raise a ValueError for models that do not fit together, or a resolution that they refuse."""
    unet, vae, text_encoder, scheduler, _ = models
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
    check_vae_family(config, vae, is_xl)
    if is_xl:
        pooled = encoders[1].module.projection_dim
        expected = pooled + 6 * unet.addition_time_embed_dim
        if unet.projection_class_embeddings_input_dim != expected:
            raise ValueError(
                f"the UNet in {config.unet_model_name_or_path} takes "
                f"{unet.projection_class_embeddings_input_dim} features of pooled text and time "
                f"ids, but {source} gives {expected}; take both from the same model"
            )
    check_resolution(config, unet, vae)


def check_resolution(config, unet, vae):
    """Raise a ValueError unless VAE and UNet can halve the sides of images and latents.

    Args:
        config: with the flags resolution and aspect_ratio_buckets.
        unet, vae: modules.
    """
    pixels_per_latent({"unet": unet.config, "vae": vae.config}, config.resolution)
    factor = 2 ** (len(vae.block_out_channels) + len(unet.block_out_channels) - 2)
    if config.resolution % factor:
        raise ValueError(
            f"{flag(config, 'resolution')} is not a multiple of {factor}; "
            f"try {nearest_multiples(config.resolution, factor)}"
        )
    for size in bucket_sizes(config.resolution, config.aspect_ratio_buckets):
        check_sides(size, factor)
