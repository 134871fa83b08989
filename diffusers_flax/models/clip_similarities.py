"""Similarities of images to texts and concepts: FlaxCLIPModel and the safety checker.

    clip = FlaxCLIPModel.from_pretrained("openai/clip-vit-large-patch14")
    features = clip.get_image_features(pixel_values)  # of a CLIPImageProcessor
    similarities = clip(input_ids, pixel_values).logits_per_image

Source: CLIP (arXiv 2103.00020), section 2.5; the numerics follow PyTorch transformers.
"""

import logging
from functools import partial

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict
from jax.typing import DTypeLike
from PIL import Image

from diffusers_flax.models.base import FlaxModelMixin
from diffusers_flax.models.clip import (
    CLIPTextTransformer,
    CLIPVisionTransformer,
    FlaxBaseModelOutputWithPooling,
    FlaxCLIPTextModule,
    FlaxCLIPVisionModule,
    as_int32,
    channels_last,
    nested_config,
    select_outputs,
)
from diffusers_flax.models.pretrained import CALL_SETTINGS, FlaxPreTrainedModel, FromTransformers
from diffusers_flax.outputs import ModelOutput

logger = logging.getLogger(__name__)

NUM_CONCEPTS = {"concept_embeds": 17, "special_care_embeds": 3}
# Added to all of an image's scores if it matches a special-care concept.
ADJUSTMENT = 0.01


class NestedConfigs(FlaxModelMixin):
    """Base of modules whose config.json contains their encoders' configs.

    A subclass has a field for each key of `encoders`, {config entry: module with its fields}.
    """

    weights_name = "model"
    model_type = "clip"
    encoders = {"vision_config": FlaxCLIPVisionModule}  # noqa: RUF012 (a Linen field otherwise)

    @classmethod
    def from_config(cls, config=None, **overrides):
        """Build the module from the content of a CLIPConfig's config.json.

        As in transformers, text_config_dict and vision_config_dict replace text_config and
        vision_config entirely.
        """
        config = config or {}
        known = {name: config[name] for name in cls.entry_names() & config.keys()}
        fields = known | {k: v for k, v in overrides.items() if k not in CALL_SETTINGS}
        for name, encoder in cls.encoders.items():
            nested = nested_config(config | overrides, name)
            entries = {entry: nested[entry] for entry in encoder.entry_names() & nested.keys()}
            fields[name] = FrozenDict(encoder.from_config(entries).config)
        return cls(**fields)

    def _file_content(self):
        content = super()._file_content()
        for name, encoder in self.encoders.items():
            content[name] = {"model_type": encoder.model_type, **getattr(self, name)}
        return content


@flax.struct.dataclass
class FlaxCLIPOutput(ModelOutput):
    """The output of FlaxCLIPModel for n images and m texts.

    Args:
        logits_per_image: (n, m), cosines of image_embeds and text_embeds, times exp(logit_scale).
        logits_per_text: (m, n), the same.
        text_embeds: (m, projection_dim), each of length 1.
        image_embeds: (n, projection_dim), each of length 1.
        text_model_output, vision_model_output: FlaxBaseModelOutputWithPooling of the encoders,
            which to_tuple() turns into tuples.
    """

    logits_per_image: jax.Array | None = None
    logits_per_text: jax.Array | None = None
    text_embeds: jax.Array | None = None
    image_embeds: jax.Array | None = None
    text_model_output: FlaxBaseModelOutputWithPooling | None = None
    vision_model_output: FlaxBaseModelOutputWithPooling | None = None

    def to_tuple(self):
        """The values that are not None, in the order of the fields, outputs as tuples."""
        values = super().to_tuple()
        return tuple(x.to_tuple() if isinstance(x, ModelOutput) else x for x in values)


