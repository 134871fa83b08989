"""Pipeline directories: model_index.json, configs of components, and writing."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

from diffusers_flax.loading.hub import fetch_config, place_in_words
from diffusers_flax.loading.single_file import INDEX_NAME
from diffusers_flax.loading.weights import weights_pattern

LORA_FILE = "pytorch_lora_weights.safetensors"  # PyTorch diffusers' name
# The first convolution, which training with LoRA writes in full.
CONV_IN_FILE = "conv_in.safetensors"
# File that each component's directory must have.
COMPONENT_FILES = {
    **dict.fromkeys(("unet", "vae", "text_encoder", "text_encoder_2", "controlnet"), "config.json"),
    **dict.fromkeys(("tokenizer", "tokenizer_2"), "tokenizer_config.json"),
    "scheduler": "scheduler_config.json",
}
COMPONENTS = {*COMPONENT_FILES, "safety_checker", "feature_extractor"}


def read_index(path, revision=None, **hub_options):
    """The content of model_index.json of a directory or hub id; hub_options: see fetch_file."""
    index, _ = fetch_config(path, INDEX_NAME, None, revision, **hub_options)
    if index is None:
        if os.path.exists(os.path.join(path, LORA_FILE)):
            raise ValueError(
                f"{path} has a LoRA and no model_index.json; open the model that it was trained "
                f"from, with lora={path}"
            )
        where = place_in_words(path, None, revision)
        raise ValueError(f"{path} has no {INDEX_NAME}; looked for in {where}")
    return index


def has_component(index, name):
    """Whether a model_index.json lists a component."""
    return (index.get(name) or [None])[0] is not None


def read_component_configs(path, names, revision=None, replaced=None, **hub_options):
    """{component: the content of its COMPONENT_FILES} of a pipeline directory or hub id.

    names: of the components; replaced: {component: its config}, instead of the directory's.
    """
    replaced = replaced or {}
    found = {
        name: fetch_config(path, COMPONENT_FILES[name], name, revision, **hub_options)
        for name in names
        if name not in replaced
    }
    missing = [f"{name}/{COMPONENT_FILES[name]}" for name, (_, file) in found.items() if not file]
    if missing:
        where = getattr(path, "configs", path)  # of a SingleFile
        raise ValueError(f"{where} lacks {', '.join(missing)}; copy or download it again")
    configs = {name: content for name, (content, _) in found.items()}
    return configs | replaced


@contextmanager
def writing_pipeline(save_directory):
    """Yield an empty directory for a pipeline, then move its files into save_directory.

    Only files are moved, so save_directory may be a mount point or a link. The old model_index.json
    is removed first and the new one is moved last: a directory with one is complete.
    """
    # save_whole would replace the directory, with files that are not the model's.
    folder = Path(save_directory).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    written = Path(tempfile.mkdtemp(dir=folder, prefix=".saving-"))
    try:
        yield written
    except BaseException:
        shutil.rmtree(written)
        raise
    files = [file.relative_to(written) for file in written.rglob("*") if file.is_file()]
    (folder / INDEX_NAME).unlink(missing_ok=True)
    # PyTorch would prefer the index of an earlier save to a new single file.
    old_weights = [weights_pattern(stem) for stem in ("diffusion_pytorch_model", "model")]
    for name in {file.parts[0] for file in files if len(file.parts) > 1}:
        for old in (folder / name).glob("*"):
            if any(pattern.fullmatch(old.name) for pattern in old_weights):
                old.unlink()
    for file in sorted(files, key=lambda file: (file.name == INDEX_NAME, file)):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(written / file, folder / file)  # copies if a directory is on another disk
    shutil.rmtree(written)
