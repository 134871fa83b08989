"""Programs that make images on an NVIDIA GPU move no parameters in their loops."""

import re

import pytest
from gpu_programs import needs_gpu_compiler

from compiling.cards import COMPILER_OPTIONS, find_gpus, gpu_devices, traced_for
from compiling.hlo import FUSED, all_bytes, operands_of, parse_program
from compiling.programs import FAMILIES, EditProgramFlags, SdxlFlags, image_program
from diffusers_flax.compilation_cache import no_compilation_cache
from diffusers_flax.published_configs import PUBLISHED_CONFIGS

MOVES = {"copy", "transpose", "concatenate"}
INDEX = re.compile(r"index=(\d+)")


def moved_in_loops(text):
    """Arrays that a loop gets from outside and moves in each step, kernels, not vectors.

    Args:
        text: an optimized program of XLA.

    Returns:
        (the number of loops, [instructions that copy, transpose or concatenate them]).
    """
    computations, _ = parse_program(text)
    bodies = [
        re.search(r"body=%([\w.\-]+)", rest)[1]
        for instructions in computations.values()
        for _, _, operation, rest in instructions
        if operation == "while"
    ]
    moved = []
    for body in bodies:
        read = {
            name: int(INDEX.search(rest)[1])
            for name, _, operation, rest in computations[body]
            if operation == "get-tuple-element"
        }
        *_, (_, _, _, root) = computations[body]
        kept = {name for i, name in enumerate(operands_of(root)) if read.get(name) == i}
        sizes = {name: all_bytes(kind) for name, kind, _, _ in computations[body]}
        for name, _, operation, rest in computations[body]:
            inside = {operation}
            if fused := FUSED.search(rest):
                inside = {operation for _, _, operation, _ in computations[fused[1]]}
            from_outside = [x for x in operands_of(rest) if x in kept and sizes[x] >= 2**14]
            if inside & MOVES and from_outside:
                moved.append(name)
    return len(bodies), moved


def small_configs(family):
    """The published configs with an eighth of the channels, few layers and a small VAE."""
    configs = {name: dict(config) for name, config in PUBLISHED_CONFIGS[FAMILIES[family]].items()}
    unet = configs["unet"]
    unet["block_out_channels"] = tuple(n // 5 for n in unet["block_out_channels"])
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
%joined (x: f32[128,64], y: f32[128,64]) -> f32[128,128] {
  %x = f32[128,64]{1,0} parameter(0)
  %y = f32[128,64]{1,0} parameter(1)
  ROOT %concatenate.1 = f32[128,128]{1,0} concatenate(%x, %y), dimensions={1}
}

%body (carry: (f32[128,64], f32[128,64], f32[8])) -> (f32[128,64], f32[128,64], f32[8]) {
  %carry = (f32[128,64]{1,0}, f32[128,64]{1,0}, f32[8]{0}) parameter(0)
  %kernel = f32[128,64]{1,0} get-tuple-element(%carry), index=0
  %sample = f32[128,64]{1,0} get-tuple-element(%carry), index=1
  %bias = f32[8]{0} get-tuple-element(%carry), index=2
  %fusion.1 = f32[128,128]{1,0} fusion(%kernel, %sample), kind=kLoop, calls=%joined
  %copy.1 = f32[8]{0} copy(%bias)
  %copy.2 = f32[128,64]{1,0} copy(%sample)
  ROOT %tuple.1 = (f32[128,64]{1,0}, f32[128,64]{1,0}, f32[8]{0}) tuple(%kernel, %copy.2, %bias)
}

ENTRY %main (carry: (f32[128,64], f32[128,64], f32[8])) -> (f32[128,64], f32[128,64], f32[8]) {
  %carry = (f32[128,64]{1,0}, f32[128,64]{1,0}, f32[8]{0}) parameter(0)
  ROOT %while.1 = (f32[128,64]{1,0}, f32[128,64]{1,0}, f32[8]{0}) while(%carry), body=%body
}
"""


def test_what_counts_as_moved():
    assert moved_in_loops(LOOP) == (1, ["fusion.1"])
