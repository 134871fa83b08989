"""Compiled programs: calling a pipeline, and saving executables on disk.

A saved executable is loaded without tracing or compiling:

    store = ExecutableStore("~/.cache/jax_executables")
    cache_key = {"program": "f of 8 images"} | surroundings(devices, [__file__])
    in_tree, out_tree = jax.tree.structure((args, {})), jax.tree.structure(result)
    compiled, reason = store.load(name, cache_key, devices, in_tree, out_tree)
    if compiled is None:
        with no_compilation_cache():
            compiled = jax.jit(f).lower(*args).compile()
        store.save(name, cache_key, compiled)

An executable is code: whoever can write the file can run code as its reader. The directory is
therefore made for its owner only (mode 0700), and a directory or file that other users may write to
is refused.
"""

import hashlib
import json
import logging
import math
import os
import platform
import re
import stat
import sys
import tempfile
import weakref
from contextlib import contextmanager
from importlib.metadata import distributions, version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.extend.core import jaxprs_in_params

from diffusers_flax.loading.configs import ModelOutput, warn_once
from diffusers_flax.loading.files import naming_full_disk, one_line
from diffusers_flax.pipelines.sampling import as_keys, keys_per_image

SUFFIX = ".executable"
SAFE_FOLDER = "~/.cache/jax_executables"
# Settings of jax that do not change programs.
NO_EFFECT = re.compile("cache|_dir|dump|log|traceback|profil|timeout|transfer|debug_leaked|explain")


class ExecutableStore:
    """A directory of executables.

    Args:
        folder: directory, created if missing with mode 0700.

    Raises:
        ValueError: it is not a directory, is not readable, belongs to another user, can be written
            to by others, or is in a directory where anybody could replace it.
    """

    def __init__(self, folder):
        self.folder = Path(folder).expanduser().resolve()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.folder.stat()
        except OSError as error:
            raise ValueError(
                f"{self.folder} cannot be used for executables: {error}; name another directory"
            ) from error
        if not is_private(status):
            raise ValueError(
                f"{self.folder} belongs to another user or may be written to by others, who can "
                f"run code as you; name another directory, such as {SAFE_FOLDER}"
            )
        for parent in self.folder.parents:
            mode = parent.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise ValueError(
                    f"{parent} may be written to by others, who could replace "
                    f"{self.folder} and run code as you; name another directory, such as "
                    f"{SAFE_FOLDER}"
                )
        if not os.access(self.folder, os.R_OK | os.W_OK | os.X_OK):
            raise ValueError(
                f"{self.folder} cannot be read and written; chmod 700 {self.folder}, or name "
                "another directory"
            )

    def load(self, name, cache_key, devices, in_tree, out_tree):
        """Load an executable.

        Args:
            name: of the program, a file name without extension.
            cache_key: everything it depends on, a flat dict for JSON; see surroundings.
            devices: that it runs on.
            in_tree, out_tree: structures of (args, kwargs) and of the result.

        Returns:
            (jax.stages.Compiled, None), or (None, the reason why it has to be compiled).
        """
        file = self.folder / f"{name}{SUFFIX}"
        try:
            with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as f:
                if not is_private(os.fstat(f.fileno())):
                    return None, f"{file} belongs to another user or may be written to by others"
                header, content = f.readline(), f.read()
        except FileNotFoundError:
            return None, "no executable of these settings is saved"
        except OSError as error:
            return None, f"{file} cannot be read ({error})"
        try:
            header = json.loads(header)
            before, checksum = dict(header["cache_key"]), header["sha256"]
        except (ValueError, KeyError, TypeError):
            return None, f"{file} is damaged"
        now = json.loads(json.dumps(cache_key))
        if changes := [
            f"{key} was {_short(before.get(key))} and is {_short(now.get(key))}"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]:
            return None, "; ".join(changes)
        if hashlib.sha256(content).hexdigest() != checksum:
            return None, f"{file} is damaged"
        try:
            compiled = deserialize_and_load(content, in_tree, out_tree, execution_devices=devices)
            return compiled, None
        except Exception as error:  # any error of the runtime: it can be compiled again
            return None, f"{file} cannot be loaded ({one_line(error, 200)})"

    def save(self, name, cache_key, compiled):
        """Save an executable; it appears under its name when it is complete."""
        content, _, _ = serialize(compiled)
        header = {"cache_key": cache_key, "sha256": hashlib.sha256(content).hexdigest()}
        file = self.folder / f"{name}{SUFFIX}"
        with (
            naming_full_disk(file, len(content)),
            tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as f,  # mode 0600
        ):
            try:
                f.write(json.dumps(header).encode() + b"\n" + content)
                f.close()
                os.replace(f.name, file)
            except BaseException:
                os.unlink(f.name)
                raise


