"""benchmarks/unet.py: counting of FLOPs, kinds of operations, tiny runs."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import unet


def test_flops_are_the_published():
    """0.18 and 0.80 TFLOP a sample of Stable Diffusion 1.5, 6.76 of SDXL."""
    for name, expected in (("sd15_256", 0.18e12), ("sd15_512", 0.80e12), ("sdxl_1024", 6.76e12)):
        case = unet.CASES[name]
        inputs = unet.make_inputs(case, 1)
        assert unet.count_flops(case, inputs, False) == pytest.approx(expected, rel=0.15)
    case = unet.CASES["tiny"]
    one, two = (unet.make_inputs(case, n) for n in (1, 2))
    forward = unet.count_flops(case, one, False)
    assert unet.count_flops(case, two, False) == pytest.approx(2 * forward)
    assert unet.count_flops(case, one, True) == pytest.approx(3 * forward, rel=0.1)


def test_command_line(tmp_path, capsys):
    output = tmp_path / "unet.json"
    flags = [
        "time",
        "--cases",
        "tiny",
        "--rounds",
        "1",
        "--seconds",
        "0",
        "--torch_compile",
        "False",
    ]
    unet.main([*flags, "--output", str(output)])
    results = json.loads(output.read_text())
    assert {row["work"] for row in results.values()} == {"forward", "gradient"}
    for row in results.values():
        assert row["summary"].keys() == {"ours", "torch eager", "torch channels_last"}
        assert row["summary"]["ours"]["ours_times_as_fast"] == 1
        assert 0 < row["summary"]["ours"]["peak_share"] < 1
    assert "| ours times as fast |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("jit(f)/Unet/mid_block/attentions_0/transformer_blocks_0/attn1/cond/x", "attention"),
        (
            "jit(f)/attn1/cond/branch_1_fun/while/body/...ts,...sh->...th/dot_general",
            "attention",
        ),
        ("jit(f)/transformer_blocks_0/attn1/to_q/dot_general", "matmuls"),
        ("jit(f)/mid_block/resnets_0/conv1/cond/branch_0_fun/dot_general", "convolutions"),
        ("jit(f)/mid_block/resnets_0/norm1/mul", "norms"),
        ("jit(f)/up_blocks_3/concatenate", "other"),
    ],
)
def test_kinds(place, kind):
    sums = unet.by_kind([(place, 2.0), ("jit(f)/add", 1.0)], unet.KINDS)
    assert sums.pop(kind) == (3 if kind == "other" else 2)
    assert sum(sums.values()) == (0 if kind == "other" else 1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::convolution_backward", "convolutions"),
        ("aten::native_layer_norm", "norms"),
        ("aten::addmm", "matmuls"),
        ("aten::add", "other"),
    ],
)
def test_kinds_of_pytorch(name, kind):
    assert unet.by_kind([(name, 2.0)], unet.TORCH_KINDS)[kind] == 2


def test_what_is_inside_is_counted_once():
    def event(name, start, end):
        return SimpleNamespace(name=name, start_ns=start * 1e9, duration_ns=(end - start) * 1e9)

    events = [event("loop", 0, 10), event("dot", 1, 4), event("wait", 2, 3), event("dot", 5, 9)]
    thread = SimpleNamespace(events=events)
    profile = SimpleNamespace(planes=[SimpleNamespace(lines=[thread, thread])])
    assert unet.own_seconds(profile, {"loop", "dot"}) == {"loop": 6.0, "dot": 14.0}


def test_profile(tmp_path, capsys):
    output = tmp_path / "profile.json"
    unet.main(["profile", "--case", "tiny", "--output", str(output)])
    results = json.loads(output.read_text())
    passes = ("forward ours", "forward torch eager", "gradient ours", "gradient torch eager")
    assert results.keys() == {f"profile {name}" for name in passes}
    for row in results.values():
        assert all(row["seconds_by_kind"][kind] > 0 for kind in unet.KINDS)
    assert "| gradient torch eager | " in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        unet.main(["profile", "--batch_size", "0", "--output", str(output)])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: --batch_size 0 must be at least 1\n"
