"""FlaxStableDiffusionInstructPix2PixPipeline: edit pictures as instructed, in one compiled program.

    pipeline, params = FlaxStableDiffusionInstructPix2PixPipeline.from_pretrained("MODEL")
    prompt_ids, image = pipeline.prepare_inputs("make it red", Image.open("in.png"))
    images = pipeline(prompt_ids, image, params, jax.random.key(0)).images    # (1, H, W, 3), [0, 1]

On several devices, each with its share of the pictures:

    p_params = flax.jax_utils.replicate(params)
    prompt_ids, image = flax.training.common_utils.shard((prompt_ids, image))
    images = pipeline(prompt_ids, image, p_params, key, jit=True).images  # (devices, B, H, W, 3)

Source: InstructPix2Pix (arXiv 2211.09800).
"""

import importlib.metadata
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from PIL import Image
from transformers import CLIPTokenizer

from modeling_flax_clip import FlaxCLIPTextModel
from modeling_flax_unet import FlaxUNet2DConditionModel
from modeling_flax_utils import fetch_file, read_json, warn_once, write_json
from modeling_flax_vae import FlaxAutoencoderKL
from scheduling_flax import CONFIG_NAME, Scheduler, scheduler_from_pretrained

# What the UNet is shown in each branch of guidance: instruction and picture, picture, nothing.
BRANCHES = ("text", "image", "null")

# Which file shows that a part of a pipeline folder is there.
PART_FILES = {
    "unet": "config.json",
    "vae": "config.json",
    "text_encoder": "config.json",
    "tokenizer": "tokenizer_config.json",
    "scheduler": CONFIG_NAME,
}


class FlaxStableDiffusionPipelineOutput(NamedTuple):
    """images, float32 in [0, 1]: (B, H, W, 3), with jit (devices, B, H, W, 3); no safety check."""

    images: jax.Array
    nsfw_content_detected: None = None


def guidance_weights(guidance_scale, image_guidance_scale):
    """Weight of each branch's noise prediction in the guided one; they sum to 1.

    Source: InstructPix2Pix (arXiv 2211.09800), equation 3, sorted by prediction.
    """
    return (
        guidance_scale,
        image_guidance_scale - guidance_scale,
        1 - image_guidance_scale,
    )


def guidance_branches(guidance_scale, image_guidance_scale):
    """Choose the branches whose weight is not zero; JAX arrays may have any value, so need all.

    Args:
        guidance_scale, image_guidance_scale: s_T and s_I, numbers >= 0 or JAX arrays.

    Returns:
        A part of BRANCHES, in its order.

    Raises:
        ValueError: a scale is negative or not finite.
    """
    scales = {"guidance_scale": guidance_scale, "image_guidance_scale": image_guidance_scale}
    if any(isinstance(scale, jax.Array) for scale in scales.values()):
        return BRANCHES
    for name, scale in scales.items():
        if not 0 <= scale < math.inf:
            raise ValueError(f"{name}={scale} must be 0 or more; 1 and 1 switch guidance off")
    weights = guidance_weights(guidance_scale, image_guidance_scale)
    return tuple(branch for branch, weight in zip(BRANCHES, weights) if weight != 0)


