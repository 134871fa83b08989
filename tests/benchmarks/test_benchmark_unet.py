"""benchmarks/unet.py: counting of FLOPs, a tiny run."""

import json

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
    flags = ["--cases", "tiny", "--rounds", "1", "--seconds", "0", "--torch_compile", "False"]
    unet.main([*flags, "--output", str(output)])
    results = json.loads(output.read_text())
    assert results.keys() == {"cpu tiny forward 2", "cpu tiny gradient 2"}
    for row in results.values():
        assert row["summary"].keys() == {"ours", "torch eager", "torch channels_last"}
        assert row["summary"]["ours"]["ours_times_as_fast"] == 1
        assert 0 < row["summary"]["ours"]["peak_share"] < 1
    assert "cpu tiny forward 2, summary, ours: samples_per_second " in capsys.readouterr().out
