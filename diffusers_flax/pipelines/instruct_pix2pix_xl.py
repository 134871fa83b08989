"""FlaxStableDiffusionXLInstructPix2PixPipeline: edit images with SDXL, in one compiled program.

    pipeline, params = FlaxStableDiffusionXLInstructPix2PixPipeline.from_pretrained("MODEL")
    prompt_ids, image = pipeline.prepare_inputs("make it red", Image.open("in.png"))
    images = pipeline(prompt_ids, image, params, jax.random.key(0)).images    # (1, H, W, 3), [0, 1]

Opens the models that flax_train_instruct_pix2pix.py makes from SDXL and published ones with 8
input channels, such as diffusers/sdxl-instructpix2pix-768. As in PyTorch's pipeline, the latents of
the image to edit are unscaled, micro-conditioning says that the image has the result's size and was
not cropped, and without a negative prompt the null text is zeros. Unlike in PyTorch, the default
size is the image's own, and any guidance scales >= 0 are applied.

Source: InstructPix2Pix (arXiv 2211.09800), SDXL (arXiv 2307.01952).
"""

from dataclasses import dataclass

from diffusers_flax.pipelines.instruct_pix2pix import TEXT_OF_BRANCH, InstructPix2Pix
from diffusers_flax.pipelines.stable_diffusion_xl import XLParts

COSXL_SCHEDULERS = ("EDMEulerScheduler", "EDMDPMSolverMultistepScheduler")


@dataclass(frozen=True, eq=False)
class FlaxStableDiffusionXLInstructPix2PixPipeline(InstructPix2Pix, XLParts):
    """Edit images with SDXL; see FlaxStableDiffusionInstructPix2PixPipeline and XLParts."""

    torch_class_name = "StableDiffusionXLInstructPix2PixPipeline"

    @classmethod
    def parts_of(cls, path, index):
        """See FlaxDiffusionPipeline.parts_of; refuses CosXL."""
        refuse_cosxl(path, index, "use an InstructPix2Pix model of SDXL")
        return super().parts_of(path, index)

    def _encode_text(self, params, prompt_ids, neg_prompt_ids, branches, latent_shape):
        texts = [TEXT_OF_BRANCH[branch] for branch in branches]
        return super()._encode_text(params, prompt_ids, neg_prompt_ids, texts, latent_shape)


def refuse_cosxl(path, index, remedy):
    """Raise a ValueError if model_index.json's content, index, is of a CosXL model."""
    scheduler = (index.get("scheduler") or [None, None])[1]
    if index.get("is_cosxl_edit") or scheduler in COSXL_SCHEDULERS:
        raise ValueError(f"{path} is a CosXL model ({scheduler}), which is not supported; {remedy}")
