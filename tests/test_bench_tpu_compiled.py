"""benchmarks/bench_tpu_compiled.py, with a tiny model, and its table."""

import importlib.util
import json

import pytest
from tiny_models import make_tiny_pipeline

from benchmarks import bench_tpu_compiled


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no compiler for TPUs")
def test_command_line(tmp_path, capsys):
    """Compiles once; the second run reads what is there."""
    model = make_tiny_pipeline(tmp_path / "model", vae_channels=(16, 32), unet_channels=(16, 32))
    flags = ["--tpus", "v5e-1", "--jobs", "unet_grad", "--resolution", "16"]
    flags += ["--pretrained_model_name_or_path", str(model), "--results_dir", str(tmp_path)]
    bench_tpu_compiled.main(flags)
    file = tmp_path / "tpu_compile_v5e-1_unet_grad.json"
    assert json.loads(file.read_text())["batch_per_chip"] == 8
    assert "v5e-1 unet_grad ..." in capsys.readouterr().out
    bench_tpu_compiled.main(flags)
    out = capsys.readouterr().out
    assert "unet_grad ..." not in out and "| v5e | unet_grad | ours | " in out
    assert "MaxDiffusion" not in out  # that was measured with Stable Diffusion 1.5
    with pytest.raises(SystemExit) as ended:
        bench_tpu_compiled.main([*flags, "--resolution", "32"])
    assert ended.value.code == 2
    assert f"error: {file} is of other flags" in capsys.readouterr().err


def test_kept_reports_beside_others(capsys):
    bench_tpu_compiled.main(["--tpus", "v5e-1", "--jobs", "unet_grad"])
    out = capsys.readouterr().out
    assert "| v5e | unet_grad | ours | " in out
    assert "| v5e | unet_grad | MaxDiffusion | 2.22 | 68.4 | | 4.08 | |" in out


def test_mistakes_are_tpu_compiles_own(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        bench_tpu_compiled.main(["--tpus", "v9-4", "--results_dir", str(tmp_path)])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: tpu=v9-4 is not known; known are ")
