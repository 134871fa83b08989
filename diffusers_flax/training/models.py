"""Models of a training run: load and check them, encode text and images."""

import zlib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffusers_flax.data.buckets import BUCKETS, bucket_sizes, check_side, size_name
from diffusers_flax.devices.precision import warn_if_slow
from diffusers_flax.loading.configs import ConfigMixin
from diffusers_flax.loading.directories import has_component, read_index
from diffusers_flax.loading.files import read_json
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
from diffusers_flax.schedulers.base import CONFIG_NAME
from diffusers_flax.schedulers.ddpm import FlaxDDPMScheduler
from diffusers_flax.schedulers.factory import (
    FLOW_CLASSES,
    REPLACEABLE,
    class_name,
    scheduler_from_config,
    training_scheduler,
)
from diffusers_flax.schedulers.flow import shift_of_size
from diffusers_flax.training.flags import flag
from diffusers_flax.training.lora import add_lora
from diffusers_flax.training.sharding import cast_kernels, replicate_frozen

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
            Maybe {"reference_image"}, like the original image or its latents, and
            {"has_reference"} bool (B,). A "mask", see diffusion_loss, is not encoded.
        frozen: {"vae", "text_encoder"} parameters; cached latents need no "vae".
        models: Models.

    Returns:
        (mean, std, condition, text): mean and std of the edited images' posterior; the mode of the
        original images' posterior times models.condition_scale; float32 (B, h, w, C). With
        references their modes, or zeros without a reference, follow in condition, (B, h, w, 2 C).
        text as from encode_text.
    """

    text = encode_text(
        models.text_encoder, frozen["text_encoder"], batch["input_ids"], batch.get("time_ids")
    )
    references = [batch["reference_image"]] if "reference_image" in batch else []
    if "edited_latents" in batch:
        mean, std = jnp.split(batch["edited_latents"].astype(jnp.float32), 2, axis=-1)
        conditions = [x.astype(jnp.float32) for x in (batch["original_latents"], *references)]
    else:
        images = batch["edited_pixel_values"], batch["original_pixel_values"], *references
        posterior = encode_images(models.vae, frozen["vae"], jnp.concatenate(images))
        B = len(images[0])
        mean, std = posterior.mean[:B], posterior.std[:B]
        conditions = [posterior.mode()[i * B : (i + 1) * B] for i in range(1, len(images))]
    if references:
        # Without a reference zeros, as dropout has, and not the latents of a black image
        has_reference = batch["has_reference"][:, None, None, None]
        conditions[1] = jnp.where(has_reference, conditions[1], 0)
    condition = jnp.concatenate(conditions, axis=-1)
    if models.condition_scale != 1:
        condition = condition * models.condition_scale
    return mean, std, condition, text


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

    open_modules(config, dtype)  # errors before gigabytes are read
    unet, params = FlaxUNet2DConditionModel.from_pretrained(
        config.unet_model_name_or_path, dtype=dtype, convert=to_unet
    )
    unet = unet.clone(gradient_checkpointing=config.gradient_checkpointing)
    vae, vae_params = load_vae(config, dtype, is_xl)
    text_encoder, text_params = load_text_encoder(config, dtype, is_xl, to_frozen)
    encoders = text_encoder if is_xl else (text_encoder,)
    tokenizers = [
        load_tokenizer(source, encoder, revision, f"tokenizer{suffix}")
        for encoder, (suffix, _) in zip(encoders, TEXT_ENCODERS)
    ]
    schedule = read_schedule(config)
    scheduler, scheduler_state = training_scheduler(schedule, source)
    sampler = open_sampler(schedule, source)
    if is_xl:
        is_cosxl = is_cosxl_edit(read_index(source, revision))
        models = Models(unet, vae, encoders, scheduler, vae.scaling_factor if is_cosxl else 1.0)
        pipeline = FlaxStableDiffusionXLInstructPix2PixPipeline(
            *encoders, vae, *tokenizers, unet, sampler, is_cosxl_edit=is_cosxl
        )
    else:
        models = Models(unet, vae, text_encoder, scheduler)
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
    """Build the modules of a run from their config files, without weights, and check them: Models.

    Args and Raises as for load_models.
    """
    source, revision, is_xl = config.pretrained_model_name_or_path, config.revision, is_sdxl(config)

    def open_module(cls, path, **place):
        content = ConfigMixin.load_config(path, **place)
        getattr(cls, "module_class", cls).check_class(content, f"{path}/config.json")
        return cls.from_config(content, dtype=dtype)

    unet_source = config.unet_model_name_or_path
    unet = open_module(FlaxUNet2DConditionModel, unet_source)
    if config.pretrained_vae_model_name_or_path:
        vae = open_module(FlaxAutoencoderKL, config.pretrained_vae_model_name_or_path)
    else:
        vae = open_module(FlaxAutoencoderKL, source, subfolder="vae", revision=revision)
    encoders = tuple(
        open_module(cls, source, subfolder=f"text_encoder{suffix}", revision=revision)
        for suffix, cls in TEXT_ENCODERS[: 1 + is_xl]
    )
    schedule = read_schedule(config)
    scheduler, _ = training_scheduler(schedule, source)
    open_sampler(schedule, source)  # raises an error if unsupported
    features = [sum(encoder.module.hidden_size for encoder in encoders), None]
    if is_xl:  # of pooled text and time ids
        features[1] = encoders[1].module.projection_dim + 6 * (unet.addition_time_embed_dim or 0)
    if features != [unet.cross_attention_dim, unet.projection_class_embeddings_input_dim]:
        raise ValueError(
            f"the UNet in {unet_source} does not fit the text encoders of {source}; take both from "
            "the same model"
        )
    if not scheduler.is_flow and scheduler.config.prediction_type == "sample":
        raise ValueError(
            f"the scheduler of {source} has prediction_type sample; use a model with epsilon or "
            "v_prediction"
        )
    beside = Path(unet_source).parent / "scheduler" / CONFIG_NAME
    if not scheduler.is_flow and beside.is_file() and class_name(read_json(beside)) in FLOW_CLASSES:
        raise ValueError(f"the UNet in {unet_source} is of a flow; add --prediction flow")
    if scheduler.is_flow and config.snr_gamma is not None:
        raise ValueError("--snr_gamma weights other timesteps than a flow draws; leave it out")
    C = vae.latent_channels
    if unet.in_channels not in (2 * C, 3 * C):
        raise ValueError(
            f"the UNet in {unet_source} has {unet.in_channels} input channels, InstructPix2Pix "
            f"needs {2 * C}, or with a reference image {3 * C}; widen it with "
            "create_modified_unet.py"
        )
    if unet.in_channels == 2 * C and config.validation_reference:
        raise ValueError(
            "--validation_reference needs a UNet that takes two images, from "
            "create_modified_unet.py --num_images 2"
        )
    if unet.in_channels == 3 * C and config.conditioning_dropout_prob > 1 / 4:
        raise ValueError(
            f"{flag(config, 'conditioning_dropout_prob')} must be at most 1/4 with a reference "
            "image, which is the fourth case"
        )
    check_vae_family(config.pretrained_vae_model_name_or_path or source, vae, is_xl)
    pixels_per_latent({"unet": unet.config, "vae": vae.config}, config.resolution)
    factor = 2 ** (len(vae.block_out_channels) + len(unet.block_out_channels) - 2)
    check_resolution(config, factor)
    return Models(unet, vae, encoders if is_xl else encoders[0], scheduler)


def read_schedule(config):
    """The content of scheduler_config.json: the model's, or with --prediction flow a flow's."""
    if config.prediction == "flow":
        shift = shift_of_size(config.resolution, config.resolution)
        return {"_class_name": FLOW_CLASSES[0], "shift": shift}
    source, revision = config.pretrained_model_name_or_path, config.revision
    return FlaxDDPMScheduler.load_config(source, subfolder="scheduler", revision=revision)


def open_sampler(config, source):
    """The scheduler of validation images and of the saved pipeline.

    It is the model's own, or DPM-Solver++ if its class is not supported: DPM-Solver++ has the same
    noise schedule and, unlike DDIM, clips only if the config asks for it.
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
        for suffix, encoder_class in TEXT_ENCODERS[: 1 + is_xl]
    ]
    return tuple(zip(*encoders)) if is_xl else encoders[0]


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
    check_vae_family(source, vae, is_xl)
    return vae.clone(dtype=jnp.float32) if is_xl and vae.force_upcast else vae, params


