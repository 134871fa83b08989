"""Parameters in the host's memory, which a program fetches to the device when it needs them.

    layout = Layout(jax.devices()[:1], offload="group")
    layout.place_params(params)                       # matrices and kernels into pinned memory
    images = pipeline(prompt_ids, params, key).images # running.generate fetches

component: text encoders and VAE have their parameters on the device while they run; UNet and
ControlNets, which run most of the time, stay there. group: residual blocks and transformers in
UNet, ControlNet and VAE, and layers of text encoders, are fetched each time they run, while the one
before computes: two of them are on the device. layer: residual blocks and transformer blocks are
fetched when they run, one at a time. Other parameters, such as time embeddings, are on the device
while their model runs.

A fetch is tied to a value of the program by an optimization barrier: XLA can start it when the
value is known, neither before a loop nor all at once.

Source: ZeRO-Offload (arXiv 2101.06840) keeps states of training in the host's memory in this way.
"""

import re
from contextlib import contextmanager

import flax.linen as nn
import jax
from jax.tree_util import keystr

# Groups: patterns of a module's path in its model, names joined by "/".
_LAYER_OF_TEXT = r"text_model/encoder/layers/\d+"
_SAMPLERS = r"(?:.*/)?(?:down|up)samplers_\d+"
GROUPS = {
    "component": None,
    "group": re.compile(rf"(?:.*/)?(?:resnets|attentions)_\d+|{_SAMPLERS}|{_LAYER_OF_TEXT}"),
    "layer": re.compile(
        rf"(?:.*/)?(?:resnets|transformer_blocks)_\d+|{_SAMPLERS}|{_LAYER_OF_TEXT}"
    ),
}
# Platforms whose devices compute in the host's memory, so that parameters stay where they are.
HOST_PLATFORMS = ("cpu",)
NOT_OFFLOADED = ("scheduler", "safety_checker")  # in params, but in no stage of a run
KEPT_MODELS = ("unet", "controlnet")  # in component

PLACE = "place"  # collection of variables with the running group's path


def check_offload(offload):
    """Raise a ValueError for an unknown offload; it is a key of GROUPS or None."""
    if offload not in (None, *GROUPS):
        raise ValueError(f"offload={offload!r} is not known; known are {', '.join(GROUPS)}")


def lives_on_host(model, x, offload):
    """Whether a parameter is kept in the host's memory; vectors are small and stay on the device.

    model: its name in a pipeline's params, "unet", "vae", ...; offload: a key of GROUPS.
    """
    if x.ndim < 2 or model in NOT_OFFLOADED:
        return False
    return offload != "component" or model not in KEPT_MODELS


def format_on_host(x, sharding):
    """The sharding in the host's memory, for arrays of 8 bits on TPUs with the order of numbers.

    Without it libtpu 0.0.42 does not compile a fetch outside of a loop: it takes tiles of 8 rows
    for the array on the host and tiles of 32 rows for its copy, and finds that they differ.
    """
    (platform,) = {device.platform for device in sharding.device_set}
    if platform != "tpu" or x.dtype.itemsize > 1:
        return sharding
    from jax.experimental.layout import Format, Layout  # for this case alone

    return Format(Layout(tuple(range(x.ndim)), ((8, 128), (4, 1))), sharding)


def group_of(names, offload):
    """The group that a parameter or module belongs to, joined by "/"; None: it is in none.

    names: of the modules from the model on, and of the parameter; offload: a key of GROUPS.
    """
    pattern, names = GROUPS[offload], list(names)
    paths = ("/".join(names[:end]) for end in range(1, len(names) + 1))
    return pattern and next(filter(pattern.fullmatch, paths), None)


@contextmanager
def fetching(offload):
    """A context in which models fetch the groups of their parameters that are on the host.

    Args:
        offload: a key of GROUPS.

    Yields:
        Fetcher, for what is in no group.
    """
    fetcher = Fetcher(offload)
    with nn.intercept_methods(fetcher.call_module):
        yield fetcher


def fetch(params, after):
    """Parameters on the device; arrays in the host's memory are fetched.

    after: tree of arrays that the device has before the fetch starts.
    """
    leaves, structure = jax.tree.flatten(params)
    on_host = [i for i, x in enumerate(leaves) if is_on_host(x)]
    if on_host:
        tied, _ = jax.lax.optimization_barrier(([leaves[i] for i in on_host], after))
        for i, x in zip(on_host, tied):
            leaves[i] = jax.device_put(x, jax.memory.Space.Device)
    return jax.tree.unflatten(structure, leaves)


def path_in_model(module):
    """A module's path in its model, names; flax's own path begins anew in a group."""
    return (*group_that_runs(module), *module.path)


def group_that_runs(module):
    """The path of the group that a module runs in, names; () outside of groups."""
    place = module.scope.root.get_variable(PLACE, "path", "")
    return tuple(place.split("/")) if place else ()


def is_on_host(x):
    """Whether an array of a traced program is in the host's memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


class Fetcher:
    """Fetches parameters for stages and modules; offload: a key of GROUPS."""

    def __init__(self, offload):
        self.offload = offload
        self.stage_before = ()  # the result of the stage before
        self.group_before = None  # input of the previous group in this call of a model

    def stage(self, stage, models):
        """A stage of a run, (params, ...), which fetches what is in no group of its models.

        models: their keys in params.
        """

        def fetch_and_run(params, *args):
            own = {name: self.fetch_ungrouped(params[name]) for name in models if name in params}
            self.stage_before = stage(params | own, *args)
            return self.stage_before

        return fetch_and_run

    def fetch_ungrouped(self, params):
        """The parameters of a model; groups stay on the host."""
        paths, structure = jax.tree_util.tree_flatten_with_path(params)
        leaves = [x for _, x in paths]
        names = [keystr(path, simple=True, separator="/").split("/") for path, _ in paths]
        outside = [i for i, names in enumerate(names) if group_of(names, self.offload) is None]
        for i, x in zip(outside, fetch([leaves[i] for i in outside], self.stage_before)):
            leaves[i] = x
        return jax.tree.unflatten(structure, leaves)

    def call_module(self, method, args, kwargs, context):
        """See nn.intercept_methods: call a group with parameters on the device."""
        module = context.module
        if group_that_runs(module):
            return method(*args, **kwargs)
        if not module.path:  # a call of a model begins; what was before may be of another trace
            self.group_before = None
        is_group = group_of(module.path, self.offload) == "/".join(module.path)
        if context.method_name != "__call__" or not is_group:
            return method(*args, **kwargs)
        path = module.path
        module, variables = module.unbind()
        after = args[0] if self.group_before is None else self.group_before
        params = fetch(variables["params"], after)
        # The next group is fetched when this one starts; in layer when this one is done.
        self.group_before = args[0] if self.offload == "group" else None
        place = {PLACE: {"path": "/".join(path)}}
        return module.apply({"params": params, **place}, *args, **kwargs)
