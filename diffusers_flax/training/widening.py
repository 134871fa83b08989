"""The UNet that create_modified_unet.py widens: opened, and refused if it is of another kind.

unet, params = load_text_to_image_unet("MODEL")
in_channels = choose_in_channels("MODEL", unet)
"""

from diffusers_flax.loading.directories import INDEX_NAME, has_component
from diffusers_flax.loading.hub import fetch_config, fetch_file, place_in_words
from diffusers_flax.loading.single_file import PURPOSES
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.published_configs import REFINER_FEATURES, kind_of_unet


def load_text_to_image_unet(path, subfolder="unet", revision=None, variant=None):
    """Open the UNet of a model of Stable Diffusion or SDXL, in the dtype of its file.

    Args:
        path: pipeline directory, hub id or SingleFile.
        subfolder: subdirectory of the UNet; "": the directory itself.
        revision: branch, tag or commit, of a hub id.
        variant: of the UNet's files, e.g. "fp16".

    Returns:
        (FlaxUNet2DConditionModel, its parameters).

    Raises:
        ValueError: there is no UNet, or it is SDXL's refiner.
    """
    given = f"--pretrained_model_name_or_path {path}"
    index = fetch_config(path, INDEX_NAME, None, revision)[0] or {}
    if has_component(index, "text_encoder_2") and not has_component(index, "text_encoder"):
        raise ValueError(
            f"{given} is SDXL's refiner, which lacks the first text encoder; give the base model"
        )
    if fetch_file(path, "config.json", subfolder or None, revision) is None:
        where = place_in_words(path, subfolder, revision)
        raise ValueError(
            f"{given}: there is no config.json in {where}; give the directory of a pipeline, or "
            'the directory of a UNet and --subfolder ""'
        )
    return FlaxUNet2DConditionModel.from_pretrained(
        path,
        subfolder=subfolder or None,
        revision=revision,
        variant=variant,
        convert=lambda name, x: x,  # no warning about float16, which the trainer casts
    )


def choose_in_channels(path, unet, in_channels=None):
    """The input channels of the widened UNet.

    Args:
        path: where the UNet is from, for errors.
        unet: FlaxUNet2DConditionModel.
        in_channels: as asked for; None: twice the latents' channels.

    Raises:
        ValueError: the UNet is of another kind, or has as many channels already.
    """
    if unet.projection_class_embeddings_input_dim == REFINER_FEATURES:
        raise ValueError(f"the UNet of {path} is of SDXL's refiner; give the base model's")
    kind = kind_of_unet(unet.in_channels, unet.out_channels)
    if kind not in PURPOSES or (in_channels is None and PURPOSES[kind]):
        raise ValueError(
            f"the UNet of {path} has {unet.in_channels} input channels ({kind or 'not known'}), "
            f"where a text-to-image model has {unet.out_channels}; give a text-to-image model"
        )
    if in_channels is None:
        return 2 * unet.out_channels
    if in_channels <= unet.in_channels:
        raise ValueError(
            f"--in_channels {in_channels} must be more than the {unet.in_channels} input "
            "channels the UNet has; give a larger number, or leave it out"
        )
    return in_channels
