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
    assert profile_unet.kind_of(place) == kind


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
    for seconds in results["seconds"].values():
        assert seconds.keys() == profile_unet.KINDS.keys()
        assert min(seconds["convolutions"], seconds["matmuls"], seconds["attention"]) > 0
    assert "| gradient, " in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        profile_unet.main(["--batch_size", "0", "--output", str(output)])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: batch_size=0 must be at least 1\n"
