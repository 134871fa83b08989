"""Flags whose value is a model in one file."""

from dataclasses import replace

from diffusers_flax.loading.hub import locate, open_source
from diffusers_flax.loading.single_file import SingleFile


def with_single_files(config, model, component=None, **components):
    """Replace the values of flags that name a model in one file by SingleFile objects.

    Args:
        config: dataclass of the flags, with config_name_or_path.
        model: name of the main model's flag, which may have several values.
        component: what the program needs of the main model; None: the whole pipeline.
        **components: {name of another flag: its component}; configs are the main model's.

    Raises:
        ValueError: see open_source; or a flag has no effect.
    """
    configs, use_ema_weights = config.config_name_or_path, getattr(config, "use_ema_weights", False)
    if configs and locate("config", configs)[1]:
        raise ValueError(f"--config_name_or_path {configs} is a file; give a directory or hub id")
    components = {flag: name for flag, name in components.items() if getattr(config, flag)}
    values = getattr(config, model)
    options = dict(revision=getattr(config, "revision", None))
    options["use_ema_weights"] = use_ema_weights and "unet" not in components.values()
    opened = [
        open_source("pretrained_model_name_or_path", source, component, configs, **options)
        for source in (values if isinstance(values, tuple) else (values,))
    ]
    main, changes = opened[0], {model: tuple(opened) if isinstance(values, tuple) else opened[0]}
    of_main = configs or getattr(main, "configs", main) or None
    for flag, name in components.items():
        is_averaged = use_ema_weights and name == "unet"
        options = dict(component=name, configs=of_main, use_ema_weights=is_averaged)
        changes[flag] = open_source(flag, getattr(config, flag), **options)
    opened += [changes[flag] for flag in components]
    files = [source for source in opened if isinstance(source, SingleFile)]
    if configs and not files:
        raise ValueError(
            f"--config_name_or_path {configs} goes with a model that is one file; leave it out"
        )
    if use_ema_weights and not any(file.use_ema_weights for file in files):
        raise ValueError("--use_ema_weights goes with a UNet in one file; leave it out")
    if getattr(config, "variant", None) and isinstance(main, SingleFile):
        raise ValueError(
            f"--variant {config.variant} goes with a directory or hub id; --{model} {main} is one "
            "file"
        )
    return replace(config, **changes)
