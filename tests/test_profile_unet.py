"""benchmarks/profile_unet.py: kinds of operations, their own times, its command line."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import profile_unet


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
    sums = profile_unet.by_kind([(place, 2.0), ("jit(f)/add", 1.0)], profile_unet.KINDS)
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
    assert profile_unet.by_kind([(name, 2.0)], profile_unet.TORCH_KINDS)[kind] == 2


def test_what_is_inside_is_counted_once():
    def event(name, start, end):
        return SimpleNamespace(name=name, start_ns=start * 1e9, duration_ns=(end - start) * 1e9)

    events = [event("loop", 0, 10), event("dot", 1, 4), event("wait", 2, 3), event("dot", 5, 9)]
    thread = SimpleNamespace(events=events)
    profile = SimpleNamespace(planes=[SimpleNamespace(lines=[thread, thread])])
    assert profile_unet.own_seconds(profile, {"loop", "dot"}) == {"loop": 6.0, "dot": 14.0}


def test_command_line(tmp_path, capsys):
    output = tmp_path / "profile.json"
    profile_unet.main(["--case", "tiny", "--output", str(output)])
    results = json.loads(output.read_text())
    for contenders in results["seconds"].values():
        assert contenders.keys() == {"ours", "torch eager"}
        for seconds in contenders.values():
            assert all(seconds[kind] > 0 for kind in profile_unet.KINDS)
    assert "| gradient | torch eager | " in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        profile_unet.main(["--batch_size", "0", "--output", str(output)])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: batch_size=0 must be at least 1\n"
