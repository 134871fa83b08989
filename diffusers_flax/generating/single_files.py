"""Flags whose value is a model in one file."""

from dataclasses import replace

from diffusers_flax.loading.hub import open_source
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
    components = {flag: name for flag, name in components.items() if getattr(config, flag)}
    values, revision = getattr(config, model), getattr(config, "revision", None)
    is_averaged = use_ema_weights and "unet" not in components.values()
    found = [
        open_source(
            "pretrained_model_name_or_path", x, component, configs, is_averaged, revision=revision
        )
        for x in (values if isinstance(values, tuple) else (values,))
    ]
    changes = {model: tuple(found) if isinstance(values, tuple) else found[0]}
    of_main = configs or getattr(found[0], "configs", found[0]) or None
    for flag, name in components.items():
        is_averaged = use_ema_weights and name == "unet"
        changes[flag] = open_source(flag, getattr(config, flag), name, of_main, is_averaged)
    files = [x for x in (*found, *changes.values()) if isinstance(x, SingleFile)]
    if configs and not files:
        raise ValueError(
            f"--config_name_or_path {configs} goes with a model that is one file; leave it out"
        )
    if use_ema_weights and not any(file.use_ema_weights for file in files):
        raise ValueError("--use_ema_weights goes with a UNet in one file; leave it out")
    return replace(config, **changes)