def use_compilation_cache(folder):
    """Set the directory of jax's compilation cache, unless one is set already.

    Args:
        folder: directory, created if missing; "": no cache.

    Returns:
        True if the cache uses this directory.

    Raises:
        ValueError: it cannot be created or written to.
    """
    if not folder or jax.config.jax_compilation_cache_dir is not None:
        return False
    folder = Path(folder).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--compilation_cache_dir {folder} cannot be made: {error}; name another directory"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(
            f'--compilation_cache_dir {folder} cannot be written to; name another, or "" for none'
        )
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return True


def initialize_cache(path):
    """Set the directory of jax's compilation cache, replacing one that is set already.

    Scripts that call cc.initialize_cache(path), which jax removed, run with
    `import executables as cc` in place of jax's compilation_cache.

    Args:
        path: of the directory, which is created when the first program is saved.
    """
    jax.config.update("jax_compilation_cache_dir", str(path))
    compilation_cache.reset_cache()  # jax reads the setting only once


@contextmanager
def no_compilation_cache():
    """Compile without reading or writing jax's persistent cache.

    An executable that was read from that cache and saved again can be loaded on a CPU, but not run.
    """
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax reads the setting only once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def is_private(status):
    """Whether only this user may write to a file or directory, given os.stat's result."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _short(value):
    text = str(value)
    return text if len(text) < 80 else f"{text[:76]}..."


def surroundings(devices, files):
    """What a compiled program depends on apart from its function, a flat dict.

    Versions, devices, settings of XLA and jax, and a checksum of the code.

    Args:
        devices: that it runs on.
        files: the code that calls the models; the code of the models is always included.
    """
    library = Path(__file__).parent
    code = hashlib.sha256()
    for file in sorted(library.rglob("*.py")):
        code.update(str(file.relative_to(library)).encode() + file.read_bytes())
    for file in map(Path, files):
        code.update(file.name.encode() + file.read_bytes())
    client = devices[0].client
    settings = {k: str(v) for k, v in jax.config.values.items() if not NO_EFFECT.search(k)}
    return {
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "flax": version("flax"),
        "libraries": _library_versions() if client.platform != "cpu" else "",
        "runtime": f"{client.platform} {client.platform_version}",
        "device": f"{devices[0].device_kind}{_cpu_features() if client.platform == 'cpu' else ''}",
        "device numbers": [device.id for device in devices],
        "code": code.hexdigest()[:16],
        **{name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")},
        **settings,
    }


def _library_versions():
    """Versions of an accelerator's installed libraries, such as cuDNN."""
    found = {(package.name or "", package.version) for package in distributions()}
    return ", ".join(f"{n} {v}" for n, v in sorted(found) if n.startswith(("nvidia", "libtpu")))


def _cpu_features():
    """A checksum of the CPU's features, as listed by Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f" {platform.machine()}"
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f" {platform.machine()} {hashlib.sha256(features.encode()).hexdigest()[:16]}"


def peak_memory(devices, reset=False):
    """The most memory in use since the process began, or since the last reset where possible.

    Args:
        devices: jax devices.
        reset: start again from what is in use; Linux can do it, a device cannot.

    Returns:
        (bytes of the fullest device, "device"), or (bytes of this process, "process") for devices
        that do not report it, such as a CPU.
    """
    stats = [device.memory_stats() or {} for device in devices]
    if all("peak_bytes_in_use" in x for x in stats):
        return max(x["peak_bytes_in_use"] for x in stats), "device"
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024, "process"
    except (OSError, ValueError, IndexError):
        import resource  # not on Windows

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process"


def replace_leaves(function, params):
    """Replace every array of parameters by function(array), in place, one at a time.

    Only one array is in memory twice: each call waits for the devices, which copy in the
    background. Old arrays stay in memory if something else refers to them.

    Args:
        function: array -> array.
        params: nested dict.
    """
    for name, value in params.items():
        if isinstance(value, dict):
            replace_leaves(function, value)
        else:
            params[name] = jax.block_until_ready(jax.tree.map(function, value))


def matmul_flops(jaxpr, switches=()):
    """FLOPs of a traced program's matmuls and convolutions.

    Args:
        jaxpr: its Jaxpr. A loop counts once for each of its trips, 1 if unknown.
        switches: of each `lax.switch` in a loop, in their order: the share of the trips that each
            branch runs in. Of other conditions the branch with the most FLOPs counts.

    Returns:
        (all FLOPs, those of them with int8 operands), numbers.
    """
    shares = iter(switches)

    def count(jaxpr, in_switch=False):
        total = np.zeros(2)
        for equation in jaxpr.eqns:
            name, params = equation.primitive.name, equation.params
            if name in ("dot_general", "conv_general_dilated"):
                flops = 2 * multiply_adds(name, equation)
                is_int8 = all(x.aval.dtype == jnp.int8 for x in equation.invars)
                total += [flops, flops * is_int8]
            elif name == "cond" and len(params["branches"]) > 1:
                costs = np.array([count(branch.jaxpr, True) for branch in params["branches"]])
                share = None if in_switch else next(shares, None)
                total += costs.max(0) if share is None else np.array(share) @ costs
            else:
                trips = params["length"] if name == "scan" else 1
                inner = jaxprs_in_params(params)
                total += trips * sum((count(x, in_switch) for x in inner), np.zeros(2))
        return total

    return tuple(count(jaxpr).tolist())


def multiply_adds(name, equation):
    """Multiply-adds of a dot_general or convolution in a jaxpr."""
    left, right = (x.aval.shape for x in equation.invars)
    out = equation.outvars[0].aval.shape
    if name == "dot_general":
        (summed, _), _ = equation.params["dimension_numbers"]
        return math.prod(out) * math.prod(left[axis] for axis in summed)
    outputs, *_ = equation.params["dimension_numbers"].rhs_spec  # the axis of output channels
    # Zeros between the inputs, of gradients of strided convolutions, are no work.
    zeros = math.prod(equation.params["lhs_dilation"])
    return math.prod(out) * math.prod(right) // (right[outputs] * zeros)


# Calling a pipeline


@struct.dataclass
class FlaxImagePipelineOutput(ModelOutput):
    """images, float32 in [0, 1]: (B, H, W, 3), with jit (devices, B, H, W, 3).

    With output_type="latent" the scaled latents instead, (B, 4, h, w); with "pil" a flat list.
    """

    images: jax.Array | np.ndarray | list


@struct.dataclass
class FlaxStableDiffusionXLPipelineOutput(FlaxImagePipelineOutput):
    """The result of SDXL's pipelines; see FlaxImagePipelineOutput."""


