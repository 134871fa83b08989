"""Traffic, cycles and collectives in the text of compiled programs, by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from tpu_programs import needs_libtpu

from diffusers_flax.compiling.chips import find_target, target_devices
from diffusers_flax.compiling.hlo import executed, traffic
from diffusers_flax.training.sharding import Split, reduce_scatter_mean


def hbm_bytes(text, fractions=None):
    """Bytes to and from the chip's memory."""
    return traffic(text, fractions)["hbm_bytes"]


def test_traffic_by_hand():
    """Counts a fusion, copies to VMEM and every iteration of a loop, but no access to VMEM."""
    text = """HloModule jit_f, is_scheduled=true

%fused (p: f32[256]) -> f32[256] {
  %p = f32[256]{0:T(256)} parameter(0)
  ROOT %n = f32[256]{0:T(256)} negate(%p)
}

%body (state: (s32[], f32[256])) -> (s32[], f32[256]) {
  %state = (s32[]{:T(128)S(6)}, f32[256]{0:T(256)}) parameter(0)
  %i = s32[]{:T(128)S(6)} get-tuple-element(%state), index=0
  %x.1 = f32[256]{0:T(256)} get-tuple-element(%state), index=1
  %y = f32[256]{0:T(256)} add(%x.1, %x.1)
  ROOT %out = (s32[]{:T(128)S(6)}, f32[256]{0:T(256)}) tuple(%i, %y)
}

%more (state.1: (s32[], f32[256])) -> pred[] {
  %state.1 = (s32[]{:T(128)S(6)}, f32[256]{0:T(256)}) parameter(0)
  %limit = s32[]{:T(128)S(6)} constant(5)
  %count = s32[]{:T(128)S(6)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)S(6)} compare(%count, %limit), direction=LT
}

ENTRY %main (a: f32[256]) -> f32[256] {
  %a = f32[256]{0:T(256)} parameter(0)
  %zero = s32[]{:T(128)S(6)} constant(0)
  %copy-start = (f32[256]{0:T(256)S(1)}, f32[256]{0:T(256)}, u32[]{:S(2)}) copy-start(%a)
  %near = f32[256]{0:T(256)S(1)} copy-done(%copy-start)
  %part = ((f32[256]{0:T(256)}), f32[64]{0:T(256)S(1)}, s32[]{:S(2)}) slice-start(%a)
  %done = f32[64]{0:T(256)S(1)} slice-done(%part)
  %far = f32[256]{0:T(256)} fusion(%near, %done), kind=kLoop, calls=%fused
  %init = (s32[]{:T(128)S(6)}, f32[256]{0:T(256)}) tuple(%zero, %far)
  %loop = (s32[]{:T(128)S(6)}, f32[256]{0:T(256)}) while(%init), condition=%more, body=%body
  ROOT %end = f32[256]{0:T(256)} get-tuple-element(%loop), index=1
}
"""
    # Read to copy, read to slice, written by the fusion; in the loop twice read and once written.
    assert hbm_bytes(text) == 1024 + 256 + 1024 + 5 * 3 * 1024
    bytes_of = {"f32": 1024, "f8e4m3fn": 256, "s4": 128, "c64": 2048, "pred": 256, "token": 0}
    for dtype, size in bytes_of.items():
        negated = f"ENTRY %main (a: x) -> x {{\n  %a = {dtype}[256]{{0}} parameter(0)\n  ROOT %n = "
        assert hbm_bytes(f"{negated}{dtype}[256]{{0}} negate(%a)\n}}") == 2 * size
    endless = text.replace("direction=LT", "direction=NE")
    assert hbm_bytes(endless) == 1024 + 256 + 1024 + 3 * 1024


