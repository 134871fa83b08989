"""results.json: a row per model, scales and seed; continued after an interruption."""

import json

import jax
import numpy as np

from diffusers_flax.devices.precision import choose_dtype
from diffusers_flax.evaluation.held_out import checksum_of_pairs
from diffusers_flax.generating.recipes import digest_of, state_of_files
from diffusers_flax.loading.files import read_json, write_text
from diffusers_flax.messages import differences

RESULTS = "results.json"
VALUES = "values"  # directory of the values per pair, a file for each row of results.json
SETTINGS = (  # flags
    *("num_inference_steps", "protocol", "clip_model", "dino_model", "metrics", "scheduler"),
    *("timesteps", "eta", "timestep_spacing", "unet_delta", "lora", "embedding", "accelerate"),
    *("batch_size", "use_masks", "wrong_reference", "guidance"),
)
FILES = ("unet_delta", "lora", "embedding", "accelerate")  # flags that may name files


def settings_of_results(config, pairs, resolution):
    """The settings that all rows of results.json share, most by their flags' names."""
    devices = jax.local_devices()[: len(pairs)]
    settings = {
        "num_pairs": len(pairs),
        "checksum of the pairs": checksum_of_pairs(pairs),
        "resolution": resolution,
        "dtype": str(choose_dtype(config.dtype)),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        **{name: getattr(config, name) for name in SETTINGS},
        "files of these flags": digest_of([state_of_files(getattr(config, x)) for x in FILES]),
    }
    return json.loads(json.dumps(settings))  # lists instead of tuples


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
    file = output_dir / RESULTS
    results = {"settings": settings, "models": {}, "baselines": [], "rows": []}
    if file.exists() and not overwrite:
        results = read_json(file)
    changes = differences(results["settings"], settings)
    for model in models:
        state = {"files": digest_of([model, state_of_files(model)])}
        if results["models"].setdefault(model, state)["files"] != state["files"]:
            changes.append(f"--model {model} has other files now")
    if changes:
        raise ValueError(
            f"{file} has other settings: {'; '.join(changes)}; name another --output_dir, or "
            "give --overwrite_output_dir to measure again"
        )
    return results


def save_results(output_dir, results):
    """Write results.json."""
    write_text(output_dir / RESULTS, json.dumps(results, indent=1) + "\n")


def save_values(output_dir, name, values):
    """Write {metric: one float per pair} of the row of results.json with "images": name."""
    known = {
        metric: [float(x) if np.isfinite(x) else None for x in numbers]
        for metric, numbers in values.items()
    }
    write_text(output_dir / VALUES / f"{name}.json", json.dumps(known) + "\n")


def load_values(output_dir, name):
    """{metric: (n,) float64, NaN where unknown} of save_values."""
    values = read_json(output_dir / VALUES / f"{name}.json")
    return {metric: np.array(x, np.float64) for metric, x in values.items()}