def to_float32(name, x):
    """Cast a parameter to float32; for convert of from_pretrained."""
    return x.astype(np.float32, copy=False)


def is_sdxl(config) -> bool:
    """Whether --pretrained_model_name_or_path is SDXL; a ValueError if it is not a pipeline."""
    index = read_index(config.pretrained_model_name_or_path, config.revision)
    return has_component(index, "text_encoder_2")


def lora_options(config):
    """The arguments of add_lora and save_lora that come from flags."""
    return dict(
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        target_modules=config.lora_target_modules,
    )


def mixed_precision_dtype(config):
    """The dtype of --mixed_precision, with a warning if the GPU is slow in it."""
    dtype = jnp.bfloat16 if config.mixed_precision == "bf16" else jnp.float32
    return warn_if_slow(dtype, instead=jnp.float32)


# Frozen parameters


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


def cast_frozen(frozen, models, storage=None):
    """Cast train_step's frozen parameters to the compute dtypes; the UNet's vectors stay float32.

    Args:
        frozen, models: of load_models.
        storage: of UNet and text encoders, see models.quantization.store.
    """
    dtype = models.unet.dtype
    cast = {
        "vae": jax.tree.map(lambda x: np.asarray(x, models.vae.dtype), frozen["vae"]),
        "text_encoder": jax.tree.map(lambda x: np.asarray(x, dtype), frozen["text_encoder"]),
    }
    if "unet" in frozen:  # with LoRA
        cast["unet"] = cast_kernels(frozen["unet"], dtype)
    return frozen | store_frozen(cast, storage)