def test_traffic_of_a_switch_by_hand():
    """A loop of ten trips computes its branches in seven and three of them."""
    text = """HloModule jit_f, is_scheduled=true

%one (a: f32[1024]) -> f32[1024] {
  %a = f32[1024]{0} parameter(0)
  ROOT %b = f32[1024]{0} negate(%a)
}

%two (c: f32[1024]) -> f32[1024] {
  %c = f32[1024]{0} parameter(0)
  %d = f32[1024]{0} negate(%c)
  ROOT %e = f32[1024]{0} negate(%d)
}

%body (x: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %x = (s32[], f32[1024]{0}) parameter(0)
  %i = s32[]{:S(6)} get-tuple-element(%x), index=0
  %y = f32[1024]{0} get-tuple-element(%x), index=1
  %z = f32[1024]{0} conditional(%i, %y, %y), branch_computations={%one, %two}, metadata={op_name="jit(f)/while/body/steps/cond"}
  ROOT %t = (s32[], f32[1024]{0}) tuple(%i, %z)
}

%condition (u: (s32[], f32[1024])) -> pred[] {
  %u = (s32[], f32[1024]{0}) parameter(0)
  ROOT %v = pred[]{:S(6)} custom-call(%u)
}

ENTRY %main (p: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %p = (s32[], f32[1024]{0}) parameter(0)
  ROOT %w = (s32[], f32[1024]{0}) while(%p), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"10"}}
}
"""  # noqa: E501
    one, two = 2 * 4096, 4 * 4096
    assert hbm_bytes(text, {"steps": (0.7, 0.3)}) == 7 * one + 3 * two
    assert hbm_bytes(text, {"body": (0.7, 0.3)}) == hbm_bytes(text) == 10 * (one + two)


def test_of_a_sliced_operand_the_slices_are_read():
    text = """
%cut (p: f32[256], q: f32[64], i: s32[]) -> f32[64] {
  %p = f32[256]{0:T(256)} parameter(0)
  %q = f32[64]{0:T(256)} parameter(1)
  %i = s32[]{:T(128)} parameter(2)
  %s = f32[64]{0:T(256)} dynamic-slice(%p, %i), dynamic_slice_sizes={64}
  ROOT %n = f32[64]{0:T(256)} add(%s, %q)
}

ENTRY %main (a: f32[256], b: f32[64], i: s32[]) -> f32[32] {
  %a = f32[256]{0:T(256)} parameter(0)
  %b = f32[64]{0:T(256)} parameter(1)
  %i.1 = s32[]{:T(128)S(6)} parameter(2)
  %near = f32[64]{0:T(256)} fusion(%a, %b, %i.1), kind=kLoop, calls=%cut
  ROOT %end = f32[32]{0:T(256)} slice(%near), slice={[0:32]}
}
"""
    assert hbm_bytes(text) == (256 + 256 + 256) + (128 + 128)
    both = text.replace("add(%s, %q)", "add(%s, %p)")  # also the full array
    assert hbm_bytes(both) == (1024 + 256) + (128 + 128)
    slice_again = "bitcast(%p)\n  %t = f32[64]{0:T(256)} dynamic-slice(%v, %i)"
    twice = text.replace("  ROOT %n", f"  %v = f32[256]{{0:T(256)}} {slice_again}\n  ROOT %n", 1)
    assert hbm_bytes(twice) == hbm_bytes(text) + 256
    at_most_whole = twice.replace("%t = f32[64]", "%t = f32[255]")
    assert hbm_bytes(at_most_whole) == hbm_bytes(both) + 256
    near = text.replace("%a = f32[256]{0:T(256)}", "%a = f32[256]{0:T(256)S(1)}")
    assert hbm_bytes(near) == hbm_bytes(text) - 256


def test_bytes_that_pass_through_chips_count_once_for_each_link():
    """Two hosts of 2x2 chips side by side, in every notation of groups."""
    coords = [(x + 2 * host, y, 0) for host in (0, 1) for y in (0, 1) for x in (0, 1)]

    def crossed(operation, groups, coords=coords):
        text = f"ENTRY %main (a: x) -> x {{\n  %a = f32[256]{{0}} {operation}(%x), {groups}\n}}"
        return traffic(text, coords=coords)["interconnect_bytes"]

    hosts = "replica_groups={{0,1,2,3},{4,5,6,7}}"
    assert crossed("all-to-all", hosts, None) == 3 * 256
    assert crossed("all-to-all", hosts) == (1 + 1 + 2) * 256  # two neighbours, one across
    between = "replica_groups=[4,2]<=[2,4]T(1,0)"
    assert crossed("all-to-all", between) == 2 * 512
    assert crossed("reduce-scatter", between) == 2 * 1024
    assert crossed("reduce-scatter", between, None) == 1024
    assert crossed("all-reduce", "replica_groups={{0}}") == 0
    assert crossed("collective-permute", "source_target_pairs={{0,1},{3,2}}") == 1024
    assert crossed("collective-permute", "source_target_pairs={{0,1},{1,2}}") == 2 * 1024


