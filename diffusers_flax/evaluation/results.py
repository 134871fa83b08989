"""results.json: a row per model, scales and seed; continued after an interruption."""

import json
import os
import zlib
from pathlib import Path

import jax

from diffusers_flax.acceleration.plans import parse
from diffusers_flax.devices.precision import choose_dtype
from diffusers_flax.evaluation.held_out import checksum_of_masks, checksum_of_pairs
from diffusers_flax.evaluation.protocols import DINO, PROTOCOLS, metrics_of
from diffusers_flax.loading.directories import COMPONENTS, INDEX_NAME
from diffusers_flax.loading.embeddings import EMBEDDING_FILES, split_token
from diffusers_flax.loading.files import write_text
from diffusers_flax.loading.hub import fetch_file, fetch_named
from diffusers_flax.loading.lora import find_lora, split_weight
from diffusers_flax.loading.single_file import SingleFile
from diffusers_flax.loading.unet_delta import split_specs, unet_files
from diffusers_flax.messages import differences, one_line
from diffusers_flax.pipelines.sampling import timestep_options

RESULTS = "results.json"
# Settings that may differ from earlier results: masks do not change the other metrics.
MASK_SETTINGS = ("num_masks", "checksum of the masks")


def settings_of_results(config, pairs, resolution, factor):
    """The settings that all rows of results.json share."""
    devices = jax.local_devices()[: len(pairs)]
    accelerate = parse(config.accelerate)
    steps = timestep_options(config.num_inference_steps, config.timesteps, config.eta)
    return {
        "num_pairs": len(pairs),
        "num_truths": sum(pair.edited is not None for pair in pairs),
        "num_masks": sum(pair.mask is not None for pair in pairs) or None,
        "checksum of the masks": checksum_of_masks(pairs),
        "checksum of the pairs": checksum_of_pairs(pairs),
        "num_inference_steps": steps["num_inference_steps"],
        "resolution": resolution,
        "multiple of sides": factor,
        "scheduler": config.scheduler,
        "timesteps": list(config.timesteps) or None,
        "eta": config.eta,
        "timestep_spacing": config.timestep_spacing,
        "unet_delta": list(config.unet_delta) or None,
        "checksum of the difference": delta_checksum(config.unet_delta),
        "lora": list(config.lora) or None,
        "checksum of the LoRAs": lora_checksum(config.lora),
        "embedding": list(config.embedding) or None,
        "checksum of the embeddings": embedding_checksum(config.embedding),
        "accelerate": str(accelerate) or None,
        "checksum of the TAESD": tiny_vae_checksum(accelerate),
        "dtype": str(choose_dtype(config.dtype)),
        "batch_size": config.batch_size,
        "use_masks": config.use_masks or None,
        "mask_feather": config.mask_feather or None,
        "clip_model": config.clip_model or "none",
        "protocol": config.protocol if config.protocol in PROTOCOLS else None,
        "metrics": list(config.metrics) or None,
        "dino_model": config.dino_model if set(metrics_of(config)) & DINO.keys() else None,
        "devices": f"{len(devices)} x {devices[0].device_kind}",
    }


def load_results(output_dir, settings, checksums, overwrite):
    """The results in output_dir to continue from, or empty ones.

    Args:
        output_dir: directory of results.json.
        settings: {name: value}; except for MASK_SETTINGS, earlier results must have the same.
        checksums: {model: checksum of its weights}, likewise.
        overwrite: begin with empty results.

    Returns:
        {"settings", "models", "baselines", "rows"}.

    Raises:
        ValueError: they are damaged, or of other settings, pairs or weights.
    """
    file = output_dir / RESULTS
    remedy = "name another --output_dir, or give --overwrite_output_dir to measure again"
    results = {"settings": settings, "models": {}, "baselines": [], "rows": []}
    if file.exists() and not overwrite:
        try:
            saved = json.loads(file.read_text(encoding="utf-8"))
            results = {name: saved[name] for name in results}
            saved_sums = {name: model["checksum"] for name, model in results["models"].items()}
            # Errors here: a row lacks a name or a number.
            for row in results["rows"]:
                row["model"], row["guidance_scale"], row["image_guidance_scale"], row["seed"]
            for row in results["rows"] + results["baselines"]:
                float(row.get("l1") or 0), float(row.get("l1_to_input") or 0)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is damaged ({one_line(error, 100)}); {remedy}") from error
        saved = results["settings"]
        compared = {
            name: value
            for name, value in settings.items()
            if name not in MASK_SETTINGS or (value and saved.get(name))
        }
        changes = differences(
            saved | {f"--model {name}": x for name, x in saved_sums.items()},
            compared
            | {f"--model {name}": x for name, x in checksums.items() if name in saved_sums},
        )
        if changes:
            raise ValueError(f"{file} has other settings: {'; '.join(changes)}; {remedy}")
        saved |= {name: settings[name] for name in MASK_SETTINGS if settings.get(name)}
    for name, checksum in checksums.items():
        results["models"].setdefault(name, {"checksum": checksum})
    return results


def save_results(output_dir, results):
    """Write results.json."""
    text = json.dumps(results, indent=1) + "\n"
    write_text(output_dir / RESULTS, text)


def find_row(rows, **key):
    """The first row with these entries, or None."""
    return next((row for row in rows if all(row.get(k) == v for k, v in key.items())), None)


def model_checksum(model):
    """CRC-32 of a model's directory, or its commit on the hub.

    For a model in one file also of its configs, the source of components that it lacks.
    """
    if isinstance(model, SingleFile):
        averages = "-averages" if model.use_ema_weights else ""
        checksum = files_checksum([Path(model)], Path(model).parent)
        return f"{checksum}{averages}-{model_checksum(model.configs)}"
    if not Path(model).is_dir():
        return fetch_file(model, INDEX_NAME, None, None).parent.name
    files = [Path(model, INDEX_NAME)]
    for name in sorted(COMPONENTS):
        files += visible_files(Path(model, name))
    return files_checksum(files, model)


def lora_checksum(specs):
    """CRC-32 of LoRA files; None without any."""
    files = [find_lora(split_weight(spec)[0]) for spec in specs]
    return files_checksum(files) if files else None


def delta_checksum(specs):
    """CRC-32 of the weights of --unet_delta; None without it."""
    sources, _ = split_specs(specs)
    files = [file for source in sources for file in unet_files(source)]
    return files_checksum(files) if files else None


def embedding_checksum(specs):
    """CRC-32 of embeddings; None without any."""
    files = [fetch_named("embeddings", split_token(spec)[0], EMBEDDING_FILES) for spec in specs]
    return files_checksum(files) if files else None


def tiny_vae_checksum(acceleration):
    """CRC-32 of a TAESD in a directory; None without one."""
    source = getattr(acceleration.tiny_decoder, "path", "")
    path = Path(source).expanduser()
    if not source or not path.is_dir():
        return None
    return files_checksum(visible_files(path), path)


def visible_files(folder):
    """The files of a directory, sorted, without hidden ones such as .DS_Store."""
    return sorted(file for file in folder.glob("[!.]*") if file.is_file())


def files_checksum(files, folder="."):
    """CRC-32 of files and their names relative to folder."""
    checksum = 0
    for file in files:
        checksum = zlib.crc32(os.path.relpath(file, folder).encode(), checksum)
        with open(file, "rb") as opened:
            while block := opened.read(1 << 24):
                checksum = zlib.crc32(block, checksum)
    return f"{checksum:08x}"
