"""Names of the files of a model's weights."""

import re

from diffusers_flax.loading.files import read_json

# A shard is in the directory of its index: letters, digits and a few signs, no path.
SHARD_NAME = re.compile(r"\w[\w.+ -]{0,254}", re.ASCII)


def shard_names(index):
    """The names of the files that an index of a sharded checkpoint lists, sorted.

    Args:
        index: Path of a *.index.json.

    Raises:
        ValueError: it lists no files, or a file in another directory.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map from tensors to files; fetch it again")
    for name in weight_map.values():
        if not isinstance(name, str) or not SHARD_NAME.fullmatch(name):
            raise ValueError(
                f"{index} lists the shard {name!r}, which is not a file name in its directory; "
                "fetch it again, from a source that you trust"
            )
    return sorted(set(weight_map.values()))


def index_names(stem, suffix, dot_variant=""):
    """Names of the index of a sharded checkpoint: today's, diffusers' older one, huggingface_hub's.

    Args:
        stem, suffix: of the single file, "model" and "safetensors".
        dot_variant: "" or the variant with its dot, ".fp16".
    """
    return list(
        dict.fromkeys(
            (
                f"{stem}.{suffix}.index{dot_variant}.json",
                f"{stem}.{suffix}{dot_variant}.index.json",
                f"{stem}{dot_variant}.{suffix}.index.json",
            )
        )
    )


def weights_pattern(stem, dot_variant=""):
    """Pattern of the safetensors files of a model: single, sharded, index, under all names.

    Args:
        stem: weights_name.
        dot_variant: as for index_names.
    """
    variant, number = re.escape(dot_variant), r"(-\d{5}-of-\d{5})?"
    files = [f"{stem}({variant}{number}|{number}{variant})[.]safetensors"]
    indices = [re.escape(name) for name in index_names(stem, "safetensors", dot_variant)]
    return re.compile("|".join(files + indices))
