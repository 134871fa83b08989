"""benchmarks/operations.py: equal results of both libraries, and the command line."""

import json

import numpy as np
import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import operations


@pytest.mark.parametrize("name", operations.KERNELS)
def test_ours_and_pytorchs_are_the_same(name):
    ours, xla, theirs, shapes, axes, flops = operations.make_operation(name)
    arrays, tensors = operations.random_operands(shapes, axes, "cpu")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        expected = theirs(*tensors).numpy()
    assert counter.get_total_flops() == flops
    for function in filter(None, (ours, xla)):
        result = np.asarray(function(*arrays)).transpose(axes[0])
        assert np.abs(result - expected).max() < 1e-4 * np.abs(expected).max()


def test_command_line(tmp_path, capsys):
    output = tmp_path / "operations.json"
    flags = ["--kernels", "text_attention_1024", "--rounds", "1", "--seconds", "0"]
    operations.main([*flags, "--output", str(output)])
    results = json.loads(output.read_text())
    assert {row["work"] for row in results.values()} == {"forward", "gradient"}
    assert all(row["summary"].keys() == {"ours", "xla", "torch eager"} for row in results.values())
    assert "| ours times as fast |" in capsys.readouterr().out
