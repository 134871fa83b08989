"""The UNet against PyTorch diffusers' UNet with the same weights, alternating in one run.

    python -m benchmarks.unet time

times the forward pass (as in an edit) and the gradient of all parameters (as in training) of Stable
Diffusion 1.5's 8-channel UNet at 256 and 512 pixels and of SDXL's at 1024: on a CPU in float32, on
a GPU in bfloat16, with float32 parameters for the gradient (PyTorch: autocast). PyTorch runs eager,
eager with channels_last, and with torch.compile where a C++ compiler is installed. All contenders
are measured once per round. Other work on the machine slows down PyTorch most, as its threads wait
for each other. Tiny, in a minute:

    python -m benchmarks.unet time --cases tiny --rounds 2 --output unet.json

    python -m benchmarks.unet profile

splits the time of both passes on a CPU into attention, convolutions, norms, matmuls and the rest,
for both UNets; a few minutes. Tiny: --case tiny --output unet.json.

The share of the peak is FLOPs (PyTorch's count) over what the fastest large matmul of the machine,
measured in the same run, does in that time. Rows go to benchmarks/results/unet.json. A case needs
four times the memory of its weights (SD1.5 14 GB, SDXL 42 GB; half of that for the forward pass).
"""

import collections
import gc
import re
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers import UNet2DConditionModel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import (
    can_compile,
    check_config,
    find_device,
    make_row,
    synchronize,
    time_in_this_process,
    write_contenders,
)
from benchmarks.random_models import SD15, TINY_UNET
from benchmarks.rows import (
    PACKAGES,
    describe_machine,
    read_rows,
    report,
    rows_of,
    run_benchmark,
    write_rows,
)
from diffusers_flax.models.unet import FlaxUNet2DConditionModel
from diffusers_flax.published_configs import PUBLISHED_CONFIGS

SD15_EDIT = SD15["unet"] | {"in_channels": 8}
TEXT_LENGTH = 77


class Case(NamedTuple):
    """A UNet's config and the side of its latents."""

    config: dict
    side: int


CASES = {
    "sd15_256": Case(SD15_EDIT, 32),
    "sd15_512": Case(SD15_EDIT, 64),
    "sdxl_1024": Case(PUBLISHED_CONFIGS["stable-diffusion-xl-base-1.0"]["unet"], 128),
    "tiny": Case(SD15_EDIT | TINY_UNET, 16),
}


@dataclass(frozen=True)
class Time:
    """Time of a pass."""

    cases: tuple[Literal["sd15_256", "sd15_512", "sdxl_1024", "tiny"], ...] = (
        "sd15_256",
        "sd15_512",
    )
    passes: tuple[Literal["forward", "gradient"], ...] = ("forward", "gradient")
    batch_size: int = 2  # samples
    rounds: int = 7  # each contender is measured once in each
    seconds: float = 3.0  # of a measurement, at least; one pass at least
    torch_compile: bool | None = None  # default: if a C++ compiler is installed
    output: str = "benchmarks/results/unet.json"


def make_inputs(case, batch_size):
    """NumPy arrays: sample, timesteps, text states, and SDXL's added conditions or None."""
    rng = np.random.default_rng(0)
    config = case.config

    def normal(*shape):
        return rng.standard_normal((batch_size, *shape), np.float32)

    sample = normal(config.get("in_channels", 4), case.side, case.side)
    timesteps = np.linspace(1, 999, batch_size).astype(np.int32)
    text = normal(TEXT_LENGTH, config["cross_attention_dim"])
    added = None
    if "addition_time_embed_dim" in config:
        pixels = 8.0 * case.side
        ids = np.tile(np.float32([pixels, pixels, 0, 0, pixels, pixels]), (batch_size, 1))
        width = (
            config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        )
        added = {"text_embeds": normal(width), "time_ids": ids}
    return sample, timesteps, text, added


