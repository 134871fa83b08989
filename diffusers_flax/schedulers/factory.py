"""Choosing a scheduler: by name, by the config of a model, and for training."""

from diffusers_flax.schedulers.base import CONFIG_NAME, FlaxSchedulerMixin
from diffusers_flax.schedulers.ddim import FlaxDDIMScheduler
from diffusers_flax.schedulers.ddpm import FlaxDDPMScheduler
from diffusers_flax.schedulers.dpmsolver import (
    FlaxDPMSolverMultistepScheduler,
    FlaxEDMDPMSolverMultistepScheduler,
)
from diffusers_flax.schedulers.euler import (
    FlaxEDMEulerScheduler,
    FlaxEDMTrainingScheduler,
    FlaxEulerAncestralDiscreteScheduler,
    FlaxEulerDiscreteScheduler,
)
from diffusers_flax.schedulers.lcm import FlaxLCMScheduler, FlaxTCDScheduler
from diffusers_flax.schedulers.lms import FlaxLMSDiscreteScheduler
from diffusers_flax.schedulers.options import FIRST_ARGUMENTS
from diffusers_flax.schedulers.pndm import FlaxPNDMScheduler

SCHEDULERS = {
    "ddpm": FlaxDDPMScheduler,
    "ddim": FlaxDDIMScheduler,
    "pndm": FlaxPNDMScheduler,
    "euler": FlaxEulerDiscreteScheduler,
    "euler_ancestral": FlaxEulerAncestralDiscreteScheduler,
    "lms": FlaxLMSDiscreteScheduler,
    "dpmsolver++": FlaxDPMSolverMultistepScheduler,
    "lcm": FlaxLCMScheduler,
    "tcd": FlaxTCDScheduler,
}

# PyTorch's classes without a Flax class, with the same noise schedule: others can take their place.
REPLACEABLE = (
    "DDIMParallelScheduler",
    "DDPMParallelScheduler",
    "DEISMultistepScheduler",
    "DPMSolverSDEScheduler",
    "DPMSolverSinglestepScheduler",
    "HeunDiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "UniPCMultistepScheduler",
)

# What takes the place of a scheduler for a model that EDM preconditions, such as CosXL.
EDM_SCHEDULERS = {
    "euler": FlaxEDMEulerScheduler,
    "dpmsolver++": FlaxEDMDPMSolverMultistepScheduler,
}
EDM_CLASSES = tuple(cls.__name__.removeprefix("Flax") for cls in EDM_SCHEDULERS.values())

# The options that training depends on.
TRAINING_OPTIONS = (*FIRST_ARGUMENTS, "prediction_type", "rescale_betas_zero_snr")


def make_scheduler(name, config):
    """Build (scheduler, state) of a name in SCHEDULERS from the config of any scheduler."""
    if name not in SCHEDULERS:
        raise ValueError(f"scheduler {name!r} is unknown; choose from {', '.join(SCHEDULERS)}")
    scheduler = SCHEDULERS[name].from_config(config)
    return scheduler, scheduler.create_state()


def scheduler_from_pretrained(
    pretrained_model_name_or_path, subfolder="scheduler", revision=None, **hub_options
):
    """Build (scheduler, state) of the class that scheduler_config.json names; see load_config."""
    config = FlaxSchedulerMixin._read_config(
        pretrained_model_name_or_path, subfolder, revision, **hub_options
    )
    return scheduler_from_config(config, pretrained_model_name_or_path)