@struct.dataclass
class FlaxStableDiffusionPipelineOutput(FlaxImagePipelineOutput):
    """images as in FlaxImagePipelineOutput, and the result of the safety checker.

    nsfw_content_detected is a list of bool, one per image, devices flattened; False without a
    safety checker. Images for which it is True are black.
    """

    nsfw_content_detected: list | bool


logger = logging.getLogger(__name__)


def step_options(num_inference_steps, timesteps, eta):
    """The options of _generate that choose the steps; timesteps win over num_inference_steps."""
    timesteps = None if timesteps is None else tuple(np.asarray(timesteps).tolist()) or None
    num_inference_steps = len(timesteps) if timesteps else num_inference_steps
    return dict(num_inference_steps=num_inference_steps, timesteps=timesteps, eta=eta)


def output_options(output_type):
    """The option of _generate for an output_type, "np" (or None), "pil" or "latent"."""
    if output_type not in (None, "np", "pil", "latent"):
        raise ValueError(f"output_type={output_type!r} is unknown; take np, pil or latent")
    return {"return_latents": output_type == "latent"}


def run(pipeline, jit, arrays, shared, options):
    """Call pipeline._generate, compiled, on one device or on all devices.

    Args:
        pipeline: FlaxDiffusionPipeline.
        jit: True: `arrays` have a leading axis of devices and run under pmap. False: NumPy arrays
            of params stay on the device, see on_device.
        arrays: {argument: tree of arrays, or None}, among them prompt_ids, params and prng_seed.
        shared: {argument: number}, the same on all devices, not compiled in.
        options: {argument: hashable}, compiled in.

    Returns:
        The result of _generate; with jit it has a leading axis of devices.

    Raises:
        ValueError: the number of axes of prompt_ids or params does not match jit.
    """
    prompt_ids = arrays["prompt_ids"]
    for name in ("prompt_ids", "neg_prompt_ids"):
        if isinstance(arrays[name], str | list | tuple):
            raise ValueError(
                f"{name} is a {type(arrays[name]).__name__}, not an array of token ids; make it "
                "with prepare_inputs, for negative prompts with prepare_text_inputs"
            )
    pipeline._require_params(arrays["params"])
    # The safety checker is not part of the program.
    params = {name: tree for name, tree in arrays["params"].items() if name != "safety_checker"}
    arrays = arrays | {"params": params}
    text_axes = ", ".join(map(str, prompt_ids.shape[-pipeline.text_axes :]))
    shape = f"(devices, batch, {text_axes})" if jit else f"(batch, {text_axes})"
    if prompt_ids.ndim != shape.count(",") + 1:
        raise ValueError(
            f"prompt_ids has shape {prompt_ids.shape}, jit={jit} takes {shape}; with jit=True "
            "shard prompt_ids (and the image), and replicate params"
        )
    kernel = params["unet"]["conv_in"]["kernel"]
    if kernel.ndim != (5 if jit else 4):
        raise ValueError(
            f"params are {'' if kernel.ndim == 5 else 'not '}replicated over devices; "
            "with jit=True replicate them, with jit=False do not"
        )
    keys = as_keys(arrays["prng_seed"])
    if jit and keys.ndim == 0:  # so that images do not depend on the number of devices
        batch = prompt_ids.shape[:2]
        keys = keys_per_image(keys, math.prod(batch)).reshape(batch)
    arrays = arrays | {"prng_seed": keys}
    image = arrays.get("image", arrays.get("masked_image"))
    height, width = pipeline.image_size(
        options["height"], options["width"], None if image is None else image.shape
    )
    options = options | {"height": height, "width": width}
    shared = {name: np.float32(number) for name, number in shared.items()}
    text_modules = pipeline.text_modules()
    program = _program_of(pipeline, jit, arrays, options, text_modules)
    if pipeline.compiled and program not in pipeline.compiled:
        nearest = min(pipeline.compiled, key=lambda other: len(program - other))
        before = dict(nearest)
        changes = [f"{k}={v} (was {before.get(k)})" for k, v in sorted(program - nearest)]
        logger.warning("compiling again, for %s", ", ".join(changes))
    if not jit:
        arrays["params"] = on_device(params)
    generate = _on_devices if jit else _on_one
    compiled_in = tuple(options.items()), text_modules
    result = generate(pipeline, compiled_in, arrays, shared)
    pipeline.compiled.add(program)
    return result