class FlaxCLIPModule(nn.Module, NestedConfigs):
    """The Linen module of FlaxCLIPModel; its images are channels-last.

    Args:
        text_config: fields of FlaxCLIPTextModule.
        vision_config: fields of FlaxCLIPVisionModule.
        projection_dim: size of the embeddings.
        logit_scale_init_value: logarithm of the factor of the logits, before training.
        dtype: compute dtype; norms and softmax compute in float32.
    """

    text_config: FrozenDict
    vision_config: FrozenDict
    projection_dim: int = 512
    logit_scale_init_value: float = 2.6592
    dtype: DTypeLike = jnp.float32

    torch_class_name = "CLIPModel"
    encoders = {  # noqa: RUF012 (a Linen field otherwise)
        "text_config": FlaxCLIPTextModule,
        "vision_config": FlaxCLIPVisionModule,
    }

    def init_weights(self, rng):
        """Random float32 parameters of this configuration. rng: a PRNG key."""
        ids = jnp.zeros((1, self.text_config["max_position_embeddings"]), jnp.int32)
        return self.init(rng, ids, jnp.zeros(image_shape(self)))["params"]

    def setup(self):
        self.text_model = CLIPTextTransformer(self.text_config, self.dtype)
        self.vision_model = CLIPVisionTransformer(self.vision_config, self.dtype)
        project = partial(
            nn.Dense,
            self.projection_dim,
            use_bias=False,
            dtype=self.dtype,
            kernel_init=nn.initializers.normal(0.02),
        )
        self.visual_projection, self.text_projection = project(), project()
        initial = nn.initializers.constant(self.logit_scale_init_value)
        self.logit_scale = self.param("logit_scale", initial, ())

    def text_features(self, *arrays):
        """Projected end-of-text rows, (B, projection_dim); arrays as for CLIPTextTransformer."""
        return self.text_projection(self.text_model(*arrays).pooler_output)

    def image_features(self, pixel_values):
        """Projected class tokens, (B, projection_dim)."""
        return self.visual_projection(self.vision_model(pixel_values).pooler_output)

    def __call__(
        self,
        input_ids,
        pixel_values,
        attention_mask=None,
        position_ids=None,
        output_attentions=False,
        output_hidden_states=False,
        return_dict=True,
    ):
        """Compare texts and images; arguments as for FlaxCLIPModel, images channels-last."""
        vision = self.vision_model(pixel_values, output_attentions)
        text = self.text_model(input_ids, attention_mask, position_ids, output_attentions)
        image_embeds = normalize(self.visual_projection(vision.pooler_output)).astype(self.dtype)
        text_embeds = normalize(self.text_projection(text.pooler_output)).astype(self.dtype)
        scale = jnp.exp(self.logit_scale.astype(jnp.float32)).astype(self.dtype)
        logits_per_text = text_embeds @ image_embeds.T * scale
        text, vision = (select_outputs(x, output_hidden_states, True) for x in (text, vision))
        output = FlaxCLIPOutput(
            logits_per_text.T, logits_per_text, text_embeds, image_embeds, text, vision
        )
        return output if return_dict else output.to_tuple()


class FlaxCLIPPreTrainedModel(FlaxPreTrainedModel):
    """Base of FlaxCLIPModel; input_shape, None for the config's, has no effect."""

    config_class = FromTransformers("CLIPConfig")

    def __init__(self, config, input_shape=None, seed=0, dtype=jnp.float32, _do_init=True):
        super().__init__(config, input_shape, seed, dtype, _do_init)
        if input_shape is None:
            self.input_shape = (1, 1), image_shape(self.module)

    def __call__(
        self,
        input_ids,
        pixel_values,
        attention_mask=None,
        position_ids=None,
        params=None,
        dropout_rng=None,
        train=False,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
    ):
        """Compare every image with every text.

        Args:
            input_ids, attention_mask, position_ids, params, dropout_rng, train,
                output_attentions, output_hidden_states, return_dict: as for FlaxCLIPTextModel.
            pixel_values: (B, C, H, W) floats, of a CLIPImageProcessor.

        Returns:
            FlaxCLIPOutput, [0] logits_per_image.

        Raises:
            ValueError: input_ids are too long, or the parameters are missing.
        """
        ids, mask, positions = map(as_int32, (input_ids, attention_mask, position_ids))
        settings = self._call_settings(output_attentions, output_hidden_states, return_dict)
        arrays = ids, channels_last(pixel_values), mask, positions
        return self.module.apply(self._variables(params), *arrays, **settings)

    def get_text_features(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        params=None,
        dropout_rng=None,
        train=False,
    ):
        """Text features, (B, projection_dim), not normalised; arguments as for a call."""
        arrays = map(as_int32, (input_ids, attention_mask, position_ids))
        return self.module.apply(self._variables(params), *arrays, method="text_features")

    def get_image_features(self, pixel_values, params=None, dropout_rng=None, train=False):
        """Image features, (B, projection_dim), not normalised; arguments as for a call."""
        images = channels_last(pixel_values)
        return self.module.apply(self._variables(params), images, method="image_features")


class FlaxCLIPModel(FlaxCLIPPreTrainedModel):
    """CLIP: texts and images in one space; see FlaxPreTrainedModel."""

    module_class = FlaxCLIPModule


# --------------------------------------------------------------------- safety checker


