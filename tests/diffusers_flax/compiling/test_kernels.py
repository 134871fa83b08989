"""A GPU's kernels by kind: bytes, FLOPs and times, from the text of a program."""

import jax
import jax.numpy as jnp
import pytest
from gpu_programs import needs_gpu_compiler

from diffusers_flax.compiling.chips import GPUS, find_target, target_devices, traced_for
from diffusers_flax.compiling.kernels import kernel_table
from diffusers_flax.compiling.report import Part, program_costs

H100 = GPUS["h100"]

# Lines as XLA writes them: a matmul with a workspace, a convolution, attention, fusions, a loop of
# 20 steps that transposes, a sliced operand, and a gather among four GPUs.
TEXT = """
HloModule jit_step, is_scheduled=true

%fused_transpose (p.0: f32[64,32]) -> f32[32,64] {
  %p.0 = f32[64,32]{1,0} parameter(0)
  ROOT %transpose.1 = f32[32,64]{1,0} transpose(%p.0), dimensions={1,0}
}

%fused_slice (p.1: f32[1000,32]) -> f32[10,32] {
  %p.1 = f32[1000,32]{1,0} parameter(0)
  ROOT %slice.1 = f32[10,32]{1,0} slice(%p.1), slice={[0:10], [0:32]}
}

%gemm_fusion_dot_computation (p.2: bf16[8,16], p.3: bf16[16,4]) -> bf16[8,4] {
  %p.2 = bf16[8,16]{1,0} parameter(0)
  %p.3 = bf16[16,4]{1,0} parameter(1)
  ROOT %dot.1 = bf16[8,4]{1,0} dot(%p.2, %p.3), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%triton (p.4: f32[64,32]) -> f32[64] {
  %p.4 = f32[64,32]{1,0} parameter(0)
  %zero = f32[] constant(0)
  ROOT %reduce.1 = f32[64]{0} reduce(%p.4, %zero), dimensions={1}, to_apply=%add
}

%condition (state: (s32[], f32[64,32])) -> pred[] {
  %state = (s32[], f32[64,32]{1,0}) parameter(0)
  ROOT %less = pred[] compare(%state, %state), direction=LT
}

%body (state.1: (s32[], f32[64,32])) -> (s32[], f32[64,32]) {
  %state.1 = (s32[], f32[64,32]{1,0}) parameter(0)
  %x.1 = f32[64,32]{1,0} get-tuple-element(%state.1), index=1
  %input_transpose_fusion = f32[32,64]{1,0} fusion(%x.1), kind=kInput, calls=%fused_transpose
  %bitcast.1 = f32[64,32]{1,0} bitcast(%input_transpose_fusion)
  ROOT %tuple.1 = (s32[], f32[64,32]{1,0}) tuple(%state.1, %bitcast.1)
}

ENTRY %main (a: bf16[128,256], b: bf16[256,512]) -> f32[64] {
  %a = bf16[128,256]{1,0} parameter(0)
  %b = bf16[256,512]{1,0} parameter(1)
  %image = bf16[2,8,8,16]{3,2,1,0} parameter(2)
  %kernel = bf16[24,3,3,16]{3,2,1,0} parameter(3)
  %x = f32[64,32]{1,0} parameter(4)
  %long = f32[1000,32]{1,0} parameter(5)
  %q = bf16[2,64,4,32]{3,2,1,0} parameter(6)
  %k = bf16[2,80,4,32]{3,2,1,0} parameter(7)
  %c = bf16[8,16]{1,0} parameter(8)
  %d = bf16[16,4]{1,0} parameter(9)
  %start = (s32[], f32[64,32]{1,0}) parameter(10)
  %cublas-lt-matmul.2 = (bf16[128,512]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_batch_dimensions":[],"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %cudnn-conv.1 = (bf16[2,8,8,24]{3,2,1,0}, u8[0]{0}) custom-call(%image, %kernel), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  %out = bf16[2,8,8,24]{3,2,1,0} get-tuple-element(%cudnn-conv.1), index=0
  %cudnn-conv-bw-input.1 = (bf16[2,8,8,16]{3,2,1,0}, u8[512]{0}) custom-call(%out, %kernel), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"
  %cudnn-conv-bw-filter.1 = (bf16[24,3,3,16]{3,2,1,0}, u8[512]{0}) custom-call(%image, %out), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %attend.1 = (bf16[2,4,64,32]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax"
  %gemm_fusion_dot = bf16[8,4]{1,0} fusion(%c, %d), kind=kCustom, calls=%gemm_fusion_dot_computation
  %loop_slice_fusion = f32[10,32]{1,0} fusion(%long), kind=kLoop, calls=%fused_slice
  %loop = (s32[], f32[64,32]{1,0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"20"}}
  %copy.1 = f32[64,32]{1,0} copy(%x)
  %all-gather.1 = f32[256,32]{1,0} all-gather(%copy.1), dimensions={0}, replica_groups={{0,1,2,3}}
  ROOT %fusion.7 = f32[64]{0} fusion(%x), kind=kCustom, calls=%triton
}
"""  # noqa: E501