@needs_libtpu
def test_bytes_to_other_chips_by_hand(libtpu_environment):
    """A ring of four: 3/4 of a gathered or scattered array, 6/4 of an array that is summed."""
    devices = target_devices(find_target("v5e-4"))
    x = jax.ShapeDtypeStruct((4, 1024, 128), jnp.float32)
    size = 4 * 1024 * 128

    def sent(f):
        program = jax.pmap(f, axis_name="batch", devices=devices)
        return traffic(program.lower(x).compile().as_text())["interconnect_bytes"]

    gathered = sent(lambda x: jax.lax.all_gather(x, "batch"))
    scattered = sent(lambda x: jax.lax.psum_scatter(x, "batch", tiled=True))
    summed = sent(lambda x: jax.lax.psum(x, "batch"))
    assert (gathered, scattered, summed) == (3 * size, 3 * size // 4, 3 * size // 2)


@needs_libtpu
@pytest.mark.parametrize(("dtype", "size"), [(jnp.bfloat16, 2), (jnp.float32, 4)])
def test_sixteen_chips_reduce_and_scatter_gradients(dtype, size, libtpu_environment):
    """In bfloat16 a chip sends to its host's, in float32 a quarter of the sum to other hosts.

    Chips of a host are one link apart on average, hosts two links. Padding is left aside.
    """
    devices = target_devices(find_target("v5e-16"))
    x = jax.ShapeDtypeStruct((16, 51200, 512), dtype)
    step = partial(reduce_scatter_mean, axes=Split(0, 16))
    text = jax.pmap(step, axis_name="batch", devices=devices).lower(x).compile().as_text()
    coords = [device.coords for device in devices]
    sent = traffic(text, coords=coords)["interconnect_bytes"] / (51200 * 512)
    in_host = {2: 1.0, 4: 3 / 4}[size]  # all to all, or a ring
    assert sent == pytest.approx(in_host * size + 2 * 3 / 4 * 4 / 4, rel=0.06)


CONDITIONS = """
%rare (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %copy.1 = f32[4]{0} copy(%p)
}

%often (p.1: f32[4]) -> f32[4] {
  %p.1 = f32[4]{0} parameter(0)
  %copy.2 = f32[4]{0} copy(%p.1)
  %copy.3 = f32[4]{0} copy(%copy.2)
  ROOT %copy.4 = f32[4]{0} copy(%copy.3)
}

%body (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %c.1 = f32[4]{0} conditional(%x, %x, %x), branch_computations={%often, %rare}, metadata={op_name="a/chosen/cond"}
  %c.2 = f32[4]{0} conditional(%x, %x, %x), true_computation=%rare, false_computation=%often, metadata={op_name="b/chosen/cond"}
  ROOT %c.3 = f32[4]{0} conditional(%x, %x, %x), branch_computations={%often, %rare}, metadata={op_name="c/cond"}
}

ENTRY %main (y: f32[4]) -> f32[4] {
  %y = f32[4]{0} parameter(0)
  ROOT %while.1 = f32[4]{0} while(%y), condition=%none, body=%body, backend_config={"known_trip_count":{"n":"10"}}
}

%none (z: f32[4]) -> pred[] {
  ROOT %z = pred[] parameter(0)
}
"""  # noqa: E501


def test_conditions_in_a_scope_count_by_their_fractions():
    """The other condition counts in full."""
    lines = executed(CONDITIONS, {"chosen": (0.75, 0.25)})
    copies = sum(times for line, times in lines if line.operation == "copy")
    assert copies == 10 * (2 * (0.75 * 3 + 0.25) + 3 + 1)
