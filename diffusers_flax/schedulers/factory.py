"""Choosing a scheduler: by name, by the config of a model, and for training."""

from diffusers_flax.schedulers.base import CONFIG_NAME, FIRST_ARGUMENTS, FlaxSchedulerMixin
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
from diffusers_flax.schedulers.flow import (
    FlaxFlowMatchEulerDiscreteScheduler,
    FlaxFlowMatchLCMScheduler,
)
from diffusers_flax.schedulers.lcm import FlaxLCMScheduler, FlaxTCDScheduler
from diffusers_flax.schedulers.lms import FlaxLMSDiscreteScheduler
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

# PyTorch's classes without a Flax class; the schedulers above can replace them, as their noise
# schedule is the same.
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

# The schedulers of models with EDM's preconditioning, such as CosXL.
EDM_SCHEDULERS = {
    "euler": FlaxEDMEulerScheduler,
    "dpmsolver++": FlaxEDMDPMSolverMultistepScheduler,
}
EDM_CLASSES = tuple(cls.__name__.removeprefix("Flax") for cls in EDM_SCHEDULERS.values())
# The schedulers of models that were trained with a rectified flow.
FLOW_SCHEDULERS = {
    "euler": FlaxFlowMatchEulerDiscreteScheduler,
    "lcm": FlaxFlowMatchLCMScheduler,
}
FLOW_CLASSES = tuple(cls.__name__.removeprefix("Flax") for cls in FLOW_SCHEDULERS.values())

# Options that change training.
TRAINING_OPTIONS = (
    "_class_name",
    *FIRST_ARGUMENTS,
    "prediction_type",
    "rescale_betas_zero_snr",
)


# Values of UniPC's and DEIS's options that stand for DPM-Solver's defaults, as in diffusers.
FOREIGN_VALUES = ("bh1", "bh2", "logrho", "deis")


def make_scheduler(name, config):
    """(scheduler, state) of a name in SCHEDULERS, from any scheduler's config."""
    check_scheduler(name)
    scheduler = SCHEDULERS[name].from_config(config)
    return scheduler, scheduler.create_state()


def scheduler_from_pretrained(
    pretrained_model_name_or_path, subfolder="scheduler", revision=None, **hub_options
):
    """(scheduler, state) of the class that scheduler_config.json names; see load_config."""
    source = pretrained_model_name_or_path
    config = FlaxSchedulerMixin._read_config(source, subfolder, revision, **hub_options)
    return scheduler_from_config(config, source)


def scheduler_from_config(config, source, name=None, **changes):
    """(scheduler, state) of a scheduler_config.json's content.

    Args:
        config: mapping.
        source: its directory or hub id, for errors.
        name: a key of SCHEDULERS; None: the class that the config names.
        **changes: options to replace.

    Raises:
        ValueError: the config names an unsupported class, unless name replaces one of REPLACEABLE;
            or one of EDM or of a flow, and name is not in EDM_SCHEDULERS or FLOW_SCHEDULERS; or as
            in from_config.
    """
    named, schedulers = class_name(config), SCHEDULERS
    if named in EDM_CLASSES + FLOW_CLASSES:
        schedulers = EDM_SCHEDULERS if named in EDM_CLASSES else FLOW_SCHEDULERS
        if name not in (None, *schedulers):
            raise ValueError(
                f"scheduler={name} has other noise levels than {named}, with which {source} was "
                f"trained; take {' or '.join(schedulers)}"
            )
    by_class_name = {cls.__name__.removeprefix("Flax"): cls for cls in schedulers.values()}
    if named not in by_class_name and not (name and named in REPLACEABLE):
        remedy = "; choose one with scheduler=" if named in REPLACEABLE else ""
        raise ValueError(
            f"{CONFIG_NAME} of {source} names _class_name={named}, which is not supported; "
            f"supported are {', '.join(by_class_name)}{remedy}"
        )
    cls = schedulers[name] if name else by_class_name[named]
    known = {k: v for k, v in config.items() if not (isinstance(v, str) and v in FOREIGN_VALUES)}
    scheduler = cls.from_file_content(known, source, **changes)
    return scheduler, scheduler.create_state()


def class_name(config):
    """PyTorch's name of the class in a scheduler_config.json's content."""
    return str(config.get("_class_name")).removeprefix("Flax")


def training_scheduler(config, source):
    """(FlaxDDPMScheduler, state) with a config's noise schedule, for training.

    An EDM config makes a FlaxEDMTrainingScheduler, a flow's one of FLOW_SCHEDULERS.

    Args:
        config, source: as for scheduler_from_config; the options for sampling may have any value.

    Raises:
        ValueError: as for scheduler_from_config.
    """
    if class_name(config) in EDM_CLASSES:
        scheduler = FlaxEDMTrainingScheduler.from_file_content(config, source)
        return scheduler, scheduler.create_state()
    if class_name(config) in FLOW_CLASSES:
        return scheduler_from_config(config, source)
    options = {name: config[name] for name in TRAINING_OPTIONS if name in config}
    return scheduler_from_config(options, source, "ddpm")


def check_scheduler(name):
    """Raise a ValueError for an unknown scheduler name; None is the model's own."""
    if name not in (None, *SCHEDULERS):
        raise ValueError(f"scheduler={name} is unknown; choose from {', '.join(SCHEDULERS)}")


def choose_scheduler(config, source, name=None, timestep_spacing=None, prediction_type=None):
    """(scheduler, state) of a model, with the user's choices.

    Args:
        config, source, name: as for scheduler_from_config.
        timestep_spacing, prediction_type: None: the config's.
    """
    changes = {"timestep_spacing": timestep_spacing, "prediction_type": prediction_type}
    changes = {option: value for option, value in changes.items() if value}
    return scheduler_from_config(config, source, name, **changes)
