"""A training step on an NVIDIA GPU moves no parameters: they are in cuDNN's order."""

import re

import jax
import pytest
from gpu_programs import needs_gpu_compiler

from compile_for import TrainFlags, train_program, with_model
from diffusers_flax.compilation_cache import no_compilation_cache
from diffusers_flax.compiling.chips import find_target, target_devices, traced_for
from diffusers_flax.compiling.hlo import array_sizes, parse_program
from diffusers_flax.compiling.programs import FAMILIES
from diffusers_flax.compiling.report import GPU_OPTIONS
from diffusers_flax.published_configs import PUBLISHED_CONFIGS

MOVES = {"copy", "transpose", "concatenate"}  # operations of HLO
# Of Stable Diffusion 1.5, with a fifth of the channels.
SMALL = {
    "unet": {"block_out_channels": (64, 128, 256, 256), "layers_per_block": 1},
    "text_encoder": {"num_hidden_layers": 2},
    "vae": {"block_out_channels": (32, 32, 32, 32)},
}


def without_ones(kind):
    """Sizes of an array's axes, sorted, without ones: "f32[1,8,3,3,4]{...}" -> [3, 3, 4, 8]."""
    sizes = re.search(r"\[([\d,]*)\]", kind)[1].split(",")
    return sorted(int(size) for size in sizes if size not in ("", "1"))


def moved_in_step(text):
    """Instructions that copy, transpose or concatenate kernels, moments or gradients.

    They are arguments of the program, casts of them, or arrays (height, width, I, O) in any order.

    Args:
        text: an optimized program of XLA without loops.
    """
    computations, entry = parse_program(text)
    arguments, moved, shapes = set(), [], []
    for line in computations[entry].values():
        is_large = line.type.startswith(("f32[", "bf16[")) and sum(array_sizes(line.type)) >= 2**14
        reads_arguments = bool(arguments.intersection(line.operands))
        inside = [*line.fused.values()] or [line]
        moves = [without_ones(x.type) for x in inside if x.operation in MOVES]
        if (moves and reads_arguments) or any(x in shapes for x in moves):
            moved.append(line.name)
        is_cast = {x.operation for x in inside} <= {"parameter", "convert", "bitcast", "fusion"}
        if is_large and (line.operation == "parameter" or (is_cast and reads_arguments)):
            arguments.add(line.name)
            if (sizes := without_ones(line.type))[:2] == [3, 3] and len(sizes) == 4:
                shapes.append(sizes)
    return moved


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("lora_rank", [None, 4])
def test_a_training_step_moves_no_parameters(monkeypatch, tmp_path, lora_rank):
    """Kernels, moments and gradients stay in cuDNN's order; the state is updated in place."""
    configs = PUBLISHED_CONFIGS[FAMILIES["sd15"]]
    for name, change in SMALL.items():
        monkeypatch.setitem(configs, name, configs[name] | change)
    host = find_target("h100")
    options = dict(resolution=256, mixed_precision="bf16", lora_rank=lora_rank)
    flags = TrainFlags(gpu="h100", train_data_dir=(), train_batch_size=4, **options)
    with traced_for(host.chip), no_compilation_cache(), jax.numpy_dtype_promotion("standard"):
        step = train_program(with_model(flags, tmp_path), target_devices(host)).parts["step"]
        lowered = step.function.lower(*step.args)
        compiled = lowered.compile(compiler_options=GPU_OPTIONS)
    assert "__cudnn$convBackwardFilter" in compiled.as_text() or lora_rank
    assert moved_in_step(compiled.as_text()) == []
    state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(step.args[0]))
    assert compiled.memory_analysis().alias_size_in_bytes >= state_bytes


STEP = """
%cast (x: f32[128,64]) -> bf16[128,64] {
  %x = f32[128,64]{1,0} parameter(0)
  ROOT %convert.1 = bf16[128,64]{1,0} convert(%x)
}

%update (x: f32[128,64], y: bf16[64,128]) -> f32[128,64] {
  %x = f32[128,64]{1,0} parameter(0)
  %y = bf16[64,128]{1,0} parameter(1)
  %transpose.1 = bf16[128,64]{1,0} transpose(%y), dimensions={1,0}
  %convert.2 = f32[128,64]{1,0} convert(%transpose.1)
  ROOT %add.1 = f32[128,64]{1,0} add(%x, %convert.2)
}

ENTRY %main (kernel: f32[128,64], image: u8[128,64], conv: f32[1,64,3,3,32]) -> f32[128,64] {
  %kernel = f32[128,64]{1,0} parameter(0)
  %image = u8[128,64]{1,0} parameter(1)
  %conv = f32[1,64,3,3,32]{4,3,2,1,0} parameter(2)
  %copy.1 = u8[128,64]{1,0} copy(%image)
  %fusion.1 = bf16[128,64]{1,0} fusion(%kernel), kind=kLoop, calls=%cast
  %copy.2 = bf16[128,64]{1,0} copy(%fusion.1)
  %dot.1 = bf16[64,128]{1,0} custom-call(%copy.2, %copy.1), custom_call_target="gradient"
  %copy.3 = bf16[64,128]{1,0} copy(%dot.1)
  %conv.1 = bf16[64,3,3,32]{3,2,1,0} custom-call(%copy.1), custom_call_target="gradient"
  %transpose.2 = bf16[3,3,32,64]{3,2,1,0} transpose(%conv.1), dimensions={1,2,3,0}
  %add.2 = f32[3,3,32,64]{3,2,1,0} custom-call(%transpose.2), custom_call_target="update"
  %copy.4 = f32[3,3,32,64]{3,2,1,0} copy(%add.2)
  ROOT %fusion.2 = f32[128,64]{1,0} fusion(%kernel, %copy.3), kind=kInput, calls=%update
}
"""


def test_what_counts_as_moved_in_a_step():
    assert moved_in_step(STEP) == ["copy.2", "transpose.2", "copy.4", "fusion.2"]
