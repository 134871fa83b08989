"""Our contenders: functions that do a pass of a Work to its end."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from transformers import CLIPTokenizer

from benchmarks.works import GUIDANCE_SCALE, PROMPT, SCALES, TEXT_LENGTH, TOKENIZER, Work
from diffusers_flax.models.clip import FlaxCLIPTextModel, FlaxCLIPTextModelWithProjection
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.models.vae import FlaxAutoencoderKL
from diffusers_flax.pipelines.instruct_pix2pix import FlaxStableDiffusionInstructPix2PixPipeline
from diffusers_flax.pipelines.stable_diffusion_xl import FlaxStableDiffusionXLPipeline
from diffusers_flax.schedulers.ddpm import FlaxDDPMScheduler
from diffusers_flax.schedulers.factory import scheduler_from_config
from diffusers_flax.training.ema import ema_start, make_update_average
from diffusers_flax.training.models import Models
from diffusers_flax.training.sharding import (
    replicate,
    replicate_frozen,
    shard_axes,
    shard_batch,
    start_state,
)
from flax_train_instruct_pix2pix import Config, make_optimizer, train_step, train_step_options

MODULES = {
    "unet": FlaxUNet2DConditionModel,
    "vae": FlaxAutoencoderKL,
    "text_encoder": FlaxCLIPTextModel,
    "text_encoder_2": FlaxCLIPTextModelWithProjection,
}
EMA_DECAY = 0.9999


def random_params(module, dtype=np.float32):
    """Random parameters of a module, in NumPy: small kernels, scales of norms 1 and biases 0.

    Kernels are parts of one array: billions of random numbers take long.
    """
    init = getattr(module, "module", module).init_weights
    shapes = jax.eval_shape(init, jax.random.key(0))
    largest = max(x.size for x in jax.tree.leaves(shapes))
    normal = np.random.default_rng(0).standard_normal(largest, np.float32) * np.float32(0.02)
    normal = normal.astype(dtype)
    constants = {"scale": 1, "bias": 0}

    def make(path, shape):
        if path[-1].key in constants:
            return np.full(shape.shape, constants[path[-1].key], dtype)
        return normal[: shape.size].reshape(shape.shape)

    return jax.tree_util.tree_map_with_path(make, shapes)


def make_modules(configs, dtype):
    """The modules of a pipeline without parameters, {component: module}."""
    names = [name for name in MODULES if name in configs]
    return {name: MODULES[name].from_config(configs[name], dtype=dtype) for name in names}


def make_pipeline(configs, is_xl, dtype):
    """A pipeline of the configs, with the demo's tokenizer; edits, or SDXL from text."""
    modules = make_modules(configs, dtype)
    names = [name for name in modules if name.startswith("text_encoder")]
    tokenizer = CLIPTokenizer.from_pretrained(TOKENIZER)
    tokenizers = {name.replace("text_encoder", "tokenizer"): tokenizer for name in names}
    scheduler, _ = scheduler_from_config(configs["scheduler"], "a published model")
    cls = FlaxStableDiffusionXLPipeline if is_xl else FlaxStableDiffusionInstructPix2PixPipeline
    return cls(**modules, **tokenizers, scheduler=scheduler, dtype=dtype)


def our_contender(work, **options):
    """A function that does a pass of a Work.

    Args:
        work: Work.
        **options: accelerate= and vae_dtype= of the pipeline that makes images.
    """
    make = {"edit": make_images, "sdxl": make_images, "forward": our_unet, "gradient": our_unet}
    return make.get(work.name, our_step)(work, **options)


def dtype_of(work):
    """The dtype in which a Work computes."""
    return jnp.bfloat16 if work.half else jnp.float32