# {id of a NumPy array: (weak reference that removes the entry, the array's copy on the device)}
_latest_copies = {}


def is_writeable_through_base(array):
    """Whether a NumPy array is a view of a writeable one."""
    base = array.base
    while isinstance(base, np.ndarray) and not base.flags.writeable:
        base = base.base
    return isinstance(base, np.ndarray)


def on_device(params):
    """Put NumPy arrays of parameters on the device; consecutive calls share the copies.

    The copies of the latest call are cached per array, so only arrays that are new in params are
    copied. A copy is deleted when a call has other arrays, or when the NumPy array is deleted (on a
    CPU, where both may share memory, at the next call). NumPy arrays become read-only, because a
    change in place would not reach the copy; an array that is writeable at the next call is copied
    again. Views of writeable arrays are copied in every call, with a warning.

    Args:
        params: tree of NumPy and JAX arrays.

    Returns:
        The same tree of JAX arrays and such views.
    """
    leaves, tree = jax.tree.flatten(params)
    arrays = {id(x): x for x in leaves if isinstance(x, np.ndarray)}
    owned = {key: x for key, x in arrays.items() if not is_writeable_through_base(x)}
    if len(owned) < len(arrays):
        warn_once(
            "params has views of writeable NumPy arrays, which are copied to the device in every "
            "call; jax.device_put(params) copies them once"
        )
    unchanged = {key for key, array in owned.items() if not array.flags.writeable}
    # A local dict, as another thread may change the shared one.
    copies = {key: copy for key, copy in list(_latest_copies.items()) if key in unchanged}
    _latest_copies.clear()  # frees the memory of other parameters first
    for key, array in owned.items():
        if key not in copies:
            array.flags.writeable = False
            forget = weakref.ref(array, lambda _, key=key: _latest_copies.pop(key, None))
            copies[key] = forget, jax.device_put(array)
    _latest_copies.update(copies)
    return jax.tree.unflatten(tree, [copies[id(x)][1] if id(x) in copies else x for x in leaves])


def _program_of(pipeline, jit, arrays, options, text_modules):
    """All that the program of a call depends on: a frozenset of (name, value)."""
    scheduler = pipeline.scheduler
    types = {
        name: f"{x.dtype}{list(x.shape)}"
        for name, x in arrays.items()
        if name != "params" and x is not None
    }
    weights = {name: tree for name, tree in arrays["params"].items() if name != "scheduler"}
    dtypes = {str(x.dtype) for x in jax.tree.leaves(weights)}
    settings = {
        "scheduler": f"{type(scheduler).__name__} {sorted(scheduler.config.items())}",
        "accelerate": str(pipeline.accelerate) or "nothing",
        "preview": pipeline.preview.every if pipeline.preview else "none",
        "params": "/".join(sorted(dtypes)),
        "text encoders": str([dict(module.config) for module in text_modules]),
    }
    return frozenset({"jit": jit, **options, **types, **settings}.items())


def _call(pipeline, compiled_in, arrays, shared):
    options, _ = compiled_in
    return pipeline._generate(**dict(options), **arrays, **shared)


_on_one = jax.jit(_call, static_argnums=(0, 1))
_on_devices = jax.pmap(_call, static_broadcasted_argnums=(0, 1), in_axes=(None, None, 0, None))
