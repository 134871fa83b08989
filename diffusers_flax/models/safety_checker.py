"""The safety checker: finds images that show a concept, and blackens them."""

import logging
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict
from jax.typing import DTypeLike
from PIL import Image

from diffusers_flax.loading.configs import RUNTIME_FIELDS
from diffusers_flax.loading.pretrained import FlaxPreTrainedModel, FromTransformers
from diffusers_flax.models.base import FlaxModelMixin
from diffusers_flax.models.clip import FlaxCLIPVisionModule, check_images

logger = logging.getLogger(__name__)

NUM_CONCEPTS, NUM_SPECIAL_CARE = 17, 3
# Added to the scores of all concepts if an image matches a special-care concept.
ADJUSTMENT = 0.01
VISION_ENTRIES = FlaxCLIPVisionModule.__dataclass_fields__.keys() - RUNTIME_FIELDS


class FlaxStableDiffusionSafetyCheckerModule(nn.Module, FlaxModelMixin):
    """The Linen module of FlaxStableDiffusionSafetyChecker.

    Args:
        vision_config: fields of FlaxCLIPVisionModule.
        projection_dim: size of the concepts' embeddings.
        dtype: compute dtype of the image encoder; distances are float32.
    """

    vision_config: FrozenDict
    projection_dim: int = 512
    dtype: DTypeLike = jnp.float32

    weights_name = "model"
    torch_class_name = "StableDiffusionSafetyChecker"
    fixed_config = {}  # noqa: RUF012 (a Linen field otherwise)

    @classmethod
    def from_config(cls, config=None, dtype=jnp.float32, **overrides):
        """Build the module from the content of a CLIPConfig's config.json.

        As in transformers, vision_config_dict replaces vision_config entirely.
        """
        if unknown := overrides.keys() - {"projection_dim"}:
            raise ValueError(
                f"{cls.__name__} has no setting {', '.join(sorted(unknown))}; it has "
                "projection_dim and dtype; to change others pass a CLIPConfig as config="
            )
        config = {**(config or {}), **overrides}
        vision = config.get("vision_config_dict") or config.get("vision_config") or {}
        vision = {name: vision[name] for name in VISION_ENTRIES & vision.keys()}
        vision = FlaxCLIPVisionModule.from_config(vision).config
        projection_dim = config.get("projection_dim", cls.projection_dim)
        return cls(FrozenDict(vision), projection_dim, dtype)

    def _file_content(self):
        return {
            "architectures": [self.torch_class_name],
            "model_type": "clip",
            "projection_dim": self.projection_dim,
            "vision_config": {"model_type": "clip_vision_model", **self.vision_config},
        }

    def init_weights(self, rng):
        """Random float32 parameters of this configuration; concepts are ones. rng: a PRNG key."""
        channels, side = self.vision_config["num_channels"], self.vision_config["image_size"]
        return self.init(rng, jnp.zeros((1, channels, side, side)))["params"]

    def setup(self):
        self.vision_model = FlaxCLIPVisionModule(**self.vision_config, dtype=self.dtype)
        self.visual_projection = nn.Dense(self.projection_dim, use_bias=False, dtype=self.dtype)
        ones = partial(self.param, init_fn=nn.initializers.ones)
        self.concept_embeds = ones("concept_embeds", shape=(NUM_CONCEPTS, self.projection_dim))
        self.special_care_embeds = ones(
            "special_care_embeds", shape=(NUM_SPECIAL_CARE, self.projection_dim)
        )
        self.concept_embeds_weights = ones("concept_embeds_weights", shape=(NUM_CONCEPTS,))
        self.special_care_embeds_weights = ones(
            "special_care_embeds_weights", shape=(NUM_SPECIAL_CARE,)
        )

    def cosine_distances(self, clip_input):
        """Cosines between the images' embeddings and the concepts'.

        Args:
            clip_input: (B, 3, H, W), from a CLIPImageProcessor.

        Returns:
            float32 similarities, (B, 17) to the concepts and (B, 3) to the special-care concepts.
        """
        channels, side = self.vision_config["num_channels"], self.vision_config["image_size"]
        check_images("clip_input", clip_input, (channels, side, side))
        pixels = jnp.transpose(clip_input, (0, 2, 3, 1)).astype(self.dtype)
        embeds = normalize(self.visual_projection(self.vision_model(pixels).pooler_output))
        concepts, special = map(normalize, (self.concept_embeds, self.special_care_embeds))
        cosines = partial(jnp.matmul, embeds, precision="highest")  # thresholds have 3 decimals
        return cosines(concepts.T), cosines(special.T)

    def __call__(self, clip_input):
        """Find images that show a concept; clip_input as above. Returns bool (B,)."""
        concept_cosines, special_cosines = self.cosine_distances(clip_input)
        weights, special_weights = (
            x.astype(jnp.float32)
            for x in (self.concept_embeds_weights, self.special_care_embeds_weights)
        )
        needs_care = jnp.any(jnp.round(special_cosines - special_weights, 3) > 0, axis=1)
        adjustment = jnp.where(needs_care, ADJUSTMENT, 0.0)[:, None]
        scores = jnp.round(concept_cosines - weights + adjustment, 3)
        return jnp.any(scores > 0, axis=1)