def to_rgb(picture):
    """A PIL picture of any mode as RGB, on white where it is transparent."""
    if picture.mode.startswith("I"):  # Pillow clips 16-bit grey instead of scaling it
        picture = Image.fromarray((np.asarray(picture) // 257).astype(np.uint8))
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    white = Image.new("RGBA", picture.size, "white")
    return Image.alpha_composite(white, picture).convert("RGB")


def check_pipeline(pretrained_model_name_or_path, revision=None):
    """Read the settings of an InstructPix2Pix pipeline, no weights; refuse anything else.

    Args:
        pretrained_model_name_or_path: folder or Hub id.
        revision: branch, tag or commit on the Hub.

    Returns:
        {"unet", "vae", "text_encoder", "tokenizer", "scheduler"}, the content of each JSON file.

    Raises:
        ValueError: nothing there, parts missing, or a pipeline that does not edit pictures.
    """
    path = pretrained_model_name_or_path
    index = fetch_file(path, "model_index.json", None, revision)
    if index is None:
        found = (
            ""
            if os.path.isdir(path)
            else " (no such folder here, nor on the Hub as far as it can be reached)"
        )
        raise ValueError(
            f"{path} has no model_index.json{found}; give the folder or Hub id of a whole "
            "InstructPix2Pix pipeline"
        )
    class_name = str(read_json(index).get("_class_name"))
    if "XL" in class_name:
        raise ValueError(
            f"{path} is a {class_name}; this pipeline edits with InstructPix2Pix models made from "
            "Stable Diffusion 1.x and 2.x"
        )
    files = {part: fetch_file(path, name, part, revision) for part, name in PART_FILES.items()}
    if missing := [f"{part}/{PART_FILES[part]}" for part, file in files.items() if file is None]:
        raise ValueError(f"{path} lacks {', '.join(missing)}; copy or download it again")
    configs = {part: read_json(file) for part, file in files.items()}

    if not isinstance(configs["vae"].get("block_out_channels"), list):
        raise ValueError(f"{files['vae']} has no list block_out_channels; download it again")
    in_channels = configs["unet"].get("in_channels", 4)
    latent_channels = configs["vae"].get("latent_channels", 4)
    if in_channels == latent_channels:
        raise ValueError(
            f"{path} is no InstructPix2Pix: its UNet has in_channels={in_channels}, so it makes "
            "pictures from text and sees none; widen it with create_modified_unet.py and train it "
            "with flax_train_instruct_pix2pix.py"
        )
    if in_channels != 2 * latent_channels:
        raise ValueError(
            f"{path} is no InstructPix2Pix: its UNet has in_channels={in_channels}, which should "
            f"be twice its VAE's latent_channels={latent_channels}"
        )
    return configs


def load_tokenizer(pretrained_model_name_or_path, text_encoder, revision=None):
    """Open the CLIP tokenizer of a pipeline folder.

    Args:
        pretrained_model_name_or_path: folder or Hub id.
        text_encoder: FlaxCLIPTextModel that will read its tokens.
        revision: branch, tag or commit on the Hub.

    Raises:
        ValueError: it is missing, damaged, or another text encoder's.
    """
    path = pretrained_model_name_or_path
    try:
        tokenizer = CLIPTokenizer.from_pretrained(path, subfolder="tokenizer", revision=revision)
    except Exception as error:  # what the tokenizers library raises has no class of its own
        reason = " ".join(str(error).split())
        raise ValueError(f"the tokenizer of {path} cannot be read: {reason}") from error
    # Without its files transformers makes a tokenizer of two tokens and says nothing.
    if not 2 < len(tokenizer) <= text_encoder.config.vocab_size:
        raise ValueError(
            f"the tokenizer of {path} has {len(tokenizer)} tokens, its text encoder knows "
            f"{text_encoder.config.vocab_size}; is {path}/tokenizer complete and of this model?"
        )
    return tokenizer


@dataclass(frozen=True, eq=False)  # compiled programs are kept per object: nothing may change in it
class FlaxStableDiffusionInstructPix2PixPipeline:
    """Instruction and picture in, edited picture out.

    Fields: the modules, and dtype, which from_pretrained gave them (they compute in their own).
    Scheduler, steps and picture size are compiled in: changing them compiles again, changing
    the scales does not, unless a branch of guidance falls away or joins.
    """

    vae: FlaxAutoencoderKL
    text_encoder: FlaxCLIPTextModel
    tokenizer: CLIPTokenizer
    unet: FlaxUNet2DConditionModel
    scheduler: Scheduler
    dtype: DTypeLike = jnp.float32

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path,
        revision=None,
        variant=None,
        dtype=jnp.float32,
        scheduler=None,
        from_pt=False,
    ):
        """Read a diffusers InstructPix2Pix pipeline.

        Args:
            pretrained_model_name_or_path: folder or Hub id; only the files used are downloaded.
            revision: branch, tag or commit on the Hub.
            variant: the part in the middle of the weights' names, e.g. "fp16".
            dtype: what the modules compute in; the parameters keep the dtype they are stored in.
            scheduler: scheduler object to use in place of the folder's.
            from_pt: True looks for PyTorch's weight files only.

        Returns:
            (pipeline, params); params {"unet", "vae", "text_encoder"} of NumPy arrays and
            {"scheduler"}, the scheduler's state, float32 for any dtype.

        Raises:
            ValueError: nothing there, no InstructPix2Pix, or a part that cannot be read.
        """
        path = pretrained_model_name_or_path
        check_pipeline(path, revision)
        if scheduler is None:
            scheduler, scheduler_state = scheduler_from_pretrained(path, revision=revision)
        else:
            scheduler_state = scheduler.create_state()
        options = dict(revision=revision, variant=variant, dtype=dtype, from_pt=from_pt)
        unet, unet_params = FlaxUNet2DConditionModel.from_pretrained(
            path, subfolder="unet", **options
        )
        vae, vae_params = FlaxAutoencoderKL.from_pretrained(path, subfolder="vae", **options)
        text_encoder, text_params = FlaxCLIPTextModel.from_pretrained(
            path, subfolder="text_encoder", **options
        )
        tokenizer = load_tokenizer(path, text_encoder, revision)
        params = {
            "unet": unet_params,
            "vae": vae_params,
            "text_encoder": text_params,
            "scheduler": scheduler_state,
        }
        return cls(vae, text_encoder, tokenizer, unet, scheduler, dtype), params

    def save_pretrained(self, save_directory, params):
        """Write a pipeline folder that PyTorch's StableDiffusionInstructPix2PixPipeline opens.

        A new folder appears under its name when it is complete. In a folder that has content
        each part is replaced once it is complete, and what is not of a pipeline stays.

        Args:
            save_directory: folder, made if absent.
            params: as from from_pretrained, not replicated; "scheduler" may be absent.
        """
        folder = Path(save_directory)
        if folder.is_dir() and any(folder.iterdir()):
            self._write(folder, params)
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as tmp:
            new = Path(tmp, folder.name)
            new.mkdir()
            self._write(new, params)
            os.replace(new, folder)

    def _write(self, folder, params):
        parts = {"unet": self.unet, "vae": self.vae, "text_encoder": self.text_encoder}
        for name, module in parts.items():
            module.save_pretrained(folder / name, params=params[name])
        self.tokenizer.save_pretrained(folder / "tokenizer")
        # vocab.json and merges.txt, which is what transformers before 5.0 reads.
        self.tokenizer.backend_tokenizer.model.save(str(folder / "tokenizer"))
        self.scheduler.save_pretrained(folder / "scheduler")
        index = {
            "_class_name": "StableDiffusionInstructPix2PixPipeline",
            "_diffusers_version": importlib.metadata.version("diffusers"),
            "feature_extractor": [None, None],
            "image_encoder": [None, None],
            "requires_safety_checker": False,
            "safety_checker": [None, None],
            "scheduler": ["diffusers", type(self.scheduler).__name__.removeprefix("Flax")],
            "text_encoder": ["transformers", self.text_encoder.torch_class_name],
            "tokenizer": ["transformers", "CLIPTokenizer"],
            "unet": ["diffusers", self.unet.torch_class_name],
            "vae": ["diffusers", self.vae.torch_class_name],
        }
        write_json(folder / "model_index.json", index)

    def prepare_text_inputs(self, prompt):
        """Tokenize prompts, for negative prompts and the like.

        Args:
            prompt: str or list of str; tokens past the text encoder's 77 are cut, with a warning.

        Returns:
            prompt_ids, int32 (B, 77).
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        if not prompts:
            raise ValueError("prompt is an empty list; give at least one text, which may be empty")
        length = self.text_encoder.config.max_position_embeddings
        rows = np.full((len(prompts), length), self.tokenizer.pad_token_id, np.int32)
        for row, ids in zip(rows, self.tokenizer(prompts, verbose=False).input_ids):
            if len(ids) > length:
                cut = self.tokenizer.decode(ids[length - 1 : -1])
                warn_once(
                    f"prompt is {len(ids)} tokens long, the text encoder takes {length}; "
                    f"cut off: {cut!r}"
                )
                ids = [*ids[: length - 1], ids[-1]]  # the end of text is kept
            row[: len(ids)] = ids
        return rows

    def prepare_inputs(self, prompt, image):
        """Turn instructions and pictures into arrays; one of either goes with many of the other.

        Args:
            prompt: str or list of str.
            image: picture or list of pictures of one size: PIL of any mode, or array (H, W, 3),
                or arrays (B, H, W, 3); uint8, or float in [0, 1].

        Returns:
            (prompt_ids, image): int32 (B, 77), float32 (B, 3, H, W) in [-1, 1].

        Raises:
            ValueError: numbers or sizes of the pictures do not fit, or it is no picture.
        """
        is_batch = isinstance(image, list | tuple) or np.ndim(image) == 4
        pictures = [self._to_array(picture) for picture in (image if is_batch else [image])]
        if len(sizes := sorted({picture.shape[:2] for picture in pictures})) != 1:
            found = ", ".join(f"{height}x{width}" for height, width in sizes) or "none"
            raise ValueError(
                f"the pictures of a batch must have one size (height x width), found {found}; "
                "resize or crop them, or call once per size"
            )
        image = np.stack(pictures).transpose(0, 3, 1, 2)  # (B, 3, H, W)

        prompt_ids = self.prepare_text_inputs(prompt)
        num_prompts, num_images = len(prompt_ids), len(image)
        if num_prompts != num_images and 1 not in (num_prompts, num_images):
            raise ValueError(
                f"{num_prompts} prompts do not fit {num_images} pictures; give as many, or one"
            )
        B = max(num_prompts, num_images)
        return (
            np.repeat(prompt_ids, B // num_prompts, axis=0),
            np.repeat(image, B // num_images, axis=0),
        )

    @staticmethod
    def _to_array(picture):
        """One picture as float32 (H, W, 3) in [-1, 1]."""
        array = np.asarray(to_rgb(picture) if isinstance(picture, Image.Image) else picture)
        if array.ndim != 3 or array.shape[-1] != 3:
            raise ValueError(f"a picture has shape {array.shape}; as an array it is (H, W, 3)")
        if array.dtype == np.uint8:
            array = array.astype(np.float32) / 255
        if not (array.dtype.kind == "f" and array.min() >= 0 and array.max() <= 1):
            raise ValueError(
                f"a picture has {array.dtype} values from {array.min()} to {array.max()}; "
                "give uint8, or float in [0, 1]"
            )
        return array.astype(np.float32) * 2 - 1

    @staticmethod
    def numpy_to_pil(images):
        """List of PIL pictures of images (..., H, W, 3) in [0, 1], leading axes flattened."""
        pixels = np.rint(np.asarray(images, np.float32) * 255).astype(np.uint8)
        return [Image.fromarray(picture) for picture in pixels.reshape(-1, *pixels.shape[-3:])]

    def __call__(
        self,
        prompt_ids,
        image,
        params,
        prng_seed,
        num_inference_steps=50,
        guidance_scale=7.5,
        image_guidance_scale=1.5,
        height=None,
        width=None,
        latents=None,
        neg_prompt_ids=None,
        return_dict=True,
        jit=False,
    ):
        """Edit a batch of pictures; compiles at the first call of each size, see the class.

        Args:
            prompt_ids: instructions, int32 (B, 77); with jit all arrays are (devices, B, ...).
            image: pictures, float32 (B, 3, H, W) in [-1, 1].
            params: as from from_pretrained, best put on the device once; with jit replicated.
            prng_seed: one PRNG key, typed or uint32, or one per picture (B,); with jit also one
                per device. With one key, picture i gets the noise of fold_in(key, i), so it does
                not depend on how many pictures or devices there are.
            num_inference_steps: of the scheduler, at least 1.
            guidance_scale: weight of the instruction, >= 0.
            image_guidance_scale: likeness to the picture, >= 0. Both 1: no guidance, a third
                of the work; image_guidance_scale 1, or both alike: two thirds.
            height, width: of the result, multiples of the VAE's factor (8); the pictures are
                resized to it. None takes the pictures' own.
            latents: standard normal noise to start from, (B, 4, H / 8, W / 8); None draws it.
            neg_prompt_ids: what to avoid, int32 (B, 77); None is the empty text.
            return_dict: False returns a plain tuple (images, None).
            jit: True runs on several devices, False on one; compiled either way.

        Returns:
            FlaxStableDiffusionPipelineOutput, images (B, H, W, 3), with jit
            (devices, B, H, W, 3), float32 in [0, 1].

        Raises:
            ValueError: shapes, sizes, scales or steps that do not fit.
        """
        shape = "(devices, batch, 77)" if jit else "(batch, 77)"
        if prompt_ids.ndim != shape.count(",") + 1:
            raise ValueError(
                f"prompt_ids has shape {prompt_ids.shape}, jit={jit} takes {shape}; with jit=True "
                "shard prompt_ids and image, and replicate params"
            )
        kernel = params["unet"]["conv_in"]["kernel"]
        if kernel.ndim != (5 if jit else 4):
            raise ValueError(
                f"params are {'' if kernel.ndim == 5 else 'not '}replicated over devices; "
                "with jit=True replicate them, with jit=False do not"
            )
        if image.dtype == np.uint8:
            raise ValueError("image is uint8; prepare_inputs makes it float32 in [-1, 1]")

        keys = _as_keys(prng_seed)
        if jit and keys.ndim == 0:
            keys = _keys_per_picture(keys, math.prod(prompt_ids.shape[:2]))
            keys = keys.reshape(prompt_ids.shape[:2])
        branches = guidance_branches(float(guidance_scale), float(image_guidance_scale))
        images = (_generate_on_devices if jit else _generate_on_one)(
            self,
            num_inference_steps,
            height,
            width,
            branches,
            prompt_ids,
            image,
            params,
            keys,
            np.float32(guidance_scale),
            np.float32(image_guidance_scale),
            latents,
            neg_prompt_ids,
        )
        output = FlaxStableDiffusionPipelineOutput(images)
        return output if return_dict else tuple(output)

    def _generate(
        self,
        prompt_ids,
        image,
        params,
        prng_seed,
        num_inference_steps=50,
        height=None,
        width=None,
        guidance_scale=7.5,
        image_guidance_scale=1.5,
        latents=None,
        neg_prompt_ids=None,
        branches=None,
    ):
        """The whole edit as one pure function of arrays, for one device; jit or pmap it.

        Args as in __call__. Scales may be traced, then all three branches run, unless `branches`
        (static) says which; None works it out.

        Returns:
            images, float32 (B, H, W, 3) in [0, 1].
        """
        if branches is None:
            branches = guidance_branches(guidance_scale, image_guidance_scale)
        B = prompt_ids.shape[0]
        if image.ndim != 4 or image.shape[0] != B:
            raise ValueError(
                f"image has shape {image.shape}, prompt_ids {prompt_ids.shape}; image is "
                "(batch, 3, height, width) with the same batch; prepare_inputs makes both"
            )
        size = (height or image.shape[2], width or image.shape[3])
        if size != image.shape[2:]:
            image = jax.image.resize(image, (*image.shape[:2], *size), "lanczos3").clip(-1, 1)

        # 1. The picture and the texts, each encoded once.
        posterior = self.vae.apply(
            {"params": params["vae"]}, image, method=self.vae.encode
        ).latent_dist
        # The posterior's mode, unscaled, as in training: section 3.2 of the paper.
        image_latents = jnp.transpose(posterior.mode(), (0, 3, 1, 2))  # (B, 4, h, w)
        null_ids = self.prepare_text_inputs("") if neg_prompt_ids is None else neg_prompt_ids
        text_ids = jnp.concatenate([prompt_ids, null_ids.astype(prompt_ids.dtype)])
        states = self.text_encoder.apply({"params": params["text_encoder"]}, text_ids)
        text, null_text = states.last_hidden_state[:B], states.last_hidden_state[B:]
        null_text = jnp.broadcast_to(null_text, text.shape)  # (B, 77, D)

        # 2. What each branch of guidance is shown.
        conditions = {
            "text": (text, image_latents),
            "image": (null_text, image_latents),
            "null": (null_text, jnp.zeros_like(image_latents)),
        }
        context = jnp.concatenate([conditions[branch][0] for branch in branches])
        image_latents_in = jnp.concatenate([conditions[branch][1] for branch in branches])
        scales = (jnp.asarray(s, jnp.float32) for s in (guidance_scale, image_guidance_scale))
        weights = dict(zip(BRANCHES, guidance_weights(*scales)))

        # 3. Noise, each picture from its own key.
        keys = _as_keys(prng_seed)
        keys = keys if keys.ndim else _keys_per_picture(keys, B)

        def draw(i):
            """Standard normal noise, (B, 4, h, w): number 0 to start from, i + 1 for step i."""
            shape = image_latents.shape[1:]
            return jax.vmap(
                lambda key: jax.random.normal(jax.random.fold_in(key, i), shape, jnp.float32)
            )(keys)

        state = self.scheduler.set_timesteps(
            params["scheduler"], num_inference_steps, image_latents.shape
        )
        if latents is None:
            latents = draw(0)
        elif latents.shape != image_latents.shape:
            raise ValueError(f"latents have shape {latents.shape}, need {image_latents.shape}")
        # The cast undoes one of all params to bfloat16; the rest of the state is made just above.
        x_t = latents.astype(jnp.float32) * state.init_noise_sigma.astype(jnp.float32)

        # 4. Denoise, in float32 between the steps.
        def denoise(i, carry):
            x_t, state = carry
            t = state.timesteps[i]
            scaled = self.scheduler.scale_model_input(state, x_t, t)
            model_input = jnp.concatenate(
                [jnp.concatenate([scaled] * len(branches)), image_latents_in], axis=1
            )  # (branches * B, 8, h, w)
            eps_pred = self.unet.apply({"params": params["unet"]}, model_input, t, context).sample
            eps_pred = jnp.split(eps_pred.astype(jnp.float32), len(branches))
            guided = sum(weights[branch] * eps for branch, eps in zip(branches, eps_pred))
            return self.scheduler.step(state, guided, t, x_t, noise=draw(i + 1), return_dict=False)

        x_0, _ = jax.lax.fori_loop(0, len(state.timesteps), denoise, (x_t, state))

        # 5. Back to a picture.
        decoded = self.vae.apply(
            {"params": params["vae"]},
            x_0 / self.vae.config.scaling_factor,
            method=self.vae.decode,
        ).sample  # (B, 3, H, W)
        images = jnp.transpose(decoded.astype(jnp.float32), (0, 2, 3, 1))
        return (images / 2 + 0.5).clip(0, 1)


def _as_keys(prng_seed):
    """PRNG keys as typed ones; old uint32 keys have one axis more."""
    if np.ndim(prng_seed) == 0 and not isinstance(prng_seed, jax.Array):
        raise ValueError(f"prng_seed={prng_seed} is no PRNG key; make one: jax.random.key(0)")
    if jnp.issubdtype(prng_seed.dtype, jax.dtypes.prng_key):
        return prng_seed
    return jax.random.wrap_key_data(prng_seed)


def _keys_per_picture(key, num_pictures):
    """Keys fold_in(key, 0), fold_in(key, 1), ...; (num_pictures,)."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_pictures))


def _generate_static(
    pipeline,
    num_inference_steps,
    height,
    width,
    branches,
    prompt_ids,
    image,
    params,
    keys,
    guidance_scale,
    image_guidance_scale,
    latents,
    neg_prompt_ids,
):
    """_generate with what is compiled in first, as static arguments."""
    return pipeline._generate(
        prompt_ids,
        image,
        params,
        keys,
        num_inference_steps,
        height,
        width,
        guidance_scale,
        image_guidance_scale,
        latents,
        neg_prompt_ids,
        branches,
    )


STATIC = (0, 1, 2, 3, 4)
_generate_on_one = jax.jit(_generate_static, static_argnums=STATIC)
_generate_on_devices = jax.pmap(
    _generate_static,
    static_broadcasted_argnums=STATIC,
    in_axes=(None, None, None, None, None, 0, 0, 0, 0, None, None, 0, 0),
)
