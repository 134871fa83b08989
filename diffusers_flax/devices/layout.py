"""Where the programs of a pipeline run, and where its parameters are.

    layout = Layout(jax.devices()[:4])                      # four images side by side
    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained("MODEL", layout=layout)
    layout.place_params(params)                             # from the host to the devices
    images = pipeline(prompt_ids, params, key).images       # of 4, 8, ... prompts

The devices are a mesh with the axes of AXES.
"""

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from diffusers_flax.parameters import replace_leaves

AXES = ("data", "branches", "rows")


@dataclass(frozen=True)
class Layout:
    """The devices of a program; data * branches * rows of them.

    data: groups of devices, each with an equal part of the images; None: as many as there are
    devices for. branches, rows: devices of a group, along the branches of guidance and along the
    rows of the latents.
    """

    devices: tuple
    data: int | None = None
    branches: int = 1
    rows: int = 1

    def __post_init__(self):
        object.__setattr__(self, "devices", tuple(self.devices))
        if self.data is None:
            data = len(self.devices) // (self.branches * self.rows)
            object.__setattr__(self, "data", data)
        needed = self.data * self.branches * self.rows
        if needed != len(self.devices) or not needed:
            raise ValueError(
                f"data={self.data}, branches={self.branches} and rows={self.rows} take {needed} "
                f"devices, given are {len(self.devices)}"
            )

    @property
    def mesh(self):
        """The devices by axis, with the names of AXES."""
        shape = self.data, self.branches, self.rows
        return jax.sharding.Mesh(np.array(self.devices).reshape(shape), AXES)

    def place_params(self, params):
        """Replace parameters by copies on all devices, in place, one array at a time."""
        sharding = NamedSharding(self.mesh, PartitionSpec())
        replace_leaves(partial(jax.device_put, device=sharding), params)

    def map(self, function):
        """The function with its images spread over the devices.

        Args:
            function: (images, shared) -> arrays (B, ...), where images are arrays (B, ...) of the
                images of one group, and shared are other arrays.

        Returns:
            The function of all images and shared, to be compiled by jit.
        """
        images = PartitionSpec("data")
        specs = dict(in_specs=(images, PartitionSpec()), out_specs=images)
        return jax.shard_map(function, mesh=self.mesh, check_vma=False, **specs)


@dataclass(frozen=True)
class DeviceFlags:
    """Flags of the programs that make images: devices and their memory."""
