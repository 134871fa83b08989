"""Stop and resume: kills, SIGTERM, many processes, checkpoints of other runs, full disks."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import free_port, slow
from PIL import Image
from safetensors.numpy import load_file
from shards import write_random_shard
from tiny_models import make_tiny_pipeline
from trainer_runs import config_of, flags_of, read_metrics

import ema_posthoc
import flax_train_instruct_pix2pix as trainer
from diffusers_flax.training.checkpoints import newest_checkpoint, read_arrays

SCRIPT = Path(trainer.__file__)
NUM_STEPS = 12
SIZE = dict(vae_channels=(16, 32), unet_channels=(16,))  # few arrays, each of them a collective
RUN = dict(
    max_train_steps=NUM_STEPS,
    ema_start_step=3,
    ema_decay=0.6,
    checkpointing_steps=2,
    checkpoints_total_limit=2,
    learning_rate=1e-3,  # so that rounding in another order stays small
    compilation_cache_dir="",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_pipeline(tmp_path_factory.mktemp("tiny") / "model", **SIZE)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Twenty-six pairs: three batches an epoch and two pairs left out."""
    folder = tmp_path_factory.mktemp("data")
    write_random_shard(folder / "a.parquet", 15, seed=1, broken=[3])
    write_random_shard(folder / "b.parquet", 11, seed=2)
    return folder


