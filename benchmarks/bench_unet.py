"""The UNet, ours against PyTorch diffusers' with the same weights, in turn in one run.

    python benchmarks/bench_unet.py

Forward (as an edit does) and forward with the gradient of all parameters (as training does) of
Stable Diffusion 1.5's 8-channel UNet at 256 and 512 pixels and of SDXL's at 1024. On a CPU in
float32; on a GPU in bfloat16, the gradient with float32 parameters (PyTorch: autocast). PyTorch
runs eager, eager with channels_last, and with torch.compile (of channels_last on a GPU) where a C++
compiler is. All contenders are measured once in each round, so that a machine that becomes slower
does for all of them; one that does other work as well slows down PyTorch, whose threads wait for
each other, far more.

The share of the peak is FLOPs (PyTorch's count) over what the machine's fastest large matmul, of
ours or PyTorch's and measured in the same run, would do in that time. Tiny, in a minute:

    python benchmarks/bench_unet.py --cases tiny --rounds 2 --output unet.json

Adds to benchmarks/results/unet.json, a row for each case, pass and device, and prints a table. A
case needs four times its weights' memory (SD1.5 14 GB, SDXL 42 GB; forward alone half of that).
"""

import gc
import sys
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.full_size import TINY_UNET, command_line, describe_machine  # noqa: E402
from benchmarks.side_by_side import (  # noqa: E402
    PACKAGES,
    can_compile,
    check_config,
    find_device,
    make_row,
    report,
    synchronize,
    time_in_this_process,
)
from config_flax import PUBLISHED_CONFIGS  # noqa: E402
from modeling_flax_unet import FlaxUNet2DConditionModel  # noqa: E402

SD15 = {"in_channels": 8, "cross_attention_dim": 768, "sample_size": 64}
TEXT_LENGTH = 77


class Case(NamedTuple):
    """A UNet's config and the side of its latents."""

    config: dict
    side: int


CASES = {
    "sd15_256": Case(SD15, 32),
    "sd15_512": Case(SD15, 64),
    "sdxl_1024": Case(PUBLISHED_CONFIGS["stable-diffusion-xl-base-1.0"]["unet"], 128),
    "tiny": Case(SD15 | TINY_UNET, 16),
}


@dataclass(frozen=True)
class Config:
    cases: tuple[Literal["sd15_256", "sd15_512", "sdxl_1024", "tiny"], ...] = (
        "sd15_256",
        "sd15_512",
    )
    passes: tuple[Literal["forward", "gradient"], ...] = ("forward", "gradient")
    batch_size: int = 2  # samples
    rounds: int = 7  # each contender is measured once in each
    seconds: float = 3.0  # of a measurement, at least; one pass at least
    torch_compile: bool | None = None  # default: where a C++ compiler is
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
    """FLOPs of a pass by PyTorch's counter, of shapes alone."""
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
    """PyTorch's ways, {name: (prepare, run)}: run does a pass to its end, after prepare.

    Args:
        unet: UNet2DConditionModel on its device, in the dtype of its parameters.
        inputs: tensors on the same device.
        with_gradient: the pass.
        half: compute in bfloat16.
        compiled: have torch.compile as well.
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

    def run(name):
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
    return {f"torch {name}": (partial(prepare, name), partial(run, name)) for name in names}


def our_program(folder, inputs, with_gradient, half):
    """Ours, compiled, and its arguments; arguments as of torch_contenders, from a folder."""
    dtype = jnp.bfloat16 if half else jnp.float32
    unet, params = FlaxUNet2DConditionModel.from_pretrained(folder, dtype=dtype)
    if half and not with_gradient:
        params = jax.tree.map(lambda x: x.astype(dtype), params)
    params, inputs = jax.device_put((params, inputs))

    def predict(params, sample, timesteps, text, added):
        return unet.apply({"params": params}, sample, timesteps, text, added).sample

    def loss(params, *inputs):
        return jnp.square(predict(params, *inputs).astype(jnp.float32)).mean()

    step = jax.jit(jax.value_and_grad(loss) if with_gradient else predict)
    return step.lower(params, *inputs).compile(), (params, *inputs)


def bench(name, with_gradient, config, device):
    """All contenders on one case and pass; a row of results as in side_by_side.py."""
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


def run(config):
    """Measure, write, print."""
    check_config(config, "batch_size")
    if not (config.cases and config.passes):
        raise ValueError("cases and passes must name at least one each")
    if config.torch_compile and not can_compile():
        raise ValueError("torch_compile=True needs a C++ compiler; install g++")
    device, machine = find_device(), describe_machine(PACKAGES)

    def rows():
        for name in config.cases:
            for which in config.passes:
                yield bench(name, which == "gradient", config, device)
                gc.collect()

    report(rows(), machine, config.output)


def main(args=None):
    """Command line."""
    command_line(Config, __doc__, run, args)


if __name__ == "__main__":
    main()
