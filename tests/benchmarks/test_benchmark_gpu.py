"""benchmarks/gpu: random arguments, the plan, kernels of a profile, tiny runs."""

import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import ROOT

from benchmarks import random_models
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import kernels, ours, plan, pytorch
from benchmarks.gpu.flags import SIZES, Config

FLAGS = ["--size", "tiny", "--minutes", "60", "--rounds", "1", "--seconds", "0"]


@pytest.fixture(autouse=True)
def as_run():
    """Optax promotes dtypes, in all threads."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def test_random_arguments():
    """Kernels are small and not all equal, norms are the identity, the optimizer starts at zero."""
    struct = jax.ShapeDtypeStruct
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), (1, 2)))
    shapes = {
        "conv": {
            "kernel": struct((1, 3, 3, 8, 64), jnp.bfloat16),
            "bias": struct((1, 64), jnp.float32),
        },
        "norm": {"scale": struct((1, 8), jnp.float32)},
        "opt_state": {"mu": struct((1, 4), jnp.float32)},
        "step": struct((1,), jnp.int32),
        "pixels": struct((1, 2, 16, 16, 3), jnp.uint8),
        "keys": keys,
    }
    arrays = ours.random_arrays(shapes)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), arrays) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    kernel = np.asarray(arrays["conv"]["kernel"], np.float32)
    assert kernel.std() == pytest.approx(0.02, rel=0.1)
    assert not np.any(arrays["conv"]["bias"]) and np.all(np.asarray(arrays["norm"]["scale"]) == 1)
    assert not np.any(arrays["opt_state"]["mu"]) and not np.any(arrays["step"])
    assert len(np.unique(arrays["pixels"])) > 200


@pytest.fixture
def flags(tmp_path):
    """Flags of a tiny run with a cache of its own."""
    folders = ["--cache_dir", str(tmp_path / "cache"), "--output", str(tmp_path / "gpu.json")]
    return [*FLAGS, *folders]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch and diffusers
def test_all_rows(tmp_path, flags, capsys):
    gpu.main([*flags, "--pytorch", "eager", "channels_last"])
    results = json.loads((tmp_path / "gpu.json").read_text())
    agreement = results.pop("cpu agreement")["psnr"]
    assert agreement["float32"] is None and agreement["bfloat16"] > 15
    names = ("forward 2", "gradient 2", "optimizer step 2", "edit, 10 steps 1")
    names = {f"cpu tiny_64 {name}" for name in (*names, "optimizer step, latents cached 2")}
    images = {f"cpu tiny_xl_64 images, 10 steps {count}" for count in (1, 2)}
    assert results.keys() == names | images
    for row in results.values():
        assert row["dtype"] == "bfloat16" and 0 < row["summary"]["ours"]["peak_share"] < 1
        assert row["summary"]["ours"]["first_seconds"] > row["compile_seconds"]["ours"] > 0
        assert {"torch eager", "torch channels_last"} <= row["summary"].keys()
        assert row["peak_bytes"]["ours"] > 1e6
    assert (
        results["cpu tiny_64 optimizer step, latents cached 2"]["peak_bytes"]["ours"]
        < results["cpu tiny_64 optimizer step 2"]["peak_bytes"]["ours"]
    )
    images = results["cpu tiny_xl_64 images, 10 steps 1"]["summary"]
    ours_only = {name for name in images if name.startswith("ours")}
    assert ours_only == {"ours", ours.HALF_VAE, ours.ACCELERATED}
    assert results["cpu tiny_xl_64 images, 10 steps 2"]["batch_size"] == 2
    assert "left out" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch.compile
def test_torch_compile_and_the_cache(tmp_path, flags, capsys, monkeypatch):
    """A first call compiles, a second one loads: it reports the time of the first one."""
    flags = [*flags, "--rows", "train", "--pytorch", "compiled"]
    gpu.main([*flags, "--compile_only"])
    assert not (tmp_path / "gpu.json").exists()
    assert "compiled 60 s" in capsys.readouterr().out
    gpu.main([*flags, "--compile_only"])
    assert "train: all programs are in --cache_dir" in capsys.readouterr().out
    notes = {
        path.name.rpartition("_")[0]: json.loads(path.read_text())["seconds"]
        for path in (tmp_path / "cache" / "ours").glob("tiny*.json")
    }

    def save(self, name, note, compiled=None):
        assert compiled is None, "a program is compiled"

    monkeypatch.setattr(gpu.ProgramCache, "save", save)
    gpu.main(flags)
    assert "ours 15 s, torch compiled 30 s" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "gpu.json").read_text()).values()
    case = "tiny_64_optimizer_step_2"
    assert row["compile_seconds"]["ours"] == notes[f"{case}_ours"]
    assert row["first_seconds"]["torch compiled"] == [notes[f"{case}_torch_compiled"]]
    assert row["summary"].keys() == {"ours", "torch compiled"}


def test_a_row_that_fails_does_not_stop_the_others(tmp_path, flags, capsys, monkeypatch):
    def fail(*args):
        raise MemoryError("too small")

    monkeypatch.setattr(gpu, "train_contenders", fail)
    with pytest.raises(SystemExit) as stop:
        gpu.main([*flags, "--rows", "train", "forward", "--pytorch", "eager"])
    assert stop.value.code == 1
    rows = json.loads((tmp_path / "gpu.json").read_text())
    assert rows["cpu tiny_64 forward 2"]["summary"].keys() == {"ours", "torch eager"}
    assert rows["cpu tiny_64 optimizer step 2"]["summary"].keys() == {"ours"}
    printed = capsys.readouterr()
    assert "train: PyTorch is left out: MemoryError: too small" in printed.out
    assert printed.err.endswith("not all of train is measured; the lines above say why\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rows"], "--rows is empty"),
        (["--rounds", "0"], "--rounds 0 must be at least 1"),
        ([], "no GPU is visible"),
        (["--size", "tiny", "--profile", "kernels"], "--profile reads the kernels of a GPU"),
        (["--size", "tiny", "--compile_only", "--cache_dir", ""], "--compile_only keeps programs"),
        (["--minutes", "0.5"], "--minutes 0.5 must be at least 1"),
    ],
)
def test_invalid_flags(flags, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        gpu.main([*flags, "--output", str(tmp_path / "gpu.json")])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_moments_and_average_take_the_parameters_strides():
    """Fused AdamW refuses moments in another order."""
    configs = random_models.SD15 | {"unet": random_models.UNET.config | random_models.TINY_UNET}
    configs["unet"] = {**configs["unet"], "in_channels": 8}
    configs["vae"] = {**configs["vae"], **random_models.TINY_VAE}
    configs["text_encoder"] = {**configs["text_encoder"], "num_hidden_layers": 1}
    sizes = SIZES["tiny"]
    held = []

    class Kept(torch.optim.AdamW):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            held.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "AdamW", Kept)
        names = ("eager", "channels_last")
        contenders = pytorch.train_contenders(names, configs, sizes, "cpu", latents=True)
    ((_, run), (prepare, _)) = contenders.values()
    run()
    prepare()
    (optimizer,) = held
    kernels = [x for group in optimizer.param_groups for x in group["params"] if x.ndim == 4]
    assert any(x.stride(1) == 1 < x.shape[1] for x in kernels)
    for kernel in kernels:
        state = optimizer.state[kernel]
        assert kernel.stride() == state["exp_avg"].stride() == state["exp_avg_sq"].stride()


PROFILE = """
planes {{
  name: "/device:GPU:0"
  lines {{ name: "Stream #7(Kernel)" {events} }}
  lines {{ name: "XLA Ops" {events} }}
  event_metadata {{ key: 1 value {{ id: 1 name: "gemm" }} }}
  event_metadata {{ key: 2 value {{ id: 2 name: "fusion_3" }} }}
  stat_metadata {{ key: 1 value {{ id: 1 name: "hlo_op" }} }}
  stat_metadata {{ key: 2 value {{ id: 2 name: "hlo_module" }} }}
}}
planes {{ name: "/host:CPU" lines {{ name: "Stream of Python" {events} }} }}
"""
EVENTS = """
events { metadata_id: 1 duration_ps: 2000000 stats { metadata_id: 1 str_value: "dot.1" } }
events { metadata_id: 1 duration_ps: 3000000 stats { metadata_id: 1 str_value: "dot.1" } }
events { metadata_id: 1 duration_ps: 1000000 stats { metadata_id: 1 str_value: "dot.2" } }
events {
  metadata_id: 2 duration_ps: 7500000
  stats { metadata_id: 1 str_value: "command_buffer_5" } stats { metadata_id: 2 str_value: "jit_f" }
}
"""


def test_kernels_of_a_profile():
    """Streams of the GPU only; launches of one kernel for one operation are one row."""
    profile = jax.profiler.ProfileData.from_text_proto(PROFILE.format(events=EVENTS))
    assert kernels.kernel_rows(profile) == [
        (7.5, 1, "fusion_3", "command_buffer_5", "jit_f"),
        (5.0, 2, "gemm", "dot.1", ""),
        (1.0, 1, "gemm", "dot.2", ""),
    ]


def test_table_of_kernels(tmp_path, monkeypatch):
    """A pass is profiled, and its table is a compressed text."""
    profile = jax.profiler.ProfileData.from_text_proto(PROFILE.format(events=EVENTS))
    ran, file = [], tmp_path / "new" / "forward ours.tsv.gz"
    monkeypatch.setattr(jax.profiler.ProfileData, "from_file", lambda path: profile, raising=False)
    assert kernels.write_kernels(lambda: ran.append(1), file) == (0.0135, 4)
    assert ran == [1]
    text = gzip.decompress(file.read_bytes()).decode()
    assert text.splitlines()[:2] == [
        "7.5\t1\tfusion_3\tcommand_buffer_5\tjit_f",
        "5.0\t2\tgemm\tdot.1\t",
    ]


def test_rows_without_figures_come_first():
    cases = {
        "complete": ("A complete", ["ours", "torch eager"]),
        "without one": ("A without one", ["ours", "torch eager"]),
        "of another GPU": ("A elsewhere", ["ours"]),
        "also without one": ("A also", ["ours", "torch eager"]),
    }
    both = {"seconds": {"ours": [1.0], "torch eager": [1.0]}}
    one = {"seconds": {"ours": [1.0]}}
    results = {"A complete": both, "A without one": one, "A also": one, "B elsewhere": both}
    names = ["of another GPU", "without one", "also without one", "complete"]
    assert plan.in_order(cases, results) == names


def test_a_plan_fits_its_minutes(capsys):
    """Ours compile at once and PyTorch's in turn; what does not fit is named."""
    config = Config(output="", rounds=2, seconds=1.0)
    results = {"H200 step": {"first_seconds": {"ours": [200.0, 240.0]}, "seconds": {"ours": [3.0]}}}
    earlier = plan.earlier_row("step", "H100", results)
    assert earlier == results["H200 step"] and plan.earlier_row("edit", "H100", results) == {}
    step = plan.plan_row("train", ["ours"], earlier, [], config)
    assert step == plan.Planned("train", {"ours": 220.0}, plan.ARGUMENTS + 3 * 3 + 2 * 3)
    cached = plan.plan_row("train", ["ours"], earlier, ["ours"], config)
    assert cached.first == {"ours": plan.LOADED["ours"]}

    names = ["ours", "torch eager", "torch compiled"]
    rows = [step, *(plan.plan_row(x, names, {}, [], config) for x in ("edit", "images", "forward"))]
    chosen, left_out = plan.choose_rows(rows, 9)
    assert [row.name for row in chosen] == ["train", "edit", "images"]
    theirs = 2 * (10 + 170)  # more than ours, 220
    total = plan.START + theirs + sum(row.measuring for row in chosen)
    assert plan.total_seconds(chosen) == pytest.approx(total) and total <= 9 * 60
    plan.print_plan(chosen, left_out, 9, "H100")
    printed = capsys.readouterr().out
    assert f"plan: {total / 60:.1f} of 9 minutes on H100" in printed
    assert "left out, 3.8 minutes alone: forward: ours 180 s, torch eager 10 s" in printed