def count_flops(case, inputs, with_gradient):
    """FLOPs of a pass by PyTorch's counter; only shapes are computed."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(**case.config)
    args = jax.tree.map(lambda x: torch.empty(x.shape, device="meta"), inputs)
    counter = FlopCounterMode(display=False)
    with counter, torch.set_grad_enabled(with_gradient):
        loss = unet(*args[:3], added_cond_kwargs=args[3]).sample.square().mean()
        if with_gradient:
            loss.backward()
    return counter.get_total_flops()


def torch_contenders(unet, inputs, with_gradient, half, compiled):
    """PyTorch's contenders, {name: (prepare, run)}: run does one pass, after prepare.

    Args:
        unet: UNet2DConditionModel on its device, in the dtype of its parameters.
        inputs: tensors on the same device.
        with_gradient: also the gradient of all parameters.
        half: compute in bfloat16.
        compiled: add a contender with torch.compile.
    """
    device = inputs[0].device.type
    memory = {
        "eager": torch.contiguous_format,
        "channels_last": torch.channels_last,
        "compiled": torch.channels_last if device == "cuda" else torch.contiguous_format,
    }
    programs = {"compiled": torch.compile(unet)} if compiled else {}

    def forward(name):
        sample = inputs[0].contiguous(memory_format=memory[name])
        with torch.autocast(device, torch.bfloat16, enabled=half and with_gradient):
            program = programs.get(name, unet)
            return program(sample, *inputs[1:3], added_cond_kwargs=inputs[3]).sample

    def run_pass(name):
        if with_gradient:
            forward(name).float().square().mean().backward()
            for parameter in unet.parameters():
                parameter.grad = None
        else:
            with torch.inference_mode():
                forward(name)
        synchronize(device)

    def prepare(name):
        unet.to(memory_format=memory[name])

    names = [name for name in memory if name != "compiled" or compiled]
    return {f"torch {name}": (partial(prepare, name), partial(run_pass, name)) for name in names}


def our_program(folder, inputs, with_gradient, half):
    """(compiled program, its arguments) of ours; arguments as in torch_contenders."""
    dtype = jnp.bfloat16 if half else jnp.float32
    unet, params = FlaxUNet2DConditionModel.from_pretrained(folder, dtype=dtype)
    if half and not with_gradient:
        params = jax.tree.map(lambda x: x.astype(dtype), params)
    params, inputs = jax.device_put((params, inputs), jax.devices()[0])

    def predict(params, sample, timesteps, text, added):
        return unet.apply({"params": params}, sample, timesteps, text, added).sample

    def loss(params, *inputs):
        return jnp.square(predict(params, *inputs).astype(jnp.float32)).mean()

    step = jax.jit(jax.value_and_grad(loss) if with_gradient else predict)
    return step.lower(params, *inputs).compile(), (params, *inputs)


def bench_unet(name, with_gradient, config, device):
    """All contenders on one case and pass; a row of results, see harness.make_row."""
    case, half = CASES[name], device == "cuda"
    inputs = make_inputs(case, config.batch_size)
    dtype = torch.bfloat16 if half and not with_gradient else torch.float32
    compiled = can_compile() if config.torch_compile is None else config.torch_compile
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        unet = UNet2DConditionModel(**case.config)
        unet.save_pretrained(folder)
        program, args = our_program(folder, inputs, with_gradient, half)
    unet = unet.to(device, dtype)
    arguments = jax.tree.map(lambda x: torch.from_numpy(x).to(device), inputs)
    arguments = [arguments[0].to(dtype), arguments[1], arguments[2].to(dtype), arguments[3]]
    contenders = {"ours": ((lambda: None), lambda: jax.block_until_ready(program(*args)))}
    contenders |= torch_contenders(unet, arguments, with_gradient, half, compiled)
    return make_row(
        name,
        "gradient" if with_gradient else "forward",
        config.batch_size,
        count_flops(case, inputs, with_gradient),
        device,
        time_in_this_process(contenders, config.rounds, config.seconds),
    )


def run_time(config):
    """Measure, write, print."""
    check_config(config, "batch_size")
    if not (config.cases and config.passes):
        raise ValueError("--cases or --passes is empty; name at least one of each")
    if config.torch_compile and not can_compile():
        raise ValueError("--torch_compile True needs a C++ compiler; install g++")
    device, machine = find_device(), describe_machine(PACKAGES)

    def rows():
        for name in config.cases:
            for which in config.passes:
                yield bench_unet(name, which == "gradient", config, device)
                gc.collect()

    write_contenders(rows(), machine, config.output)


# Patterns of an operation's path in the model; the first that is found gives the operation's kind.
KINDS = {
    "attention": r"attn\d/(cond|while)|ts,|sh->|st,",
    "convolutions": r"conv|proj_in|proj_out",
    "norms": r"norm",
    "matmuls": r"dot_general",
    "other": r"",
}

TORCH_KINDS = {
    "attention": "scaled_dot_product",
    "convolutions": "convolution",
    "norms": "norm",
    "matmuls": r"::(addmm|mm|bmm)$",
    "other": "",
}

INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name="([^"]*)"', re.M)


@dataclass(frozen=True)
class Profile:
    """Time by kind of operation, on a CPU."""

    case: Literal[tuple(CASES)] = "sd15_256"
    batch_size: int = 2  # samples
    output: str = "benchmarks/results/unet.json"


def by_kind(seconds, kinds):
    """Sum {name: seconds} into {kind: seconds}; kinds: KINDS or TORCH_KINDS."""
    sums = dict.fromkeys(kinds, 0.0)
    for name, own in seconds:
        sums[next(kind for kind, pattern in kinds.items() if re.search(pattern, name))] += own
    return sums


def own_seconds(profile, names):
    """{name: seconds} of the operations of a jax.profiler.ProfileData.

    Nested operations count once: the time of an operation excludes the operations inside it.
    """
    seconds = collections.Counter()
    for line in (line for plane in profile.planes for line in plane.lines):
        inside = []  # (name, end) of the operations that have begun
        for event in sorted(line.events, key=lambda e: (e.start_ns, -e.duration_ns)):
            if event.name not in names:
                continue
            while inside and event.start_ns >= inside[-1][1]:
                inside.pop()
            if inside:
                seconds[inside[-1][0]] -= event.duration_ns / 1e9
            seconds[event.name] += event.duration_ns / 1e9
            inside.append((event.name, event.start_ns + event.duration_ns))
    return seconds


def profile_ours(program, args):
    """{kind: seconds} of a pass, after a first one."""
    jax.block_until_ready(program(*args))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program(*args))
        (file,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
        places = dict(INSTRUCTION.findall(program.as_text()))
    seconds = own_seconds(data, places)
    return by_kind(((places[name], own) for name, own in seconds.items()), KINDS)


def profile_theirs(run):
    """{kind: seconds} of a pass, after a first one; run does one."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        run()
    averages = trace.key_averages()
    return by_kind(((x.key, x.self_cpu_time_total / 1e6) for x in averages), TORCH_KINDS)


