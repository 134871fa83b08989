"""FlaxStableDiffusionControlNetPipeline and FlaxStableDiffusionXLControlNetPipeline.

An image, such as edges, depth or a pose, guides what the text describes:

    controlnet, controlnet_params = FlaxControlNetModel.from_pretrained("CONTROLNET")
    pipeline, params = FlaxStableDiffusionControlNetPipeline.from_pretrained(
        "MODEL", controlnet=controlnet
    )
    params["controlnet"] = controlnet_params
    prompt_ids, image = pipeline.prepare_inputs("a red panda reading", Image.open("edges.png"))
    images = pipeline(prompt_ids, image, params, jax.random.key(0)).images  # (1, H, W, 3), [0, 1]

controlnet="CONTROLNET", a directory, hub id or file, also reads the weights. With a list of
ControlNets their residuals are summed; params["controlnet"] may then be a list too, and
prepare_inputs takes a list with an image for each.

Source: ControlNet (arXiv 2302.05543).
"""

from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from PIL import Image

from diffusers_flax.images import pair_up, prepare_images, to_rgb
from diffusers_flax.loading.directories import has_component, read_index
from diffusers_flax.loading.hub import open_source
from diffusers_flax.models.blocks import TEXT, project_text
from diffusers_flax.models.clip import FlaxCLIPTextModel
from diffusers_flax.models.controlnet import (
    FlaxControlNetModel,
    FlaxMultiControlNetModel,
)
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.models.vae import FlaxAutoencoderKL
from diffusers_flax.pipelines.running import CallOptions, run
from diffusers_flax.pipelines.sampling import resize
from diffusers_flax.pipelines.stable_diffusion import StableDiffusionFamily
from diffusers_flax.pipelines.stable_diffusion_xl import XLComponents
from diffusers_flax.pipelines.text_to_image import TextToImage
from diffusers_flax.schedulers.base import FlaxSchedulerMixin

CONTROL_ARGUMENTS = {
    "controlnet_conditioning_scale": 1.0,
    "control_guidance_start": 0.0,
    "control_guidance_end": 1.0,
}
# Config entries that a ControlNet has in common with the UNet that takes its residuals.
SAME_AS_UNET = ("in_channels", "block_out_channels", "cross_attention_dim", "addition_embed_type")


