"""FlaxStableDiffusionXLInstructPix2PixPipeline: edit images with SDXL, in one compiled program.

    pipeline, params = FlaxStableDiffusionXLInstructPix2PixPipeline.from_pretrained("MODEL")
    prompt_ids, image = pipeline.prepare_inputs("make it red", Image.open("in.png"))
    images = pipeline(prompt_ids, image, params, jax.random.key(0)).images    # (1, H, W, 3), [0, 1]

For SDXL models whose UNet has 8 input channels, such as diffusers/sdxl-instructpix2pix-768 and
CosXL Edit. As in PyTorch's pipeline, the latents of the image to edit are unscaled except for CosXL
Edit, micro-conditioning says that the image has the result's size and was not cropped, and without
a negative prompt the null text is zeros. Unlike in PyTorch, the default size is the image's own,
and any guidance scales >= 0 are applied.

Source: InstructPix2Pix (arXiv 2211.09800), SDXL (arXiv 2307.01952).
"""

from dataclasses import dataclass

from diffusers_flax.pipelines.instruct_pix2pix import InstructPix2Pix
from diffusers_flax.pipelines.stable_diffusion_xl import XLComponents
from diffusers_flax.schedulers.factory import EDM_CLASSES


def is_cosxl_edit(index):
    """Whether a model takes scaled latents of the image to edit, as CosXL Edit, by its index.

    Without an entry the scheduler decides, as PyTorch's save_pretrained does not write the entry.
    """
    _, scheduler = index.get("scheduler") or (None, None)
    return bool(index.get("is_cosxl_edit", scheduler in EDM_CLASSES))


@dataclass(frozen=True, eq=False)
class FlaxStableDiffusionXLInstructPix2PixPipeline(InstructPix2Pix, XLComponents):
    """Edit images with SDXL; see FlaxStableDiffusionInstructPix2PixPipeline and XLComponents.

    is_cosxl_edit: the latents of the image to edit are scaled, as CosXL Edit was trained.
    """

    is_cosxl_edit: bool = False

    torch_class_name = "StableDiffusionXLInstructPix2PixPipeline"

    @classmethod
    def _settings(cls, index):
        return super()._settings(index) | {"is_cosxl_edit": is_cosxl_edit(index)}

    def _index(self):
        return super()._index() | {"is_cosxl_edit": self.is_cosxl_edit}
