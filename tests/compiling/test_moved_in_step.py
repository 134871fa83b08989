"""A training step on an NVIDIA GPU moves no parameters: they are in cuDNN's order."""

import jax
import pytest
from gpu_programs import needs_gpu_compiler

from compile_for import TrainFlags, train_program
from compiling.cards import COMPILER_OPTIONS, find_gpus, gpu_devices, traced_for
from compiling.hlo import FUSED, all_bytes, operands_of, parse_program
from compiling.programs import FAMILIES
from diffusers_flax.compilation_cache import no_compilation_cache
from diffusers_flax.published_configs import PUBLISHED_CONFIGS

MOVES = {"copy", "transpose", "concatenate"}
# Of Stable Diffusion 1.5, with a fifth of the channels.
SMALL = {
    "unet": {"block_out_channels": (64, 128, 256, 256), "layers_per_block": 1},
    "text_encoder": {"num_hidden_layers": 2},
    "vae": {"block_out_channels": (32, 32, 32, 32)},
}


def moved_in_step(text):
    """Instructions that copy, transpose or concatenate kernels or moments of the state.

    Args:
        text: an optimized program of XLA without loops.
    """
    computations, entry = parse_program(text)
    kernels, moved = set(), []
    for name, kind, operation, rest in computations[entry]:
        is_large = kind.startswith(("f32[", "bf16[")) and all_bytes(kind) >= 2**14
        operands = operands_of(rest)
        inside = {operation}
        if fused := FUSED.search(rest):
            inside = {operation for _, _, operation, _ in computations[fused[1]]}
        if inside & MOVES and kernels.intersection(operands):
            moved.append(name)
        is_cast = inside <= {"parameter", "convert", "bitcast", "fusion"}
        if is_large and (operation == "parameter" or (is_cast and kernels.intersection(operands))):
            kernels.add(name)
    return moved


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("lora_rank", [None, 4])
def test_a_training_step_moves_no_parameters(monkeypatch, lora_rank):
    """Kernels, moments and gradients stay in cuDNN's order; donated arrays are written in place."""
    configs = PUBLISHED_CONFIGS[FAMILIES["sd15"]]
    for name, change in SMALL.items():
        monkeypatch.setitem(configs, name, configs[name] | change)
    host = find_gpus("h100")
    options = dict(resolution=256, mixed_precision="bf16", lora_rank=lora_rank)
    flags = TrainFlags(gpu="h100", train_data_dir=(), train_batch_size=4, **options)
    with traced_for(host.chip), no_compilation_cache(), jax.numpy_dtype_promotion("standard"):
        program = train_program(flags, gpu_devices(host))
        lowered = program.step.lower(*program.args)
        compiled = lowered.compile(compiler_options=COMPILER_OPTIONS)
    assert "__cudnn$convBackwardFilter" in compiled.as_text() or lora_rank
    assert moved_in_step(compiled.as_text()) == []


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

ENTRY %main (kernel: f32[128,64], image: u8[128,64]) -> f32[128,64] {
  %kernel = f32[128,64]{1,0} parameter(0)
  %image = u8[128,64]{1,0} parameter(1)
  %copy.1 = u8[128,64]{1,0} copy(%image)
  %fusion.1 = bf16[128,64]{1,0} fusion(%kernel), kind=kLoop, calls=%cast
  %copy.2 = bf16[128,64]{1,0} copy(%fusion.1)
  %dot.1 = bf16[64,128]{1,0} custom-call(%copy.2, %copy.1), custom_call_target="gradient"
  %copy.3 = bf16[64,128]{1,0} copy(%dot.1)
  ROOT %fusion.2 = f32[128,64]{1,0} fusion(%kernel, %copy.3), kind=kInput, calls=%update
}
"""


def test_what_counts_as_moved_in_a_step():
    assert moved_in_step(STEP) == ["copy.2", "fusion.2"]
