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
from diffusers_flax.messages import first_names

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
        variant: of the weights' file names in directories.
        **hub_options: see take_hub_options.
    """

    def __init__(self, specs, config, variant=None, **hub_options):
        if len(specs) not in (0, 2) or isinstance(specs, str):
            raise ValueError(f"unet_delta={specs}: write DISTILLED BASE or DISTILLED BASE:WEIGHT")
        self.folded, self.readers = set(), []  # [{name of a parameter: function that reads it}]
        if specs:
            self.what = f"unet_delta={' '.join(map(str, specs))}"
            base, self.weight = split_weight(specs[1], "unet_delta")
            for source in (str(specs[0]), base):
                self.readers.append(open_unet(source, config, variant, **hub_options))

    def fold(self, name, x):
        """A parameter x of the UNet plus the difference, summed in float32, in the dtype of x.

        name: of the parameter, joined by "/". A ValueError for UNets that do not fit.
        """
        if not self.readers:
            return x
        self.folded.add(name)
        found = [np.asarray(of[name](), np.float32) for of in self.readers if name in of]
        shape = x.shape
        if name == CONV_IN and found:  # the noisy latents are the first channels
            shape = (*shape[:2], found[0].shape[2], shape[3])
        if [array.shape for array in found] != [shape] * 2:
            raise ValueError(
                f"{self.what} is of another family: {name} is {[array.shape for array in found]}, "
                f"the model's is {x.shape}; take the UNet that the model began as, and its "
                "distilled one"
            )
        delta = np.float32(self.weight) * (found[0] - found[1])
        if name == CONV_IN:
            delta = np.pad(delta, ((0, 0), (0, 0), (0, x.shape[2] - shape[2]), (0, 0)))
        return (np.asarray(x, np.float32) + delta).astype(x.dtype)

    def require_folded(self):
        """Raise a ValueError if DISTILLED or BASE has parameters that the model lacks."""
        names = {name for readers in self.readers for name in readers}
        if others := sorted(names - self.folded - {GUIDANCE_EMBEDDING}):
            raise ValueError(
                f"{self.what} is of another family than the model, which lacks "
                f"{first_names(others)}"
            )


def open_unet(source, config, variant=None, **hub_options):
    """{name of a parameter: function that reads it} of a UNet; arguments: see UnetDelta."""
    repository, name = locate("unet_delta", source)
    if name is None:
        is_pipeline = fetch_file(repository, "config.json", "unet", **hub_options) is not None
        place = {"subfolder": "unet" if is_pipeline else None}
        fetch = partial(fetch_file, repository, **place, **hub_options)
        where = f"unet_delta={place_in_words(repository, **place)}"
        files = find_weights(fetch, "diffusion_pytorch_model", variant, False, where)
        return {name: read for file in files for name, read in readers_of(file)}
    file = fetch_named("unet_delta", source, **hub_options)
    if name.endswith(SINGLE_FILE_SUFFIXES):
        single = SingleFile(file).as_component("unet")
        check_content("unet_delta", single)
        if not single.is_converted:
            read = partial(single.read_component, "unet", dict(config))
            return {name: partial(np.asarray, x) for name, x in read_weights(file, read)}
    return dict(readers_of(file))


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