def store_frozen(frozen, storage):
    """Store the kernels of UNet and text encoders in 8 bits, see store; None: unchanged."""
    kernels = {name: x for name, x in frozen.items() if name in ("text_encoder", "unet")}

    def store_part(params):
        is_tuple = isinstance(params, tuple)
        return tuple(store(x, storage) for x in params) if is_tuple else store(params, storage)

    return frozen | {name: store_part(params) for name, params in kernels.items()}


def params_beside_unet(frozen):
    """Parameters of the pipeline's other components, from train_step's frozen parameters."""
    encoders = frozen["text_encoder"]
    if not isinstance(encoders, tuple):
        return {"vae": frozen["vae"], "text_encoder": encoders}
    return {"vae": frozen["vae"], "text_encoder": encoders[0], "text_encoder_2": encoders[1]}


def tree_checksum(tree):
    """A CRC-32 of the names and bytes of all arrays of a tree."""
    checksum = 0
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        checksum = zlib.crc32(jax.tree_util.keystr(path).encode(), checksum)
        checksum = zlib.crc32(np.ascontiguousarray(x).view(np.uint8), checksum)
    return checksum


# Checks


def check_vae_family(source, vae, is_xl):
    """Raise a ValueError for Stable Diffusion's VAE with SDXL, or SDXL's with Stable Diffusion."""
    if vae.scaling_factor == (SD_SCALING_FACTOR if is_xl else SDXL_SCALING_FACTOR):
        kinds = ("Stable Diffusion", "SDXL") if is_xl else ("SDXL", "Stable Diffusion")
        raise ValueError(f"the VAE in {source} is {kinds[0]}'s; {kinds[1]} needs its own")


def check_resolution(config, factor):
    """Raise a ValueError unless the sides of images are multiples of factor.

    Args:
        config: with the flags resolution and aspect_ratio_buckets.
        factor: by which the models divide a side.
    """
    check_side(flag(config, "resolution"), config.resolution, factor)
    for size in bucket_sizes(config.resolution, config.aspect_ratio_buckets):
        for side in size:
            check_side(f"{BUCKETS} {size_name(size)}: {side}", side, factor)
