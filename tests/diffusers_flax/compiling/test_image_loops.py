"""Programs that make images on an NVIDIA GPU move no parameters in their loops."""

import re

import pytest
from diffusers_flax.compiling.cards import COMPILER_OPTIONS, find_gpus, gpu_devices, traced_for
from gpu_programs import MOVES, needs_gpu_compiler

from diffusers_flax.compilation_cache import no_compilation_cache
from diffusers_flax.compiling.hlo import all_bytes, fused_by, parse_program
from diffusers_flax.compiling.programs import FAMILIES, EditProgramFlags, SdxlFlags, image_program
from diffusers_flax.published_configs import PUBLISHED_CONFIGS

INDEX = re.compile(r"index=(\d+)")


def moved_in_loops(text):
    """Parameters that a loop gets from outside and moves in each step.

    They are known by their dtype, bfloat16, and size; vectors are small.

    Args:
        text: an optimized program of XLA.

    Returns:
        (the number of loops, [instructions that copy, transpose or concatenate them]).
    """
    computations, _ = parse_program(text)
    lines = [line for computation in computations.values() for line in computation.values()]
    loops, moved = [line for line in lines if line.operation == "while"], []
    for loop in loops:
        (body,) = loop.called("body")
        root, read = [*computations[body].values()][-1], read_from_parameter(computations[body])
        kept = {read[name] for i, name in enumerate(root.operands) if read.get(name) == i}
        moved += moved_by(body, kept, computations)
    return len(loops), moved


def read_from_parameter(computation):
    """{instruction: index in the computation's parameter, a tuple, that it reads}."""
    parameters = [x.name for x in computation.values() if x.operation == "parameter"]
    return {
        x.name: int(INDEX.search(x.text)[1])
        for x in computation.values()
        if x.operation == "get-tuple-element" and x.operands == parameters
    }


def moved_by(name, kept, computations):
    """Instructions that move parameters, here and in branches; kept: their indices in the tuple."""
    computation, moved = computations[name], []

    def is_large(line):
        return line.type.startswith("bf16") and all_bytes(line.type) >= 2**14

    inputs = {name for name, i in read_from_parameter(computation).items() if i in kept}
    large = {name for name in inputs if is_large(computation[name])}
    for line in computation.values():
        parts = fused_by(line, computations).values() or [line]
        moves = any(x.operation in MOVES and is_large(x) for x in parts)
        if moves and large & {*line.operands}:
            moved.append(line.name)
        branches = line.called("branch_computations")
        for branch, argument in zip(branches, line.operands[1:] if branches else [], strict=True):
            passed = computation[argument].operands
            passed = {i for i, name in enumerate(passed) if name in inputs}
            moved += moved_by(branch, passed, computations)
    return moved


def small_configs(family):
    """The published configs with a fifth of the channels, few layers and a small VAE."""
    configs = {name: dict(config) for name, config in PUBLISHED_CONFIGS[FAMILIES[family]].items()}
    unet = configs["unet"]
    unet["block_out_channels"] = (64, 128, 256) if family == "sdxl" else (64, 128, 256, 256)
    unet["attention_head_dim"] = 2
    unet["layers_per_block"] = 1
    if family == "sdxl":
        unet["transformer_layers_per_block"] = (1, 1, 2)
        configs["text_encoder_2"]["num_hidden_layers"] = 2
    configs["text_encoder"]["num_hidden_layers"] = 2
    configs["vae"]["block_out_channels"] = (32, 32, 32, 32)
    return configs


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize(
    ("family", "accelerate"),
    [
        ("sdxl", ()),
        ("sdxl", ("deepcache:interval=2", "guidance:stop=0.5")),
        ("sd15", ()),
    ],
)
def test_a_loop_moves_no_parameters(monkeypatch, family, accelerate):
    monkeypatch.setitem(PUBLISHED_CONFIGS, FAMILIES[family], small_configs(family))
    host = find_gpus("h100")
    options = dict(gpu="h100", vae_tile=0, accelerate=accelerate)
    flags = SdxlFlags(image_size=512, **options)
    if family == "sd15":
        flags = EditProgramFlags(resolution=512, **options)
    with traced_for(host.chip), no_compilation_cache():
        program = image_program(flags, gpu_devices(host))
        lowered = program.step.lower(*program.args)
        text = lowered.compile(compiler_options=COMPILER_OPTIONS).as_text()
    assert "__cudnn$fmhaSoftmax" in text
    num_loops, moved = moved_in_loops(text)
    assert num_loops >= (2 if accelerate else 1)
    assert not moved


LOOP = """
%joined (x: bf16[128,64], y: bf16[128,64]) -> bf16[128,128] {
  %x = bf16[128,64]{1,0} parameter(0)
  %y = bf16[128,64]{1,0} parameter(1)
  ROOT %concatenate.1 = bf16[128,128]{1,0} concatenate(%x, %y), dimensions={1}
}

%branch (passed: (bf16[128,64])) -> bf16[64,128] {
  %passed = (bf16[128,64]{1,0}) parameter(0)
  %own = bf16[128,64]{1,0} get-tuple-element(%passed), index=0
  ROOT %transpose.1 = bf16[64,128]{1,0} transpose(%own), dimensions={1,0}
}

%body (carry: (bf16[128,64], bf16[128,64], bf16[64])) -> (bf16[128,64], bf16[128,64], bf16[64]) {
  %carry = (bf16[128,64]{1,0}, bf16[128,64]{1,0}, bf16[64]{0}) parameter(0)
  %kernel = bf16[128,64]{1,0} get-tuple-element(%carry), index=0
  %sample = bf16[128,64]{1,0} get-tuple-element(%carry), index=1
  %bias = bf16[64]{0} get-tuple-element(%carry), index=2
  %fusion.1 = bf16[128,128]{1,0} fusion(%kernel, %sample), kind=kLoop, calls=%joined
  %copy.1 = bf16[64]{0} copy(%bias)
  %copy.2 = bf16[128,64]{1,0} copy(%sample)
  %tuple.1 = (bf16[128,64]{1,0}) tuple(%kernel)
  %conditional.1 = bf16[64,128]{1,0} conditional(%i, %tuple.1), branch_computations={%branch}
  ROOT %tuple.2 = (bf16[128,64], bf16[128,64], bf16[64]) tuple(%kernel, %copy.2, %bias)
}

ENTRY %main (carry: (bf16[128,64], bf16[128,64], bf16[64])) -> (bf16[128,64]) {
  %carry = (bf16[128,64]{1,0}, bf16[128,64]{1,0}, bf16[64]{0}) parameter(0)
  ROOT %while.1 = (bf16[128,64]{1,0}) while(%carry), condition=%condition, body=%body
}
"""


def test_what_counts_as_moved():
    assert moved_in_loops(LOOP) == (1, ["fusion.1", "transpose.1"])