class ControlNetTextToImage(TextToImage):
    """Base of the pipelines with ControlNets of Stable Diffusion and SDXL.

    A subclass has the field controlnet, a FlaxControlNetModel or a list of several.
    """

    def __post_init__(self):
        if isinstance(self.controlnet, list | tuple):
            nets = FlaxMultiControlNetModel(tuple(self.controlnet))
            object.__setattr__(self, "controlnet", nets)
        for net in self.nets:
            for name in SAME_AS_UNET:
                theirs, ours = getattr(net, name), getattr(self.unet, name)
                if theirs != ours:
                    raise ValueError(
                        f"the ControlNet has {name}={theirs}, the UNet {ours}: they are of "
                        "different families; take a ControlNet that was made for this model"
                    )
        super().__post_init__()

    @classmethod
    def check_acceleration(cls, acceleration):
        """See FlaxDiffusionPipeline.check_acceleration."""
        from diffusers_flax.acceleration.plans import DeepCache, FirstBlockCache, TGate

        if isinstance(acceleration.cache, DeepCache | FirstBlockCache | TGate):
            raise ValueError(
                f"accelerate={acceleration.cache.name} reuses features of the UNet, which a "
                "ControlNet changes in each step; take guidance, spectrum, tome, int8 or taesd"
            )

    @property
    def nets(self):
        """The ControlNets, a tuple."""
        return self.controlnet.nets if self.has_several else (self.controlnet,)

    @property
    def has_several(self):
        """Whether the field is a list of ControlNets."""
        return isinstance(self.controlnet, FlaxMultiControlNetModel)

    @classmethod
    def _open_more_components(cls, path, revision, dtype, replaced, index, **hub_options):
        """See FlaxDiffusionPipeline; replaced["controlnet"]: a module or its place, or several."""
        controlnet = replaced.get("controlnet")
        if controlnet is None:
            index = read_index(path, revision, **hub_options) if index is None else index
            if not has_component(index, "controlnet"):
                raise ValueError(
                    f"{path} has no ControlNet; give controlnet=, a FlaxControlNetModel, or its "
                    "directory, hub id or file"
                )
            options = {"subfolder": "controlnet", "revision": revision, **hub_options}
            if index["controlnet"][1] == FlaxMultiControlNetModel.torch_class_name:
                configs = FlaxMultiControlNetModel.load_config(path, **options)
                return {"controlnet": FlaxMultiControlNetModel.from_config(configs, dtype)}, {}
            net = FlaxControlNetModel.from_config(path, dtype=dtype, **options)
            return {"controlnet": net}, {}
        is_several = isinstance(controlnet, list | tuple)
        nets = list(controlnet) if is_several else [controlnet]
        if not isinstance(nets[0], str | Path):
            return {}, {}
        component = FlaxControlNetModel.single_file_component
        sources = tuple(open_source("controlnet", net, component, **hub_options) for net in nets)
        configs = [FlaxControlNetModel.load_config(source, **hub_options) for source in sources]
        for config, source in zip(configs, sources):
            FlaxControlNetModel.check_class(config, source)
        several = FlaxMultiControlNetModel.from_config(configs, dtype)
        if is_several:
            return {"controlnet": several}, {"controlnet": sources}
        return {"controlnet": several.nets[0]}, {"controlnet": sources[0]}

    def prepare_image_inputs(self, image):
        """Turn control images, such as edges, into an array.

        Args:
            image: image or list of images of one size: PIL of any mode, whose sides become
                multiples of 8, or array (H, W, 3), or arrays (B, H, W, 3); uint8, or float in
                [0, 1]. For several ControlNets, a list with such an entry for each.

        Returns:
            float32 (B, 3, H, W) in [0, 1], for several ControlNets (B, ControlNets, 3, H, W).

        Raises:
            ValueError: sizes or numbers differ, or it is not an image.
        """
        if not self.has_several:
            return self._prepare_control_images(image)
        arrays = [self._prepare_control_images(one) for one in image]
        most = max(arrays, key=len)
        return np.stack([pair_up(most, one, "images", "images")[1] for one in arrays], axis=1)

    def _prepare_control_images(self, image):
        factor = self.vae_scale_factor

        def resized(one):
            if not isinstance(one, Image.Image):
                return one
            size = tuple(max(factor, side - side % factor) for side in one.size)
            return one if size == one.size else to_rgb(one).resize(size, Image.LANCZOS)

        is_batch = isinstance(image, list | tuple)
        image = [resized(one) for one in image] if is_batch else resized(image)
        return (prepare_images(image) + 1) / 2

    def prepare_inputs(self, prompt, image):
        """Turn prompts and control images into arrays; a single one of either is repeated.

        Returns:
            (prompt_ids, image).
        """
        return pair_up(self.prepare_text_inputs(prompt), self.prepare_image_inputs(image))

    def is_latents(self, image_shape):
        return False

    def __call__(
        self,
        prompt_ids,
        image,
        params,
        prng_seed,
        num_inference_steps=50,
        guidance_scale=7.5,
        latents=None,
        neg_prompt_ids=None,
        controlnet_conditioning_scale=1.0,
        return_dict=True,
        jit=False,
        height=None,
        width=None,
        control_guidance_start=0.0,
        control_guidance_end=1.0,
        guess_mode=False,
        **options: Unpack[CallOptions],
    ):
        """Make images that follow control images; compiles at the first call of each size.

        Args:
            image: control image in [0, 1], as from prepare_image_inputs: (B, 3, H, W), for several
                ControlNets (B, ControlNets, 3, H, W).
            controlnet_conditioning_scale: factor of a ControlNet's residuals, a number, or an array
                of one per image; for several ControlNets a number or a list of one for each.
            height, width: of the result, multiples of 8; the image is resized to it. None: the size
                of the image.
            control_guidance_start, control_guidance_end: fractions of the steps, from 0 to 1,
                between which the ControlNet acts; for several also a list with one for each.
            guess_mode: True: the ControlNet acts on the branch of the prompt alone, and its first
                residuals less, for images without a prompt.
            prompt_ids, params, prng_seed, num_inference_steps, guidance_scale, latents,
                neg_prompt_ids, return_dict, jit, options: as for FlaxStableDiffusionPipeline's
                call.

        Returns, Raises: as FlaxStableDiffusionPipeline's call.
        """
        if self.has_several and (image.ndim != 5 + jit or image.shape[-4] != len(self.nets)):
            raise ValueError(
                f"image has shape {image.shape}, {len(self.nets)} ControlNets take (batch, "
                f"{len(self.nets)}, channels, height, width); prepare_image_inputs makes it"
            )
        return run(self, self.make_call(locals()))

    def make_call(self, arguments):
        """See FlaxDiffusionPipeline.make_call; a number is for all ControlNets."""
        given, nets = CONTROL_ARGUMENTS | arguments.get("options", {}) | arguments, len(self.nets)
        values = {name: given[name] for name in CONTROL_ARGUMENTS}
        for name, value in values.items():
            if isinstance(value, list | tuple | Real):  # an array of scales stays as it is
                values[name] = tuple(value) if isinstance(value, list | tuple) else (value,) * nets
                if len(values[name]) != nets:
                    raise ValueError(
                        f"{name} has {len(values[name])} entries, there are {nets} ControlNets; "
                        "give one for each, or a number for all"
                    )
        starts, ends = values["control_guidance_start"], values["control_guidance_end"]
        for start, end in zip(starts, ends):
            if not 0 <= start < end <= 1:
                raise ValueError(
                    f"control_guidance_start={start} and control_guidance_end={end} must be from 0 "
                    "to 1, fractions of the steps, the start below the end"
                )
        return super().make_call(arguments | values)

    def residuals_of(self, params, inputs, options, schedule, text):
        """See TextToImage.residuals_of; in guess mode the branch of the text alone has some."""
        image = resize_control_images(inputs["image"], (options.height, options.width))
        B, is_several = len(image), self.has_several
        guess_mode = options.guess_mode or self.nets[0].global_pool_conditions
        scale = jnp.asarray(inputs["controlnet_conditioning_scale"], jnp.float32).reshape(-1)
        acts = acting_steps(options, len(schedule.state.timesteps))
        tree = params["controlnet"]
        tree = self.controlnet.params_of(tree) if is_several else tree

        def project(states):
            if not is_several:
                return project_text(tree, states, self.controlnet.dtype)
            names = {f"nets_{i}": net.dtype for i, net in enumerate(self.nets)}
            return {name: project_text(tree[name], states, dtype) for name, dtype in names.items()}

        projected = project(text[0][:B] if guess_mode else text[0])

        def compute(scale, sample, t, states, added):
            rows = B if guess_mode else len(sample)
            # Fewer than all rows where guidance has ended.
            sample_rows, states, added, of_text = jax.tree.map(
                lambda x: x[:rows], (sample, states, added, projected)
            )
            variables = {"params": tree, TEXT: of_text}
            images = jnp.concatenate([image] * (rows // B))
            if is_several:
                scale = list(jnp.broadcast_to(scale, len(self.nets)))
            elif len(scale) > 1:
                scale = jnp.tile(scale, rows // B)
            found = self.controlnet.apply(
                *(variables, sample_rows, t, states, images, scale),
                return_dict=False,
                added_cond_kwargs=added,
                guess_mode=guess_mode,
            )
            missing = len(sample) - rows
            return jax.tree.map(lambda x: jnp.pad(x, ((0, missing), *((0, 0),) * 3)), found)

        def residuals(i, *arguments):
            if acts.all():
                return compute(scale, *arguments)
            active = jnp.asarray(acts, jnp.float32)[i]
            zeros = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute, scale, *arguments)
            )
            run = partial(compute, scale * active, *arguments)
            return jax.lax.cond(active.any(), run, lambda: zeros)

        return residuals


@dataclass(frozen=True, eq=False)
class FlaxStableDiffusionControlNetPipeline(ControlNetTextToImage, StableDiffusionFamily):
    """Text and a control image in, image out, with Stable Diffusion 1.x and 2.x.

    See TextToImage for what is compiled in; fields as of StableDiffusionComponents, and controlnet.
    """

    vae: FlaxAutoencoderKL
    text_encoder: FlaxCLIPTextModel
    tokenizer: Any
    unet: FlaxUNet2DConditionModel
    controlnet: FlaxControlNetModel | FlaxMultiControlNetModel | list | tuple
    scheduler: FlaxSchedulerMixin
    safety_checker: Any = None
    feature_extractor: Any = None
    dtype: DTypeLike = jnp.float32

    torch_class_name = "StableDiffusionControlNetPipeline"


@dataclass(frozen=True, eq=False)
class FlaxStableDiffusionXLControlNetPipeline(ControlNetTextToImage, XLComponents):
    """Text and a control image in, image out, with SDXL; see XLComponents."""

    controlnet: FlaxControlNetModel | FlaxMultiControlNetModel | list | tuple = field(kw_only=True)

    torch_class_name = "StableDiffusionXLControlNetPipeline"


def acting_steps(options, num_steps):
    """Whether each ControlNet acts in each step, NumPy bool (steps, ControlNets)."""
    first = np.arange(num_steps)[:, None] / num_steps
    last = np.arange(1, num_steps + 1)[:, None] / num_steps
    starts, ends = np.array(options.control_guidance_start), np.array(options.control_guidance_end)
    return (first >= starts) & (last <= ends)


def resize_control_images(image, shape):
    """Control images (..., C, H, W) in [0, 1] resized to a shape (height, width) by Lanczos."""
    if shape == image.shape[-2:]:
        return image
    flat = image.reshape(-1, *image.shape[-3:])
    resized = (resize(2 * flat - 1, shape) + 1) / 2
    return resized.reshape(*image.shape[:-2], *shape)