class FlaxStableDiffusionSafetyCheckerModule(nn.Module, NestedConfigs):
    """The Linen module of FlaxStableDiffusionSafetyChecker.

    Args:
        vision_config: fields of FlaxCLIPVisionModule.
        projection_dim: size of the concepts' embeddings.
        dtype: compute dtype of the image encoder; distances are float32.
    """

    vision_config: FrozenDict
    projection_dim: int = 512
    dtype: DTypeLike = jnp.float32

    torch_class_name = "StableDiffusionSafetyChecker"

    @classmethod
    def path_in_tree(cls, path, config):
        """See FlaxModelMixin.path_in_tree; published files have the prefix twice."""
        has_one = path.startswith("vision_model/") and not path.startswith("vision_model/vision_m")
        return f"vision_model/{path}" if has_one else path

    def init_weights(self, rng):
        """Random float32 parameters of this configuration; concepts are ones. rng: a PRNG key."""
        B, H, W, C = image_shape(self)
        return self.init(rng, jnp.zeros((B, C, H, W)))["params"]

    def setup(self):
        self.vision_model = FlaxCLIPVisionModule(**self.vision_config, dtype=self.dtype)
        self.visual_projection = nn.Dense(self.projection_dim, use_bias=False, dtype=self.dtype)
        for name, number in NUM_CONCEPTS.items():
            shape = (number, self.projection_dim)
            setattr(self, name, self.param(name, nn.initializers.ones, shape))
            name = f"{name}_weights"  # thresholds
            setattr(self, name, self.param(name, nn.initializers.ones, (number,)))

    def cosine_distances(self, clip_input):
        """Cosine similarities of images to the concepts.

        Args:
            clip_input: (B, 3, H, W), from a CLIPImageProcessor.

        Returns:
            float32 (B, 17), to the concepts, and (B, 3), to the special-care concepts.
        """
        pixels = jnp.transpose(clip_input, (0, 2, 3, 1)).astype(self.dtype)
        embeds = normalize(self.visual_projection(self.vision_model(pixels).pooler_output))
        concepts, special = map(normalize, (self.concept_embeds, self.special_care_embeds))
        cosines = partial(jnp.matmul, embeds, precision="highest")  # thresholds have 3 decimals
        return cosines(concepts.T), cosines(special.T)

    def __call__(self, clip_input):
        """Whether images show a concept, bool (B,); clip_input as for cosine_distances."""
        concept_cosines, special_cosines = self.cosine_distances(clip_input)
        weights = self.concept_embeds_weights.astype(jnp.float32)
        special_weights = self.special_care_embeds_weights.astype(jnp.float32)
        needs_care = jnp.any(jnp.round(special_cosines - special_weights, 3) > 0, axis=1)
        adjustment = jnp.where(needs_care, ADJUSTMENT, 0.0)[:, None]
        scores = jnp.round(concept_cosines - weights + adjustment, 3)
        return jnp.any(scores > 0, axis=1)


def image_shape(module):
    """(1, H, W, C) of the images of a module with a vision_config."""
    side = module.vision_config["image_size"]
    return 1, side, side, module.vision_config["num_channels"]


def normalize(rows):
    """Rows of length 1, float32."""
    rows = rows.astype(jnp.float32)
    return rows / jnp.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12)


class FlaxStableDiffusionSafetyChecker(FlaxPreTrainedModel):
    """Detects images that show a concept; see FlaxPreTrainedModel. input_shape has no effect."""

    config_class = FromTransformers("CLIPConfig")
    module_class = FlaxStableDiffusionSafetyCheckerModule
    main_input_name = "clip_input"

    def __init__(self, config, input_shape=None, seed=0, dtype=jnp.float32, _do_init=True):
        super().__init__(config, input_shape or (1, 224, 224, 3), seed, dtype, _do_init)

    def __call__(self, clip_input, params=None):
        """Detect images that show a concept.

        Args:
            clip_input: (B, 3, H, W), the pixel_values of a CLIPImageProcessor.
            params: nested dict of arrays; None or {} for the model's own.

        Returns:
            bool (B,).
        """
        return _detect(self.module, self._variables(params), jnp.asarray(clip_input))

    def filter_images(self, images, feature_extractor, params=None):
        """Blacken the images that show a concept.

        Args:
            images: (B, H, W, 3), float in [0, 1].
            feature_extractor: this model's CLIPImageProcessor.
            params: nested dict of arrays; None for the model's own.

        Returns:
            (images, has_nsfw_concepts): a NumPy array like images, and a list of B bools, True
            for a black image.
        """
        images = np.asarray(images)
        pixels = (images * 255).round().astype(np.uint8)
        features = feature_extractor([Image.fromarray(image) for image in pixels])
        flags = np.asarray(self(np.stack(features.pixel_values), params))
        if flags.any():
            logger.warning(
                f"{flags.sum()} of {len(flags)} images may not be safe for work and are black; "
                "try another prompt or another seed"
            )
            images = np.where(flags[:, None, None, None], np.zeros((), images.dtype), images)
        return images, flags.tolist()


@partial(jax.jit, static_argnums=0)
def _detect(module, variables, clip_input):
    return module.apply(variables, clip_input)
