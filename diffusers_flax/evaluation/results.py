"""results.json: a row per model, scales and seed; continued after an interruption."""

import hashlib
import json

import jax

from diffusers_flax.acceleration.plans import parse
from diffusers_flax.devices.precision import choose_dtype
from diffusers_flax.evaluation.held_out import checksum_of_pairs
from diffusers_flax.evaluation.metrics import METRICS
from diffusers_flax.evaluation.protocols import PROTOCOLS, metrics_of
from diffusers_flax.generating.recipes import commit_of, identify
from diffusers_flax.loading.files import read_json, write_text
from diffusers_flax.loading.single_file import SingleFile
from diffusers_flax.messages import differences
from diffusers_flax.pipelines.sampling import timestep_options

RESULTS = "results.json"


def settings_of_results(config, pairs, resolution, factor):
    """The settings that all rows of results.json share, by their flags' names."""
    devices = jax.local_devices()[: len(pairs)]
    steps = timestep_options(config.num_inference_steps, config.timesteps, config.eta)
    uses_dino = any(METRICS[name].network == "dino" for name in metrics_of(config))
    settings = {
        "num_pairs": len(pairs),
        "num_masks": sum(pair.mask is not None for pair in pairs),
        "checksum of the pairs": checksum_of_pairs(pairs),
        "num_inference_steps": steps["num_inference_steps"],
        "resolution": resolution,
        "multiple of sides": factor,
        "timesteps": list(config.timesteps) or None,
        "accelerate": str(parse(config.accelerate)) or None,
        "dtype": str(choose_dtype(config.dtype)),
        "clip_model": config.clip_model or "none",
        "protocol": config.protocol if PROTOCOLS[config.protocol].is_benchmark else None,
        "dino_model": config.dino_model if uses_dino else None,
        "devices": f"{len(devices)} x {devices[0].device_kind}",
    }
    for name in ("unet_delta", "lora", "embedding", "metrics"):
        settings[name] = list(getattr(config, name)) or None
    for name in ("scheduler", "eta", "timestep_spacing", "batch_size", "use_masks", "mask_feather"):
        settings[name] = getattr(config, name)
    # Sizes and times of files that the flags name
    for name in ("unet_delta", "lora", "embedding", "accelerate"):
        settings[f"files of {name}"] = state_of(name, getattr(config, name))
    return settings


def state_of(flag, value):
    """A checksum of a flag's value with names, sizes and times of the files that it names."""
    state = identify(flag, value)
    if isinstance(value, SingleFile):
        state = [state, value.use_ema_weights, identify(flag, value.configs)]
    state = json.dumps(state, default=str)
    return hashlib.sha256(state.encode()).hexdigest()[:16]


def load_results(output_dir, settings, models, overwrite):
    """The results in output_dir to continue from, or empty ones.

    Args:
        output_dir: directory of results.json.
        settings: of settings_of_results; earlier results must have the same.
        models: whose files, with sizes and times, must be the same too.
        overwrite: begin with empty results.

    Returns:
        {"settings", "models", "baselines", "rows"}.

    Raises:
        ValueError: they are of other settings, pairs or weights.
    """
    file, results = output_dir / RESULTS, {"settings": settings, "models": {}}
    results |= {"baselines": [], "rows": []}
    states = {model: f"{state_of('model', model)} {commit_of(model) or ''}" for model in models}
    if file.exists() and not overwrite:
        results = read_json(file)
        saved = {f"--model {name}": x.get("files") for name, x in results["models"].items()}
        current = {f"--model {name}": x for name, x in states.items()}
        current = {name: x for name, x in current.items() if name in saved}
        if changes := differences(results["settings"] | saved, settings | current):
            raise ValueError(
                f"{file} has other settings: {'; '.join(changes)}; name another --output_dir, or "
                "give --overwrite_output_dir to measure again"
            )
    for name, state in states.items():
        results["models"].setdefault(name, {"files": state})
    return results


def save_results(output_dir, results):
    """Write results.json."""
    write_text(output_dir / RESULTS, json.dumps(results, indent=1) + "\n")