def format_profile(results):
    """Markdown of the profile's rows, in seconds."""
    lines = ["| | " + " | ".join([*KINDS, "all"]) + " |", "|---" * (len(KINDS) + 2) + "|"]
    for name, row in rows_of(results, "profile").items():
        seconds = row["seconds_by_kind"]
        numbers = [*(seconds[kind] for kind in KINDS), sum(seconds.values())]
        lines.append(f"| {name} | {' | '.join(f'{x:.2f}' for x in numbers)} |")
    return "\n".join(lines)


def run_profile(config):
    """Profile both passes, write, print."""
    if config.batch_size < 1:
        raise ValueError(f"--batch_size {config.batch_size} must be at least 1")
    if jax.default_backend() != "cpu":
        raise ValueError("this is for CPUs; set JAX_PLATFORMS=cpu")
    read_rows(config.output)
    machine = describe_machine(PACKAGES)
    case = CASES[config.case]
    inputs = make_inputs(case, config.batch_size)
    arguments = jax.tree.map(torch.from_numpy, inputs)
    unet = UNet2DConditionModel(**case.config)
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        unet.save_pretrained(folder)
        for name in ("forward", "gradient"):
            with_gradient = name == "gradient"
            ours = profile_ours(*our_program(folder, inputs, with_gradient, False))
            theirs = torch_contenders(unet, arguments, with_gradient, False, False)
            prepare, run_theirs = theirs["torch eager"]
            prepare()
            figures[f"profile {name} ours"] = {"seconds_by_kind": ours}
            figures[f"profile {name} torch eager"] = {"seconds_by_kind": profile_theirs(run_theirs)}
    results = write_rows(figures, machine, config.output)
    report(format_profile(results), config.output)


SUBCOMMANDS = {Time: run_time, Profile: run_profile}


def main(args=None):
    """Command line."""
    run_benchmark(SUBCOMMANDS, __doc__, args)


if __name__ == "__main__":
    main()