def normalize(rows):
    """Rows of length 1, float32."""
    rows = rows.astype(jnp.float32)
    return rows / jnp.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12)


class FlaxStableDiffusionSafetyChecker(FlaxPreTrainedModel):
    """Finds images that show a concept; see FlaxPreTrainedModel. input_shape has no effect."""

    config_class = FromTransformers("CLIPConfig")
    module_class = FlaxStableDiffusionSafetyCheckerModule
    main_input_name = "clip_input"

    def __init__(self, config, input_shape=None, seed=0, dtype=jnp.float32, _do_init=True):
        super().__init__(config, input_shape or (1, 224, 224, 3), seed, dtype, _do_init)

    @classmethod
    def _entries(cls, config):
        vision = {name: getattr(config.vision_config, name) for name in VISION_ENTRIES}
        return {"projection_dim": config.projection_dim, "vision_config": vision}

    @classmethod
    def _entry_names(cls):
        return {"projection_dim"}

    def __call__(self, clip_input, params=None):
        """Find images that show a concept.

        Args:
            clip_input: (B, 3, H, W), the pixel_values of a CLIPImageProcessor.
            params: nested dict of arrays; None or {} for the model's own.

        Returns:
            bool (B,).

        Raises:
            ValueError: clip_input of another size, or the parameters are missing.
        """
        return _flags(self.module, self._variables(params), jnp.asarray(clip_input))

    def filter_images(self, images, feature_extractor, params=None):
        """Blacken the images that show a concept.

        Args:
            images: (B, H, W, 3), float in [0, 1].
            feature_extractor: CLIPImageProcessor of this model.
            params: nested dict of arrays; None for the model's own.

        Returns:
            (images, has_nsfw_concepts): a NumPy array like images, and a list of B bools, True
            where the image is black.

        Raises:
            ValueError: the feature extractor makes images of another size than the model takes.
        """
        images = np.asarray(images)
        pixels = (images * 255).round().astype(np.uint8)
        features = feature_extractor([Image.fromarray(image) for image in pixels])
        flags = np.asarray(self(np.stack(features.pixel_values), params))
        if flags.any():
            logger.warning(
                "%d of %d images may not be safe for work and are black; "
                "try another prompt or another seed",
                flags.sum(),
                len(flags),
            )
            images = np.where(flags[:, None, None, None], np.zeros((), images.dtype), images)
        return images, flags.tolist()


@partial(jax.jit, static_argnums=0)
def _flags(module, variables, clip_input):
    return module.apply(variables, clip_input)