class Start:
    """One start of the trainer by its command line, in the background."""

    def __init__(self, config, num_devices=4, code=None):
        flags = os.environ["XLA_FLAGS"].replace("device_count=4", f"device_count={num_devices}")
        self.out = Path(config.output_dir)
        program = [SCRIPT] if code is None else ["-c", code]
        self.process = subprocess.Popen(
            [sys.executable, *program, *flags_of(config)],
            env=os.environ | {"XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=SCRIPT.parent,
        )

    def wait_until(self, condition, timeout=400):
        """Poll until condition() or the process has ended; is it still there?"""
        stop = time.monotonic() + timeout
        while not condition() and self.process.poll() is None:
            assert time.monotonic() < stop, "nothing happened"
            time.sleep(0.001)
        return self.process.poll() is None

    def logged(self, step):
        file = self.out / "metrics.jsonl"
        return lambda: file.exists() and f'"step": {step},' in file.read_text()

    def __del__(self):
        self.process.kill()
        self.process.communicate()

    def end(self, code=0, timeout=400):
        """Wait for the end of the process; returns its output."""
        output, errors = self.process.communicate(timeout=timeout)
        assert self.process.returncode == code, errors[-2000:]
        return output, errors


def run(config, num_devices=4, code=0):
    return Start(config, num_devices).end(code)


def contents(out):
    """All that a run ends with: model files, the last checkpoint's arrays, metrics that matter."""
    state = read_arrays(newest_checkpoint(out))
    arrays = {name: (x.dtype, x.shape, x.tobytes()) for name, x in state.items()}
    index = json.loads((out / "model_index.json").read_text())
    components = [name for name, value in index.items() if isinstance(value, list) and value[0]]
    assert {"unet", "vae", "text_encoder", "scheduler", "tokenizer"} <= set(components)
    files = {
        str(file.relative_to(out)): file.read_bytes()
        for component in components
        for file in sorted(Path(out, component).iterdir())
    }
    files["model_index.json"] = index
    timings = ("pairs_per_second", "data_wait", "host_seconds", "memory_gb")
    rows = [{k: v for k, v in row.items() if k not in timings} for row in read_metrics(out)]
    return arrays, files, rows


@pytest.fixture(scope="module")
def uninterrupted(model, data, tmp_path_factory):
    """The directory of a run that nothing interrupts, on four devices of one process."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run_here(config_of(model, data, out, **RUN))
    return out


@pytest.fixture(scope="module")
def whole_run(uninterrupted):
    return contents(uninterrupted)


def assert_same(found, expected):
    for a, b in zip(found, expected):
        assert a == b
    arrays, files, rows = found
    assert {name.split("/")[0] for name in arrays} == {"params", "opt_state", "ema"}
    assert "unet/diffusion_pytorch_model.safetensors" in files
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))


def new_files(folder, old=frozenset()):
    """What orbax is writing at the moment, but for `old`."""
    return set(folder.glob("*tmp*")) - old


@pytest.mark.parametrize(
    "num_kills", [1, pytest.param(12, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_killed_it_ends_as_if_it_had_not_been(model, data, whole_run, tmp_path, num_kills):
    """SIGKILL at random steps, every other time while a checkpoint is being written."""
    rng = random.Random(num_kills)
    out = tmp_path / "out"
    config = config_of(model, data, out, **RUN)
    saving = 0
    for kill in range(num_kills):
        start = Start(config)
        if kill % 2:
            old = new_files(out / "checkpoints")
            start.wait_until(partial(new_files, out / "checkpoints", old))
            time.sleep(rng.uniform(0, 0.02))
        else:
            start.wait_until(
                start.logged(rng.randint(kill * NUM_STEPS // num_kills + 1, NUM_STEPS))
            )
        start.process.kill()
        start.process.communicate()
        if (out / "model_index.json").exists():
            break
        assert (out / ".lock").exists()  # which does not keep the next start out
        saving += bool(list((out / "checkpoints").glob("*tmp*")))
    if not (out / "model_index.json").exists():
        run(config)
    assert_same(contents(out), whole_run)
    assert len(list((out / "checkpoints").iterdir())) == 2
    if num_kills > 4:
        assert saving


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_goes_on(model, data, whole_run, tmp_path):
    out = tmp_path / "out"
    config = config_of(model, data, out, **RUN | {"checkpointing_steps": 0})
    start = Start(config)
    start.wait_until(start.logged(4))
    sent = time.monotonic()
    start.process.send_signal(signal.SIGTERM)
    output, errors = start.end(143)
    assert time.monotonic() - sent < 30
    last = read_metrics(out)[-1]["step"]
    assert f"stopped by SIGTERM after step {last}, which is saved" in output
    assert [path.name for path in (out / "checkpoints").iterdir()] == [str(last)]
    assert "Traceback" not in errors
    assert not (out / ".lock").exists()

    output, _ = run(config_of(model, data, out, **RUN))
    assert f"resuming after step {last}" in output
    assert_same(contents(out), whole_run)

    # Another run needs --overwrite_output_dir.
    with pytest.raises(ValueError, match="belongs to another run: seed was 3 and is 5"):
        run_here(config_of(model, data, out, **RUN | {"seed": 5}))
    assert_same(contents(out), whole_run)
    other = config_of(model, data, out, **RUN | {"seed": 5, "overwrite_output_dir": True})
    output, _ = run(other)
    assert "resuming" not in output
    arrays, _, rows = contents(out)
    assert arrays.keys() == whole_run[0].keys() and arrays != whole_run[0]
    assert len(rows) == NUM_STEPS


def start_all(
    model, data, out, num_processes, num_devices, seeds=None, codes=None, folders=None, **options
):
    """The same command, but for seeds, code and data, in processes that share num_devices.

    folders: names of the processes' directories of data, beside data.
    """
    address = f"localhost:{free_port()}"
    starts = []
    for k in range(num_processes):
        who = dict(coordinator_address=address, num_processes=num_processes, process_id=k)
        seed = {"seed": seeds[k]} if seeds else {}
        own_data = data.with_name(folders[k]) if folders else data
        config = config_of(model, own_data, out, **RUN | options | who | seed)
        code = codes[k] if codes else None
        starts.append(Start(config, num_devices // num_processes, code))
    return starts


def read_losses(out):
    """Loss, gradient norm and undecodable pairs of each step, which no step lacks or repeats."""
    rows = read_metrics(out)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return np.array([[row["loss"], row["grad_norm"], row["num_bad"]] for row in rows])


def losses(out):
    found = read_losses(out)
    assert len(found) == NUM_STEPS
    return found


@pytest.fixture(scope="module")
def one_process(uninterrupted):
    return losses(uninterrupted)


@pytest.fixture
def edits(tmp_path):
    """Flags for validation images."""
    image = tmp_path / "image.png"
    Image.new("RGB", (16, 16), "red").save(image)
    images = dict(validation_image=(str(image),), validation_prompt=("x",), validation_steps=10)
    # Of so few rows the broken one may come to one process in every epoch.
    return images | dict(max_bad_fraction=0.5)


@pytest.mark.slow
def test_four_processes_do_what_one_does(model, data, one_process, edits, tmp_path):
    out = tmp_path / "out"
    starts = start_all(model, data, out, 4, 4, **edits)
    ends = [start.process.communicate(timeout=400)[1][-2000:] for start in starts]
    assert not any(start.process.returncode for start in starts), "\n".join(ends)
    assert len(list((out / "validation").glob("step-*"))) == 2
    np.testing.assert_allclose(losses(out), one_process, rtol=1e-5)


@pytest.mark.slow
def test_processes_train_at_the_same_sizes(model, tmp_path):
    """With all shards, and with shards of their own."""
    stored = ((22, 18), (18, 30), (20, 19), (34, 18))  # (width, height)
    for k in range(2):
        for folder in ("all", f"own{k}"):
            (tmp_path / folder).mkdir(exist_ok=True)
            write_random_shard(tmp_path / folder / f"{k}.parquet", 32 + 4 * k, seed=k, sizes=stored)
    sizes = dict(aspect_ratio_buckets=("16x16", "20x12", "12x20"))
    run(config_of(model, tmp_path / "all", tmp_path / "one", **RUN | sizes))
    starts = start_all(model, tmp_path / "all", tmp_path / "two", 2, 4, **sizes)
    outputs = [start.end()[0] for start in starts]
    assert outputs[0].count("compiled") == 3 and "3 of 3" in outputs[0]
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-5)

    out = tmp_path / "own"
    starts = start_all(model, tmp_path / "own0", out, 2, 4, folders=("own0", "own1"), **sizes)
    assert "pairs by size: 12x20 17, 16x16 34, 20x12 17" in starts[0].end()[0]
    starts[1].end()
    assert len(losses(out)) == NUM_STEPS


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_other_processes_end_when_one_dies(model, data, one_process, tmp_path, monkeypatch, victim):
    """Another number of processes resumes."""
    sooner = f"{os.environ['XLA_FLAGS']} --xla_cpu_collective_timeout_seconds=40"
    monkeypatch.setenv("XLA_FLAGS", sooner)
    out = tmp_path / "out"
    starts = start_all(model, data, out, 2, 4)
    starts[0].wait_until(starts[0].logged(5))
    starts[victim].process.kill()
    _, errors = starts[1 - victim].process.communicate(timeout=200)
    assert starts[1 - victim].process.returncode not in (0, None)
    print(errors[-1500:])
    if victim == 1:
        assert errors.splitlines()[-1].startswith("error: process 0 has lost another process")
    starts[victim].process.communicate()
    run(config_of(model, data, out, **RUN))
    np.testing.assert_allclose(losses(out), one_process, rtol=1e-5)


@pytest.mark.slow
def test_stopped_processes_resume_and_equal_one_process(model, data, one_process, tmp_path):
    out = tmp_path / "out"
    # Of so few rows the broken one may come to one process in every epoch.
    starts = start_all(model, data, out, 2, 2, checkpointing_steps=0, max_bad_fraction=0.5)
    starts[0].wait_until(starts[0].logged(3))
    starts[1].process.send_signal(signal.SIGTERM)  # to one, which stops all
    ends = [start.end(143) for start in starts]
    assert all("stopped by SIGTERM after step" in output for output, _ in ends)
    for start in start_all(model, data, out, 2, 2, max_bad_fraction=0.5):
        start.end()
    np.testing.assert_allclose(losses(out), one_process, rtol=1e-5)


@pytest.mark.slow
def test_a_run_resumes_on_other_numbers_of_devices(model, data, one_process, tmp_path):
    """Stopped on four devices, then on two, it ends on one; every row gets its random numbers."""
    out = tmp_path / "out"
    for num_devices, last_step in ((4, 3), (2, 7)):
        start = Start(config_of(model, data, out, **RUN), num_devices)
        start.wait_until(start.logged(last_step))
        start.process.send_signal(signal.SIGTERM)
        output, _ = start.end(143)
    step = int(re.search(r"stopped by SIGTERM after step (\d+)", output)[1])
    output, _ = run(config_of(model, data, out, **RUN), 1)
    assert f"resuming after step {step}\n" in output
    np.testing.assert_allclose(losses(out), one_process, rtol=1e-4)


def run_here(config):
    """A run in this process, on its four devices."""
    with jax.numpy_dtype_promotion("standard"):  # optax
        trainer.train(config)


SHORT = RUN | {"max_train_steps": 4}


@pytest.mark.parametrize("name", ["muon", *slow("schedule_free", "adafactor", "lion")])
def test_a_run_resumes_with_its_optimizer(model, data, tmp_path, name):
    out = tmp_path / "out"
    no_average = dict(ema="none", ema_start_step=None, ema_decay=None, lr_scheduler="constant")
    options = SHORT | no_average | dict(optimizer=name, adam_epsilon=1e-8)
    run_here(config_of(model, data, out, **options))
    once = contents(out)
    if name == "schedule_free":
        flags = ["--checkpoint", newest_checkpoint(out), "--output_dir", tmp_path / "made"]
        ema_posthoc.main([*map(str, flags)])
        file = "unet/diffusion_pytorch_model.safetensors"
        made, saved = (load_file(folder / file) for folder in (tmp_path / "made", out))
        for key, x in saved.items():
            np.testing.assert_allclose(x, made[key], rtol=1e-5, atol=1e-6)

    (out / "model_index.json").unlink()
    shutil.rmtree(newest_checkpoint(out))
    with pytest.raises(ValueError, match=f"optimizer was {name} and is adamw"):
        run_here(config_of(model, data, out, **options | {"optimizer": "adamw"}))
    run_here(config_of(model, data, out, **options))
    assert contents(out) == once


@pytest.fixture(scope="module")
def stopped(model, data, tmp_path_factory):
    """The folder of a run of four steps that has checkpoints of steps 2 and 4 and no model."""
    out = tmp_path_factory.mktemp("stopped") / "out"
    run_here(config_of(model, data, out, **SHORT))
    (out / "model_index.json").unlink()
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 1}, "weights of unet_model_name_or_path was"),
        ({"data": 1}, "shards of train_data_dir was"),
    ],
)
def test_another_run_is_refused_by_name(model, data, stopped, tmp_path, options, message):
    out = shutil.copytree(stopped, tmp_path / "out")
    options = SHORT | options
    if options.pop("model", None):
        model = make_tiny_pipeline(tmp_path / "model", **SIZE, seed=1)
    if options.pop("data", None):
        write_random_shard(tmp_path / "a.parquet", 26, seed=1)
        data = tmp_path
    before = sorted(map(str, out.rglob("*")))
    with pytest.raises(ValueError, match=re.escape(message)):
        run_here(config_of(model, data, out, **options))
    assert sorted(map(str, out.rglob("*"))) == before


@pytest.mark.slow
def test_any_checkpoint_can_be_the_start(model, data, tmp_path, capsys):
    """An older one of the folder, or another folder's; or none."""
    out = tmp_path / "out"
    run_here(config_of(model, data, out, **SHORT))
    expected = contents(out)
    (out / "model_index.json").unlink()
    capsys.readouterr()
    folder = str(out / "checkpoints" / "2")
    run_here(config_of(model, data, out, **SHORT, resume_from_checkpoint=folder))
    assert "resuming after step 2" in capsys.readouterr().out
    assert contents(out)[0] == expected[0] and contents(out)[2] == expected[2]
    new = tmp_path / "new"
    run_here(config_of(model, data, new, **SHORT, resume_from_checkpoint=folder))
    assert "resuming after step 2" in capsys.readouterr().out
    assert contents(new)[:2] == contents(out)[:2]
    (out / "model_index.json").unlink()
    run_here(config_of(model, data, out, **SHORT, resume_from_checkpoint="none"))
    assert "resuming" not in capsys.readouterr().out
    assert contents(out)[0] == expected[0] and contents(out)[2] == expected[2]


CONSTANT = SHORT | dict(
    lr_scheduler="constant",
    lr_warmup_steps=1,
    max_train_steps=3,
    ema_start_step=None,
    ema_fraction=0.5,
)


@pytest.fixture(scope="module")
def finished(model, data, tmp_path_factory):
    """The folder of a run of three steps, one epoch, that averages from the second one on."""
    out = tmp_path_factory.mktemp("finished") / "out"
    run_here(config_of(model, data, out, **CONSTANT))
    return out


@pytest.mark.slow
def test_a_finished_run_goes_on_as_if_it_had_been_longer(model, data, finished, tmp_path, capsys):
    """By two epochs instead of one, and killed once before its next checkpoint."""
    out, whole = shutil.copytree(finished, tmp_path / "out"), tmp_path / "whole"
    options = CONSTANT | {"checkpointing_steps": 4}
    run_here(config_of(model, data, whole, **options | {"max_train_steps": 6}))
    epochs = {"max_train_steps": trainer.Config.max_train_steps, "num_train_epochs": 2}
    config = config_of(model, data, out, **options | epochs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Reports, "log", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_here(config)
    assert (out / "model_index.json").exists()  # of the shorter run, until the longer one has ended
    capsys.readouterr()
    run_here(config)
    assert "resuming after step 3; the run had 3 steps and has 6\n" in capsys.readouterr().out
    (*found, rows), (*expected, whole_rows) = contents(out), contents(whole)
    assert found == expected
    assert [(row["step"], row["loss"]) for row in rows] == [
        (row["step"], row["loss"]) for row in whole_rows
    ]
    files = sorted(map(str, out.rglob("*")))
    run_here(config)
    assert "out has the model of this run, which is finished" in capsys.readouterr().out
    assert sorted(map(str, out.rglob("*"))) == files


@pytest.mark.slow
def test_the_command_of_a_finished_run_ends_well(model, data, tmp_path, capsys):
    """With a checkpoint's model, which is the run's; another configuration is an error."""
    out, made = tmp_path / "out", tmp_path / "made"
    flags = CONSTANT | dict(checkpointing_steps=2, max_train_steps=2, ema_fraction=0.5)
    config = config_of(model, data, out, **flags)
    run_here(config)
    before = contents(out)
    capsys.readouterr()
    trainer.main(flags_of(config))
    assert "out has the model of this run, which is finished" in capsys.readouterr().out
    assert contents(out) == before
    shutil.copytree(out, tmp_path / "bare", ignore=shutil.ignore_patterns("checkpoints"))
    run_here(replace(config, output_dir=str(tmp_path / "bare")))
    assert "bare has the model of this run, which is finished" in capsys.readouterr().out
    checkpoint = ["--checkpoint", str(out / "checkpoints" / "2"), "--output_dir", str(made)]
    ema_posthoc.main(checkpoint)
    name = "unet/diffusion_pytorch_model.safetensors"
    assert (made / name).read_bytes() == (out / name).read_bytes()
    defaults = json.loads((made / "sampling_defaults.json").read_text())
    assert defaults == json.loads((out / "sampling_defaults.json").read_text())
    assert defaults["guidance_scale"] == 2 and defaults["num_inference_steps"] == 20
    with pytest.raises(SystemExit):
        ema_posthoc.main(["--checkpoint", str(out), "--output_dir", str(tmp_path / "no")])
    assert "is not a checkpoint of the trainer; give its directory" in capsys.readouterr().err


@pytest.mark.slow
def test_a_failed_last_checkpoint_does_not_cost_the_model(model, data, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(trainer.Checkpoints, "_write", fail)
    with pytest.raises(OSError, match="no space left on device"):
        run_here(config_of(model, data, tmp_path, **SHORT | dict(checkpointing_steps=4)))
    assert (tmp_path / "model_index.json").exists()