def test_kernels_by_hand():
    table = kernel_table(TEXT, H100)
    numbers = {kind: row["kernels"] for kind, row in table.items()}
    assert numbers == {
        "attention": 1,
        "convolution": 3,
        "matmul": 2,
        "collective": 1,
        "copy": 1,
        "transpose": 20,  # trips
        "reduction": 1,
        "element-wise": 1,
    }
    x = 4 * 64 * 32  # bytes of f32[64,32]
    gemm = 2 * (128 * 256 + 256 * 512 + 128 * 512)  # without the workspace
    image, kernel, out = (2 * n for n in (2 * 8 * 8 * 16, 24 * 9 * 16, 2 * 8 * 8 * 24))
    assert {kind: row["bytes"] for kind, row in table.items()} == {
        "attention": 2 * (2 * 2 * 64 * 4 * 32 + 2 * 2 * 80 * 4 * 32),
        "convolution": 3 * (image + kernel + out),
        "matmul": gemm + 2 * (8 * 16 + 16 * 4 + 8 * 4),
        "collective": 3 * x,  # three quarters of the gathered array
        "copy": 2 * x,
        "transpose": 20 * 2 * x,
        "reduction": x + 4 * 64,
        "element-wise": 2 * 4 * 10 * 32,  # of the sliced operand only the slice
    }
    convolution = 2 * (2 * 8 * 8 * 24) * (9 * 16)
    assert {kind: row["flops"] for kind, row in table.items() if row["flops"]} == {
        "attention": 2 * 2 * (2 * 4) * 64 * 80 * 32,
        "convolution": 3 * convolution,
        "matmul": 2 * 128 * 256 * 512 + 2 * 8 * 16 * 4,
    }
    assert table["transpose"]["least_seconds"] == pytest.approx(20 * 2 * x / 3.35232e12)
    assert table["collective"]["least_seconds"] == pytest.approx(3 * x / 450e9)
    # Each kernel at its own limit: the first matmul is small, so its memory.
    least = gemm / 3.35232e12 + 2 * (8 * 16 + 16 * 4 + 8 * 4) / 3.35232e12
    assert table["matmul"]["least_seconds"] == pytest.approx(least)


def test_rates_by_dtype():
    """Matmuls of 4096: bf16 at the peak, float32 as TF32 at half of it, int8 at its own."""
    line = (
        "  %cublas-gemm.1 = {}[4096,4096]{{1,0}} custom-call(%a, %a), "
        'custom_call_target="__cublas$gemm", backend_config={{"dot_dimension_numbers":'
        '{{"lhs_contracting_dimensions":["1"]}}}}'
    )
    for dtype, rate in (("bf16", 989.4e12), ("f32", 494.7e12), ("s8", 1978.9e12)):
        text = f"ENTRY %main (a: {dtype}[4096,4096]) -> {dtype}[4096,4096] {{\n"
        text += f"  %a = {dtype}[4096,4096]{{1,0}} parameter(0)\n{line.format(dtype)}\n}}\n"
        row = kernel_table(text, H100)["matmul"]
        assert row["flops"] == 2 * 4096**3
        assert row["least_seconds"] == pytest.approx(2 * 4096**3 / rate)


@pytest.mark.slow
@needs_gpu_compiler
def test_a_compiled_program():
    """Eight GPUs reduce what each of them multiplies."""
    target = find_target("h100x8")
    devices = target_devices(target)
    assert len(devices) == 8
    x = jax.ShapeDtypeStruct((8, 1024, 2048), jnp.bfloat16)
    y = jax.ShapeDtypeStruct((8, 2048, 512), jnp.bfloat16)

    def multiply(x, y):
        product = jnp.matmul(x, y, preferred_element_type=jnp.float32)
        return jax.lax.psum(product, "batch")

    program = jax.pmap(multiply, axis_name="batch", devices=devices)
    with traced_for(target.chip):
        costs = program_costs(Part(program, (x, y)), target.chip)
    assert costs["kernels"]["matmul"]["flops"] == 2 * 1024 * 2048 * 512
    # A ring sends twice 7 of 8 parts of the product.
    assert costs["interconnect_bytes"] == 2 * 4 * 1024 * 512 * 7 / 8
    assert costs["memory"]["outputs"] == 4 * 1024 * 512
