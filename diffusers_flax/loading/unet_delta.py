"""The difference that distillation made to a UNet, added to another UNet while it is read.

    delta = ("latent-consistency/lcm-sdxl", "stabilityai/stable-diffusion-xl-base-1.0")
    pipeline, params = FlaxStableDiffusionXLInstructPix2PixPipeline.from_pretrained(
        "diffusers/sdxl-instructpix2pix-768", unet_delta=delta
    )

An edit model whose UNet began as BASE edits in the few steps of DISTILLED:
W + WEIGHT (W_distilled - W_base).

Source: the code of quickjkee/instruct-pix2pix-distill; for sums of such differences, task
arithmetic (arXiv 2212.04089).
"""

from functools import partial
from pathlib import Path

import numpy as np

from diffusers_flax.loading.hub import fetch_file, fetch_named, locate, place_in_words
from diffusers_flax.loading.lora import split_weight
from diffusers_flax.loading.single_file import SINGLE_FILE_SUFFIXES, SingleFile, check_content
from diffusers_flax.loading.weights import (
    SafetensorsFile,
    find_weights,
    naming_damage,
    read_weights,
    torch_to_flax,
)
from diffusers_flax.messages import first_names, warn_once

WRITE = (
    "write DISTILLED BASE or DISTILLED BASE:WEIGHT; DISTILLED is the distilled UNet, BASE the UNet "
    "it was distilled from"
)
CONV_IN = "conv_in/kernel"  # an edit model has more input channels, after the noisy latents
# Of LCM's UNets; left out, as in public code, as an edit model has two guidance scales.
GUIDANCE_EMBEDDING = "time_embedding/cond_proj/kernel"


class UnetDelta:
    """The difference of two UNets, added to a model's UNet while the weights are read.

    Tensors of both are read one at a time.

    Args:
        specs: (DISTILLED, BASE) or (DISTILLED, "BASE:WEIGHT"), or nothing. Each is a directory or
            hub id of a UNet or of a pipeline, or a file of a UNet or of a whole model. WEIGHT
            multiplies the difference, default 1.
        config: of the model's UNet.
        variant: of the weights' file names in directories; weights without a variant are read, with
            a warning, where there are none.
        **hub_options: see take_hub_options.

    Raises:
        ValueError: a source is missing, damaged, or no UNet.
    """

    def __init__(self, specs, config, variant=None, **hub_options):
        sources, self.weight = split_specs(specs)
        self.folded = set()
        # {source: {name of a parameter: function that reads it}}, DISTILLED first
        self.readers = {
            source: open_unet(source, config, variant, **hub_options) for source in sources
        }

    def fold(self, name, x):
        """A parameter of the UNet plus the difference, summed in float32, in the dtype of x.

        Args:
            name: of the parameter, joined by "/".
            x: NumPy array.

        Raises:
            ValueError: DISTILLED or BASE lacks the parameter, or has another shape.
        """
        if not self.readers:
            return x
        self.folded.add(name)
        found = []
        for source, readers in self.readers.items():
            array = np.asarray(readers[name](), np.float32) if name in readers else None
            shape = "missing" if array is None else array.shape
            if name == CONV_IN and array is not None:  # the noisy latents are the first channels
                channels = max(0, x.shape[2] - array.shape[2])
                array = np.pad(array, ((0, 0), (0, 0), (0, channels), (0, 0)))
            if array is None or array.shape != x.shape or (found and shape != found[0][0]):
                raise ValueError(
                    f"unet_delta={source} is of another family: its {name} is {shape}, the model's "
                    f"is {x.shape}; take the UNet that the model began as, and its distilled one"
                )
            found.append((shape, array))
        (_, distilled), (_, base) = found
        delta = np.float32(self.weight) * (distilled - base)
        return (np.asarray(x, np.float32) + delta).astype(x.dtype)

    def require_folded(self):
        """Raise a ValueError if DISTILLED or BASE has parameters that the model lacks."""
        for source, readers in self.readers.items():
            names = readers.keys() - self.folded
            if GUIDANCE_EMBEDDING in names:
                warn_once(
                    f"unet_delta={source}: {GUIDANCE_EMBEDDING} is left out, the model lacks it"
                )
            if others := sorted(names - {GUIDANCE_EMBEDDING}):
                raise ValueError(
                    f"unet_delta={source} is of another family than the model, which lacks "
                    f"{first_names(others)}"
                )


def split_specs(specs):
    """([DISTILLED, BASE], WEIGHT) of UnetDelta's specs; ([], 1.0) of none."""
    specs = [specs] if isinstance(specs, str | Path) else specs
    what = f"unet_delta={(*map(str, specs),)}"
    if len(specs) not in (0, 2):
        raise ValueError(f"{what}: {WRITE}")
    if not specs:
        return [], 1.0
    base, weight = split_weight(specs[1], "unet_delta", WRITE)
    sources = [str(specs[0]), base]
    if sources[0] == sources[1]:
        raise ValueError(f"{what} is no difference; {WRITE}")
    return sources, weight


def open_unet(source, config, variant=None, **hub_options):
    """{name of a parameter: function that reads it} of a UNet with a config."""
    files = unet_files(source, variant, **hub_options)
    _, name = locate("unet_delta", source)
    if name is not None and name.endswith(SINGLE_FILE_SUFFIXES):
        file = SingleFile(files[0]).as_component("unet")
        check_content("unet_delta", file)
        if not file.is_converted:
            read = partial(file.read_component, "unet", dict(config))
            return {name: partial(np.asarray, x) for name, x in read_weights(files[0], read)}
    return {name: read for file in files for name, read in readers_of(file)}


def unet_files(source, variant=None, **hub_options):
    """The files of a UNet's weights.

    Args:
        source: directory or hub id of a UNet or of a pipeline, or a file of a UNet or of a whole
            model.
        variant: of the file names in a directory, see UnetDelta.
        **hub_options: see take_hub_options.

    Raises:
        ValueError: there are none.
    """
    repository, name = locate("unet_delta", source)
    if name is not None:
        return [fetch_named("unet_delta", source, **hub_options)]
    is_pipeline = fetch_file(repository, "config.json", "unet", None, **hub_options) is not None
    place = {"subfolder": "unet" if is_pipeline else None, "revision": None}
    fetch = partial(fetch_file, repository, **place, **hub_options)
    where = f"unet_delta={place_in_words(repository, **place)}"
    return find_weights(fetch, "diffusion_pytorch_model", variant, False, where)


def readers_of(file):
    """Yield (name of a parameter, function that reads it) of one file with diffusers' names."""
    if file.suffix != ".safetensors":
        for name, x in read_weights(file):  # memory maps
            yield name, partial(np.asarray, x)
        return
    with naming_damage(file):
        tensors = SafetensorsFile(file)
    for key, shape in tensors.shapes.items():
        # An array without memory gives the parameter's name.
        name, _ = torch_to_flax(key, np.broadcast_to(np.float32(0), shape))
        yield name, lambda key=key: torch_to_flax(key, tensors.read(key))[1]