def test_the_plan_of_all_rows_from_the_results_file():
    """With the figures of the H100 and programs from the cache, nine minutes are enough for all but
    the batch of images, which fits into the next nine.
    """
    results = json.loads((ROOT / "benchmarks/results/gpu.json").read_text())
    config = Config()
    rows, _ = gpu.make_rows(config, {"sd15": "", "sdxl": ""}, "cuda")
    kind, torchs = "NVIDIA H100 80GB HBM3", [f"torch {x}" for x in config.pytorch]
    candidates = []
    for name, row in rows.items():
        earlier = plan.earlier_row(row.case, kind, results)
        assert earlier or name in ("train_latents", "image_batch"), name
        candidates.append(plan.plan_row(name, [*row.ours, *torchs], earlier, [], config))
    chosen, left_out = plan.choose_rows(candidates, config.minutes)
    assert chosen and left_out and plan.total_seconds(chosen) <= 60 * config.minutes
    warm = []
    for row in candidates:
        kept = [name for name in row.first if name.startswith(("ours", "torch compiled"))]
        earlier = plan.earlier_row(rows[row.name].case, kind, results)
        warm.append(plan.plan_row(row.name, row.first, earlier, kept, config))
    _, left_out = plan.choose_rows(warm, config.minutes)
    assert [row.name for row in left_out] == ["image_batch"]
    assert plan.choose_rows(left_out, config.minutes)[1] == []
