"""The Flax classes that diffusers 0.40 and transformers 5 removed, under the same names.

    from diffusers_flax import FlaxStableDiffusionPipeline

A name is imported when it is first used, as jax takes seconds to import.
"""

import importlib

NAMES = {  # by module
    "models.unet": ("FlaxUNet2DConditionModel", "FlaxUNet2DConditionOutput"),
    "models.controlnet": (
        "FlaxControlNetModel",
        "FlaxControlNetOutput",
        "FlaxMultiControlNetModel",
    ),
    "models.vae": (
        "FlaxAutoencoderKL",
        "FlaxAutoencoderKLOutput",
        "FlaxDecoderOutput",
        "FlaxDiagonalGaussianDistribution",
    ),
    "models.tiny_vae": ("FlaxAutoencoderTiny", "FlaxAutoencoderTinyOutput"),
    "models.clip": (
        "FlaxBaseModelOutput",
        "FlaxBaseModelOutputWithPooling",
        "FlaxCLIPTextModel",
        "FlaxCLIPTextModelOutput",
        "FlaxCLIPTextModelWithProjection",
        "FlaxCLIPTextPreTrainedModel",
        "FlaxCLIPVisionModel",
        "FlaxCLIPVisionPreTrainedModel",
    ),
    "models.clip_similarities": (
        "FlaxCLIPModel",
        "FlaxCLIPOutput",
        "FlaxCLIPPreTrainedModel",
        "FlaxStableDiffusionSafetyChecker",
    ),
    "models.base": ("FlaxModelMixin",),
    "models.pretrained": ("FlaxPreTrainedModel",),
    "schedulers.base": (
        "FlaxKarrasDiffusionSchedulers",
        "FlaxSchedulerMixin",
        "FlaxSchedulerOutput",
        "SchedulerState",
    ),
    "schedulers.noise_schedule": ("CommonSchedulerState",),
    "schedulers.ddpm": ("DDPMSchedulerState", "FlaxDDPMScheduler", "FlaxDDPMSchedulerOutput"),
    "schedulers.ddim": ("DDIMSchedulerState", "FlaxDDIMScheduler", "FlaxDDIMSchedulerOutput"),
    "schedulers.pndm": ("FlaxPNDMScheduler", "FlaxPNDMSchedulerOutput", "PNDMSchedulerState"),
    "schedulers.euler": (
        "EulerDiscreteSchedulerState",
        "FlaxEDMEulerScheduler",
        "FlaxEulerAncestralDiscreteScheduler",
        "FlaxEulerDiscreteScheduler",
        "FlaxEulerDiscreteSchedulerOutput",
    ),
    "schedulers.lms": (
        "FlaxLMSDiscreteScheduler",
        "FlaxLMSSchedulerOutput",
        "LMSDiscreteSchedulerState",
    ),
    "schedulers.dpmsolver": (
        "DPMSolverMultistepSchedulerState",
        "FlaxDPMSolverMultistepScheduler",
        "FlaxDPMSolverMultistepSchedulerOutput",
        "FlaxEDMDPMSolverMultistepScheduler",
    ),
    "schedulers.flow": (
        "FlaxFlowMatchEulerDiscreteScheduler",
        "FlaxFlowMatchEulerDiscreteSchedulerOutput",
        "FlaxFlowMatchLCMScheduler",
        "FlaxFlowMatchLCMSchedulerOutput",
    ),
    "schedulers.lcm": (
        "FlaxLCMScheduler",
        "FlaxLCMSchedulerOutput",
        "FlaxTCDScheduler",
        "FlaxTCDSchedulerOutput",
    ),
    "pipelines.base": ("FlaxDiffusionPipeline",),
    "pipelines.stable_diffusion": (
        "FlaxStableDiffusionImg2ImgPipeline",
        "FlaxStableDiffusionInpaintPipeline",
        "FlaxStableDiffusionPipeline",
    ),
    "pipelines.instruct_pix2pix": ("FlaxStableDiffusionInstructPix2PixPipeline",),
    "pipelines.stable_diffusion_xl": (
        "FlaxStableDiffusionXLImg2ImgPipeline",
        "FlaxStableDiffusionXLInpaintPipeline",
        "FlaxStableDiffusionXLPipeline",
    ),
    "pipelines.controlnet": (
        "FlaxStableDiffusionControlNetPipeline",
        "FlaxStableDiffusionXLControlNetPipeline",
    ),
    "pipelines.instruct_pix2pix_xl": ("FlaxStableDiffusionXLInstructPix2PixPipeline",),
    "outputs": (
        "FlaxImagePipelineOutput",
        "FlaxStableDiffusionPipelineOutput",
        "FlaxStableDiffusionXLPipelineOutput",
        "ModelOutput",
    ),
    "loading.configs": ("ConfigMixin",),
}
MODULE_OF = {name: module for module, names in NAMES.items() for name in names}
__all__ = sorted(MODULE_OF)


def __getattr__(name):
    if name not in MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return __all__
