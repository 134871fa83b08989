"""Opening models as the flags of a program say."""

from pathlib import Path

from diffusers_flax.loading.directories import read_index
from diffusers_flax.loading.hub import locate
from diffusers_flax.pipelines.base import MODULES


def check_xl(model, revision, unet):
    """Raise a ValueError, which names the right program, for a model that is not SDXL for text.

    Args:
        model, revision: --pretrained_model_name_or_path and --revision.
        unet: --unet, or None.
    """
    given = f"--pretrained_model_name_or_path {model}"
    name = str(read_index(model, revision).get("_class_name"))
    if "InstructPix2Pix" in name:
        raise ValueError(f"{given} is an edit model ({name}); edit_cli.py edits images with it")
    if "XL" not in name:
        raise ValueError(
            f"{given} is a {name}, not Stable Diffusion XL; give an SDXL model, or use Stable "
            "Diffusion 1.x and 2.x from Python, see docs/sdxl.md"
        )
    folder, file = locate("unet", unet) if unet else (None, None)
    if not folder or file:
        return
    if Path(folder, "unet", "config.json").is_file():
        raise ValueError(f"--unet {unet} is a pipeline; give its UNet, {Path(unet, 'unet')}")
    config = MODULES["unet"].load_config(folder)
    if config.get("addition_embed_type") != "text_time":
        raise ValueError(
            f"--unet {unet} is a UNet of Stable Diffusion 1.x or 2.x, the model is SDXL; give a "
            "UNet of SDXL"
        )
