"""Where the programs of a pipeline run, and where its parameters are.

    layout = Layout(jax.devices()[:4])                      # four images side by side
    layout = parse_layout("branches=2,rows=2")              # one image on four devices
    pipeline, params = FlaxStableDiffusionXLPipeline.from_pretrained("MODEL", layout=layout)
    layout.place_params(params)                             # from the host to the devices
    images = pipeline(prompt_ids, params, key).images       # of 4, 8, ... prompts

The devices are a mesh with the axes of AXES; parallelism.py splits the work of a group. They may
belong to several processes: all make the same calls and get the same arrays.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import NamedSharding, PartitionSpec

from diffusers_flax.devices.offload import (
    HOST_PLATFORMS,
    check_offload,
    format_on_host,
    lives_on_host,
)
from diffusers_flax.devices.processes import list_of_process_0
from diffusers_flax.parameters import replace_leaves

AXES = ("data", "branches", "rows")
# {component that may have its own device: its models, keys of params}
COMPONENTS = {
    "text": ("text_encoder", "text_encoder_2"),
    "unet": ("unet", "controlnet", "tiny_vae"),
    "vae": ("vae", "safety_checker"),
}
BALANCED = "balanced"


@dataclass(frozen=True)
class Layout:
    """The devices of a program; data * branches * rows of them.

    data: number of device groups, among which images are divided; None: as many as the devices
    allow. branches, rows: devices of a group, for branch and spatial parallelism.

    components: {"text", "unet", "vae": index in devices}: component parallelism instead. Text
    encoders, UNet and VAE are programs of their own on these devices, on the first one if left out,
    and all images are one group. Or BALANCED, until with_balanced_components chooses the devices.

    offload: a key of offload.GROUPS: parameters are in the host's memory; None: on the devices.
    """

    devices: tuple
    data: int | None = None
    branches: int = 1
    rows: int = 1
    components: tuple = ()
    offload: str | None = None

    def __post_init__(self):
        object.__setattr__(self, "devices", tuple(self.devices))
        check_offload(self.offload)
        if self.components:
            self._check_components()
            return
        if self.data is None:
            data = max(1, len(self.devices) // self.group_size)
            object.__setattr__(self, "data", data)
        needed = self.data * self.group_size
        if needed != len(self.devices):
            raise ValueError(
                f"data={self.data}, branches={self.branches} and rows={self.rows} take {needed} "
                f"devices, not {len(self.devices)}"
            )

    def _check_components(self):
        if self.offload or self.data not in (None, 1) or self.group_size != 1:
            raise ValueError(
                "components on devices of their own exclude data, branches and rows, and offload; "
                "choose one or the other"
            )
        object.__setattr__(self, "data", 1)
        if self.components == BALANCED:
            return
        object.__setattr__(self, "components", tuple(sorted(dict(self.components).items())))
        for name, number in self.components:
            if number >= len(self.devices):
                raise ValueError(
                    f"components={name}={number} does not exist; devices are numbered from 0 to "
                    f"{len(self.devices) - 1}"
                )

    def device_of(self, component):
        """The device of a key of COMPONENTS."""
        return self.devices[dict(self.components).get(component, 0)]

    @property
    def groups(self):
        """The first device of each group, a list."""
        return [self.devices[0]] if self.components else list(self.devices[:: self.group_size])

    @property
    def group_size(self):
        """Number of devices that share the work on an image."""
        return self.branches * self.rows

    @property
    def everywhere(self):
        """The sharding of arrays that are on all devices."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def mesh(self):
        """The devices by axis, with the names of AXES."""
        shape = self.data, self.branches, self.rows
        return jax.sharding.Mesh(np.array(self.devices).reshape(shape), AXES)

    @property
    def is_local(self):
        """Whether all devices belong to this process."""
        return {device.process_index for device in self.devices} == {jax.process_index()}

    @property
    def fetches(self):
        """Whether parameters are in another memory than the devices'."""
        return self.offload is not None and self.devices[0].platform not in HOST_PLATFORMS

    def placement_of(self, model, x):
        """A parameter's sharding: on all devices, or in the host's pinned memory."""
        if not self.fetches or not lives_on_host(model, x, self.offload):
            return self.everywhere
        return format_on_host(x, self.everywhere.with_memory_kind("pinned_host"))

    def place_params(self, params):
        """Replace parameters by copies for all devices, in place, one array at a time.

        With components each model is on its component's device.

        Args:
            params: {model: tree of arrays}, NumPy or jax; of several processes all have the same.
        """
        if self.components:
            for model in params.keys() - {"scheduler"}:
                device = self.device_of(component_of(model))
                replace_leaves(partial(jax.device_put, device=device), params[model])
            return

        def place(model, x):
            sharding = self.placement_of(model, x)
            if self.is_local:
                return jax.device_put(x, sharding)
            # device_put would compare the arrays of all processes.
            x = np.asarray(x)
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        for model in params:
            own = {model: params[model]}
            replace_leaves(partial(place, model), own)
            params |= own

    @property
    def is_writer(self):
        """Whether this process writes files: the first one."""
        return jax.process_index() == 0

    def agree(self, numbers):
        """Process 0's list of whole numbers below 2^31, in all processes, which all call this."""
        return numbers if self.is_local else list_of_process_0(numbers)

    def as_inputs(self, tree):
        """Arrays for calls, which several processes pass as NumPy arrays, keys as their data."""

        def convert(x):
            is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            return np.asarray(jax.random.key_data(x) if is_key else x)

        return tree if self.is_local else jax.tree.map(convert, tree)

    def jit_batches(self, function):
        """Compile a function of one batch to run on one batch per group.

        Args:
            function: as for map: (images, shared) -> array (B, ...); images are arrays (B, ...).

        Returns:
            Its jit of (images, shared), where images are arrays (data, B, ...), as for jax.pmap,
            NumPy if there are several processes; shared is as place_params places it.
        """

        def on_group(images, shared):
            return function(jax.tree.map(lambda x: x[0], images), shared)[None]

        def on_all(images, shared):
            return self.on_all_devices(self.map(on_group)(images, shared))

        # Each process passes all arrays; each device takes its share.
        shared = None if self.fetches else self.everywhere
        return jax.jit(on_all, in_shardings=(self.everywhere, shared))

    def first(self, num_groups):
        """The Layout of the first groups alone; of all if the devices belong to several processes,
        as every process must take part in a program.
        """
        if self.components or not self.is_local or num_groups >= self.data:
            return self
        devices = self.devices[: num_groups * self.group_size]
        return replace(self, devices=devices, data=num_groups)

    def shapes_of_params(self, shapes):
        """ShapeDtypeStructs of parameters as place_params places them, to compile for."""

        def place(model, x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.placement_of(model, x))

        return {model: jax.tree.map(partial(place, model), x) for model, x in shapes.items()}

    def with_shardings(self, shapes):
        """ShapeDtypeStructs of arrays that are on all devices, to compile for."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.everywhere), shapes
        )

    def on_all_devices(self, x):
        """A result of map, inside jit, copied to all devices if they are of several processes.

        A process can read its own devices only.
        """
        return x if self.is_local else jax.lax.with_sharding_constraint(x, self.everywhere)

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


def component_of(model):
    """The key of COMPONENTS that has a model, a key of params."""
    return next(name for name, models in COMPONENTS.items() if model in models)


def parse_layout(parallel, devices=None):
    """The Layout that a text describes, or None without.

    Args:
        parallel: NAME=NUMBER,... with names of AXES, or several such texts. Without data there are
            as many groups as there are devices for.
        devices: to take them from; None: all devices of all processes.

    Raises:
        ValueError: a name or number is not valid, or there are too few devices.
    """
    words = parallel if isinstance(parallel, str) else ",".join(parallel or ())
    if not words:
        return None
    sizes = parse_numbers("parallel", words.split(","), AXES, least=1)
    devices = jax.devices() if devices is None else list(devices)
    branches, rows = sizes.get("branches", 1), sizes.get("rows", 1)
    shape = sizes.get("data", max(1, len(devices) // (branches * rows))), branches, rows
    if (needed := math.prod(shape)) > len(devices):
        raise ValueError(
            f"parallel={words} takes {needed} devices, not {len(devices)}; take smaller numbers"
        )
    if len(devices) == needed:  # neighbours in the mesh are neighbours in the slice
        mesh = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        devices = mesh.ravel().tolist()
    return Layout(devices[:needed], *shape)


def parse_components(words):
    """The components of a Layout: {component: index of its device}, or "balanced".

    words: COMPONENT=NUMBER each, or balanced alone; a ValueError for others.
    """
    if tuple(words) == (BALANCED,):
        return BALANCED
    return parse_numbers("devices", words, COMPONENTS, least=0)


def parse_numbers(argument, words, names, least):
    """{name: number} of words NAME=NUMBER; numbers are at least `least`."""
    numbers = {}
    for word in words:
        name, _, number = word.strip().partition("=")
        if name not in names or not number.isdecimal() or int(number) < least:
            raise ValueError(
                f"{argument}={word} must be NAME=NUMBER, with a name of {', '.join(names)} and a "
                f"number from {least} on"
            )
        numbers[name] = int(number)
    return numbers