def scheduler_from_config(config, source, name=None, **changes):
    """Build (scheduler, state) of a scheduler_config.json's content.

    Args:
        config: mapping.
        source: its directory or hub id, for errors.
        name: of SCHEDULERS; None: the class that the config names.
        **changes: options to replace.

    Raises:
        ValueError: the config is of a class that is not supported, unless name replaces one of
            REPLACEABLE; it is of EDM and name is not in EDM_SCHEDULERS; or as in from_config.
    """
    by_class_name = {cls.__name__.removeprefix("Flax"): cls for cls in SCHEDULERS.values()}
    own = class_name(config)
    if own in EDM_CLASSES:
        return edm_scheduler(config, source, name, changes)
    if own not in by_class_name and not (name and own in REPLACEABLE):
        remedy = "; choose one with --scheduler or scheduler=" if own in REPLACEABLE else ""
        raise ValueError(
            f"{CONFIG_NAME} of {source} names _class_name={own}, which is not supported; "
            f"supported are {', '.join(by_class_name)}{remedy}"
        )
    cls = SCHEDULERS[name] if name else by_class_name[own]
    scheduler = cls.from_file_content(config, source, **changes)
    return scheduler, scheduler.create_state()


def edm_scheduler(config, source, name, changes):
    """scheduler_from_config of one of EDM_CLASSES."""
    if name not in (None, *EDM_SCHEDULERS):
        raise ValueError(
            f"--scheduler {name} has other noise levels than EDM, with which {source} was trained; "
            f"take {' or '.join(EDM_SCHEDULERS)}"
        )
    by_class_name = dict(zip(EDM_CLASSES, EDM_SCHEDULERS.values()))
    cls = EDM_SCHEDULERS[name] if name else by_class_name[class_name(config)]
    scheduler = cls.from_file_content(config, source, **changes)
    return scheduler, scheduler.create_state()


def class_name(config):
    """The class of a scheduler_config.json's content, as PyTorch names it."""
    return str(config.get("_class_name")).removeprefix("Flax")


def training_scheduler(config, source):
    """Build (FlaxDDPMScheduler, state) with the noise schedule of a config, for training.

    A config of EDM makes a FlaxEDMTrainingScheduler.

    Args:
        config, source: as for scheduler_from_config. Options of sampling may have any value.

    Raises:
        ValueError: as for scheduler_from_config, or EDM's prediction_type is not v_prediction.
    """
    if class_name(config) in EDM_CLASSES:
        scheduler = FlaxEDMTrainingScheduler.from_file_content(config, source)
        if scheduler.config.prediction_type != "v_prediction":
            raise ValueError(
                f"{CONFIG_NAME} of {source} has EDM's prediction_type="
                f"{scheduler.config.prediction_type!r}, which cannot be trained; v_prediction can"
            )
        return scheduler, scheduler.create_state()
    noise = {name: value for name, value in config.items() if name in TRAINING_OPTIONS}
    named = {"_class_name": config.get("_class_name")}
    return scheduler_from_config(noise | named, source, "ddpm")


def check_scheduler(name):
    """Raise a ValueError for an unknown --scheduler; None is the model's own."""
    if name not in (None, *SCHEDULERS):
        raise ValueError(f"--scheduler {name} is unknown; choose from {', '.join(SCHEDULERS)}")


def choose_scheduler(config, source, name=None, timestep_spacing=None, prediction_type=None):
    """Build (scheduler, state) of --scheduler, --timestep_spacing and --prediction_type.

    Args:
        config, source: content of the model's scheduler_config.json, and the model.
        name: of SCHEDULERS; None: the class that the config names.
        timestep_spacing, prediction_type: None: as in the config.

    Raises:
        ValueError: the scheduler does not use timestep_spacing, or is not supported.
    """
    changes = {"timestep_spacing": timestep_spacing, "prediction_type": prediction_type}
    changes = {option: value for option, value in changes.items() if value}
    scheduler, state = scheduler_from_config(config, source, name, **changes)
    if timestep_spacing and isinstance(scheduler, (SCHEDULERS["lcm"], SCHEDULERS["tcd"])):
        raise ValueError(
            f"--timestep_spacing {timestep_spacing} has no effect with "
            f"{type(scheduler).__name__}, which visits timesteps of the distillation; leave it out"
        )
    return scheduler, state
