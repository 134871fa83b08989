"""The UNet against PyTorch diffusers' UNet with the same weights, alternating in one run.

    python -m benchmarks.unet

times the forward pass (as in an edit) and the gradient of all parameters (as in training) of Stable
Diffusion 1.5's 8-channel UNet at 256 and 512 pixels on a CPU in float32. PyTorch runs eager, eager
with channels_last, and with torch.compile where a C++ compiler is installed. All contenders are
measured once per round. Other work on the machine slows down PyTorch most, as its threads wait for
each other. Tiny, in a minute:

    python -m benchmarks.unet --cases tiny --rounds 2 --output unet.json

The share of the peak is FLOPs (PyTorch's count) over what the fastest large matmul of the machine,
measured in the same run, does in that time. Rows go to benchmarks/results/unet.json. A case needs
14 GB of memory, half of that for the forward pass.
"""

import gc
import shutil
import tempfile
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers import UNet2DConditionModel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import (
    TimingFlags,
    check_timing,
    synchronize,
    time_in_this_process,
    write_contenders,
)
from benchmarks.random_models import SD15, SDXL, TINY_UNET
from benchmarks.rows import describe_machine, run_benchmark
from diffusers_flax.models.unet import FlaxUNet2DConditionModel

SD15_EDIT = SD15["unet"] | {"in_channels": 8}
TEXT_LENGTH = 77


class Case(NamedTuple):
    """A UNet's config and the side of its latents."""

    config: dict
    side: int


CASES = {
    "sd15_256": Case(SD15_EDIT, 32),
    "sd15_512": Case(SD15_EDIT, 64),
    "sdxl_1024": Case(SDXL["unet"], 128),
    "tiny": Case(SD15_EDIT | TINY_UNET, 16),
}


@dataclass(frozen=True, kw_only=True)
class Config(TimingFlags):
    cases: tuple[Literal["sd15_256", "sd15_512", "tiny"], ...] = ("sd15_256", "sd15_512")
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


def our_program(folder, inputs, with_gradient):
    """Our program on its arguments, as a function that does a pass."""
    unet, params = FlaxUNet2DConditionModel.from_pretrained(folder)
    args = jax.device_put((params, *inputs), jax.devices()[0])

    def predict(params, *inputs):
        return unet.apply({"params": params}, *inputs).sample

    def loss(params, *inputs):
        return jnp.square(predict(params, *inputs)).mean()

    program = jax.jit(jax.value_and_grad(loss) if with_gradient else predict)
    program = program.lower(*args).compile()
    return lambda: jax.block_until_ready(program(*args))


def can_compile():
    """Whether the C++ compiler that torch.compile needs is installed."""
    return shutil.which("g++") is not None or shutil.which("clang++") is not None


def run(config):
    """Measure, write."""
    check_timing(config, batch_size=1)
    if not config.cases:
        raise ValueError("--cases is empty; name at least one")
    compiled = can_compile() if config.torch_compile is None else config.torch_compile
    if compiled and not can_compile():
        raise ValueError("--torch_compile True needs a C++ compiler; install g++")
    machine = describe_machine()
    for name in config.cases:
        inputs = make_inputs(CASES[name], config.batch_size)
        tensors = jax.tree.map(torch.from_numpy, inputs)
        for with_gradient in (False, True):
            torch.manual_seed(0)
            unet = UNet2DConditionModel(**CASES[name].config)
            with tempfile.TemporaryDirectory() as folder:
                unet.save_pretrained(folder)
                contenders = {"ours": ((lambda: None), our_program(folder, inputs, with_gradient))}
            contenders |= torch_contenders(unet, tensors, with_gradient, False, compiled)
            row = {
                "batch_size": config.batch_size,
                "flops": count_flops(CASES[name], inputs, with_gradient),
                **time_in_this_process(contenders, config.rounds, config.seconds),
            }
            case = f"{name} {'gradient' if with_gradient else 'forward'} {config.batch_size}"
            write_contenders(case, row, machine, config.output)
            del unet, contenders
            gc.collect()


def main(args=None):
    """Command line."""
    run_benchmark(Config, run, __doc__, args)


if __name__ == "__main__":
    main()