def our_unet(work):
    """A pass of the UNet: forward, or loss and gradient of float32 parameters."""
    has_gradient, dtype = work.name == "gradient", dtype_of(work)
    unet = make_modules(work.configs, dtype)["unet"]
    params = random_params(unet, np.float32 if has_gradient else dtype)
    args = jax.device_put((params, *work.unet_inputs(work.batch_size)), jax.devices()[0])

    def predict(params, sample, timesteps, text, added):
        args = sample.astype(dtype), timesteps, text.astype(dtype), added
        return unet.apply({"params": params}, *args).sample

    def loss(params, *inputs):
        return jnp.square(predict(params, *inputs).astype(jnp.float32)).mean()

    program = jax.jit(jax.value_and_grad(loss) if has_gradient else predict)
    return lambda: jax.block_until_ready(program(*args))


def make_images(work, **options):
    """Edits of one image, or SDXL images; options: fields of the pipeline."""
    is_xl, side, steps = work.name == "sdxl", work.resolution, work.num_inference_steps
    pipeline = make_pipeline(work.configs, is_xl, dtype_of(work))
    pipeline = replace(pipeline, **options)
    params = {
        name: random_params(getattr(pipeline, name), dtype_of(work))
        for name in MODULES
        if name in work.configs
    }
    vae = pipeline.compute_vae
    params["vae"] = random_params(vae, vae.dtype)
    params["scheduler"] = pipeline.scheduler.create_state()
    params = jax.device_put(params, jax.devices()[0])
    if is_xl:
        inputs = (pipeline.prepare_text_inputs([PROMPT] * work.batch_size),)
        settings = dict(guidance_scale=GUIDANCE_SCALE, height=side, width=side)
    else:
        inputs, settings = pipeline.prepare_inputs(PROMPT, random_image(side)), SCALES
    inputs, key = jax.device_put(inputs, jax.devices()[0]), jax.random.key(0)

    def run():
        return jax.block_until_ready(pipeline(*inputs, params, key, steps, **settings).images)

    return run


def random_image(side):
    """Random pixels, uint8 (side, side, 3)."""
    return np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)


def our_step(work):
    """A step of flax_train_instruct_pix2pix.py and an update of the average, on the only device."""
    configs, dtype, flags = work.configs, dtype_of(work), Config("")
    modules = make_modules(configs, dtype)
    scheduler = FlaxDDPMScheduler.from_config(configs["scheduler"])
    models = Models(**modules, scheduler=scheduler)
    states = np.zeros((1, TEXT_LENGTH, configs["unet"]["cross_attention_dim"]), np.float32)
    frozen = {"null_text": {"states": states}, "scheduler": scheduler.create_state()}
    encoders = ("vae", "text_encoder") if work.name == "train" else ("text_encoder",)
    frozen |= {name: random_params(modules[name], dtype) for name in encoders}
    p_frozen = replicate_frozen(frozen)

    params, (tx, _) = random_params(models.unet), make_optimizer(flags, flags.max_train_steps)
    axes = shard_axes(params, 1)
    step = partial(train_step, models=models, tx=tx, axes=axes, **train_step_options(flags))
    p_train_step = jax.pmap(step, axis_name="batch", donate_argnums=0)
    p_update = make_update_average()
    held = {"state": start_state(params, tx, axes)}
    held["average"] = jax.pmap(ema_start)(held["state"].params)
    decay, rng = replicate((np.float32(EMA_DECAY), np.asarray(jax.random.PRNGKey(0))))
    batch = shard_batch(work.batch())

    def run():
        held["state"], metrics = p_train_step(held["state"], p_frozen, batch, rng)
        held["average"] = p_update(held["average"], held["state"].params, decay)
        jax.block_until_ready((metrics, held))

    return run


def tiny_edit(dtype, platform=None):
    """A tiny pipeline's edit of 4 steps: float32 (1, 64, 64, 3), with exact matmuls in float32.

    Args:
        dtype: to compute in.
        platform: "cpu" in a new process; None: the process's default device.
    """
    if platform:
        jax.config.update("jax_platforms", platform)
    work = Work("edit", 64, num_inference_steps=4, half=dtype == jnp.bfloat16, tiny=True)
    with jax.default_matmul_precision("highest"):
        return np.asarray(make_images(work)(), np.float32)
